"""Names and quantities as the Kubernetes API takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.device import Device, Version
from deviceplugin.naming import (
    NamingError,
    canonical_resource,
    check_attribute,
    check_attribute_name,
    check_capacity,
    check_counters,
    check_driver,
    check_label,
    check_resource,
    class_name,
    device_name,
    kept_qualifiers,
    parse_quantity,
    problems,
    published_names,
    qualified,
    qualifiers,
)

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=63)
labels = st.from_regex(LABEL, fullmatch=True)
like_qualified = st.from_regex(r"([a-z]{1,2}--)?[01]", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (3, 3),
        ("3", 3),
        ("16Gi", 16 * 2**30),
        ("1.5Ki", 1536),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("250m", Fraction(1, 4)),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E-3", Fraction(1, 1000)),
        ("1Ei", 2**60),
        ("-2k", -2000),
        ("7n", Fraction(7, 10**9)),
    ],
)
def test_quantities(text: int | str, value: int | Fraction) -> None:
    """Integers and all suffixes of Kubernetes are understood exactly."""
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "16GB", "1 Gi", "0x10", "1_000", "1.2.3", "e3", "١", True, None, 1.5])
def test_no_quantities(text: object) -> None:
    """An invalid quantity is refused."""
    with pytest.raises(NamingError):
        parse_quantity(text)  # type: ignore[arg-type]


@given(ids)
def test_device_names_are_labels(device: str) -> None:
    """For any id the device name is a DNS label, with and without a qualifier (a word for the resource)."""
    assert LABEL.fullmatch(device_name(device))
    assert LABEL.fullmatch(device_name(device, "gpu"))


@given(labels)
def test_labels_are_kept(device: str) -> None:
    """An id that is a DNS label is its own name, unless it ends like a generated name."""
    assert (device_name(device) == device) == (not re.fullmatch(r".*--[0-9a-f]{10}", device))


@given(ids | labels, ids | labels, st.sampled_from(["", "gpu", "fpga"]), st.sampled_from(["", "gpu", "fpga"]))
def test_device_names_are_unique(one: str, other: str, left: str, right: str) -> None:
    """Two devices of a driver never share a name."""
    if (one, left) != (other, right) and bool(left) == bool(right):
        assert device_name(one, left) != device_name(other, right)
    made = device_name(one, left)
    if not left and made != one:
        assert device_name(made) != made


@given(st.lists(st.from_regex(r"[a-z]{1,3}\.com/[A-Za-z]{1,30}", fullmatch=True), max_size=5))
def test_qualifiers_are_unique(resources: list[str]) -> None:
    """A driver's resources get different words (qualifiers) for their devices' names; a single resource gets none."""
    words = qualifiers(resources)
    assert len(set(words.values())) == len(set(resources))
    assert all(LABEL.fullmatch(word) for word in words.values() if word)
    assert all(bool(word) == (len(words) > 1) for word in words.values())


@given(
    st.lists(st.from_regex(r"([a-c]\.){1,2}com/[A-Ca-c.]{0,2}[a-c]", fullmatch=True), unique=True),
    st.from_regex(r"([a-c]\.){1,3}com", fullmatch=True),
)
def test_classes_of_one_driver_differ(resources: list[str], driver: str) -> None:
    """Each resource has a DeviceClass of its own, whose name ends with the driver's name."""
    names = [class_name(resource, driver) for resource in resources]
    assert len(set(names)) == len(resources)
    assert all(f".{name}".endswith(f".{driver}") for name in names)


resources = st.from_regex(r"[a-z]{1,3}\.com/([A-Z]|[a-z]{1,2})", fullmatch=True)


@given(
    st.lists(resources, unique=True, min_size=1, max_size=3),
    st.lists(resources, max_size=4),
    st.lists(st.sets(ids | like_qualified, min_size=1, max_size=3), min_size=7, max_size=7),
)
def test_published_names_never_change_nor_collide(first: list[str], later: list[str], some: list[set[str]]) -> None:
    """When further resources join a driver, the published names of devices stay the same and stay unique."""
    words = kept_qualifiers({}, first)
    assert words == qualifiers(first)
    devices = dict(zip(dict.fromkeys((*first, *later)), some, strict=False))
    for number in range(len(later) + 1):
        names = published_names(words, devices)
        assert len(names) == sum(len(devices[name]) for name in words)
        if number < len(later):
            more = kept_qualifiers(words, [later[number]])
            assert names.items() <= published_names(more, devices).items()
            words = more


