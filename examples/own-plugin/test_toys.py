"""Tests of `toys`, for `pytest`. The package deviceplugin has the fixtures, with its extras `test` and `bridge`."""

from toys import Toys


def test_pods_get_toys_either_way(fake_node, bridged):
    source = Toys()
    bridged(source, share="50%")
    by_limits = fake_node.run_pod("a", {"example.com/toy": 1})
    by_claim = fake_node.start_pod("b", template={"toy.example.com": 1}).wait_running()
    assert list(fake_node.devices_of(by_limits).values()) == ["plugin"]
    assert list(fake_node.devices_of(by_claim).values()) == ["claim"]
    assert fake_node.edits_of(by_claim).env["TOY_MODE"] == "balanced"
    by_claim.delete()
    fake_node.wait_until(lambda: not source.modes)


def test_a_toy_that_is_missing_is_not_given_away(fake_kubelet, served):
    served(Toys(["/dev/zero", "/dev/nonesuch"]))
    assert fake_kubelet.allocatable("example.com/toy") == 1
