"""Tells the runtime what a prompt will run, as its first node does: sizes are in the sampler, which runs later."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import ModelRef
from .. import DECLARATIONS
from ..graphs import core, graph
from ..graphs.core import Source
from ..model import CLIP_TYPES, chosen_id, quality_of
from .core_loaders import LOADERS
from .host import ComfyHost, folders, path_of
from .networks import inputs

Call = tuple[ModelRef, dict[str, Any]]
_LOADER = "TPUModelLoader"
# In all rows of a sample: of more, which a workflow from anyone may ask for, zeros would fill the host's memory.
_MOST_NUMBERS = 2**26


@dataclass
class Announcer:
    """For all nodes; each prompt once."""

    announced: object = field(default=None)

    def __call__(self, prompt: dict[str, Any] | None, host: ComfyHost) -> None:
        if prompt is not None and prompt is not self.announced:
            self.announced = prompt
            pipeline.expect(graph.expected(prompt, folders(), DECLARATIONS), progress=host)
            pipeline.prepare(calls(prompt), progress=host)


announce = Announcer()


def calls(prompt: dict[str, Any]) -> Iterator[Call]:
    """What core's samplers, and the nodes around them, will ask of our loaders' models, in its order."""
    for source in core.encoders(prompt):
        if (model := _model(source, "clip")) is not None:
            yield model, {}
    found = [(one, _model(one.model, "model")) for one in core.samplings(prompt)]
    for sampling, model in found:
        conditionings = sampling.batch * sampling.branches
        rows = (1 if sampling.batch == 1 else conditionings, conditionings)
        if model is not None and 0 < conditionings * math.prod(shape := _shape(sampling, model)) <= _MOST_NUMBERS:
            shape = _shape(replace(sampling, num_frames=sampling.window), model)
            expert = int(sampling.model.kind == _LOADER and sampling.model.output == 4)
            yield model, {"prediction": inputs.expected(model, expert, shape, rows, sampling.pictures)}
    for sampling, model in found:
        for decoder in sampling.decoders if model is not None else ():
            vae = _model(decoder, "vae")
            if vae is not None and 0 < math.prod(shape := _shape(sampling, vae)) <= _MOST_NUMBERS:
                yield vae, {"decoded": (1, *shape)}


def _shape(sampling: core.Sampling, model: ModelRef) -> tuple[int, ...]:
    """Of a sample, without its batch."""
    # Core takes sizes that our own samplers do not, and pads them.
    settings = replace(
        model.spec.settings(), width=sampling.width, height=sampling.height, num_frames=sampling.num_frames
    )
    return model.spec.geometry.latent_shape(settings)[1:]


def _model(source: Source, part: str) -> ModelRef | None:
    """The model of a loader of ours; None for another's, and for what its loader will refuse."""
    specs, values = pipeline.SPECS, dict(source.values)
    try:
        if source.kind == _LOADER:
            values = DECLARATIONS[_LOADER].values(values)
            spec = pipeline.spec_for_family(values["family"])
            return pipeline.choose_model(
                spec,
                chosen_id(values),
                precision=values["precision"],
                quality=values["quality"],
                folders=folders().models,
            )
        if source.kind not in LOADERS:
            return None
        if "type" in values:
            specs = tuple(spec for spec in specs if spec.family in CLIP_TYPES[str(values["type"])])
        if part == "vae":
            specs = tuple(spec for spec in specs if spec.vae.encode is not None)
        paths = [path_of(one.files, values[one.name]) for one in LOADERS[source.kind].inputs if one.files]
        quality = quality_of(values.get("weight_dtype"))
        return pipeline.choose_part(specs, pipeline.SEPARATOR.join(paths), quality=quality)
    except (ValueError, KeyError, OSError, TypeError):
        return None
