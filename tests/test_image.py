"""The agents' image: the files of which examples/Dockerfile builds it. Tests on the real node run the image."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cluster import image

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "examples" / "Dockerfile").read_text()
LOCK = (ROOT / "examples" / "image" / "requirements.txt").read_text()


def test_base_image_is_one_that_stays() -> None:
    """The base image is named by its digest, and the last stage is built from scratch."""
    base, last = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:\S+@sha256:[0-9a-f]{64}", base)
    assert last == "scratch"


def test_python_of_the_image_is_supported() -> None:
    """The package supports the image's Python version, and the lock file is made for that version."""
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    (version,) = re.findall(r"^FROM python:(3\.\d+)-slim", DOCKERFILE, re.MULTILINE)
    assert version in named
    assert f"--python-version {version} " in LOCK


def test_lock_has_what_the_packages_require() -> None:
    """The lock file has a fitting version of each requirement, also of the image's extras, with hashes."""
    assert "--require-hashes" in DOCKERFILE
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+) \\\n    --hash=sha256:", LOCK, re.MULTILINE))
    assert len(locked) == len(re.findall(r"^[A-Za-z]", LOCK, re.MULTILINE))
    ours = configparser.ConfigParser()
    ours.read(ROOT / "setup.cfg")
    texts = [ours["options"]["install_requires"], *(ours["options.extras_require"][one] for one in image.EXTRAS)]
    for wanted in (Requirement(line) for text in texts for line in text.split("\n") if line):
        assert wanted.specifier.contains(locked[wanted.name.lower()]), wanted


def test_what_is_copied_is_sent_to_the_builder() -> None:
    """.dockerignore admits exactly the files that the Dockerfile copies."""
    copied = set(re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE))
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of an image with this Python, and with a small package in place of this project's."""
    directory = tmp_path_factory.mktemp("image")
    (directory / "site" / "ours").mkdir(parents=True)
    (directory / "site" / "ours" / "__init__.py").write_text("import asyncio, json, ssl\n")
    script = ROOT / "examples" / "image" / "tree.py"
    environment = {"PATH": os.environ["PATH"], "PYTHONOPTIMIZE": "2"}
    into = directory / "tree"
    subprocess.run([sys.executable, script, directory / "site", into], check=True, env=environment)
    return into


def test_no_shell_and_no_pip(tree: Path) -> None:
    """The image has Python, deviceplugin and dra-bridge, without a shell, pip or another program."""
    programs = {path.name for path in tree.rglob("*") if path.parent.name in ("bin", "sbin") and not path.is_dir()}
    python = Path(os.path.realpath(sys.executable)).name
    assert programs == {"deviceplugin", "dra-bridge", "python", python}
    assert not [path for path in tree.rglob("*") if re.fullmatch(r"pip|ensurepip|site-packages|setuptools", path.name)]
    assert (tree / "usr/local/bin/dra-bridge").read_text().startswith(f"#!{os.path.realpath(sys.executable)}\n")


def test_bytecode_is_that_of_the_image(tree: Path) -> None:
    """The image has the bytecode files that its environment variables require, so that no start compiles."""
    tag = f"{sys.implementation.cache_tag}.opt-2.pyc"
    assert (tree / f"opt/site/ours/__pycache__/__init__.{tag}").exists()
    assert list(tree.rglob(f"asyncio/__pycache__/base_events.{tag}"))
    assert list(tree.rglob("libc.so.6"))


def test_nothing_that_agents_import_is_left_out() -> None:
    """The image leaves out no module of the standard library that the packages import."""
    left_out = runpy.run_path(str(ROOT / "examples" / "image" / "tree.py"))
    modules = [path for package in ("deviceplugin", "dra_bridge") for path in (ROOT / package).rglob("*.py")]
    text = "\n".join(path.read_text() for path in modules)
    names = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert {"asyncio", "sqlite3"} <= names
    assert not names & left_out["LEFT_OUT"]
    assert not [name for name in names if left_out["EXTENSIONS"].match(f"_{name}.")]
