"""Checks of the disk with the models: free space, and read rate."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ...tpu_runtime.units import GB, GIB, MIB, format_size
from .machine import Finding, Findings, HostMachine

# The smallest checkpoint (FLUX.2-klein-4B) is about this big, the largest seven times.
MODEL_BYTES = 16 * GIB
# Compiled programs and videos.
MIN_FREE_BYTES = 2 * GIB
# A model of 60 GB takes five minutes to load at this rate, in GB/s.
SLOW_RATE = 0.2
# Smaller files do not allow a measurement of the rate.
SMALLEST_FILE = 64 * MIB


def check_free_space(machine: HostMachine) -> Findings:
    """Check the free space in the Hub's cache: for the chosen model, else for the smallest one if none is here."""
    existing = existing_folder(machine.hub)
    if not existing.is_dir():
        return
    free = machine.free_bytes(existing)
    message = f"{format_size(free)} free in {existing}"
    if machine.model:
        try:
            missing, total = machine.download
        except (ValueError, ImportError) as error:
            yield Finding("disk", f"{message}; what {machine.model} needs is not known: {error}")
            return
        needed, why = missing + MIN_FREE_BYTES, f"{machine.model} of {format_size(total)}, programs and videos need"
        message += f"; {format_size(missing)} of {machine.model} are not here yet" if missing else ""
    else:
        needed = MIN_FREE_BYTES if machine.has_pack_models else MODEL_BYTES
        why = "programs and videos need" if machine.has_pack_models else "the smallest model needs"
    if free >= needed:
        yield Finding("disk", message)
        return
    remedy = "export HF_HOME=FOLDER, on a larger disk; or: hf cache rm MODEL"
    yield Finding("disk", f"{message}; {why} {format_size(needed)}", remedy)


def check_read_rate(machine: HostMachine) -> Findings:
    """Measure how fast a model on this machine is read from the disk."""
    file = max(_weights(machine), key=lambda path: path.stat().st_size, default=None)
    if file is None or file.stat().st_size < SMALLEST_FILE:
        return
    try:
        per_s = machine.read_rate(file)
    except OSError as error:
        yield Finding("disk's rate", f"not known: {file} cannot be read ({error.strerror or error})", advice=True)
        return
    message = f"{per_s:.2f} GB/s, read from {file}"
    with contextlib.suppress(ValueError, ImportError):  # `room` reports it
        if machine.model:
            _, total = machine.download
            message += f"; {machine.model} takes {total / GB / per_s:.0f} s to read"
    remedy = "export HF_HOME=FOLDER, on a faster disk, such as a local SSD" if per_s < SLOW_RATE else ""
    yield Finding("disk's rate", message + "; loading a model takes minutes" * bool(remedy), remedy, advice=True)


def _weights(machine: HostMachine) -> Iterator[Path]:
    """Yield the weight files in the Hub's cache and in ComfyUI's folders."""
    for folder in (machine.hub, machine.comfyui / "models"):
        yield from (path for path in folder.rglob("*.safetensors") if path.is_file())


def existing_folder(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)
