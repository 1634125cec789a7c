"""Tests of the register (who holds which device), and of agents on a fake node: no device is given to two pods."""
