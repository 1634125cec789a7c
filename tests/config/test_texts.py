"""The patterns of the schema agree with deviceplugin.naming, which has the rules of the API server."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Meta

from deviceplugin import naming
from deviceplugin.config import texts
from deviceplugin.device import Version
from tests.config.files import WORD


def matches(meta: Meta, text: str) -> bool:
    assert meta.pattern is not None
    return (meta.max_length is None or len(text) <= meta.max_length) and re.fullmatch(meta.pattern, text) is not None


def allowed(check: Any, *args: Any) -> bool:
    try:
        check(*args)
    except naming.NamingError:
        return False
    return True


@given(st.from_regex(r"\A[-a-zA-Z0-9.]{1,20}\Z") | WORD)
@example("a" * 63)
@example("a" * 64)
def test_driver_names_are_those_of_the_api(name: str) -> None:
    """The pattern for drivers' names takes what the API server takes."""
    assert matches(texts.DRIVER_NAME, name) == allowed(naming.check_driver, name)


@given(st.from_regex(r"\A([-a-z.]{1,9}/)?[-a-zA-Z0-9_]{1,20}\Z") | WORD)
@example("a" * 32)
@example("a" * 33)
@example("a" * 64 + "/b")
def test_attribute_names_are_those_of_the_api(name: str) -> None:
    """The pattern for attributes' names takes what the API server takes."""
    assert matches(texts.ATTRIBUTE_NAME, name) == allowed(naming.check_attribute_name, name)


@given(st.from_regex(r"\A[0-9.]{1,5}(-[0-9a-z.-]{1,5})?(\+[0-9a-z.-]{1,5})?\Z"))
def test_versions_are_those_of_the_api(version: str) -> None:
    """The pattern for versions takes what the API server takes."""
    assert matches(texts.SEMVER, version) == allowed(naming.check_attribute, "a", Version(version))


@given(st.from_regex(r"\A[+0-9.]{1,4}([a-zA-Z]{0,2}|e[+-]?[0-9]{1,2})\Z"))
def test_quantities_are_those_of_the_api(quantity: str) -> None:
    """The pattern for quantities takes what the API server takes, except quantities that are too large."""
    assert matches(texts.QUANTITY, quantity) == allowed(naming.parse_quantity, quantity)
