"""`python -m deviceplugin` does the same as `deviceplugin`."""

import sys

from deviceplugin.cli import main

sys.exit(main())
