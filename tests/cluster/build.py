"""Build the programs of a real Kubernetes node from their Go modules.

``ensure(version)`` builds missing programs, and returns the paths of kube-apiserver, kube-controller-manager,
kube-scheduler, kubelet and kubectl of a Kubernetes version, and of etcd and containerd, which have one version for
all versions of Kubernetes::

    python -m tests.cluster.build              # the default version, and the version that a node is upgraded from
    python -m tests.cluster.build 1.32.2 1.35.4
    python -m tests.cluster.build default      # the default version only; `former`: only the version before an upgrade
    python -m tests.cluster.build helm         # a program of TOOLS: helm or actionlint

``ensure_peer(name)`` does the same for another project's driver or plugin with which the agent is compared (``PEERS``),
and ``ensure_tool(name)`` for programs that check files of this repository (``TOOLS``).

All sources are Go modules, so that a build needs only a Go tool chain and a module proxy. The cache is outside the work
tree, in ``$XDG_CACHE_HOME/deviceplugin-cluster`` (by default in ``~/.cache``): ``<kubernetes version>/bin``,
``etcd-<version>/bin``, ``containerd-<version>/bin`` and so on. Each of these directories is renamed into its place when
it is complete, so that a killed build leaves no incomplete directory. A lock for each directory prevents that two runs
build the same directory. A cold build of one version takes 5 to 10 minutes on two cores.

The agents' image also needs packages of its Debian release and wheels from PyPI (``ensure_python``).

Kubernetes as a module: its ``go.mod`` names its staging modules (``k8s.io/api`` and so on) as ``v0.0.0`` and replaces
them by directories, but Go ignores replacements in a dependency. So the generated main module replaces each staging
module by its published module, ``v0.<minor>.<patch>`` of the same release. Modules with real versions, such as
``k8s.io/utils`` and ``k8s.io/kube-openapi``, stay unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_VERSION = "1.37.2"
FORMER_VERSION = "1.36.3"
"""The version from which tests upgrade a node, and to which they downgrade it again."""
ETCD_VERSION = "3.6.8"
# 2.3.0 starts without its CRI plugin unless mkfs.erofs is installed; 1.6 of Debian 12 does not support CDI.
CONTAINERD_VERSION = "2.1.5"

KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")
CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
PEER_PROGRAMS = "PEER_PROGRAMS"
"""The environment variable with a directory of built programs, for peers that are not available as Go modules."""

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
CNI_DIRECTORIES = ("/usr/lib/cni", "/opt/cni/bin")
CNI_PLUGINS = ("ptp", "host-local", "loopback")


class BuildError(Exception):
    """A program or package that the cluster needs is missing and could not be built or installed."""


@dataclass(frozen=True)
class Binaries:
    """The directories of the programs of one Kubernetes version."""

    version: str
    kubernetes: Path
    """Directory of kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl."""
    etcd: Path
    containerd: Path
    """Directory of containerd, its shim and ctr."""
    cni: Path
    """Directory of the CNI plugins."""

    @property
    def minor(self) -> int:
        """The minor version, such as 37 for 1.37.2."""
        return int(self.version.split(".")[1])

    def path(self, program: str) -> str:
        """Return the path of a program in one of the directories."""
        for directory in (self.kubernetes, self.etcd, self.containerd):
            if (directory / program).exists():
                return str(directory / program)
        raise BuildError(f"{program} is not among the programs of {self}")


@dataclass(frozen=True)
class Peer:
    """A Go program of another project: its module with a version, and its package in the module."""

    module: str
    version: str
    package: str = "."


PEERS = {
    "dra-example-kubeletplugin": Peer(
        "sigs.k8s.io/dra-example-driver",
        "v0.4.0",
        "cmd/dra-example-kubeletplugin",
    ),
    "generic-device-plugin": Peer(
        "github.com/squat/generic-device-plugin",
        "v0.0.0-20260409131346-179b1fee5dcb",
    ),
}
"""The programs with which the agent is compared, by name."""


@dataclass(frozen=True)
class Tool:
    """A Go program that reads files of this repository. stamps: values that its build sets, by the variable's name."""

    package: str
    version: str
    stamps: Mapping[str, str] = field(default_factory=dict)


