"""The files of the agents' image: `python tree.py SITE INTO` lays them out as the root of a file system.

The image has only the files that an agent loads: the running Python, its standard library without the modules that no
agent imports, SITE (a directory of packages), the shared libraries of all these, and a program for each entry point.
There is no shell and no pip. In the image, SITE is /opt/site; all other files have the same paths as on this machine.
examples/Dockerfile runs this script, and the tests make their image with it.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping

SITE = "/opt/site"
PROGRAMS = {"deviceplugin": "deviceplugin.cli", "dra-bridge": "dra_bridge.cli"}
"""For each program in the image, the module whose `main` it runs."""
LEFT_OUT = frozenset(
    [
        "curses",
        "dbm",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tkinter",
        "turtledemo",
    ]
)
"""Directories of the standard library that no agent imports."""
EXTENSIONS = re.compile(r"(_curses|_curses_panel|_dbm|_gdbm|_tkinter|nis|readline|_test\w*|_xxtest\w*|xx\w*)\.")
"""Extension modules that no agent imports. Some of them would need further libraries in the image."""
SYSTEM = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d/*", "/etc/debian_version", "/etc/os-release")
"""Files of the dynamic loader, and files by which scanners and the NVIDIA runtime identify a system."""


def files(site: str, compiled: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return, for each file of this machine that belongs to the image, its path in the image.

    site: the directory SITE. compiled: an empty directory for the bytecode. environment: the image's Python variables,
    such as PYTHONOPTIMIZE, which determine the bytecode.
    """
    python = os.path.realpath(sys.executable)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    sources = {source: SITE + source.removeprefix(site) for source in _below(site)}
    sources = {source: target for source, target in sources.items() if not target.startswith(f"{SITE}/bin/")}
    sources |= {source: source for top in standard for source in _below(top, LEFT_OUT)}
    found = {python: python, **sources, **_compiled(sources, compiled, environment)}
    found |= {source: source for source in _libraries(found)}
    return found | {source: source for pattern in SYSTEM for source in glob.glob(pattern)}


def texts() -> dict[str, str]:
    """Return the texts of the programs, and of the files with the names of users and groups, by path in the image."""
    python = os.path.realpath(sys.executable)
    return {
        "/etc/passwd": "root:x:0:0:root:/:/none\nnobody:x:65534:65534:nobody:/:/none\n",
        "/etc/group": "root:x:0:\nnobody:x:65534:\n",
        **{
            f"/usr/local/bin/{name}": f"#!{python}\nimport sys\n\nfrom {module} import main\n\nsys.exit(main())\n"
            for name, module in PROGRAMS.items()
        },
    }


def _below(top: str, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the files below a directory, without the files that no agent needs.

    without: names of directories to leave out.
    """
    for directory, names, inside in os.walk(top):
        names[:] = [name for name in names if name not in without]
        for name in inside:
            if not name.endswith((".pyc", ".a")) and not EXTENSIONS.match(name):
                yield os.path.join(directory, name)


def _compiled(sources: Mapping[str, str], directory: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Compile modules into a directory; return, for each file with bytecode, its path in the image.

    sources: for each file of this machine, its path in the image.
    """
    modules = "\n".join(source for source in sources if source.endswith(".py"))
    python = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    python |= {**environment, "PYTHONPYCACHEPREFIX": directory}
    # Some distributions contain templates with the ending .py that are not valid Python, and are never imported.
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "2", "-i", "-"]
    subprocess.run(command, input=modules, env=python, text=True)
    places = {}
    for source, target in sources.items():
        if source.endswith(".py"):
            optimization = environment.get("PYTHONOPTIMIZE", "")
            name = os.path.basename(importlib.util.cache_from_source(source, optimization=optimization))
            file = f"{directory}{os.path.dirname(source)}/{name}"
            if os.path.exists(file):
                places[file] = f"{os.path.dirname(target)}/__pycache__/{name}"
    return places


def _libraries(loading: Iterable[str]) -> set[str]:
    """Return the shared libraries that these programs and extension modules load, including the dynamic loader."""
    programs = [file for file in loading if re.search(r"\.so[.\d]*$|/bin/", file)]
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True)
    return set(re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", done.stdout, re.MULTILINE)) - set(programs)


def main(site: str, into: str) -> None:
    """Copy the image's files into the directory `into`. site: the directory SITE."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    compiled = f"{into}.compiled"
    for source, target in files(site, compiled, environment).items():
        os.makedirs(os.path.dirname(into + target), exist_ok=True)
        shutil.copy2(os.path.realpath(source), into + target)
    for target, text in texts().items():
        os.makedirs(os.path.dirname(into + target), exist_ok=True)
        with open(into + target, "w") as file:
            file.write(text)
        os.chmod(into + target, 0o755 if "/bin/" in target else 0o644)
    for empty in ("run", "tmp"):
        os.makedirs(f"{into}/{empty}", exist_ok=True)
    link = f"{into}/usr/local/bin/python"
    if not os.path.lexists(link):
        os.symlink(os.path.realpath(sys.executable), link)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
