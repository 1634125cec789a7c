"""Gives these tests the fake node of tests.dra, on which agents serve limits and claims."""

from tests.dra.conftest import node

__all__ = ["node"]