TOOLS = {
    "actionlint": Tool("github.com/rhysd/actionlint/cmd/actionlint", "1.7.12"),
    "helm": Tool(
        "helm.sh/helm/v3/cmd/helm",
        "3.22.0",
        {
            "helm.sh/helm/v3/internal/version.version": "v3.22.0",
            # The Kubernetes version that `helm template` and `helm lint` assume.
            **{
                f"helm.sh/helm/v3/pkg/{package}.k8sVersion{part}": value
                for package in ("chartutil", "lint/rules")
                for part, value in (("Major", "1"), ("Minor", DEFAULT_VERSION.split(".")[1]))
            },
        },
    ),
}
"""The programs that check files of this repository, by name."""


def default_version() -> str:
    """Return the version in KUBERNETES_VERSION, which may have a leading v; DEFAULT_VERSION if it is not set."""
    return (os.environ.get("KUBERNETES_VERSION") or DEFAULT_VERSION).removeprefix("v")


def cache_directory() -> Path:
    """Return the directory of the built programs, which all work trees of a user share."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "deviceplugin-cluster"


def _say(text: str) -> None:
    print(f"[build] {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str], cwd: Path, **environment: str) -> str:
    """Run a command and return its output. Raises BuildError with the end of the output if the command fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BuildError(
            f"{' '.join(command)} in {cwd} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-8000:]}"
        )
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel releases the lock at the latest when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another run that builds {path.stem}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def built(name: str, programs: Sequence[str], make: Callable[[Path, Path], None]) -> Path:
    """Return ``<cache>/<name>/bin``; if it does not exist, create it with ``make(work, bin)``."""
    cache = cache_directory()
    final = cache / name
    if final.is_dir():
        return final / "bin"
    with locked(cache / "locks" / f"{name}.lock"):
        if final.is_dir():
            return final / "bin"
        if shutil.which("go") is None:
            raise BuildError(f"{name} has to be built and there is no go in PATH: install Go 1.24 or newer")
        for stale in cache.glob(f".{name}-*"):  # directories of killed builds: the lock excludes running builds
            shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        started = time.monotonic()
        try:
            _say(f"building {name} (into {final})")
            (staging / "work").mkdir()
            (staging / "done" / "bin").mkdir(parents=True)
            make(staging / "work", staging / "done" / "bin")
            missing = [program for program in programs if not (staging / "done" / "bin" / program).is_file()]
            if missing:
                raise BuildError(f"the build of {name} left no {', '.join(missing)}")
            os.rename(staging / "done", final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        _say(f"built {name} in {time.monotonic() - started:.0f} s")
    return final / "bin"


SAMPLE_PLUGIN = "sample-device-plugin"
"""Kubernetes' device plugin for its e2e tests, which the agent adopts in a test; it is built only on request."""


def sample_plugin() -> Path:
    """Return where the sample plugin of the default version is once it is built; this function does not build it."""
    return cache_directory() / f"{SAMPLE_PLUGIN}-{default_version()}" / "bin" / SAMPLE_PLUGIN


def kubernetes_go_mod(version: str, upstream: str, packages: Sequence[str]) -> str:
    """Return the go.mod of a main module that builds these packages of a Kubernetes release.

    ``upstream`` is the release's own go.mod. The result has the same requirements, with the release's versions of the
    staging modules, so that the programs get the dependencies of the release. It also has the ``godebug`` line, which
    Go reads in a main module only.
    """
    minor, patch = version.split(".")[1:]
    module = f"v0.{minor}.{patch}"
    requirements = re.findall(r"^(?:require)?\s+([\w./~-]+\.[\w./~-]+) (v[^\s]+)", upstream, re.MULTILINE)
    staging = sorted({name for name, at in requirements if name.startswith("k8s.io/") and at == "v0.0.0"})
    go_line = re.search(r"^go (\d+)\.(\d+)(\S*)", upstream, re.MULTILINE)
    if not staging or go_line is None:
        raise BuildError(f"the go.mod of k8s.io/kubernetes {version} is not what this script knows:\n{upstream[:2000]}")
    # Go has tool lines since 1.24
    language = go_line.group(0) if (int(go_line.group(1)), int(go_line.group(2))) >= (1, 24) else "go 1.24"
    godebug = re.findall(r"^godebug .*$", upstream, re.MULTILINE)
    lines = ["module deviceplugin-cluster", "", language, "", *godebug, ""]
    lines += [f"tool k8s.io/kubernetes/{package}" for package in packages]
    lines += ["", f"require k8s.io/kubernetes v{version}"]
    lines += [f"require {name} {module if name in staging else at}" for name, at in sorted(set(requirements))]
    lines += [""] + [f"replace {name} => {name} {module}" for name in staging]
    return "\n".join(lines) + "\n"


def _make_kubernetes(version: str, packages: Sequence[str]) -> Callable[[Path, Path], None]:
    def make(work: Path, into: Path) -> None:
        (work / "go.mod").write_text("module scratch\n\ngo 1.24\n")
        got = json.loads(run(["go", "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"], work))
        (work / "go.mod").write_text(kubernetes_go_mod(version, Path(got["GoMod"]).read_text(), packages))
        run(["go", "mod", "tidy"], work)
        # Without these values, programs and the Node's kubeletVersion report v0.0.0-master.
        major, minor = version.split(".")[:2]
        stamps = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive"}
        flags = ["-s", "-w"] + [
            f"-X {package}.{name}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for name, value in stamps.items()
        ]
        run(
            ["go", "build", "-trimpath", "-ldflags", " ".join(flags), "-o", f"{into}/", "tool"],
            work,
            CGO_ENABLED="0",
        )

    return make


def _make_etcd(work: Path, into: Path) -> None:
    # The module's root package is the main package; `go install` would name the program "server".
    (work / "go.mod").write_text("module scratch\n\ngo 1.24\n")
    run(["go", "get", "-tool", f"go.etcd.io/etcd/server/v3@v{ETCD_VERSION}"], work)
    run(
        ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(into / "etcd"), "go.etcd.io/etcd/server/v3"],
        work,
        CGO_ENABLED="0",
    )


