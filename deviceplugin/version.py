"""The version of both distributions; setup.cfg reads it from here."""

from typing import Final

VERSION: Final = "0.1.0"
