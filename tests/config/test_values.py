"""The values of a config file."""

from __future__ import annotations

import pytest

from deviceplugin.config import parse
from deviceplugin.config.types import typed_attributes
from deviceplugin.device import Version
from tests.config.files import WHOLE, resource


def test_every_key_is_read() -> None:
    """A file that uses every key of a resource becomes objects with the file's values."""
    one = parse(WHOLE).resources[0]
    assert (one.name, one.driver) == ("example.com/serial", "serial.example.com")
    assert [entry.globs for entry in one.devices] == [("/dev/ttyUSB*",), (), ("/dev/a*", "/dev/b*")]
    assert one.devices[0].path == "/dev/ttyUSB*"
    simulated = one.devices[1].simulated
    assert simulated is not None
    assert (simulated.count, simulated.numa, simulated.unhealthy_file) == (8, 2, "/run/unhealthy")
    assert one.devices[2].group == ("/dev/a*", "/dev/b*")
    assert one.env == {"SERIAL_MODE": "fast"}
    assert one.nodes == ("/dev/control",)
    assert [(mount.host, mount.container, mount.readonly) for mount in one.mounts] == [("/opt/x", "/opt/y", True)]
    assert one.annotations == {"example.com/tty": "yes"}
    assert one.cdi == ("example.com/nic=nic0",)
    assert (one.sharing.replicas, one.topology) == (4, False)
    assert one.capacity == {"memory": "16Gi", "slots": 3}
    assert (one.dra.share, one.dra.drain) == ("50%", "wait")


def test_attributes_become_those_of_devices() -> None:
    """Attributes keep their four kinds; a version becomes a Version."""
    attributes = typed_attributes(parse(WHOLE).resources[0].attributes)
    assert attributes == {"ports": 2, "fast": True, "model": "x", "firmware": "1.2.3"}
    assert isinstance(attributes["firmware"], Version)
    assert not isinstance(attributes["model"], Version)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("permissions: rw", "permissions: wr"),
        ("env: {A: '1', B: '2'}", "env: {B: '2', A: '1'}"),
        ("topology: true", ""),
        ("sharing: {}", "sharing: {replicas: 1}"),
        ("mounts: [{host: /a, container: /b}]", "mounts: [{container: /b, host: /a, readonly: true}]"),
        ("env: {A: x}", 'env: {"A": "x"}  '),
    ],
)
def test_resources_that_mean_the_same_are_equal(one: str, other: str) -> None:
    """Resources with the same meaning, written in two ways, are equal, so that a reload leaves them alone."""
    assert resource(one) == resource(other)
    assert hash(resource(one)) == hash(resource(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("attributes: {a: 1}", "attributes: {a: true}"),
        ("attributes: {a: 1.2.3}", "attributes: {a: {version: 1.2.3}}"),
        ("capacity: {a: 1}", "capacity: {a: '1'}"),
        ("mounts: [{host: /a, container: /b}]", "mounts: [{host: /a, container: /b, readonly: false}]"),
        ("sharing: {replicas: 2}", "sharing: {replicas: 3}"),
        ("sharing: {replicas: {a: 2, b: 3}}", "sharing: {replicas: {b: 3, a: 2}}"),
    ],
)
def test_resources_that_mean_something_else_differ(one: str, other: str) -> None:
    """Resources that would be served differently are not equal, also if Python compares their values as equal."""
    assert resource(one) != resource(other)


@pytest.mark.parametrize("text", ["on", "no", "12:30", "0644", "2024-01-01", "0x10", "1_000", "00:11:22:33:44:55"])
def test_text_is_what_was_written(text: str) -> None:
    """Text that YAML 1.1 reads as a boolean, a date or a number stays text."""
    assert resource(f'env: {{A: {text}, B: "{text}"}}').env == {"A": text, "B": text}


def test_anchors_and_merge_keys_work() -> None:
    """An alias repeats a value; a merge key adds a mapping to another, whose own keys have priority."""
    parsed = parse(
        """
resources:
  - &base
    name: example.com/a
    devices: [path: /dev/a]
    env: &env {A: one, B: one}
    sharing: &sharing {replicas: 2}
  - <<: *base
    name: example.com/b
    env: {<<: [*env, {C: one, A: three}], A: two}
    sharing: *sharing
"""
    )
    assert parsed.resources[1].name == "example.com/b"
    assert parsed.resources[1].devices == parsed.resources[0].devices
    assert parsed.resources[1].env == {"A": "two", "B": "one", "C": "one"}
    assert parsed.resources[1].sharing.replicas == 2


def test_byte_order_mark_is_no_matter() -> None:
    """A byte order mark at the begin of a file is ignored."""
    assert parse(b"\xef\xbb\xbf" + WHOLE.encode()) == parse(WHOLE)
