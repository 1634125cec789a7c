"""Speed and memory of the agent, measured from outside its process, against the limits that it promises.

`python -m tests.bench` (or `tox -e bench`) runs all of it in some minutes; `python -m tests.bench restart allocate`
runs parts, `--quick` with fewer repetitions. It ends with 1 when a limit is missed. Run it on an idle machine.

`python -m tests.bench.peers` (or `tox -e peers`) is a run of its own: the latency of calls beside that of Go programs.
`python -m tests.bench.trace` counts the functions and modules that calls pass through; tests/test_trace.py limits them.
"""
