"""Entry point for ComfyUI: the extension and the folder of its web files, nothing else.

Importing this opens no device and does not import torch, JAX or ComfyUI.
"""

import sys

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint():
    """Return the `ComfyExtension` with all nodes of the pack; ComfyUI calls this once, at its start."""
    if sys.version_info < (3, 11):  # noqa: UP036 - ComfyUI itself runs on older ones, and logs this in one line
        raise RuntimeError(
            f"ComfyUI-TPU needs Python 3.11 or newer; ComfyUI runs on {sys.version.split()[0]} ({sys.executable}). "
            "Make ComfyUI's environment again with a newer Python, then install the pack in it."
        )
    from .nodes.comfyui import adapter

    return adapter.extension()
