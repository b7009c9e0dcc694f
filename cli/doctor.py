"""What `comfyui-tpu doctor` reports: versions, devices, folders, and for each thing that is wrong how to mend it."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..tpu_runtime.cache import store

# A TPU VM's chips, by the driver of its generation.
_TPU_DEVICES = ("/dev/accel*", "/dev/vfio/[0-9]*")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report; `remedy` is a command or sentence, empty when all is well."""

    topic: str
    found: str
    remedy: str = ""


def report() -> list[Finding]:
    """Everything about this machine that matters to the pack. Starts JAX's devices, so no TPU program may run."""
    return [
        Finding(topic="Python", found=f"{platform.python_version()} on {platform.system()}"),
        *_versions(),
        *_devices(),
        *_folders(),
    ]


def _versions() -> Iterator[Finding]:
    """What the pack needs, against the versions it was run with."""
    if find_spec("packaging") is None:
        yield Finding(topic="packaging", found="not installed", remedy="pip install packaging")
        return
    from ..tpu_runtime import versions

    for package in versions.packages():
        found = package.installed
        if found is None and package.name == "libtpu" and not has_tpu():
            yield Finding(topic=package.name, found="not installed; needed only on a TPU machine")
        elif found is None:
            yield Finding(topic=package.name, found="not installed", remedy=package.command)
        elif package.is_outside:
            yield Finding(topic=package.name, found=f"{found}; tested with {package.range}", remedy=package.command)
        elif package.name == "torch" and found.partition("+")[2].startswith(("cu", "rocm")):
            # It works, but brings gigabytes that a TPU machine cannot use.
            yield Finding(topic=package.name, found=f"{found}, a GPU build", remedy=package.command)
        else:
            yield Finding(topic=package.name, found=found)


def has_tpu() -> bool:
    """Whether the kernel shows a TPU's device files."""
    return any(any(Path("/").glob(pattern.lstrip("/"))) for pattern in _TPU_DEVICES)


def _devices() -> Iterator[Finding]:
    try:
        import jax

        devices = jax.devices()
    except ImportError:
        yield Finding(topic="devices", found="unknown without jax", remedy="pip install 'jax[tpu]'")
        return
    except RuntimeError as error:
        remedy = "End other programs that hold the TPU (sudo lsof /dev/accel* /dev/vfio/*), then try again."
        yield Finding(topic="devices", found=f"JAX cannot start: {error}", remedy=remedy)
        return
    kind = devices[0].device_kind
    is_idle = has_tpu() and devices[0].platform != "tpu"
    remedy = "JAX does not use this machine's TPU: unset JAX_PLATFORMS; pip install 'jax[tpu]'" if is_idle else ""
    yield Finding(topic="devices", found=f"{len(devices)} x {kind} ({devices[0].platform})", remedy=remedy)
    yield from _meshes(len(devices))


def _meshes(num_devices: int) -> Iterator[Finding]:
    from ..tpu_runtime.spec import guidance_first

    for branches, when in ((2, "with guidance"), (1, "without guidance")):
        yield Finding(topic=f"mesh {when}", found=str(guidance_first(num_devices, branches)))


def _folders() -> Iterator[Finding]:
    folder = store.cache_folder()
    yield Finding(topic="cache", found=f"{folder}, {_size_mib(folder):.0f} MiB")
    programs = store.xla_cache_folder()
    if folder not in programs.parents:
        yield Finding(topic="compiled programs", found=f"{programs}, {_size_mib(programs):.0f} MiB")
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    models = sorted(path.name.removeprefix("models--").replace("--", "/") for path in hub.glob("models--*"))
    yield Finding(topic="downloaded models", found=f"{hub}: {', '.join(models) or 'none'}")
    comfyui = comfyui_folder()
    if not (comfyui / "main.py").is_file():
        remedy = "git clone https://github.com/Comfy-Org/ComfyUI ~/ComfyUI, or set COMFYUI_PATH; `run` needs none."
        yield Finding(topic="ComfyUI", found=f"not in {comfyui}", remedy=remedy)
        return
    yield Finding(topic="ComfyUI", found=str(comfyui))
    yield from _disagreements(comfyui / "requirements.txt")
    local = sorted(path.parent.name for path in (comfyui / "models" / "diffusers").glob("*/model_index.json"))
    yield Finding(topic="models/diffusers", found=", ".join(local) or "none")


def comfyui_folder() -> Path:
    return Path(os.environ.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()


def _disagreements(requirements: Path) -> Iterator[Finding]:
    """Where what ComfyUI asks for was never run with this pack."""
    if find_spec("packaging") is None or not requirements.is_file():
        return
    from ..tpu_runtime import versions

    for asked, package in versions.unserved(requirements):
        remedy = "Take a ComfyUI that allows one of these versions; no other is known to work."
        yield Finding(topic="ComfyUI needs", found=f"{asked}; tested with {package.range}", remedy=remedy)


def _size_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
