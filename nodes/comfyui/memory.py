"""Registers the pack in ComfyUI's model management as one loaded model, so that unloading models unloads it too."""

import asyncio
import functools
import threading
from collections.abc import Iterator

import comfy.model_management
import comfy.model_patcher
from server import PromptServer

from ...tpu_runtime import api
from ...tpu_runtime.anchor import TPUModels
from ...tpu_runtime.garbage import set_aside


class _Patcher(comfy.model_patcher.ModelPatcher):
    """One ComfyUI model that stands for everything the pack has on its devices.

    ComfyUI never moves it: for ComfyUI it is a model on the CPU.
    """

    def __init__(self) -> None:
        anchor = TPUModels()
        super().__init__(anchor, load_device=anchor.device, offload_device=anchor.device, size=1)

    def model_size(self) -> int:
        return max(1, api.resident_bytes())

    def loaded_size(self) -> int:
        return self.model_size()

    def partially_load(self, *args: object, **kwargs: object) -> int:
        return 0

    def partially_unload(self, *args: object, **kwargs: object) -> int:
        return 0

    def patch_model(self, *args: object, **kwargs: object) -> TPUModels:
        return self.model

    def detach(self, unpatch_all: bool = True) -> TPUModels:
        # Without `unpatch_all` a model is only about to be registered again.
        if unpatch_all:
            _free()
        return self.model


def _free() -> None:
    """Free the devices after a running stage. The server's event loop must not wait, so it only requests that."""
    if _is_server_loop():
        _ask_to_unload()
    else:
        api.free_memory()


def _is_server_loop() -> bool:
    """Return whether this thread runs the page's event loop; nodes run in ComfyUI's own thread for prompts."""
    try:
        return asyncio.get_running_loop() is PromptServer.instance.loop
    except RuntimeError:
        return False


def _ask_to_unload() -> None:
    """Request ComfyUI's own "unload models", which runs between two prompts."""
    PromptServer.instance.prompt_queue.set_flag("unload_models", True)


@functools.cache
def _patcher() -> _Patcher:
    """Return the one patcher; cached, because ComfyUI keeps only weak references."""
    return _Patcher()


def register() -> None:
    """Add the pack to ComfyUI's loaded models. Unloading removes it, so this is called at every use."""
    comfy.model_management.load_models_gpu([_patcher()])


def set_imports_aside() -> None:
    """Exclude objects of our imports from ComfyUI's garbage collections (see `api.set_aside`).

    Nothing is excluded while a model of ComfyUI or another pack exists. Our models hold no weights on the host.
    """
    package = __name__.rpartition(".")[0]
    set_aside([kind for kind in _kinds(comfy.model_patcher.ModelPatcher) if package not in kind.__module__])


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _kinds(inner)


def wrap_unload() -> None:
    """Make `unload_all_models` also free memory of no model, such as programs after a failed run.

    Installed once, however often the pack is imported. Calls run one at a time: freeing waits for a running stage, and
    two waiting calls would both remove the same models from ComfyUI's list. On the server's event loop, where other
    packs call it, it returns at once, so that the page does not freeze.
    """
    original = comfy.model_management.unload_all_models
    if getattr(original, "frees_tpu", False):
        return
    unloading = threading.RLock()

    @functools.wraps(original)
    def unload_all_models(*args: object, **kwargs: object) -> object:
        if _is_server_loop():
            _ask_to_unload()
            return None
        with unloading:
            try:
                return original(*args, **kwargs)
            finally:
                api.free_memory()

    unload_all_models.__dict__["frees_tpu"] = True
    comfy.model_management.unload_all_models = unload_all_models
