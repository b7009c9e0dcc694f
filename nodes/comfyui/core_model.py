"""ComfyUI's own MODEL whose network runs on the TPU: samplers, guiders and wrappers are core's, the network is ours.

Core builds its own network from the shapes in a file, on the meta device, where it takes no memory: so names for LoRAs,
latent formats, schedules and conditionings are core's. Only the innermost `_forward` is another: it asks the engine.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.ops
import torch
from comfy.patcher_extension import WrappersMP, get_all_wrappers

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import QUALITIES, ModelRef, Progress
from . import core_patches, errors
from .core_patches import CorePatcher
from .networks import inputs
from .networks.rows import KEY, PlainBatch
from .weights.sources import CoreWeights

# The progress of the node that runs: one object is used by many.
MakeHost = Callable[[], Progress]


def model(path: str, precision: str, host: MakeHost, quality: str = QUALITIES[0]) -> CorePatcher:
    """Core's MODEL of the denoiser in a file."""
    found = later(pipeline.choose_part(pipeline.SPECS, path, precision=precision, quality=quality), 0, host)
    found.make_now()
    return found


def later(chosen: ModelRef, expert: int, host: MakeHost) -> CorePatcher:
    """Core's MODEL of a model's denoiser, by its number, made when it is first used; refused where there is none."""
    return CorePatcher.later(lambda patcher: _make(patcher, chosen, expert, host))


def _make(patcher: CorePatcher, chosen: ModelRef, expert: int, host: MakeHost) -> None:
    experts = chosen.spec.denoiser.experts
    if expert >= len(experts):
        raise ValueError(
            f"{chosen.spec.title} has one denoiser, and this MODEL is that of a second one, for low noise. Link the "
            "output MODEL."
        )
    held = pipeline.checkpoint.network(chosen.locate(), experts[expert], host())
    base = _core_model(held)
    inputs.check_known(base)
    ours = inputs.CoreNetwork.of(chosen, expert)
    network = base.diffusion_model
    forward = inspect.signature(type(network)._forward)

    def predict(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = forward.bind(network, *args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name != "self"}
        given |= given.pop("kwargs", {})
        patcher = base.current_patcher
        options = given.pop("transformer_options", None) or {}
        core_patches.check(options, given.pop("control", None))
        core_patches.check_network(network, theirs)
        x, loras = given["x"], core_patches.loras(patcher)
        found = x.new_empty(0)
        asked = inputs.asked(ours, {**given, "options": options})
        for rows, one in asked:
            prediction = pipeline.Prediction(sample=one.sample, timestep=one.timestep, inputs=one.inputs, expert=expert)
            result = ask("predict", replace(chosen, loras=loras), host, prediction=prediction)
            if len(asked) == 1:
                found = result
            else:
                found = found if len(found) else result.new_empty(len(x), *result.shape[1:])
                found[rows] = result
        found = found[(..., *(slice(0, size) for size in x.shape[2:]))]
        # One row that stands for all: whoever wraps the network may write into each.
        found = found if len(found) >= len(x) else found.repeat(len(x), *(1,) * (found.ndim - 1))
        return found.to(x.dtype)

    network._forward = predict
    network.register_forward_pre_hook(partial(_with_own_sample, chosen, host), with_kwargs=True)
    base.extra_conds = partial(_extra_conds, ours, base.extra_conds)
    theirs = core_patches.own_attributes(network)
    base.tpu_texts = inputs.texts(ours)
    base.tpu_source = _source(held)
    patcher.fill(base)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, partial(_prepare_sampling, ours))
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, PlainBatch(core_patches.CONTROL))


def _with_own_sample(
    chosen: ModelRef, host: MakeHost, network: Any, args: tuple[Any, ...], given: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """The sample for wrappers of the network, such as EasyCache, that write into it. In core a network of float32 is
    given the sampler's own, and one of another format a copy; so is ours, of which core knows no other than float32.
    """
    if not get_all_wrappers(WrappersMP.DIFFUSION_MODEL, given.get("transformer_options") or {}):
        return None
    platform = pipeline.engine(host()).devices[0].platform
    if pipeline.resolve_precision(chosen.precision, platform) == "float32":
        return None
    return (args[0].clone(), *args[1:]), given


def _extra_conds(network: inputs.CoreNetwork, extra_conds: Callable[..., Any], **given: Any) -> Any:
    inputs.check_conditioning(network, given)
    return extra_conds(**given)


def _prepare_sampling(
    network: inputs.CoreNetwork, execute: Callable[..., Any], model: Any, shape: Any, *args: Any, **more: Any
) -> Any:
    inputs.check_sample(network, shape)
    return execute(model, shape, *args, **more)


def _source(held: Any) -> CoreWeights:
    names = {f"diffusion_model.{name}": tensor for name, tensor in held.tensors.items()}
    return CoreWeights(names, [f"diffusion_model.{name}" for name in held.layout.flags if name in held.tensors])


def ask(stage: str, model: ModelRef, host: MakeHost, **arguments: Any) -> Any:
    """`pipeline.run`, whose error for want of memory ComfyUI then knows: it unloads everything and says so."""
    try:
        with errors.named():
            return pipeline.run(stage, model, host(), **arguments)
    except pipeline.OutOfMemory as error:
        failure = str(error)
    raise comfy.model_management.OOM_EXCEPTION(failure)


def _core_model(held: Any) -> Any:
    """Core's model of a network, as its own loader finds it, without memory for weights."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in held.tensors.items()}
    said = held.contents.config
    metadata = {"config": json.dumps(said)} if said else None
    config = comfy.model_detection.model_config_from_unet(shapes, "", metadata=metadata)
    if config is None:
        found = comfy.model_detection.convert_diffusers_mmdit(shapes, "")
        config = found and comfy.model_detection.model_config_from_unet(found, "")
        shapes = found or shapes
    if config is None:
        raise ValueError(
            f"{held.path}: ComfyUI does not know this file's names, so its samplers cannot run it. Use the file in "
            "ComfyUI's own names (Comfy-Org's repositories), or this pack's own sampler."
        )
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = comfy.ops.disable_weight_init
    return config.get_model(shapes, "", device=torch.device("meta"))
