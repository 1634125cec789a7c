"""Resources whose devices a vendor's plugin lists."""

from __future__ import annotations

import re

import pytest

from deviceplugin.config import parse
from deviceplugin.config.known_plugins import PLUGINS, known_plugin
from tests.config.files import problems

BOTH = "driver: x.example.com, "


def text(name: str, more: str = "", plugin: str = "") -> str:
    return f"resources: [{{name: {name}, {more}devices: [{{plugin: {{{plugin}}}}}]}}]"


def test_a_plugin_serves_claims_where_that_is_known() -> None:
    """A vendor's plugin may serve claims if it is known to support that, or if the file says `claims: true`."""
    parse(text("nvidia.com/gpu", BOTH))
    parse(text("nvidia.com/mig-1g.10gb", BOTH))
    parse(text("vendor.example/gadget"))
    parse(text("vendor.example/gadget", BOTH, "claims: true"))
    (problem,) = problems(text("vendor.example/gadget", BOTH))
    assert problem.path == "$.resources[0].driver"
    assert "it is not known whether the plugin of vendor.example/gadget can serve claims" in problem.message
    assert "write `claims: true` under `plugin`" in problem.message


def test_a_plugin_that_serves_no_claims_is_refused_with_the_reason() -> None:
    """A driver for a plugin that is known to serve no claims is refused with the reason, also with `claims: true`."""
    parse(text("akri.sh/camera"))
    for plugin in ("", "claims: true"):
        (problem,) = problems(text("akri.sh/camera", BOTH, plugin))
        assert problem.path == "$.resources[0].driver"
        assert "(project-akri/akri) serves no claims: it frees what PodResources does not show" in problem.message


def test_a_plugin_that_cannot_be_adopted_is_refused() -> None:
    """A plugin is refused if a changed hostPath cannot move its sockets to the agent's directory."""
    (problem,) = problems(text("devices.kubevirt.io/kvm"))
    assert problem.path == "$.resources[0].devices"
    assert "(KubeVirt) cannot be adopted: virt-handler mounts the whole" in problem.message


def test_what_is_the_plugins_is_refused_with_what_may_be_said() -> None:
    """An adopted resource may set attributes and capacity, but not what containers get, such as `env`."""
    more = "attributes: {model: a, example.com/id: '{id}'}, capacity: {memory: 1Gi}, dra: {share: 1}, "
    (resource,) = parse(text("vendor.example/gadget", BOTH + more, "claims: true, answer: claim")).resources
    assert resource.plugin is not None
    assert resource.plugin.answer == "claim"
    (problem,) = problems(text("vendor.example/gadget", "env: {A: b}, "))
    assert "only name, driver, attributes, capacity and dra are given" in problem.message


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("GPU-b1c2d3e4-0000-1111-2222-333344445555", True),
        ("GPU-b1c2d3e4-0000-1111-2222-333344445555::3", True),
        ("MIG-b1c2d3e4-0000-1111-2222-333344445555", True),
        ("MIG-GPU-b1c2d3e4-0000-1111-2222-333344445555/1/0", True),
        ("GPU-b1c2d3e4-0000-1111-2222-333344445555-0", False),
        ("nvidia0", False),
    ],
)
def test_ids_tell_plugins_of_one_resource_apart(name: str, fits: bool) -> None:
    """HAMi's device ids end with a number; the ids of GKE's plugin are names of device nodes."""
    known = known_plugin("nvidia.com/gpu")
    assert known is not None
    assert bool(re.fullmatch(known.ids, name)) is fits


def test_each_known_plugin_has_a_reason_or_none() -> None:
    """Each known plugin with a restriction has a reason, and patterns of resources do not overlap."""
    for one in PLUGINS:
        assert bool(one.why) is (one.serves != "both")
        for name in one.resources:
            assert known_plugin(name.replace("*", "x")) is one


def test_a_plugin_that_restarts_ends_no_pods() -> None:
    """NoExecute is refused for a driver with an adopted plugin, as a restart of the plugin would end its pods."""
    (problem,) = problems(text("nvidia.com/gpu", f"{BOTH}dra: {{unhealthy: NoExecute}}, "))
    assert "driver x.example.com has devices of a vendor's plugin" in problem.message
    other = "{name: example.com/a, driver: x.example.com, devices: [path: /dev/x], dra: {unhealthy: NoExecute}}"
    (problem,) = problems(f"resources: [{other}, {text('nvidia.com/gpu', BOTH).partition('[')[2]}")
    assert problem.path == "$.resources[0]"
