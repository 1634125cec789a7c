"""The ledger's records of prepared claims, read by several threads."""

from __future__ import annotations

import subprocess
import sys

FIRST_READERS = """
import importlib, sys, threading
from deviceplugin.register.records import Claim
from dra_bridge.driver import claims

CLAIM = Claim("fpga", "uid", "", "", (), '{"devices":[{"request":"r","pool":"p","device":"fpga0"}]}', 0.0)
sys.setswitchinterval(1e-6)
for _ in range(100):
    importlib.reload(claims)
    together = threading.Barrier(4)
    def read():
        together.wait()
        assert claims.prepared_of(CLAIM).devices[0].device == "fpga0"
    readers = [threading.Thread(target=read) for _ in range(4)]
    for one in readers: one.start()
    for one in readers: one.join()
"""


def test_threads_that_read_the_first_answer_together() -> None:
    """Four threads that decode the first prepared claim of a process at the same time all get its answer."""
    done = subprocess.run([sys.executable, "-c", FIRST_READERS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
