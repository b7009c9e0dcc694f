"""A neighbour pack for the tests of memory and cancelling: it makes the runtime wait or fail, and looks inside.

Its source is copied into a server's `custom_nodes`; nothing of it is part of the pack.
"""

import asyncio
import ctypes
import gc
import hashlib
import os
import sys
import threading
import types

from aiohttp import web
from server import PromptServer

routes = PromptServer.instance.routes
# At which kind of work it fails; at which it is held until `release`, after how many units of it.
NO_FAULTS = {"fail": "", "hold": "", "after": 0}
FAULTS = dict(NO_FAULTS)
HELD, RELEASED = threading.Event(), threading.Event()
HOLD_S = 300  # for a test that never comes to release it
PATCHED = []
UNLOADING = []


def runtime(name):
    """A module of the pack, whose name depends on where ComfyUI found it."""
    found = [module for key, module in list(sys.modules.items()) if key.endswith(f".tpu_runtime.{name}")]
    return found[0] if found else None


def disturb(where):
    """Called by the patched runtime at every unit of work."""
    if FAULTS["hold"] == where:
        FAULTS["after"] -= 1
        if FAULTS["after"] < 0:
            HELD.set()
            RELEASED.wait(HOLD_S)
            HELD.clear()
    if FAULTS["fail"] == where:
        import jax

        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.")


def patch():
    if PATCHED:
        return
    PATCHED.append(True)
    __import__(runtime("api").__package__ + ".engine.engine")
    load, executables, cache = runtime("checkpoints.weight_loader"), runtime("programs.executables"), runtime("files")
    read, call = load.TensorReader.slice, executables.Executable.__call__
    files = types.SimpleNamespace(**vars(os))

    def slow_read(self, *args):
        disturb("load")
        return read(self, *args)

    def slow_call(self, *args):
        name = self.program.name
        disturb("step" if name == "denoise_step" else "decode" if "decode" in name else "other")
        return call(self, *args)

    def slow_replace(*args):
        disturb("write")
        os.replace(*args)

    load.TensorReader.slice, executables.Executable.__call__ = slow_read, slow_call
    files.replace = slow_replace
    cache.os = files


@routes.post("/citizen/faults")
async def faults(request):
    FAULTS.update(NO_FAULTS, **await request.json())
    RELEASED.clear() if FAULTS["hold"] else RELEASED.set()
    patch()
    return web.json_response(FAULTS)


@routes.get("/citizen/held")
async def held(request):
    """Whether the runtime waits to be released."""
    return web.json_response({"held": HELD.is_set()})


@routes.get("/citizen/release")
async def release(request):
    FAULTS.update(NO_FAULTS)
    RELEASED.set()
    return web.json_response({})


@routes.post("/citizen/validate")
async def validate(request):
    """What ComfyUI says of a prompt before it queues it; nothing runs."""
    import execution

    prompt = (await request.json())["prompt"]
    is_valid, error, _, node_errors = await execution.validate_prompt("looked at", prompt, None)
    return web.json_response({"is_valid": is_valid, "error": error, "node_errors": node_errors})


@routes.get("/citizen/stats")
async def stats(request):
    """The monitor's numbers of this moment; its own address may answer with those of half a second ago."""
    return web.json_response(runtime("monitor.snapshot").take_snapshot())


@routes.get("/citizen/flags")
async def flags(request):
    """Names of the unloads that ComfyUI was asked for and has not begun."""
    return web.json_response({"pending": sorted(PromptServer.instance.prompt_queue.get_flags(reset=False))})


@routes.get("/citizen/memory")
async def memory(request):
    """Bytes of this process when nothing that could be given back is kept."""
    import psutil

    def swept():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return psutil.Process().memory_info().rss

    return web.json_response({"rss": await asyncio.get_running_loop().run_in_executor(None, swept)})


@routes.get("/citizen/living")
async def living(request):
    """How many arrays of JAX and tensors of PyTorch there are when nothing that could be given back is kept."""
    import jax
    import torch

    gc.collect()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    return web.json_response({"arrays": len(jax.live_arrays()), "tensors": tensors})


@routes.post("/citizen/budget")
async def budget(request):
    """What the environment would say at the start; the runtime reads it at every use."""
    os.environ["COMFYUI_TPU_HBM_GIB"] = str((await request.json())["gib"])
    return web.json_response({})


@routes.get("/citizen/unload")
async def unload(request):
    """The official call, as other packs make it."""
    import comfy.model_management

    UNLOADING.append(request)
    await asyncio.get_running_loop().run_in_executor(None, comfy.model_management.unload_all_models)
    UNLOADING.remove(request)
    return web.json_response({})


@routes.get("/citizen/unloading")
async def unloading(request):
    """How many official calls have not ended yet."""
    return web.json_response({"count": len(UNLOADING)})


@routes.get("/citizen/unload_here")
async def unload_here(request):
    """The same call as some packs make it: on the event loop itself."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    return web.json_response({})


@routes.get("/citizen/compilations")
async def compilations(request):
    return web.json_response({"backend": len(COMPILED) - len(FROM_CACHE)})


COMPILED, FROM_CACHE = [], []


def count_compilations():
    """Every compilation by XLA in this process, by JAX's own events; what its cache spared is told apart."""
    import jax

    def on_duration(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            COMPILED.append(name)

    def on_event(name, **_):
        if name == "/jax/compilation_cache/cache_hits":
            FROM_CACHE.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)


count_compilations()


@routes.get("/citizen/walk")
async def walk(request):
    """Types on the devices, or of torchax, in anything that ComfyUI's cache of outputs holds."""
    import jax

    gc.unfreeze()  # the pack freezes the objects of its imports, and all others of that moment
    executors = [one for one in gc.get_objects() if type(one).__name__ == "PromptExecutor"]
    seen, wrong, count = set(), [], 0
    stack = [executor.caches.outputs for executor in executors]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, (str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(one))
        count += 1
        if isinstance(one, jax.Array) or type(one).__module__.startswith("torchax"):
            wrong.append(str(type(one)))
        elif isinstance(one, dict):
            stack.extend([*one.keys(), *one.values()])
        elif isinstance(one, (list, tuple, set, frozenset)):
            stack.extend(one)
        elif hasattr(one, "__dict__") and not callable(one):
            stack.extend(vars(one).values())
    return web.json_response({"executors": len(executors), "seen": count, "wrong": wrong})


class CitizenDigest:
    """An output node: the digest of what came in."""

    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "run", (), True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}}

    def run(self, image):
        digest = hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()
        return {"ui": {"digest": [digest], "shape": [list(image.shape)]}}


NODE_CLASS_MAPPINGS = {"CitizenDigest": CitizenDigest}
