"""What ComfyUI loads: the extension's entry point and the folder of its web files; nothing else.

Importing this touches no device and imports neither torch, jax nor ComfyUI.
"""

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint():
    """The `ComfyExtension` with all nodes of the pack; ComfyUI calls this once, at its start."""
    from .nodes.comfyui import adapter

    return adapter.extension()
