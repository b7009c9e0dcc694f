"""ComfyUI's model management knows the pack as one loaded model: whatever unloads models unloads this one too."""

import asyncio
import functools
import threading
from collections.abc import Iterator

import comfy.model_management
import comfy.model_patcher
from server import PromptServer

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import TPUModels


class _Patcher(comfy.model_patcher.ModelPatcher):
    """Answers ComfyUI's questions about loaded models for everything that the pack has on its devices.

    ComfyUI never moves it by itself: to it this is a model on the CPU.
    """

    def __init__(self) -> None:
        anchor = TPUModels()
        super().__init__(anchor, load_device=anchor.device, offload_device=anchor.device, size=1)

    def model_size(self) -> int:
        return max(1, pipeline.resident_bytes())

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
    """Frees the devices, after a running stage; the server's event loop cannot wait for that, so it only asks."""
    if _is_server_loop():
        _ask_to_unload()
    else:
        pipeline.free()


def _is_server_loop() -> bool:
    """Whether this thread runs the page's event loop. Nodes run under another, in ComfyUI's own thread for prompts."""
    try:
        return asyncio.get_running_loop() is PromptServer.instance.loop
    except RuntimeError:
        return False


def _ask_to_unload() -> None:
    """ComfyUI's own "unload models", which it does between two prompts."""
    PromptServer.instance.prompt_queue.set_flag("unload_models", True)


@functools.cache
def _patcher() -> _Patcher:
    """ComfyUI keeps weak references only."""
    return _Patcher()


def register() -> None:
    """Puts the pack among ComfyUI's loaded models. Unloading takes it out again, so this is called at every use."""
    comfy.model_management.load_models_gpu([_patcher()])


def set_imports_aside() -> None:
    """Leaves what our imports made out of ComfyUI's searches for garbage (see `pipeline.set_aside`), unless a model of
    ComfyUI's or another pack's is there. Ours hold no weights.
    """
    package = __name__.rpartition(".")[0]
    pipeline.set_aside([kind for kind in _kinds(comfy.model_patcher.ModelPatcher) if package not in kind.__module__])


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _kinds(inner)


def wrap_unload() -> None:
    """Lets `unload_all_models` free also what no model stands for (programs, after a run that failed while loading).

    Done once, however often the pack is imported. One call at a time: freeing waits for a running stage, and two calls
    that wait would both take the same models out of ComfyUI's list. Called on the server's event loop, as other packs
    do, it returns at once: whoever waited there would freeze the page.
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
                pipeline.free()

    unload_all_models.__dict__["frees_tpu"] = True
    comfy.model_management.unload_all_models = unload_all_models
