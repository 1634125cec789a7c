"""The image that the pods of a cluster run: a static busybox in an OCI archive, for nothing can be pulled."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path

IMAGE = "localhost/busybox:1"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def _file(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = mode
    archive.addfile(entry, io.BytesIO(data))


def _layer(busybox: str) -> bytes:
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("bin", "dev", "etc", "proc", "run", "sys", "tmp", "var"):
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        _file(archive, "bin/busybox", Path(busybox).read_bytes(), 0o755)
        for applet in applets:
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type = tarfile.SYMTYPE
                entry.linkname = "busybox"
                archive.addfile(entry)
        _file(archive, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
        _file(archive, "etc/group", b"root:x:0:\nnobody:x:65534:\n")
    return buffer.getvalue()


def write_image(busybox: str, path: Path) -> None:
    """Write an OCI image layout (https://github.com/opencontainers/image-spec) as a tar for ``ctr images import``."""
    blobs: dict[str, bytes] = {}

    def blob(media_type: str, data: bytes) -> dict[str, object]:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    layer = blob(_LAYER, _layer(busybox))
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        # What the sandbox of a pod runs; the containers of the tests bring their own command.
        "config": {"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": blob(_CONFIG, json.dumps(config).encode()),
        "layers": [layer],
    }
    entry = blob(_MANIFEST, json.dumps(manifest).encode())
    entry["annotations"] = {"io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": "1"}
    with tarfile.open(path, "w") as archive:
        _file(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _file(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        for digest, data in blobs.items():
            _file(archive, f"blobs/sha256/{digest.removeprefix('sha256:')}", data)
