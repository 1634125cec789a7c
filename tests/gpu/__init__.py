"""Checks on a machine with NVIDIA GPUs. `tox -e gpu` runs the checks."""
