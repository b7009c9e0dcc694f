"""ComfyUI's own MODEL whose network runs on the TPU: samplers, guiders and wrappers are core's.

Core builds its own network from the shapes in a file, on the meta device, where it needs no memory. So LoRA names,
latent formats, schedules and conditionings are core's; only the innermost `_forward` is replaced, by a call to the
engine.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import comfy.model_detection
import comfy.model_management
import comfy.ops
import torch
from comfy.patcher_extension import WrappersMP, get_all_wrappers

from ...tpu_runtime import api
from ...tpu_runtime.checkpoints import checkpoint
from ...tpu_runtime.checkpoints.model_ref import ModelRef, choose_partial_model
from ...tpu_runtime.engine.lifecycle import get_engine
from ...tpu_runtime.engine.memory_advice import OutOfMemory
from ...tpu_runtime.messages import compose
from ...tpu_runtime.model_spec import Quality
from ...tpu_runtime.models import SPECS
from ...tpu_runtime.precision import resolve_precision
from ...tpu_runtime.progress import Progress
from . import core_control_nets, core_control_patches, errors, model_patcher
from .core_control_nets import ControlCall
from .model_patcher import CorePatcher
from .networks import inputs
from .networks.rows import KEY, GuidanceBatch
from .weights.sources import CoreWeights

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

# Returns the progress of the running node: several nodes use one object.
MakeContext = Callable[[], Progress]


def load_model(path: str, precision: str, host: MakeContext, quality: str = Quality.EXACT) -> CorePatcher:
    """Return core's MODEL of the denoiser in a file.

    path: of the file. precision, quality: as a node has them. host: returns the running node's progress.
    """
    patcher = defer_model(choose_partial_model(SPECS, path, precision=precision, quality=quality), 0, host)
    patcher.resolve()
    return patcher


def defer_model(chosen: ModelRef, expert: int, host: MakeContext) -> CorePatcher:
    """Return core's MODEL of a model's denoiser, created on first use.

    expert: number of the denoiser; one that does not exist raises ValueError on first use.
    """
    return CorePatcher.later(lambda patcher: _make(patcher, chosen, expert, host))


def _make(patcher: CorePatcher, chosen: ModelRef, expert: int, host: MakeContext) -> None:
    """Create core's model for a denoiser and put it into `patcher`."""
    experts = chosen.spec.denoiser.experts
    if expert >= len(experts):
        raise ValueError(compose("comfyui.no_second_expert", title=chosen.spec.title))
    file = checkpoint.export_network(chosen.locate(), experts[expert], host())
    base = _core_model(file)
    inputs.check_known(base)
    ours = inputs.describe_network(chosen, expert)
    network = base.diffusion_model
    forward = inspect.signature(type(network)._forward)

    def predict(*args: object, **kwargs: object) -> torch.Tensor:
        """Predict as the network's `_forward`, on the TPU."""
        bound = forward.bind(network, *args, **kwargs).arguments
        passed = {name: value for name, value in bound.items() if name != "self"}
        passed |= passed.pop("kwargs", {})
        patcher = base.current_patcher
        options = passed.pop("transformer_options", None) or {}
        patches = base.tpu_patches(options.get("patches") or {})
        control = passed.pop("control", None)
        model_patcher.check_options(options, control, patches is not None)
        model_patcher.check_network(network, attributes)
        x, loras = passed["x"], model_patcher.convert_loras(patcher)
        files, controls = core_control_patches.read_inputs(patches or (), x)
        if isinstance(control, ControlCall):
            core_control_nets.check_mask(passed.get("attention_mask"), ours)
            files += tuple(str(file.path) for file in control.files)
            controls += control.inputs
        called, result = replace(chosen, loras=loras, controls=files), x.new_empty(0)
        requests = inputs.split_call(ours, {**passed, "options": options})
        for rows, request in requests:
            own = core_control_patches.select_rows(controls, rows)
            prediction = replace(request, expert=expert, controls=own)
            predicted = run_stage("predict", called, host, prediction=prediction)
            if len(requests) == 1:
                result = predicted
            else:
                result = result if len(result) else predicted.new_empty(len(x), *predicted.shape[1:])
                result[rows] = predicted
        result = result[(..., *(slice(0, size) for size in x.shape[2:]))]
        # Copy one row that serves all: wrappers of the network may write into each row.
        result = result if len(result) >= len(x) else result.repeat(len(x), *(1,) * (result.ndim - 1))
        return result.to(x.dtype)

    network._forward = predict
    network.register_forward_pre_hook(partial(_with_own_sample, chosen, host), with_kwargs=True)
    base.extra_conds = partial(_extra_conds, ours, base.extra_conds)
    attributes = model_patcher.instance_attributes(network)
    base.tpu_patches = partial(core_control_patches.list_patches, network=ours)
    base.tpu_texts = inputs.text_lengths(ours)
    base.tpu_source = _source(file)
    patcher.fill(base)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, partial(_prepare_sampling, ours))
    check_controls = partial(core_control_nets.check_controls, network=ours, refusal=model_patcher.CONTROL_REFUSAL)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, GuidanceBatch(check_controls))


