"""ComfyUI's official templates on tiny files, with its own loaders and with this pack's."""

from pathlib import Path


def small_core_source() -> str:
    """Return the neighbour pack that lets ComfyUI load tiny files and make small images."""
    return Path(__file__).with_name("small_core.py").read_text("utf-8")
