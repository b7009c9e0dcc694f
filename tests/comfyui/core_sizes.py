"""Run in a process of its own: nodes of a workflow in API format, by ComfyUI's own classes, on small tensors.

Arguments: ComfyUI's folder, and a job as JSON: `nodes` by id, the `folder` of images, the `classes` by node type as
`module:name` for those that `nodes` does not have, the modules to stub, and `latents`: nodes whose latent a sampler
would take for a model of a latent format (`comfy.latent_formats`). Prints what each node returns: numbers, sizes of
images, shapes of latents and of references.
"""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

Job = dict[str, Any]


class Vae:
    """ComfyUI's cutting of pixels, and zeros for the latents, of 8 or 16 pixels on a side each."""

    latent_channels = 16

    def __init__(self, stride: int) -> None:
        self.stride, self.crop_input, self.output_channels = stride, True, 3

    def spacial_compression_encode(self) -> int:
        return self.stride

    def encode(self, pixels: Any) -> Any:
        import comfy.sd
        import torch

        batch, height, width, _ = comfy.sd.VAE.vae_encode_crop_pixels(self, pixels).shape
        return torch.zeros(batch, 16, height // self.stride, width // self.stride)


class Clip:
    def tokenize(self, text: str, **more: Any) -> str:
        return text

    def encode_from_tokens_scheduled(self, tokens: str) -> Any:
        import torch

        return [[torch.zeros(1, 3, 8), {}]]


class Missing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None


def main(comfyui: str, text: str) -> None:
    sys.path.insert(0, comfyui)
    import comfy.latent_formats
    import comfy.sample
    import folder_paths
    import torch

    job = json.loads(text)
    sys.modules |= {name: Missing(name) for name in job["stubs"] if name not in sys.modules}
    folder_paths.set_input_directory(job["folder"])
    results: dict[str, tuple[Any, ...]] = {}
    with torch.inference_mode():
        for name in job["nodes"]:
            run(job, name, results)
        shapes = {name: [describe_output(value) for value in values] for name, values in results.items()}
        for name, kind in job["latents"].items():
            model = SimpleNamespace(get_model_object=lambda _, kind=kind: getattr(comfy.latent_formats, kind)())
            latent = results[name][0]
            fixed = comfy.sample.fix_empty_latent_channels(
                model, latent["samples"], latent.get("downscale_ratio_spacial", None)
            )
            shapes[f"{name} for {kind}"] = [{"latent": list(fixed.shape)}]
    print(json.dumps(shapes))


def run(job: Job, name: str, results: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    if name not in results:
        node = job["nodes"][name]
        values: dict[str, Any] = {}
        for key, value in node["inputs"].items():
            if isinstance(value, list):
                value = run(job, value[0], results)[value[1]]
            group, _, inner = key.partition(".")
            if inner:
                held = values.get(group, {})
                values[group] = {**(held if isinstance(held, dict) else {group: held}), inner: value}
            else:
                values[key] = value
        results[name] = execute(job, node["class_type"], values)
    return results[name]


def execute(job: Job, kind: str, values: dict[str, Any]) -> tuple[Any, ...]:
    if kind.startswith("Vae"):
        return (Vae(values["stride"]),)
    if kind == "Clip":
        return (Clip(),)
    core = importlib.import_module("nodes")
    if kind in job["classes"]:
        module, name = job["classes"][kind].split(":")
        node = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
        if hasattr(node, "hidden"):
            node.hidden = SimpleNamespace(unique_id=None)
        return node.execute(**values).result
    node = core.NODE_CLASS_MAPPINGS[kind]
    return getattr(node(), node.FUNCTION)(**values)


def describe_output(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return {"image": list(value.shape[:3])}
    if isinstance(value, dict) and "samples" in value:
        return {"latent": list(value["samples"].shape)}
    if isinstance(value, list):
        return {"references": [list(one.shape) for one in value[0][1].get("reference_latents", ())]}
    return value if isinstance(value, bool | int | float | str) else None


if __name__ == "__main__":
    main(*sys.argv[1:])