def _make_containerd(work: Path, into: Path) -> None:
    module = "github.com/containerd/containerd/v2"
    (work / "go.mod").write_text("module scratch\n\ngo 1.24\n")
    packages = [f"{module}/cmd/{program}" for program in CONTAINERD_PROGRAMS]
    run(["go", "get", "-tool", *(f"{package}@v{CONTAINERD_VERSION}" for package in packages)], work)
    stamp = f"-X {module}/version.Version=v{CONTAINERD_VERSION}"
    tags = "no_btrfs no_devmapper no_zfs"
    run(
        ["go", "build", "-trimpath", "-tags", tags, "-ldflags", f"-s -w {stamp}", "-o", f"{into}/", *packages],
        work,
        CGO_ENABLED="0",
    )


def _make_tool(program: str, tool: Tool) -> Callable[[Path, Path], None]:
    def make(work: Path, into: Path) -> None:
        (work / "go.mod").write_text("module scratch\n\ngo 1.24\n")
        run(["go", "get", "-tool", f"{tool.package}@v{tool.version}"], work)
        flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in tool.stamps.items())])
        build = ["go", "build", "-trimpath", "-ldflags", flags, "-o", str(into / program), tool.package]
        run(build, work, CGO_ENABLED="0")

    return make


def ensure_tool(program: str) -> Path:
    """Return the path of a program of TOOLS, built if it is missing. Raises BuildError if it cannot be built."""
    tool = TOOLS[program]
    return built(f"{program}-{tool.version}", (program,), _make_tool(program, tool)) / program


def image_base() -> tuple[str, str]:
    """Return the versions of Python and Debian in the agents' image, such as 3.13 and trixie."""
    found = re.search(r"^FROM python:([\d.]+)-slim-(\w+)@", (EXAMPLES / "Dockerfile").read_text(), re.MULTILINE)
    if found is None:
        raise BuildError("examples/Dockerfile does not name a base image with its Python and Debian release")
    return found[1], found[2]


