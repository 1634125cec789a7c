"""Generate the stubs from api/**/*.proto, and compare them with the files in the repository.

`python -m tests.stubs` exits with 1 if a file differs; `--write` writes the files. Needs grpcio-tools and mypy-protobuf
in the versions that tox.ini names.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "api"


def generate(into: Path) -> list[Path]:
    """Generate all stubs under a directory; return their paths in it."""
    from grpc_tools import protoc  # type: ignore[import-untyped,import-not-found,unused-ignore]

    protos = sorted(str(path.relative_to(API)) for path in API.rglob("*.proto"))
    out = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # The plugins of mypy-protobuf are beside the interpreter, in a directory that may not be on PATH.
    plugins = [
        f"--plugin={name}={Path(sys.executable).parent / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    status = protoc.main(["protoc", f"-I{API}", *plugins, *out, *protos])
    if status:
        raise SystemExit(status)
    return sorted(path.relative_to(into) for path in into.rglob("*.py*") if path.is_file())


def main(arguments: list[str]) -> int:
    """Compare the generated stubs with the repository's, or write them; return the exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        into = Path(scratch)
        names = generate(into)
        fresh = {name: (into / name).read_bytes() for name in names}
    packages = {name.parent for name in names}
    stale = [
        path.relative_to(ROOT)
        for package in packages
        for path in (ROOT / package).glob("*_pb2*.py*")
        if path.is_file() and path.relative_to(ROOT) not in fresh
    ]
    differ = [name for name, text in fresh.items() if not (ROOT / name).exists() or (ROOT / name).read_bytes() != text]
    if arguments == ["--write"]:
        for name in differ:
            (ROOT / name).write_bytes(fresh[name])
        for name in stale:
            (ROOT / name).unlink()
        print(f"{len(differ)} written, {len(stale)} removed, {len(fresh) - len(differ)} unchanged")
        return 0
    for name in differ:
        print(f"{name} is not what api/ says")
    for name in stale:
        print(f"{name} has no .proto in api/")
    if differ or stale:
        print("generate them again: tox -e stubs -- --write")
        return 1
    print(f"{len(fresh)} generated files are as api/ says")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
