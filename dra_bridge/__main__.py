"""`python -m dra_bridge` does the same as `dra-bridge`."""

import sys

from dra_bridge.cli import main

sys.exit(main())
