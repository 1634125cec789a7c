"""Tests on a node as most clusters have it: a virtual machine with systemd, cgroup v2 and the agent as a unit.

`tox -e vm` runs them on demand. They need root, a Go tool chain and Debian's packages; without KVM they take an hour.
"""