def _make_python(version: str, release: str) -> Callable[[Path, Path], None]:
    def make(work: Path, into: Path) -> None:
        for name in ("lists/partial", "archives/partial"):
            (work / name).mkdir(parents=True)
        (work / "status").touch()
        (work / "sources.list").write_text(
            f"deb [signed-by={DEBIAN_KEYS}] http://deb.debian.org/debian {release} main\n"
        )
        places = {
            "Dir::State::Lists": "lists",
            "Dir::State::status": "status",
            "Dir::Cache::archives": "archives",
            "Dir::Etc::SourceList": "sources.list",
        }
        apt = ["apt-get", *(f"-o{option}={work / name}" for option, name in places.items())]
        apt += ["-oDir::Etc::SourceParts=/dev/null", "-oDir::Cache::pkgcache=", "-oDir::Cache::srcpkgcache="]
        run([*apt, "update"], work)
        # tree.py finds libraries with ldd, a bash script in libc-bin.
        packages = [f"python{version}-minimal", f"libpython{version}-stdlib", "bash", "libc-bin", "libstdc++6"]
        run([*apt, "install", "-y", "--download-only", "--no-install-recommends", *packages], work)
        for archive in sorted((work / "archives").glob("*.deb")):
            run(["dpkg-deb", "--extract", str(archive), str(into)], work)
        run(install_locked(version, into / "site"), work)

    return make


def locked_packages() -> str:
    """Return a hash of the agents' image's requirements.txt, for the name of the cache's directory."""
    return hashlib.sha256((EXAMPLES / "image" / "requirements.txt").read_bytes()).hexdigest()[:10]


def install_locked(version: str, into: Path) -> list[str]:
    """Return the pip command that installs the PyPI packages of the agents' image, for a version of Python."""
    machine = platform.machine()
    fits = [f"--platform=manylinux{glibc}_{machine}" for glibc in ("_2_28", "_2_17", "2014")]
    fits += [f"--abi={abi}" for abi in (f"cp{version.replace('.', '')}", "abi3", "none")]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--require-hashes"]
    install += ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp", *fits]
    return [*install, f"--target={into}", f"--requirement={EXAMPLES / 'image' / 'requirements.txt'}"]


def ensure_python() -> Path:
    """Return the root of a file system with the Python of the agents' image, and in /site the locked PyPI packages.

    The file system is made from packages of the Debian release, because the tests cannot pull the base image.
    """
    version, release = image_base()
    return built(f"python-{version}-{locked_packages()}", (f"usr/bin/python{version}",), _make_python(version, release))


def _make_peer(program: str, peer: Peer) -> Callable[[Path, Path], None]:
    package = str(Path(peer.module) / peer.package)
    build = ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", program]

    def make(work: Path, into: Path) -> None:
        (work / "go.mod").write_text("module scratch\n\ngo 1.24\n")
        try:
            run(["go", "get", "-tool", f"{package}@{peer.version}"], work)
            run([*build, package], work, CGO_ENABLED="0")
        except BuildError as error:
            advice = f"put the program {program} into a directory, and name that by {PEER_PROGRAMS}"
            raise BuildError(f"{peer.module} {peer.version} cannot be had as a Go module; {advice}\n{error}") from None
        shutil.move(work / program, into / program)

    return make


def ensure_peer(program: str) -> Path:
    """Return the path of a program of PEERS, built if it is missing. Raises BuildError if it cannot be built."""
    finished = Path(os.environ.get(PEER_PROGRAMS, "")) / program
    if PEER_PROGRAMS in os.environ and os.access(finished, os.X_OK):
        return finished
    peer = PEERS[program]
    return built(f"{program}-{peer.version}", (program,), _make_peer(program, peer)) / program


def _is_static(program: str) -> bool:
    """Return whether a program can run without any other file: a 64 bit ELF file without an interpreter."""
    try:
        data = Path(program).read_bytes()
    except OSError:
        return False
    if data[:5] != b"\x7fELF\x02":
        return False
    table = int.from_bytes(data[32:40], "little")
    size = int.from_bytes(data[54:56], "little")
    count = int.from_bytes(data[56:58], "little")
    kinds = (int.from_bytes(data[table + n * size : table + n * size + 4], "little") for n in range(count))
    return 3 not in kinds  # PT_INTERP


def find_busybox() -> str | None:
    """Return the path of a statically linked busybox for the pods' image; None if there is none."""
    found = shutil.which("busybox")
    return found if found and _is_static(found) else None


