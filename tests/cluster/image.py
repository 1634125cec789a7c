"""Makes images for the pods of a cluster, as OCI archives, because nodes cannot pull images.

``IMAGE`` is a static busybox for the pods of tests. The agent's image resembles the image of examples/Dockerfile, but
has no base image: Python and Debian have the same releases, from Debian's packages; the dependencies have the same
versions; and the same script, examples/image/tree.py, selects the files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import build

IMAGE = "localhost/busybox:1"
AGENTS = ("localhost/deviceplugin:1", "localhost/deviceplugin:2")
"""Two names of the agent's image, so that tests can update a DaemonSet from one to the other."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"

_REPOSITORY = Path(__file__).resolve().parents[2]
EXTRAS = ("bridge", "nvidia")
"""Extras of this project's distribution whose dependencies are in the agent's image."""


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
    """Write the directories and files that every image has."""
    for name in ("bin", "dev", "etc", "proc", "run", "sys", "tmp", "var"):
        entry = tarfile.TarInfo(name)
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o1777 if name == "tmp" else 0o755
        archive.addfile(entry)
    _link(archive, "var/run", "/run")
    _file(archive, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
    _file(archive, "etc/group", b"root:x:0:\nnobody:x:65534:\n")


def write_busybox(busybox: str, path: Path) -> None:
    """Write the archive of ``IMAGE``, for ``Cluster.import_image``. busybox: the path of the program."""
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _begin(archive)
        _file(archive, "bin/busybox", Path(busybox).read_bytes(), 0o755)
        for applet in applets:
            if applet != "busybox":
                _link(archive, f"bin/{applet}", "busybox")
    # A pod's sandbox runs this command; the containers of the tests have their own command. If the containers share the
    # sandbox's pid namespace, the waiting shell reaps orphaned processes, as the usual sandbox image does.
    forever = "trap 'exit 0' INT TERM; while :; do sleep 2147483647 & wait; done"
    config = {"Cmd": ["/bin/sh", "-c", forever], "Env": ["PATH=/bin"]}
    _write(path, [buffer.getvalue()], config, [IMAGE])


def write_agent(
    into: Path,
    entrypoint: Sequence[str],
    names: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Write the agent's image with several names. Requires root, because the image is made in a chroot.

    environment: environment variables of the image; its Python files are also compiled with these variables.
    """
    root = build.ensure_python()
    python = f"/usr/bin/python{build.image_base()[0]}"
    buffer = io.BytesIO()
    with (
        # The directory is in the cache's file system, so that files are linked instead of copied.
        tempfile.TemporaryDirectory(prefix=".image-", dir=build.cache_directory()) as directory,
        tarfile.open(fileobj=buffer, mode="w") as archive,
    ):
        inside = Path(directory) / "root"
        subprocess.run(["cp", "--archive", "--link", root, inside], check=True, stdin=subprocess.DEVNULL)
        shutil.copy(_REPOSITORY / "examples" / "image" / "tree.py", inside)
        for package in ("deviceplugin", "dra_bridge"):
            shutil.copytree(
                _REPOSITORY / package, inside / "site" / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        command = ["chroot", str(inside), python, "/tree.py", "/site", "/tree"]
        subprocess.run(command, check=True, env={"PATH": os.environ["PATH"], **environment}, stdin=subprocess.DEVNULL)
        _begin(archive)
        for path in sorted((inside / "tree").rglob("*")):
            if not path.is_dir():
                archive.add(path, path.relative_to(inside / "tree"), recursive=False, filter=_of_root)
    variables = {"PATH": "/usr/local/bin", "PYTHONPATH": "/opt/site", **environment}
    config = {"Entrypoint": list(entrypoint), "Env": [f"{name}={value}" for name, value in variables.items()]}
    _write(into, [buffer.getvalue()], config, names)


def write_derived(base: Path, into: Path, directory: Path, name: str) -> None:
    """Write the image of a directory's Dockerfile, whose base is an image of `write_agent`.

    Of the Dockerfile, only COPY of files and ENTRYPOINT are executed.
    """
    text = (directory / "Dockerfile").read_text()
    with tarfile.open(base) as archive:

        def content(digest: str) -> bytes:
            file = archive.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
            assert file is not None
            return file.read()

        index = archive.extractfile("index.json")
        assert index is not None
        manifest = json.loads(content(json.load(index)["manifests"][0]["digest"]))
        layers = [content(one["digest"]) for one in manifest["layers"]]
        how = json.loads(content(manifest["config"]["digest"]))["config"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for source, target in re.findall(r"^COPY (\S+) (/\S*/)$", text, re.MULTILINE):
            _file(made, target.lstrip("/") + source, (directory / source).read_bytes())
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    _write(into, [*layers, buffer.getvalue()], {**how, "Entrypoint": json.loads(entrypoint)}, [name])


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _write(path: Path, layers: Sequence[bytes], how: Mapping[str, object], names: Sequence[str]) -> None:
    """Write an OCI image layout (https://github.com/opencontainers/image-spec) as a tar for ``ctr images import``."""
    blobs: dict[str, bytes] = {}

    def blob(media_type: str, data: bytes) -> dict[str, object]:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    stored = [blob(_LAYER, layer) for layer in layers]
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": how,
        "rootfs": {"type": "layers", "diff_ids": [one["digest"] for one in stored]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": blob(_CONFIG, json.dumps(config).encode()),
        "layers": stored,
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
