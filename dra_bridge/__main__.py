"""`python -m dra_bridge` is `dra-bridge`."""

import sys

from dra_bridge.cli import main

sys.exit(main())