@pytest.mark.parametrize(
    ("check", "names"),
    [
        (check_driver, ["gpu.example.com", "a", "a-b.c0", "x" * 63]),
        (check_resource, ["example.com/gpu-1_x.y", "a/" + "b" * 63, "a" * 244 + "/b", "requestsa/b"]),
        (check_attribute_name, ["model", "_x", "example.com/memory", "A1" * 16]),
    ],
)
def test_names(check: Callable[[str], None], names: list[str]) -> None:
    """Drivers have DNS names, resources a vendor's domain, attributes C identifiers with or without a domain."""
    for name in names:
        check(name)


RESERVED = ["kubernetes.io/gpu", "x.kubernetes.io/gpu", "xkubernetes.io/b", "requests.a/b"]


@pytest.mark.parametrize(
    ("check", "name"),
    [
        *((check_driver, name) for name in ("", "Gpu.example.com", "a_b", "-a", "a..b", "x" * 64, "a/b", "a.b\n")),
        *((check_resource, name) for name in ("gpu", "/gpu", "a.com/", "a.com/b/c", "a/b\n", "A/b", "a_b/c", "a/-b")),
        *((check_resource, name) for name in ("a" * 245 + "/b", "a/" + "b" * 64, *RESERVED)),
        *(
            (check_attribute_name, name)
            for name in ("", "1x", "a-b", "a.b", "x" * 33, "A.com/x", "/x", "a.com/", "x\n")
        ),
        (check_attribute_name, "a/b/c"),  # the API of 1.36 accepts this name
    ],
)
def test_no_names(check: Callable[[str], None], name: str) -> None:
    """An invalid name is refused, also if only a taint with a driver's name would be invalid."""
    with pytest.raises(NamingError):
        check(name)


@pytest.mark.parametrize(
    "value", ["x" * 65, "é" * 33, 2**63, -(2**63) - 1, 1.5, None, Version("1.2"), Version("01.2.3")]
)
def test_no_attribute_values(value: object) -> None:
    """Values are short strings, 64-bit integers, booleans and semantic versions."""
    with pytest.raises(NamingError):
        check_attribute("x", value)


def test_capacity_and_counters() -> None:
    """Amounts are quantities that are not negative, counters have labels for names."""
    check_capacity("memory", "16Gi")
    check_counters("card-0", {"memory": "16Gi", "slices": 7})
    for wrong in ({}, {"Memory": 1}, {"memory": "-1"}, {f"c{number}": 1 for number in range(33)}):
        with pytest.raises(NamingError):
            check_counters("card-0", wrong)
    with pytest.raises(NamingError):
        check_capacity("memory", -1)
    with pytest.raises(NamingError):
        check_label("Card")


@pytest.mark.parametrize("field", ["counters", "consumes"])
@pytest.mark.parametrize("sets", [{"card_0": {"memory": 1}}, {"card0": {"Memory": 1}}, {"-a": {"memory": 1}}])
def test_a_counters_name_is_checked_where_it_is_written(field: str, sets: dict[str, dict[str, int]]) -> None:
    """Device refuses counter names that the API server refuses; otherwise only claims would lack the device."""
    with pytest.raises(ValueError, match=f"device 'a': {field}: a counter.* must be 1 to 63 lower-case letters"):
        Device("a", counters=sets if field == "counters" else {}, consumes=sets if field == "consumes" else {})


def test_device_is_checked_whole() -> None:
    """A device may not have two names for one attribute, or more than 30 attributes and capacities."""

    def found(device: Device) -> list[tuple[str, str]]:
        return list(problems(device, "d.example.com"))

    assert not found(Device("a", attributes={"x": 1}, capacity={"y": "1Gi"}))
    assert found(Device("a", attributes={"x": 1, "d.example.com/x": 2})) == [
        ("attributes", "attributes 'x' and 'd.example.com/x' are the same to driver d.example.com")
    ]
    ((where, message),) = found(Device("a", attributes={f"x{number}": 1 for number in range(31)}))
    assert where == "attributes"
    assert "30 attributes and capacities at the most" in message


def test_qualified_and_canonical() -> None:
    """Unqualified names get the driver's domain; long resource names still fit into an attribute."""
    assert qualified("x", "d.com") == "d.com/x"
    assert qualified("e.com/x", "d.com") == "e.com/x"
    assert canonical_resource("example.com/gpu") == "example.com/gpu"
    long = "example.com/" + "x" * 63
    assert len(canonical_resource(long)) == 64
    assert canonical_resource(long) != canonical_resource("f" + long[1:])
