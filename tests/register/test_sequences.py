"""Sequences that once gave hardware twice, replayed on the node of the machine, for each kind of identity."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.register.agent import Config, Settings
from tests.register.checked import A, B, CheckedNode, D, E

Make = Callable[..., CheckedNode]


@pytest.fixture(
    params=["node", "name", *(pytest.param(kind, marks=pytest.mark.explore) for kind in ("file", "serial"))]
)
def begin(request: pytest.FixtureRequest) -> Make:
    """Begin with a config; `CheckedNode` does the rest."""

    def made(config: Config, *, both: bool = True) -> CheckedNode:
        return CheckedNode(request.param, both=both, config=config)

    return made


def test_a_driver_is_renamed_and_renamed_back(begin: Make) -> None:
    """What a claim took through the other driver meanwhile is given to no claim of the first."""
    with begin({A: Settings(D, share="all")}) as here:
        here.reload({A: Settings(E, share="all")})
        here.claimant(E)
        here.reload({A: Settings(D, share="all")})
        here.claimant(D)
        here.claimant(D)
        here.leave_alone()


def test_a_list_says_other_replicas(begin: Make) -> None:
    """A device of which a pod has a part is given whole to nobody, and the other way round."""
    with begin({A: Settings(replicas=2)}, both=False) as here:
        here.list(A, "d1", None)
        here.pod(A)
        here.list(A, "d0", "h0", 1)
        here.pod(A, how="static")
        here.list(A, "d0", "h0", 3)
        here.pod(A, how="static")
        here.leave_alone()


def test_a_reload_says_other_replicas(begin: Make) -> None:
    """Parts count as they were granted."""
    with begin({A: Settings(replicas=2)}, both=False) as here:
        here.list(A, "d1", None)
        here.pod(A, 2)
        here.reload({A: Settings(replicas=3)})
        here.pod(A, how="static")
        here.leave_alone()


def test_names_are_made_anew_after_register_and_slices_are_lost(begin: Make) -> None:
    """A claim is known by its device, not by the name that was published."""
    with begin({A: Settings(D, share="all"), B: Settings(D, share="all")}) as here:
        here.list(B, "d0", None)
        here.claimant(D)
        here.end_agent(kill=True)
        here.config = {A: Settings(D)}
        here.lose({"register", "slices"})
        here.start_agent()
        here.pod(A)
        here.pod(A)
        here.leave_alone()


def test_a_claim_is_allocated_anew_while_the_kubelet_is_down(begin: Make) -> None:
    """Its next pod gets what it is allocated now, not what its last pod has."""
    with begin({A: Settings(D, share="all")}) as here:
        former = here.user("mine", D)
        here.stop_kubelet()
        here.end(former, "hang")
        here.claimant(D)
        here.user("mine", D)
        here.start_kubelet()
        here.reap(former)
        here.leave_alone()


def test_another_drivers_claim_has_a_device_of_our_name(begin: Make) -> None:
    """Names of others mean nothing."""
    with begin({A: Settings(D, share="all")}) as here:
        here.reload({A: Settings()})
        here.foreign()
        here.leave_alone()