def _with_own_sample(
    chosen: ModelRef,
    host: MakeContext,
    network: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    given: Mapping[str, Any],
) -> tuple[tuple[torch.Tensor, ...], Mapping[str, Any]] | None:
    """Copy the sample for wrappers of the network, such as EasyCache, that write into it.

    Core passes the sampler's own sample to a float32 network, and a copy to any other. It takes ours for float32, so
    other precisions are copied here.
    """
    if not get_all_wrappers(WrappersMP.DIFFUSION_MODEL, given.get("transformer_options") or {}):
        return None
    platform = get_engine(host()).devices[0].platform
    if resolve_precision(chosen.precision, platform) == "float32":
        return None
    return (args[0].clone(), *args[1:]), given


def _extra_conds(
    network: inputs.CoreNetwork, extra_conds: Callable[..., dict[str, object]], **given: Any
) -> dict[str, object]:
    inputs.check_conditioning(network, given)
    return extra_conds(**given)


def _prepare_sampling(
    network: inputs.CoreNetwork,
    execute: Callable[..., object],
    model: object,
    shape: Sequence[int],
    *args: object,
    **more: object,
) -> object:
    inputs.check_sample(network, shape)
    return execute(model, shape, *args, **more)


def _source(file: Any) -> CoreWeights:
    names = {f"diffusion_model.{name}": tensor for name, tensor in file.tensors.items()}
    return CoreWeights(names, [f"diffusion_model.{name}" for name in file.layout.flags if name in file.tensors])


def run_stage(stage: str, model: ModelRef, host: MakeContext, **arguments: object) -> Any:
    """Run a stage as `pipeline.run` does.

    An OutOfMemory becomes ComfyUI's own exception: it unloads everything and reports it.

    stage: name of the stage. arguments: its keywords.
    """
    try:
        with errors.shorten_error_names():
            return api.run_stage(stage, model, host(), **arguments)
    except OutOfMemory as error:
        failure = str(error)
    raise comfy.model_management.OOM_EXCEPTION(failure)


def _core_model(file: Any) -> "BaseModel":
    """Return core's model of a network, as its own loader detects it, without memory for weights.

    Raises ValueError if ComfyUI does not know the file's names.
    """
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in file.tensors.items()}
    declared = file.contents.config
    metadata = {"config": json.dumps(declared)} if declared else None
    config = comfy.model_detection.model_config_from_unet(shapes, "", metadata=metadata)
    if config is None:
        converted = comfy.model_detection.convert_diffusers_mmdit(shapes, "")
        config = converted and comfy.model_detection.model_config_from_unet(converted, "")
        shapes = converted or shapes
    if config is None:
        raise ValueError(compose("comfyui.file_names_unknown", path=file.path))
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = comfy.ops.disable_weight_init
    return config.get_model(shapes, "", device=torch.device("meta"))
