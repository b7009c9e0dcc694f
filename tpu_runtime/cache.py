"""Where things are kept between runs: compiled programs, tiny checkpoints."""

import os
from pathlib import Path

VARIABLE = "COMFYUI_TPU_CACHE"


def cache_folder() -> Path:
    return Path(os.environ.get(VARIABLE) or "~/.cache/comfyui-tpu").expanduser()


def xla_cache_folder() -> Path:
    """XLA's compiled programs; JAX's own variable wins."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder() / "xla").expanduser()
