"""Sequences that once gave hardware twice, replayed in the world of the machine, for each kind of identity."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.register.agent import Config, Settings
from tests.register.world import A, B, D, E, World

Make = Callable[..., World]


@pytest.fixture(
    params=["node", "name", *(pytest.param(kind, marks=pytest.mark.explore) for kind in ("file", "serial"))]
)
def begin(request: pytest.FixtureRequest) -> Make:
    """Begin with a config; `World` does the rest."""

    def made(config: Config, *, both: bool = True) -> World:
        return World(request.param, both=both, config=config)

    return made


def test_a_driver_is_renamed_and_renamed_back(begin: Make) -> None:
    """What a claim took through the other driver meanwhile is given to no claim of the first."""
    with begin({A: Settings(D, share="all")}) as world:
        world.reload({A: Settings(E, share="all")})
        world.claimant(E)
        world.reload({A: Settings(D, share="all")})
        world.claimant(D)
        world.claimant(D)
        world.leave_alone()


def test_a_list_says_other_replicas(begin: Make) -> None:
    """A device of which a pod has a part is given whole to nobody, and the other way round."""
    with begin({A: Settings(replicas=2)}, both=False) as world:
        world.list(A, "d1", None)
        world.pod(A)
        world.list(A, "d0", "h0", 1)
        world.pod(A, how="static")
        world.list(A, "d0", "h0", 3)
        world.pod(A, how="static")
        world.leave_alone()


def test_a_reload_says_other_replicas(begin: Make) -> None:
    """Parts count as they were granted."""
    with begin({A: Settings(replicas=2)}, both=False) as world:
        world.list(A, "d1", None)
        world.pod(A, 2)
        world.reload({A: Settings(replicas=3)})
        world.pod(A, how="static")
        world.leave_alone()


def test_names_are_made_anew_after_register_and_slices_are_lost(begin: Make) -> None:
    """A claim is known by its device, not by the name that was published."""
    with begin({A: Settings(D, share="all"), B: Settings(D, share="all")}) as world:
        world.list(B, "d0", None)
        world.claimant(D)
        world.end_agent(kill=True)
        world.config = {A: Settings(D)}
        world.lose({"register", "slices"})
        world.start_agent()
        world.pod(A)
        world.pod(A)
        world.leave_alone()


def test_a_claim_is_allocated_anew_while_the_kubelet_is_down(begin: Make) -> None:
    """Its next pod gets what it is allocated now, not what its last pod has."""
    with begin({A: Settings(D, share="all")}) as world:
        former = world.user("mine", D)
        world.stop_kubelet()
        world.end(former, "hang")
        world.claimant(D)
        world.user("mine", D)
        world.start_kubelet()
        world.reap(former)
        world.leave_alone()


def test_another_drivers_claim_has_a_device_of_our_name(begin: Make) -> None:
    """Names of others mean nothing."""
    with begin({A: Settings(D, share="all")}) as world:
        world.reload({A: Settings()})
        world.foreign()
        world.leave_alone()
