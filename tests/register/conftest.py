"""The fake node for these tests: the one of the tests of agents that serve limits and claims."""

from tests.dra.conftest import node

__all__ = ["node"]
