"""Where things are on this machine: the repository, ComfyUI, a TPU."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Without these, libtpu asks a cloud's metadata server and locks itself to one process.
NO_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def has_tpu() -> bool:
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def comfyui_folder(environment: Mapping[str, str]) -> Path:
    # Unlike `Path.expanduser` this raises nothing for a user without a home.
    return Path(os.path.expanduser(environment.get("COMFYUI_PATH") or "~/ComfyUI"))
