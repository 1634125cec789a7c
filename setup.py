"""What setup.cfg cannot say: on PyPI the README's links lead to the repository, at the tag of the version."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

root = Path(__file__).parent
about = ConfigParser()
about.read(root / "setup.cfg", encoding="utf-8")
url = about["metadata"]["url"]
module = (root / "deviceplugin" / "version.py").read_text(encoding="utf-8")
(version,) = re.findall(r'^VERSION.*"(.+)"', module, re.MULTILINE)
readme = (root / "README.md").read_text(encoding="utf-8")
setup(long_description=re.sub(r"\]\((?!https?:|#)", f"]({url}/blob/v{version}/", readme))
