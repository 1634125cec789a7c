"""`python -m dra_bridge` is `dra-bridge`."""

from __future__ import annotations

import sys

from dra_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
