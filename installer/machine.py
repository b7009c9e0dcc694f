"""Where things are on this machine: the repository, ComfyUI, a TPU."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def has_tpu() -> bool:
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def comfyui_folder(environment: Mapping[str, str]) -> Path:
    # Unlike `Path.expanduser` this raises nothing for a user without a home.
    return Path(os.path.expanduser(environment.get("COMFYUI_PATH") or "~/ComfyUI"))
