"""Has the version of the package, and makes the command that installs it. setup.cfg reads the version from here."""

from typing import Final

VERSION: Final = "0.1.0"


def installing(extra: str) -> str:
    """Return the command that installs the package with an extra, for messages.

    The package is in no package index yet, so the command names a file.
    """
    return (
        f"pip install '.[{extra}]' in the repository, or pip install 'deviceplugin-{VERSION}-py3-none-any.whl[{extra}]'"
    )
