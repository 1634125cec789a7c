"""The fake node of the tests of agents with both sides."""

from tests.dra.conftest import node

__all__ = ["node"]
