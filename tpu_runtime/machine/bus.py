"""The chips of this machine as its bus shows them, and who holds them. Starts nothing.

`tpu-info` knows which of Google's devices is which TPU. They are counted here: its `get_local_chips` counts PCI
functions, of which a TPU7x has two a chip, and raises where a device cannot be read.
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
    """What is plugged in; `kind` is "v6e". JAX has a device for every core where a chip has two that are not joined."""

    kind: str
    num_chips: int
    devices_per_chip: int
    hbm_bytes_per_chip: int

    @property
    def num_devices(self) -> int:
        """What `jax.devices()` will count."""
        return self.num_chips * self.devices_per_chip

    def __str__(self) -> str:
        return f"{self.num_chips} x {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that has a chip's device file open. `program` is its name, without arguments, which may be secrets."""

    pid: int
    program: str


def chips(root: Path = ROOT) -> Chips | None:
    """The machine's chips, None without any. Raises ImportError without tpu-info."""
    from tpu_info.device import GOOGLE_PCI_VENDOR_ID, TpuChip

    slots: dict[TpuChip, set[str]] = collections.defaultdict(set)
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, model, board = (_text(device / name) for name in ("vendor", "device", "subsystem_device"))
        if vendor == GOOGLE_PCI_VENDOR_ID and (kind := TpuChip.from_pci_device_id(model, board)):
            slots[kind].add(device.name.rpartition(".")[0])
    if not slots:
        return None
    kind = max(slots, key=lambda each: len(slots[each]))
    info = kind.value
    return Chips(
        kind=info.name if info.name.startswith("v") else f"TPU{info.name}",
        num_chips=len(slots[kind]),
        devices_per_chip=info.devices_per_chip,
        hbm_bytes_per_chip=info.hbm_gib * GIB,
    )


def device_files(root: Path = ROOT) -> list[Path]:
    """What libtpu opens: one file a chip, made by the driver."""
    return [path for pattern in _FILES for path in sorted(root.glob(pattern))]


def expect_no_tpu(root: Path = ROOT) -> None:
    """Without a TPU JAX is told so before it is imported, for libtpu would search a cloud for one, and complain at
    length. What the user has set stays; a GPU that JAX has a plugin for may be another pack's.
    """
    try:
        has_tpu = bool(device_files(root) or chips(root))  # a container may see chips without their files
    except ImportError:
        has_tpu = False
    if not has_tpu:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        if not importlib.metadata.entry_points(group="jax_plugins"):
            os.environ.setdefault("JAX_PLATFORMS", "cpu")


def holders(root: Path = ROOT) -> list[Holder]:
    """The processes that hold chips, this one among them, as far as this user may see their open files."""
    pids = {pid for pid, target in open_files(root) if _FILE.fullmatch(target)}
    return [Holder(pid=pid, program=program(pid, root)) for pid in sorted(pids)]


def open_files(root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Process and target of every open file that this user may see; sockets are `socket:[inode]`."""
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


def program(pid: int, root: Path = ROOT) -> str:
    """Name of a process and of its script, such as "python3 main.py"; no other argument."""
    words = [word for word in _text(root / f"proc/{pid}/cmdline").split("\0") if word]
    names = [Path(word).name for word in words[:1]]
    if script := next((word for word in words[1:2] if not word.startswith("-")), ""):
        names.append(Path(script).name)
    elif words[1:2] == ["-m"]:
        names += words[1:3]
    return " ".join(names) or "a program"


def _text(path: Path) -> str:
    """A small file of the kernel's; nothing where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
