"""Build the distributions and check them: `python -m tests.package [DIRECTORY]` leaves them in the directory.

Needs build and twine.

The source distribution has every file of the repository. Its tests can be collected, and the tests in PART pass with
the wheel's requirements. The wheel is installed into a new environment, and its programs run there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = ("tests/config/test_schema.py", "tests/dra/test_manifests.py", "tests/test_documents.py", "tests/test_layers.py")
"""The tests that run in the unpacked source distribution, because they read files of all kinds."""
PROGRAMS = {
    "deviceplugin": "deviceplugin",
    "dra-bridge": "dra-bridge",
    "kubectl-dra_bridge": "kubectl dra-bridge",
}
"""The name that each program prints for itself, by the program's file name."""
MADE = re.compile(r"deviceplugin\.egg-info/|PKG-INFO$|setup\.cfg$")


class PackageError(Exception):
    """A distribution lacks a file, or a check of it fails."""


def _run(command: Sequence[str | Path], cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        text = " ".join(map(str, command))
        raise PackageError(f"{text} in {cwd} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-8000:]}")
    return done.stdout


def check_files(names: Sequence[str]) -> None:
    """Compare the files of a source distribution with the files in git, in a work tree."""
    if not (ROOT / ".git").exists():
        return
    known = {name for name in _run(["git", "ls-files"], ROOT).splitlines() if (ROOT / name).exists()}
    found = {name for name in names if not MADE.match(name)} | {"setup.cfg"}
    if missing := sorted(known - found):
        raise PackageError(f"the source distribution lacks {', '.join(missing)}: see MANIFEST.in")
    if more := sorted(found - known):
        raise PackageError(f"the source distribution has {', '.join(more)}, which git does not know")


def check_links(text: str) -> None:
    """Raise PackageError if a description has a relative link, which leads nowhere on PyPI."""
    if relative := re.findall(r"\]\(((?!https?:|#)[^)]*)", text):
        raise PackageError(f"links of the description lead nowhere on PyPI: {', '.join(relative)}")


OWN = """
from deviceplugin import Device, DeviceSource

class Toys(DeviceSource):
    resource, driver = "example.com/toy", "toy.example.com"

    def watch(self):
        yield [Device("a")]

def test_by_limits(fake_kubelet, served):
    served(Toys())
    fake_kubelet.run_pod("p", {"example.com/toy": 1})

def test_by_a_claim(fake_node, bridged):
    bridged(Toys(), share="all")
    fake_node.start_pod("p", template={"toy.example.com": 1}).wait_running()
"""


def check_fixtures(python: Path, directory: Path) -> None:
    """Run a plugin author's tests with the extra `test` and no pytest settings; a failure or warning is an error.

    Raises PackageError.
    """
    directory.mkdir()
    (directory / "test_own.py").write_text(OWN)
    said = _run([python, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"], directory)
    if "2 passed" not in said or "arning" in said:
        raise PackageError(f"an author's tests with the extra `test`: {said}")


def check(dist: Path, scratch: Path) -> None:
    """Check the source distribution and the wheel in a directory; raise PackageError if a check fails."""
    (sdist,), (wheel,) = (list(dist.glob(name)) for name in ("*.tar.gz", "*.whl"))
    print(_run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel], scratch))
    with tarfile.open(sdist) as archive:
        check_files([one.name.partition("/")[2] for one in archive if one.isfile()])
        archive.extractall(scratch, filter="data")
    with zipfile.ZipFile(wheel) as archived:
        (name,) = (one for one in archived.namelist() if one.endswith(".dist-info/METADATA"))
        check_links(archived.read(name).decode())
    venv.create(scratch / "venv", with_pip=True)
    programs = scratch / "venv" / "bin"
    _run([programs / "pip", "install", "-q", "--no-compile", f"{wheel}[bridge,cli,nvidia,test]"], scratch)
    check_fixtures(programs / "python", scratch / "own")
    _run([programs / "pip", "install", "-q", "--no-compile", f"{wheel}[develop]"], scratch)
    for name, called in PROGRAMS.items():
        *said, version = _run([programs / name, "--version"], scratch).split()
        if f"-{version}.tar.gz" not in sdist.name or " ".join(said) != called:
            raise PackageError(f"{name} --version says {' '.join(said)} {version}")
    (source,) = scratch.glob("deviceplugin-*/")
    pytest: list[str | Path] = [programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    print(_run([*pytest, "--collect-only"], source).splitlines()[-1])
    print(_run([*pytest, "-n", "2", *PART], source).splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    """Build and check the distributions; return the exit status."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            dist = Path(*arguments).resolve() if arguments else scratch / "dist"
            _run([sys.executable, "-m", "build", "--outdir", dist], ROOT)
            check(dist, scratch)
    except PackageError as error:
        print(f"package: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
