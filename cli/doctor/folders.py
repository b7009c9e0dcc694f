"""Checks of folders, memory and the Hugging Face token."""

import re
from collections.abc import Iterator
from pathlib import Path

from ...tpu_runtime.cache import store
from ...tpu_runtime.models import SPECS
from ...tpu_runtime.units import GIB, readable
from .machine import Finding, Machine

# The smallest checkpoint (FLUX.2-klein-4B) is about this big, the largest seven times.
MODEL_BYTES = 16 * GIB
# Compiled programs and videos.
LEAST_BYTES = 2 * GIB
# Compiling programs of real sizes takes two to four of the host, more beside other stages.
RAM_BYTES = 8 * GIB
GATED = ("FLUX.2-dev", "FLUX.2-klein-9B")
_PIP_FILES = (".config/pip/pip.conf", ".pip/pip.conf")


def caches(machine: Machine) -> Iterator[Finding]:
    """The folders that are written: there or not yet, with rights, on a disk."""
    own = machine.path(store.VARIABLE, machine.home / ".cache/comfyui-tpu")
    programs = machine.path("JAX_COMPILATION_CACHE_DIR", own / "xla")
    folders = [(store.VARIABLE, "cache", own), ("HF_HOME", "downloads", machine.hub)]
    if own not in programs.parents:
        folders.append(("JAX_COMPILATION_CACHE_DIR", "compiled programs", programs))
    for name, topic, folder in folders:
        existing = _existing(folder)
        memory = machine.root / "dev/shm"
        if not existing.is_dir() or not machine.is_writable(existing):
            remedy = f"unset {name}" if machine.environ.get(name) else f"export {name}=FOLDER, one that can be written"
            yield Finding(topic=topic, found=f"{folder} cannot be written", remedy=remedy)
        elif memory in (folder, *folder.parents):
            found = f"{folder} is memory of the host, and empty after a restart"
            yield Finding(topic=topic, found=found, remedy=f"unset {name} (look for it in ~/.bashrc)", advice=True)
        else:
            size = f", {readable(size_bytes(folder))}" if topic != "downloads" else ""
            yield Finding(topic=topic, found=f"{folder}{size}")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def models(machine: Machine) -> Iterator[Finding]:
    """What is downloaded, and whether more has room."""
    hub = machine.hub
    found = sorted(path.name.removeprefix("models--").replace("--", "/") for path in hub.glob("models--*"))
    yield Finding(topic="downloaded models", found=f"{hub}: {', '.join(found) or 'none'}")
    has_ours = bool({spec.hub_id for spec in SPECS} & set(found))
    needed = LEAST_BYTES if has_ours else MODEL_BYTES
    existing = _existing(hub)
    if existing.is_dir():
        free = machine.free_bytes(existing)
        why = "programs and videos need" if has_ours else "the smallest model needs"
        missing = f"; {why} {readable(needed)}" if free < needed else ""
        remedy = "export HF_HOME=FOLDER, on a larger disk; or: hf cache rm MODEL" if missing else ""
        yield Finding(topic="disk", found=f"{readable(free)} free in {existing}{missing}", remedy=remedy)
    is_offline = machine.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if is_offline and not has_ours:
        said = "on, and no model of this pack is downloaded"
        yield Finding(topic="HF_HUB_OFFLINE", found=said, remedy="unset HF_HUB_OFFLINE")


def token(machine: Machine) -> Iterator[Finding]:
    """Whether there is a token; never which."""
    home = machine.path("HF_HOME", machine.home / ".cache/huggingface")
    names = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if machine.environ.get(name, "").strip()]
    if names or machine.path("HF_TOKEN_PATH", home / "token").is_file():
        yield Finding(topic="Hugging Face token", found=f"there ({names[0] if names else 'saved by hf auth login'})")
        return
    found = f"none; only gated models need one ({', '.join(GATED)})"
    yield Finding(topic="Hugging Face token", found=found, remedy="hf auth login", advice=True)


def memory(machine: Machine) -> Iterator[Finding]:
    """The host's memory. /dev/shm matters only where a cache lies in it, which `caches` says."""
    if given := re.search(r"^MemAvailable:\s+(\d+) kB", machine.text("proc/meminfo"), re.MULTILINE):
        available = 1024 * int(given[1])
        remedy = "ps aux --sort=-rss | head, then end what is not needed" if available < RAM_BYTES else ""
        needed = f"; compiling and loading may need {readable(RAM_BYTES)}" if remedy else ""
        yield Finding(topic="host memory", found=f"{readable(available)} free{needed}", remedy=remedy, advice=True)


def pip(machine: Machine) -> Iterator[Finding]:
    """A line that the installer of the separate packs left, by which pip writes into the system's Python."""
    for name in _PIP_FILES:
        file = machine.home / name
        if file.is_file() and re.search(r"break-system-packages\s*=\s*(true|1)", file.read_text("utf-8", "replace")):
            remedy = "pip config --user unset global.break-system-packages"
            found = f"{file} lets pip write into the system's Python"
            yield Finding(topic="pip", found=found, remedy=remedy, advice=True)
