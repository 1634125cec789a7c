"""Images for the pods of a cluster, as OCI archives, for nothing can be pulled.

``IMAGE`` is a static busybox, which pods of tests run. An agent's image is made of what this process itself runs on:
its Python, our packages and the distributions that they require, and the shared libraries that all these need.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

IMAGE = "localhost/busybox:1"
AGENTS = ("localhost/deviceplugin:1", "localhost/deviceplugin:2")
"""The names of one agent's image, so that tests can roll another one out."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"

_REPOSITORY = Path(__file__).resolve().parents[2]
_SITE = "/opt/site"
# Of the standard library, what no agent imports and what makes it big.
_LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages", "dist-packages"}


def _file(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = mode
    archive.addfile(entry, io.BytesIO(data))


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.SYMTYPE
    entry.linkname = target
    archive.addfile(entry)


def _begin(archive: tarfile.TarFile) -> None:
    """Write what every image has."""
    for name in ("bin", "dev", "etc", "proc", "run", "sys", "tmp", "var"):
        entry = tarfile.TarInfo(name)
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o1777 if name == "tmp" else 0o755
        archive.addfile(entry)
    _link(archive, "var/run", "/run")
    _file(archive, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
    _file(archive, "etc/group", b"root:x:0:\nnobody:x:65534:\n")


def write_busybox(busybox: str, path: Path) -> None:
    """Write ``IMAGE`` for ``Cluster.import_image``."""
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _begin(archive)
        _file(archive, "bin/busybox", Path(busybox).read_bytes(), 0o755)
        for applet in applets:
            if applet != "busybox":
                _link(archive, f"bin/{applet}", "busybox")
    # What the sandbox of a pod runs; the containers of the tests bring their own command. Where the containers are in
    # the sandbox's pid namespace it buries orphans, as the usual image of sandboxes does: a shell that waits does.
    forever = "trap 'exit 0' INT TERM; while :; do sleep 2147483647 & wait; done"
    config = {"Cmd": ["/bin/sh", "-c", forever], "Env": ["PATH=/bin"]}
    _write(path, buffer.getvalue(), config, [IMAGE])


def write_agent(
    path: Path,
    extras: Iterable[str],
    entrypoint: Sequence[str],
    names: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Write an image with this process's Python and our packages, under several names.

    extras: of our distribution, what it requires with these is there, and nothing else that this environment has.
    environment: variables of the image; its bytecode is compiled with them.
    Python and libraries lie where they lie on this machine, so that they find each other.
    """
    python = os.path.realpath(sys.executable)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    buffer = io.BytesIO()
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory() as compiled,
        tarfile.open(fileobj=buffer, mode="w") as archive,
    ):
        site = Path(directory)
        scripts = _install(site, extras)
        sources = {source: _SITE + source.removeprefix(directory) for source in _below(directory)}
        sources |= {source: source for top in standard for source in _below(top, without=_LEFT_OUT)}
        files = {python: python, **sources, **_compiled(sources, Path(compiled), environment)}
        files |= {source: source for source in _libraries(files)}
        _begin(archive)
        for source, target in files.items():
            archive.add(os.path.realpath(source), target.lstrip("/"), recursive=False, filter=_of_root)
        for name, (module, function) in scripts.items():
            text = f"#!{python}\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
            _file(archive, f"usr/local/bin/{name}", text.encode(), 0o755)
        _link(archive, "usr/local/bin/python", python)
    variables = {"PATH": "/usr/local/bin:/bin", "PYTHONPATH": _SITE, **environment}
    config = {"Entrypoint": list(entrypoint), "Env": [f"{name}={value}" for name, value in variables.items()]}
    _write(path, buffer.getvalue(), config, names)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _below(top: str, without: Collection[str] = ()) -> Iterator[str]:
    """The files in a directory and below, without directories of these names and what only makes an image big."""
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if name not in without]
        for name in files:
            if not re.search(r"\.pyc$|\.a$|^_tkinter\.", name):
                yield os.path.join(directory, name)


def _compiled(sources: Mapping[str, str], directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Compile modules into a directory; return where each file of bytecode belongs, beside its module's place."""
    modules = "\n".join(source for source in sources if source.endswith(".py"))
    python = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    python |= {**environment, "PYTHONPYCACHEPREFIX": str(directory)}
    # Some distributions ship templates that are no Python; nothing imports these.
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


def _install(site: Path, extras: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Copy our packages and what they require; return our console scripts: module and function by name."""
    for package in ("deviceplugin", "dra_bridge"):
        shutil.copytree(_REPOSITORY / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    ours = configparser.ConfigParser()
    ours.read(_REPOSITORY / "setup.cfg")  # what is installed may be older
    lists = [ours["options"]["install_requires"], *(ours["options.extras_require"][extra] for extra in extras)]
    wanted = [Requirement(line) for text in lists for line in text.split("\n") if line]
    seen: set[tuple[str, str]] = set()
    while wanted:
        one = wanted.pop()
        distribution = importlib.metadata.distribution(one.name)
        for extra in {"", *one.extras} - {extra for name, extra in seen if name == one.name}:
            seen.add((one.name, extra))
            required = map(Requirement, distribution.requires or ())
            wanted += [dep for dep in required if dep.marker is None or dep.marker.evaluate({"extra": extra})]
        for file in distribution.files or ():
            if ".." not in file.parts and not (site / file).exists():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), site / file)
    scripts = (line.split(" = ") for line in ours["options.entry_points"]["console_scripts"].split("\n") if line)
    return {name: (target.partition(":")[0], target.partition(":")[2]) for name, target in scripts}


def _libraries(files: Iterable[str]) -> set[str]:
    """The shared libraries that these programs and extensions load, the loader included."""
    loading = [file for file in files if re.search(r"\.so[.\d]*$|/bin/", file)]
    done = subprocess.run(["ldd", *loading], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return set(re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", done.stdout, re.MULTILINE)) - set(loading)


def _write(path: Path, layer: bytes, how: Mapping[str, object], names: Sequence[str]) -> None:
    """Write an OCI image layout (https://github.com/opencontainers/image-spec) as a tar for ``ctr images import``."""
    blobs: dict[str, bytes] = {}

    def blob(media_type: str, data: bytes) -> dict[str, object]:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    stored = blob(_LAYER, layer)
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": how,
        "rootfs": {"type": "layers", "diff_ids": [stored["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": blob(_CONFIG, json.dumps(config).encode()),
        "layers": [stored],
    }
    entry = blob(_MANIFEST, json.dumps(manifest).encode())
    entries = []
    for name in names:
        tag = name.rpartition(":")[2]
        called = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag}
        entries.append({**entry, "annotations": called})
    with tarfile.open(path, "w") as archive:
        _file(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _file(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": entries}).encode())
        for digest, data in blobs.items():
            _file(archive, f"blobs/sha256/{digest.removeprefix('sha256:')}", data)
