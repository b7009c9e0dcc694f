"""Announces to the runtime what a prompt will run, at its first node: sizes are in the sampler, which runs later."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...tpu_runtime import api
from ...tpu_runtime.api import ModelRef
from .. import DECLARATIONS
from ..declare import Value
from ..graphs import core_samplers, graph
from ..graphs.core_samplers import LoaderOutput
from ..model import CLIP_TYPES, join_model_id, parse_quality
from .core_loaders import LOADERS
from .host import ComfyContext, comfyui_folders, resolve_path
from .networks import inputs

# A model, and the keywords of `pipeline.prepare` for one call.
Call = tuple[ModelRef, dict[str, Value]]
_LOADER = "TPUModelLoader"
# Largest number of values in all rows of a sample: zeros for more would fill the host's memory.
_MOST_NUMBERS = 2**26


@dataclass
class Precompiler:
    """Announces each prompt once, for all nodes."""

    announced: object = field(default=None)

    def __call__(self, prompt: graph.Workflow | None, host: ComfyContext) -> None:
        if prompt is not None and prompt is not self.announced:
            self.announced = prompt
            api.announce_generations(graph.plan_generations(prompt, comfyui_folders(), DECLARATIONS), progress=host)
            api.precompile_calls(predict_calls(prompt), progress=host)


precompile = Precompiler()


def predict_calls(prompt: graph.Workflow) -> Iterator[Call]:
    """Yield the calls that core's samplers, and the nodes around them, will make to our loaders' models, in order."""
    for source in core_samplers.find_text_encoders(prompt):
        if (model := _model(source, "clip")) is not None:
            yield model, {}
    sampled = [(sampling, _model(sampling.model, "model")) for sampling in core_samplers.find_sampler_calls(prompt)]
    for sampling, model in sampled:
        conditionings = sampling.batch * sampling.branches
        rows = (1 if sampling.batch == 1 else conditionings, conditionings)
        if model is not None and 0 < conditionings * math.prod(shape := _shape(sampling, model)) <= _MOST_NUMBERS:
            shape = _shape(replace(sampling, num_frames=sampling.window), model)
            expert = int(sampling.model.kind == _LOADER and sampling.model.output == 4)
            yield model, {"prediction": inputs.predict_call(model, expert, shape, rows, sampling.pictures)}
    for sampling, model in sampled:
        for decoder in sampling.decoders if model is not None else ():
            vae = _model(decoder, "vae")
            if vae is not None and 0 < math.prod(shape := _shape(sampling, vae)) <= _MOST_NUMBERS:
                yield vae, {"decoded": (1, *shape)}


def _shape(sampling: core_samplers.SamplerCall, model: ModelRef) -> tuple[int, ...]:
    """Return the shape of one sample, without the batch."""
    # Core accepts sizes that our own samplers do not, and pads them.
    settings = replace(
        model.spec.settings(), width=sampling.width, height=sampling.height, num_frames=sampling.num_frames
    )
    return model.spec.geometry.latent_shape(settings)[1:]


def _model(source: LoaderOutput, part: str) -> ModelRef | None:
    """Return the model of one of our loaders; None for other loaders, and for values that its loader will refuse.

    part: "model", "clip" or "vae".
    """
    specs, values = api.SPECS, dict(source.values)
    try:
        if source.kind == _LOADER:
            values = DECLARATIONS[_LOADER].values(values)
            spec = api.spec_for_family(values["family"])
            return api.choose_model(
                spec,
                join_model_id(values),
                precision=values["precision"],
                quality=values["quality"],
                folders=comfyui_folders().models,
            )
        if source.kind not in LOADERS:
            return None
        if "type" in values:
            specs = tuple(spec for spec in specs if spec.family in CLIP_TYPES[str(values["type"])])
        if part == "vae":
            specs = tuple(spec for spec in specs if spec.vae.encode is not None)
        paths = [
            resolve_path(widget.files, values[widget.name]) for widget in LOADERS[source.kind].inputs if widget.files
        ]
        quality = parse_quality(values.get("weight_dtype"))
        return api.choose_partial_model(specs, api.SEPARATOR.join(paths), quality=quality)
    except (ValueError, KeyError, OSError, TypeError):
        return None
