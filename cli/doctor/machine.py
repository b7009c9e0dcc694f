"""The machine that the checks examine. A test describes another one by folders instead of `/`, home and ComfyUI's."""

import functools
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ...tpu_runtime.cache import store
from ...tpu_runtime.checkpoints.checkpoint import Checkpoint
from ...tpu_runtime.machine import pci
from ...tpu_runtime.models import SPECS, lookup_spec
from ...tpu_runtime.progress import SilentProgress
from ...tpu_runtime.units import GB, MIB

_PACK = Path(__file__).parents[2]
# Limits of a read test: bytes of a file, bytes per read, seconds, threads (weights are read by several, too).
READ_BYTES, PIECE_BYTES, READ_S, READERS = 512 * MIB, 8 * MIB, 2.0, 8
# State of a listening socket in /proc/net/tcp.
_LISTENS = "0A"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    found: str
    remedy: str = ""  # a command or sentence; "" if all is well
    advice: bool = False  # whether the remedy is optional

    @property
    def is_fault(self) -> bool:
        return bool(self.remedy) and not self.advice


@dataclass(frozen=True)
class RunningComfyUI:
    """A running ComfyUI."""

    pid: int
    folder: Path
    environ: Mapping[str, str] | None  # None: not readable by this user


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def is_writable(folder: Path) -> bool:
    """Return whether a file can be created in an existing folder: permissions, a read-only disk, a quota.

    Leaves no file.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def may_use(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def memlock_bytes() -> int | None:
    """Return how much memory a process of this user may lock; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_rate(file: Path) -> float:
    """Return the rate in GB/s at which the beginning of a file is read from the disk, not from the page cache."""
    with file.open("rb", buffering=0) as opened:
        number = opened.fileno()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()

        def read(start: int) -> int:
            return len(os.pread(number, PIECE_BYTES, start)) if time.perf_counter() - started < READ_S else 0

        starts = range(0, min(os.fstat(number).st_size, READ_BYTES), PIECE_BYTES)
        with ThreadPoolExecutor(READERS) as threads:
            done = sum(threads.map(read, starts))
        return done / GB / (time.perf_counter() - started)


def download_bytes(model: str) -> tuple[int, int]:
    """Return the missing and the total bytes of a model's weights on the Hub. Downloads only index and configs.

    Raises ValueError if they are not known.
    """
    spec, silent = lookup_spec(model), SilentProgress()
    remote = Checkpoint(spec=spec, model_id=spec.published.hub_id, root=None)
    remote.configs(silent)
    files = [file for part in remote.all_weights_on_hub(silent).values() for file in part]
    return sum(file.size_bytes - file.local_bytes for file in files), sum(file.size_bytes for file in files)


def distributions(*folders: Path) -> dict[str, str]:
    """Return versions of installed packages by normalized name, in these site-packages or else in this process's."""
    path = [str(folder) for folder in folders] or sys.path
    every = reversed(list(importlib.metadata.distributions(path=path)))  # the first on the path is imported
    versions = ((package.metadata["Name"], package.version) for package in every)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions if name}


