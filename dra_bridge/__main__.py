"""Makes `python -m dra_bridge` do the same as `dra-bridge`."""

import sys

from dra_bridge.cli import main

sys.exit(main())
