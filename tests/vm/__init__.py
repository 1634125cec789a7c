"""Tests on a node like those of most clusters: a virtual machine with systemd and cgroup v2; the agent is a unit.

`tox -e vm` runs the tests. They require root, a Go tool chain and Debian's packages. Without KVM they take an hour.
"""
