"""Run in a process of its own: prompts in ComfyUI's own executor, with nodes that only note that they ran.

Arguments: ComfyUI's folder, and a job as JSON: `prompts` in order, and the executor's `cache`. Prints what happened:
which nodes ran, and between them which calls were announced, as the node that will make a call and its size.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any


def main(comfyui: str, text: str) -> None:
    sys.path.insert(0, comfyui)
    import execution
    import torch
    from comfyui_tpu.nodes.comfyui import precompile
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    import nodes

    job, events = json.loads(text), []

    def announce(calls: Any, *, progress: Any) -> None:
        events.extend(f"{call.node_id} of {size(call)}" for call in calls if hasattr(call, "latent"))

    precompile.predict_calls = iter
    precompile.api.precompile_calls = announce
    precompile.api.announce_generations = lambda *args, **named: None
    precompile.observe_nodes()

    def node(name: str, outputs: tuple[str, ...], run: Any, **inputs: Any) -> None:
        def execute(self: Any, prompt: Any = None, unique_id: str = "", **values: Any) -> Any:
            if name.startswith("TPU"):
                precompile.precompile(prompt, SilentProgress())
            events.append(f"{unique_id} runs")
            return run(**values)

        body = {
            "INPUT_TYPES": classmethod(
                lambda cls: {"required": inputs, "hidden": {"prompt": "PROMPT", "unique_id": "UNIQUE_ID"}}
            ),
            "RETURN_TYPES": outputs, "FUNCTION": "execute", "execute": execute, "CATEGORY": "",
            "OUTPUT_NODE": name == "VAEDecode",
        }  # fmt: skip
        nodes.NODE_CLASS_MAPPINGS[name] = type(name, (), body)

    number = ("INT", {})

    def latent(height: int, width: int) -> tuple[Any, ...]:
        return ({"samples": torch.zeros(1, 16, height // 8, width // 8)},)

    node("TPUUNETLoader", ("MODEL",), lambda **_: ("model",), unet_name=("STRING", {}))
    node("TPUVAELoader", ("VAE",), lambda **_: ("vae",), vae_name=("STRING", {}))
    node("Camera", ("IMAGE",), lambda side: (torch.zeros(1, side, 64, 3),), side=number)
    node("Counter", ("INT",), lambda side: (side,), side=number)
    node("Text", ("CONDITIONING",), lambda: ([[torch.zeros(1, 3, 8), {"pooled_output": None}]],))
    node("VAEEncode", ("LATENT",), lambda pixels, vae: latent(*pixels.shape[1:3]), pixels=("IMAGE",), vae=("VAE",))
    node("EmptySD3LatentImage", ("LATENT",), latent, width=number, height=number)
    node(
        "KSampler", ("LATENT",), lambda latent_image, **_: (latent_image,), model=("MODEL",),
        positive=("CONDITIONING",), latent_image=("LATENT",), cfg=("FLOAT", {}),
    )  # fmt: skip
    node("VAEDecode", (), lambda **_: (), samples=("LATENT",), vae=("VAE",))
    server = SimpleNamespace(client_id=None, last_node_id=None, send_sync=lambda *args: None)
    kind = execution.CacheType[job["cache"]]
    executor = execution.PromptExecutor(server, cache_type=kind, cache_args={"lru": 0, "ram": 0, "ram_inactive": 0})
    for prompt in job["prompts"]:
        events.append("queued")
        asyncio.run(executor.execute_async(prompt, "id", {}, ["frames"]))
        assert executor.success, executor.status_messages
    print(json.dumps(events))


def size(call: Any) -> str:
    return "{}x{}".format(*call.latent.size(8))


if __name__ == "__main__":
    main(*sys.argv[1:])
