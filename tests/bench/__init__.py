"""Measures the speed and memory of the agent from outside its process, and compares them with the promised limits.

`python -m tests.bench` (or `tox -e bench`) runs all measurements in some minutes. Arguments select measurements, for
example `python -m tests.bench restart allocate`. The option `--quick` reduces the number of repetitions. The exit
status is 1 if a limit is exceeded. The machine should be idle.

`python -m tests.bench.peers` (or `tox -e peers`) compares the latency of calls with the latency of Go programs. `python
-m tests.bench.trace` counts the functions and modules that the handling of a call uses; tests/test_trace.py limits
these numbers.
"""
