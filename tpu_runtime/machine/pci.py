"""The chips of this machine as its PCI bus shows them, and the processes that hold them. Starts no device.

`tpu-info` maps PCI ids to TPU generations. Chips are counted here, because its `get_local_chips` counts PCI functions,
of which a TPU7x has two per chip, and raises if a device cannot be read.
"""

import collections
import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..units import GIB

ROOT = Path("/")
_FILES = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
_FILE = re.compile(r"/dev/(accel|vfio/)\d+")


@dataclass(frozen=True, kw_only=True)
class Chips:
    """The chips that are plugged in. JAX has one device per core where a chip has two separate cores."""

    kind: str  # such as "v6e"
    num_chips: int
    devices_per_chip: int  # JAX devices
    hbm_bytes_per_chip: int

    @property
    def num_devices(self) -> int:
        """Return the number of devices that `jax.devices()` will have."""
        return self.num_chips * self.devices_per_chip

    def __str__(self) -> str:
        return f"{self.num_chips} x {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that has a chip's device file open."""

    pid: int
    program: str  # its name, without arguments, which may be secrets


def detect_chips(root: Path = ROOT) -> Chips | None:
    """Return the machine's chips, or None without any. Raises ImportError without tpu-info."""
    from tpu_info.device import GOOGLE_PCI_VENDOR_ID, TpuChip

    slots: dict[TpuChip, set[str]] = collections.defaultdict(set)
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, model, board = (_text(device / name) for name in ("vendor", "device", "subsystem_device"))
        if vendor == GOOGLE_PCI_VENDOR_ID and (most_common := TpuChip.from_pci_device_id(model, board)):
            slots[most_common].add(device.name.rpartition(".")[0])
    if not slots:
        return None
    most_common = max(slots, key=lambda chip: len(slots[chip]))
    info = most_common.value
    return Chips(
        kind=info.name if info.name.startswith("v") else f"TPU{info.name}",
        num_chips=len(slots[most_common]),
        devices_per_chip=info.devices_per_chip,
        hbm_bytes_per_chip=info.hbm_gib * GIB,
    )


def find_device_files(root: Path = ROOT) -> list[Path]:
    """Return the files that libtpu opens: one per chip, created by the driver."""
    return [path for pattern in _FILES for path in sorted(root.glob(pattern))]


def configure_without_tpu(root: Path = ROOT) -> None:
    """Configure JAX for a machine without a TPU, before JAX is imported; does nothing with a TPU.

    libtpu would otherwise search a cloud for a TPU, and log long warnings. Variables that the user has set stay. A GPU
    for which JAX has a plugin may be used by another node pack.
    """
    try:
        has_tpu = bool(find_device_files(root) or detect_chips(root))  # a container may see chips without their files
    except ImportError:
        has_tpu = False
    if not has_tpu:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        if not importlib.metadata.entry_points(group="jax_plugins"):
            os.environ.setdefault("JAX_PLATFORMS", "cpu")


def find_holders(root: Path = ROOT) -> list[Holder]:
    """Return the processes that hold chips, this one included, as far as this user may see their open files."""
    pids = {pid for pid, target in iterate_open_files(root) if _FILE.fullmatch(target)}
    return [Holder(pid=pid, program=program_name(pid, root)) for pid in sorted(pids)]


def iterate_open_files(root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yield process id and target of every open file that this user may see; sockets are `socket:[inode]`."""
    for folder in (root / "proc").glob("[0-9]*/fd"):
        try:
            links = list(folder.iterdir())
        except OSError:  # another user's, or just ended
            continue
        for link in links:
            try:
                yield int(folder.parent.name), os.readlink(link)
            except OSError:
                continue


def program_name(pid: int, root: Path = ROOT) -> str:
    """Return the name of a process and of its script, such as "python3 main.py", without further arguments."""
    words = [word for word in _text(root / f"proc/{pid}/cmdline").split("\0") if word]
    names = [Path(word).name for word in words[:1]]
    if script := next((word for word in words[1:2] if not word.startswith("-")), ""):
        names.append(Path(script).name)
    elif words[1:2] == ["-m"]:
        names += words[1:3]
    return " ".join(names) or "a program"


def _text(path: Path) -> str:
    """Return the content of a small kernel file; "" if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
