"""How the paths of a group are paired into devices."""

from __future__ import annotations

import pytest

from deviceplugin.sources.pairing import Part, paired


def column(text: str) -> list[Part]:
    """Return a `Part` for each word such as `card0@gpu=0`, which has path, hardware, and text of the wildcard."""
    made = []
    for word in text.split():
        named, _, wild = word.partition("=")
        path, _, hardware = named.partition("@")
        made.append(Part(path, hardware, (wild,) if wild else ()))
    return made


def groups(*columns: str, optional: tuple[bool, ...] = ()) -> tuple[list[str], list[str]]:
    """Return the groups of paired paths, each with the way of its pairing, and the paths that are left."""
    pairing = paired([column(one) for one in columns], optional)
    made = [f"{'+'.join(p.path if p else '-' for p in group)} {how.name}" for group, how in pairing.groups]
    return made, [part.path for part in pairing.left]


@pytest.mark.parametrize(
    ("columns", "made", "left"),
    [
        # One GPU has card0 and renderD129, the other one card1 and renderD128.
        (("card0@x=0 card1@y=1", "r128@y=128 r129@x=129"), ["card0+r129 HARDWARE", "card1+r128 HARDWARE"], []),
        # Camera 3 has only index0, camera 4 only index1.
        (("v0@c3=3", "v1@c4=4"), [], ["v0", "v1"]),
        (("v0@c3=3 v2@c5=5", "v1@c4=4 v3@c5=5"), ["v2+v3 HARDWARE"], ["v0", "v1"]),
        (("a1=1 a3=3", "b3=3 b2=2"), ["a3+b3 TEXT"], ["a1", "b2"]),
        (("a1=1 a3=3 a4=4", "b2=2 b3=3 b5=5"), ["a3+b3 TEXT"], ["a1", "a4", "b2", "b5"]),
        # Equal texts do not pair paths of different hardware.
        (("a1@x=1 a2@y=2", "b1@y=1 b2@x=2"), ["a1+b2 HARDWARE", "a2+b1 HARDWARE"], []),
        (("a1@x=1", "b1@y=1"), [], ["a1", "b1"]),
        (("a1@x=1", "b1=1"), ["a1+b1 TEXT"], []),
        # Two ports of one adapter.
        (("a0@x=0 a1@x=1", "b0@x=0 b1@x=1"), ["a0+b0 HARDWARE", "a1+b1 HARDWARE"], []),
        (("a0@x=0 a1@x=1", "b4@x=4 b5@x=5"), ["a0+b4 HARDWARE", "a1+b5 HARDWARE"], []),
        (("a0@x=0 a1@x=1", "b4@x=4"), [], ["a0", "a1", "b4"]),
        # Paths without wildcards always belong together.
        (("a@x", "b@y"), ["a+b ALONE"], []),
        (("a@x", ""), [], ["a"]),
        (("", ""), [], []),
    ],
)
def test_parts_are_paired_by_hardware_then_by_text(columns: tuple[str, ...], made: list[str], left: list[str]) -> None:
    """Paths are paired by hardware in sysfs, then by the text of the wildcards; paths of different hardware are not."""
    assert groups(*columns) == (made, left)


def test_optional_parts_may_be_missing() -> None:
    """A device may lack an optional part; without a part that is not optional there is no device."""
    columns = "card0@x=0 card1@y=1 card2=2", "r128@y=128"
    assert groups(*columns, optional=(False, True)) == (
        ["card0+- HARDWARE", "card1+r128 HARDWARE", "card2+- TEXT"],
        [],
    )
    assert groups(*columns, optional=(True, False)) == (["card1+r128 HARDWARE"], ["card0", "card2"])
