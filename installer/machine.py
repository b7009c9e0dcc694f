"""Locations on this machine: the repository, ComfyUI, a TPU."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def has_tpu() -> bool:
    """Return whether device files of a TPU exist."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def comfyui_folder(environment: Mapping[str, str]) -> Path:
    """Return ComfyUI's folder from the environment, else ~/ComfyUI."""
    # Unlike `Path.expanduser` this does not raise for a user without a home.
    return Path(os.path.expanduser(environment.get("COMFYUI_PATH") or "~/ComfyUI"))