@dataclass(frozen=True, kw_only=True)
class HostMachine:
    """The machine, and the environment that the command runs in."""

    root: Path = pci.ROOT
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Path = field(default_factory=Path.home)
    pack: Path = _PACK
    prefix: Path = field(default_factory=lambda: Path(sys.prefix))
    packages: Mapping[str, str] = field(default_factory=distributions)
    free_bytes: Callable[[Path], int] = free_bytes
    is_writable: Callable[[Path], bool] = is_writable
    may_use: Callable[[Path], bool] = may_use
    memlock_bytes: Callable[[], int | None] = memlock_bytes
    download_bytes: Callable[[str], tuple[int, int]] = download_bytes
    read_rate: Callable[[Path], float] = read_rate
    model: str = ""
    python: str = field(default_factory=platform.python_version)
    uid: int = field(default_factory=os.getuid)

    @property
    def comfyui(self) -> Path:
        return comfyui_folder(self.environ, self.home)

    @functools.cached_property
    def device_files(self) -> list[Path]:
        return pci.find_device_files(self.root)

    @functools.cached_property
    def chips(self) -> pci.Chips | None:
        """Return the chips on the bus; None if they are not known."""
        try:
            return pci.detect_chips(self.root)
        except ImportError:
            return None

    def path(self, name: str, default: Path) -> Path:
        """Return the folder in an environment variable, else `default`."""
        value = self.environ.get(name)
        return Path(value.replace("~", str(self.home), 1) if value.startswith("~") else value) if value else default

    @property
    def cache(self) -> Path:
        """Return the pack's cache."""
        return self.path(store.VARIABLE, self.home / store.DEFAULT.removeprefix("~/"))

    @property
    def hf_home(self) -> Path:
        """Return huggingface_hub's own folder."""
        return self.path("HF_HOME", self.path("XDG_CACHE_HOME", self.home / ".cache") / "huggingface")

    @property
    def hub(self) -> Path:
        """Return huggingface_hub's cache of downloads."""
        return self.path("HF_HUB_CACHE", self.hf_home / "hub")

    @functools.cached_property
    def hub_models(self) -> list[str]:
        """Return the ids of models in the Hub's cache, complete or not."""
        return sorted(path.name.removeprefix("models--").replace("--", "/") for path in self.hub.glob("models--*"))

    @property
    def has_pack_models(self) -> bool:
        """Return whether a model of this pack is among them."""
        return any(spec.published.hub_id in self.hub_models for spec in SPECS)

    @functools.cached_property
    def download(self) -> tuple[int, int]:
        """Return `download_bytes` of the chosen model."""
        return self.download_bytes(self.model)

    def is_own(self, pid: int) -> bool:
        """Return whether a process belongs to this user."""
        try:
            return (self.root / f"proc/{pid}").stat().st_uid == self.uid
        except OSError:  # it has just ended
            return False

    def text(self, path: str) -> str:
        """Return the text of a file below `root`; "" if it cannot be read."""
        try:
            return (self.root / path).read_text("utf-8", "replace")
        except OSError:
            return ""

    @functools.cached_property
    def servers(self) -> list[RunningComfyUI]:
        """Return the running ComfyUIs."""
        servers = []
        for process in sorted((self.root / "proc").glob("[0-9]*")):
            words = self.text(f"proc/{process.name}/cmdline").split("\0")
            script = next((word for word in words[1:] if Path(word).name == "main.py"), None)
            if script is None:
                continue
            try:
                folder = (Path(os.readlink(process / "cwd")) / script).parent
            except OSError:
                continue
            if (folder / "comfyui_version.py").is_file():
                pairs = self.text(f"proc/{process.name}/environ").split("\0")
                environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                servers.append(RunningComfyUI(int(process.name), folder, environ or None))
        return servers

    def listeners(self, port: int) -> list[int | None]:
        """Return the processes that listen at a port; None for one of another user."""
        inodes = {
            words[9]
            for table in ("proc/net/tcp", "proc/net/tcp6")
            for line in self.text(table).splitlines()[1:]
            if len(words := line.split()) > 9 and words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port
        }
        if not inodes:
            return []
        targets = {f"socket:[{inode}]" for inode in inodes}
        pids = {pid for pid, target in pci.iterate_open_files(self.root) if target in targets}
        return [*sorted(pids)] or [None]


def comfyui_folder(environ: Mapping[str, str] | None = None, home: Path | None = None) -> Path:
    """Return ComfyUI's folder: COMFYUI_PATH, else ~/ComfyUI."""
    path = (os.environ if environ is None else environ).get("COMFYUI_PATH")
    return Path(path).expanduser() if path else (home or Path.home()) / "ComfyUI"


Findings = Iterator[Finding]
Inspection = Callable[[HostMachine], Findings]