def find_cni() -> Path | None:
    """Return the directory with the CNI plugins; None if there is none."""
    for directory in CNI_DIRECTORIES:
        if all(os.access(os.path.join(directory, plugin), os.X_OK) for plugin in CNI_PLUGINS):
            return Path(directory)
    return None


def missing_packages() -> list[str]:
    """Return the Debian packages whose programs are missing.

    runc is Debian's, because a runc built without the ``seccomp`` tag refuses containerd's default profile.
    """
    wanted = {
        "runc": shutil.which("runc"),
        "busybox-static": find_busybox(),
        "containernetworking-plugins": find_cni(),
        "iproute2": shutil.which("ip"),
        "util-linux": shutil.which("unshare"),
        "mount": shutil.which("mount"),
        "openssl": shutil.which("openssl"),
        "prometheus": shutil.which("prometheus") and shutil.which("promtool"),
        "chromium": shutil.which("chromium"),
    }
    return [package for package, found in wanted.items() if not found]


QUIETLY = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
"""The environment in which apt-get asks no questions and starts no services, such as Debian's prometheus."""


def ensure_packages(find_missing: Callable[[], list[str]] = missing_packages) -> None:
    """Install the missing Debian packages. Raises BuildError with the needed command if this is not possible."""
    missing = find_missing()
    if not missing:
        return
    advice = f"apt-get install {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BuildError(f"the tests need programs that are not installed; as root: {advice}")
    _say(advice)
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    with locked(cache_directory() / "locks" / "apt.lock"):
        try:
            run(install, Path("/"), **QUIETLY)
        except BuildError:
            run(["apt-get", "update"], Path("/"))
            run(install, Path("/"), **QUIETLY)
    still = find_missing()
    if still:
        raise BuildError(f"still missing after {advice}: {', '.join(still)}")


def is_built(version: str) -> bool:
    """Return whether the programs of a Kubernetes version are built; inside the isolation no build is possible."""
    return all((cache_directory() / version / "bin" / program).exists() for program in KUBERNETES_PROGRAMS)


def wait_built(version: str, seconds: float) -> None:
    """Wait until another process has built a Kubernetes version. Raises BuildError after this many seconds."""
    deadline = time.monotonic() + seconds
    while not is_built(version):
        if time.monotonic() > deadline:
            raise BuildError(f"Kubernetes {version} was not built within {seconds:.0f} s")
        time.sleep(1)


def ensure(version: str | None = None) -> Binaries:
    """Return the programs of a Kubernetes version (default: ``default_version``); build and install missing ones."""
    version = (version or default_version()).removeprefix("v")
    if not re.fullmatch(r"1\.\d+\.\d+", version):
        raise BuildError(f"{version!r} is no Kubernetes version like {DEFAULT_VERSION}")
    ensure_packages()
    etcd = built(f"etcd-{ETCD_VERSION}", ("etcd",), _make_etcd)
    containerd = built(f"containerd-{CONTAINERD_VERSION}", CONTAINERD_PROGRAMS, _make_containerd)
    ensure_tool("helm")
    ensure_python()
    packages = [f"cmd/{program}" for program in KUBERNETES_PROGRAMS]
    kubernetes = built(version, KUBERNETES_PROGRAMS, _make_kubernetes(version, packages))
    cni = find_cni()
    assert cni is not None
    return Binaries(version, kubernetes, etcd, containerd, cni)


def main(arguments: Sequence[str]) -> int:
    """Build the given versions and tools, one after another; return the exit status."""
    try:
        named = {"default": default_version(), "former": FORMER_VERSION}
        both = (DEFAULT_VERSION, FORMER_VERSION)
        for argument in arguments or (both if default_version() == DEFAULT_VERSION else (default_version(),)):
            version = named.get(argument, argument)
            if version in TOOLS:
                print(f"{version}: {ensure_tool(version)}")
                continue
            if version == SAMPLE_PLUGIN:
                make = _make_kubernetes(default_version(), [f"test/images/{SAMPLE_PLUGIN}"])
                print(f"{version}: {built(sample_plugin().parents[1].name, (SAMPLE_PLUGIN,), make)}")
                continue
            binaries = ensure(version)
            print(f"{version}: {binaries.kubernetes} {binaries.etcd} {binaries.containerd}")
    except BuildError as error:
        print(f"[build] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
