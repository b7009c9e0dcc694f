"""Announces the calls of a prompt to the runtime at its first node, because sizes are in the sampler, which runs later.

Calls that depend on a node's result are announced when that node has run, ahead of the sampler.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import comfy_execution.graph
import folder_paths

from ...tpu_runtime import api
from ...tpu_runtime.checkpoints.file_resolution import SEPARATOR
from ...tpu_runtime.checkpoints.model_ref import ModelRef, choose_model, choose_partial_model
from ...tpu_runtime.models import SPECS, spec_for_family
from ...tpu_runtime.progress import Progress, SilentProgress
from .. import DECLARATIONS
from ..declare import Value
from ..graphs import core_calls, graph, image_headers
from ..graphs.core_calls import Prediction
from ..graphs.known import UNKNOWN, ImageSize, LatentSize, LoaderOutput, NoFacts, Outputs
from ..graphs.sampling_rules import SamplerCall
from ..model import join_model_id, parse_quality, specs_of_clip_type
from .core_loaders import LOADERS
from .host import comfyui_folders, resolve_path
from .networks import inputs
from .node_outputs import differ, read_output

# A model, and the keywords of `stage_functions.precompile_call` for one call.
Call = tuple[ModelRef, dict[str, Value]]
_LOADER = "TPUModelLoader"
_OURS = frozenset((*DECLARATIONS, *LOADERS))
# Largest number of values in all rows of a sample: zeros for more would fill the host's memory.
_MOST_NUMBERS = 2**26
# Largest number of pixels' values to be encoded, of which only a few frames are held at once.
_MOST_PIXELS = 2**30
# Largest number of calls whose programs are listed.
_MOST_LISTED = 100
# How often a prompt is looked at again: each time takes work in proportion to the prompt.
_MOST_REPEATS = 32


@dataclass(eq=False)
class _PromptState:
    """A prompt with the values of its outputs that are known."""

    prompt: graph.Workflow
    finished: dict[str, Outputs] = field(default_factory=dict)  # outputs of nodes that have run, by node id
    prediction: Prediction | None = None
    is_announced: bool = False
    is_predicting: bool = False  # in a thread that looks at `finished` again before it ends
    repeats: int = 0
    called: set[object] = field(default_factory=set)  # calls that were announced
    lock: Lock = field(default_factory=Lock)  # of the fields above

    def calls(self) -> Iterator[Call]:
        """Yield the calls of the prompt that were not announced yet, until nothing more is known."""
        try:
            while True:
                finished = dict(self.finished)
                prediction = core_calls.predict(self.prompt, Files(), finished)
                self.prediction = prediction
                new = {key: call for call in prediction.calls if (key := _key(call)) not in self.called}
                self.called.update(new)
                yield from predict_calls(list(new.values()))
                with self.lock:
                    later = self.finished.keys() - finished.keys()
                    self.repeats += 1
                    if self.repeats > _MOST_REPEATS or not any(map(self.is_news, later)):
                        self.is_predicting = False
                        return
        finally:
            self.is_predicting = False

    def is_news(self, node_id: str) -> bool:
        """Return whether more calls may be known by what a node returned."""
        predicted, actual = self.prediction, self.finished[node_id]
        return predicted is not None and (
            node_id in predicted.waiting or differ(predicted.outputs.get(node_id, actual), actual)
        )


class Precompiler:
    """Announces each prompt once, for all nodes, and calls that become known later."""

    def __init__(self) -> None:
        self._state: _PromptState | None = None

    def __call__(self, prompt: graph.Workflow | None, host: Progress) -> None:
        """Announce a prompt, unless it is the announced one."""
        if prompt is None or (state := self._find_state(prompt)).is_announced:
            return
        state.is_announced = state.is_predicting = True
        api.announce_generations(graph.plan_generations(prompt, comfyui_folders(), DECLARATIONS), progress=host)
        api.precompile_calls(state.calls(), progress=host)

    def finish(self, prompt: graph.Workflow, node_id: str, results: Sequence[Any]) -> None:
        """Note a node's outputs, each a list as ComfyUI has them, and announce the calls that become known by them.

        A node of ours that did not run, because ComfyUI has kept its outputs, announces the prompt as well.
        """
        state = self._find_state(prompt)
        if not state.is_announced and node_id in prompt and prompt[node_id]["class_type"] in _OURS:
            self(prompt, SilentProgress())
        actual = tuple(read_output(values) for values in results) if node_id in prompt else ()
        if all(value is UNKNOWN for value in actual):
            return  # also of a node that another one has made
        with state.lock:
            state.finished[node_id] = actual
            if not state.is_announced or state.is_predicting or state.repeats >= _MOST_REPEATS:
                return
            if not state.is_news(node_id):
                return
            state.is_predicting = True
        api.precompile_calls(state.calls(), progress=SilentProgress())

    def _find_state(self, prompt: graph.Workflow) -> _PromptState:
        """Return the state of a prompt, which replaces that of another one."""
        state = self._state
        if state is None or state.prompt is not prompt:
            state = self._state = _PromptState(prompt)
        return state


precompile = Precompiler()


def observe_nodes() -> None:
    """Let `precompile` see the outputs of every node that has run, and of those whose outputs ComfyUI has kept."""
    execution_list: Any = comfy_execution.graph.ExecutionList
    if not hasattr(execution_list, "cache_update") or not hasattr(execution_list, "cache_link"):
        return  # another version of ComfyUI
    update, link = execution_list.cache_update, execution_list.cache_link

    @functools.wraps(update)
    def cache_update(self: Any, node_id: str, value: Any) -> None:
        update(self, node_id, value)
        _observe(self, node_id, lambda: value)

    @functools.wraps(link)
    def cache_link(self: Any, from_node_id: str, to_node_id: str, *socket: Any, **named: Any) -> None:
        link(self, from_node_id, to_node_id, *socket, **named)
        _observe(self, from_node_id, lambda: self.execution_cache[to_node_id][from_node_id])

    execution_list.cache_update, execution_list.cache_link = cache_update, cache_link


def _observe(execution_list: Any, node_id: str, cached: Callable[[], Any]) -> None:
    """Pass on a node's outputs, if it has any yet."""
    with contextlib.suppress(Exception):  # of other versions; nothing fails because it cannot be compiled ahead
        if (value := cached()) is not None:
            precompile.finish(execution_list.dynprompt.get_original_prompt(), node_id, value.outputs)


def _key(call: core_calls.Call) -> object:
    """Return a key that differs between calls that need different programs."""
    if isinstance(call, SamplerCall):
        return call.model.key, call.model.window, call.latent, call.conditionings
    if isinstance(call, core_calls.DecoderCall):
        return call.vae.key, call.latent
    if isinstance(call, core_calls.ImageCall):
        return call.vae.key, call.images
    return call.clip.key


# --- calls ------------------------------------------------------------------------------------------------------------


class Files(NoFacts):
    """Facts about ComfyUI's files."""

    def __init__(self) -> None:
        self._strides: dict[tuple[str, int], int | None] = {}

    def image_size(self, name: str) -> ImageSize | None:
        """Return the size of an image in ComfyUI's folders, from the first bytes of the file."""
        try:
            path = Path(folder_paths.get_annotated_filepath(name))
            if not path.is_file():
                return None
            with path.open("rb") as file:
                return image_headers.read_size(file.read(image_headers.MAX_BYTES))
        except (OSError, ValueError):
            return None

    def stride(self, loaded: LoaderOutput) -> int | None:
        """Return the pixels per latent of a side, from the headers of a loader's files."""
        if loaded.key not in self._strides:
            model = _model(loaded, "vae" if loaded.kind == "TPUVAELoader" else "model")
            self._strides[loaded.key] = model and model.spec.geometry.stride_hw
        return self._strides[loaded.key]


def predict_calls(calls: Sequence[core_calls.Call]) -> Iterator[Call]:
    """Yield the calls of our loaders' models that core's nodes will make: encoders, samplers, then decoders."""
    encoders = {call.clip.key: call.clip for call in calls if isinstance(call, core_calls.EncoderCall)}
    for clip in encoders.values():
        if (model := _model(clip, "clip")) is not None:
            yield model, {}
    for call in calls:
        if isinstance(call, core_calls.ImageCall) and (vae := _model(call.vae, "vae")) is not None:
            frames = call.images.batch if vae.spec.geometry.stride_t else 1
            shape = (1, 3, frames, call.images.height, call.images.width)
            if math.prod(shape) <= _MOST_PIXELS:
                yield vae, {"encoded": shape}
    for call in calls:
        if isinstance(call, SamplerCall):
            yield from _sampler_calls(call)
    for call in calls:
        if isinstance(call, core_calls.DecoderCall) and (vae := _model(call.vae, "vae")) is not None:
            shape = _shape(call.latent, vae)
            if 0 < math.prod(shape[1:]) <= _MOST_NUMBERS:
                yield vae, {"decoded": (1, *shape[1:])}


def list_programs(prompt: graph.Workflow) -> list[str]:
    """Return a message for each program that a prompt compiles, as far as it is known before the prompt runs."""
    calls = core_calls.predict(prompt, Files(), {}).calls[:_MOST_LISTED]
    return api.list_programs(predict_calls(calls))


def _sampler_calls(call: SamplerCall) -> Iterator[Call]:
    """Yield a sampler's calls of a step: equal conditionings share one."""
    model = _model(call.model, "model")
    if model is None:
        return
    shape = _shape(call.latent, model)
    expert = int(call.model.kind == _LOADER and call.model.output == 4)
    window = _shape(call.latent, model, call.model.window)
    for conditioning, number in Counter(call.conditionings).items():
        shapes = [shape, *(_shape(latent, model) for latent in conditioning.references)]
        rows = number * shape[0]
        if not all(0 < rows * math.prod(shape[1:]) <= _MOST_NUMBERS // len(shapes) for shape in shapes):
            continue
        sample_rows = 1 if shape[0] == 1 else rows
        prediction = inputs.predict_call(
            model, expert, window[1:], (sample_rows, rows), conditioning.pictures, [shape[1:] for shape in shapes[1:]]
        )
        yield model, {"prediction": prediction}


def _shape(latent: LatentSize, model: ModelRef, window: int = 0) -> tuple[int, ...]:
    """Return the shape `[batch, channels, (frames,) height, width]` of a latent for a model.

    window: frames that the network gets at once; 0 for all.
    """
    geometry = model.spec.geometry
    is_video = bool(geometry.stride_t)  # the VAE takes images as frames
    num_frames = latent.images if is_video and latent.images else latent.num_frames
    frames = (geometry.latent_frames(min(num_frames, window or num_frames)),) if is_video else ()
    batch = latent.batch * (1 if is_video else max(1, latent.images))
    return (batch, geometry.channels, *frames, *latent.size(geometry.stride_hw))


def _model(source: LoaderOutput, part: str) -> ModelRef | None:
    """Return the model of one of our loaders; None for other loaders, and for values that its loader will refuse.

    part: "model", "clip" or "vae".
    """
    specs, values = SPECS, dict(source.values)
    try:
        if source.kind == _LOADER:
            values = DECLARATIONS[_LOADER].values(values)
            spec = spec_for_family(values["family"])
            return choose_model(
                spec,
                join_model_id(values),
                precision=values["precision"],
                quality=values["quality"],
                folders=comfyui_folders().models,
            )
        if source.kind not in LOADERS:
            return None
        if "type" in values:
            specs = specs_of_clip_type(str(values["type"]))
        if part == "vae":
            specs = tuple(spec for spec in specs if spec.vae.encode is not None)
        paths = [
            resolve_path(widget.files, values[widget.name]) for widget in LOADERS[source.kind].inputs if widget.files
        ]
        quality = parse_quality(values.get("weight_dtype"))
        return choose_partial_model(specs, SEPARATOR.join(paths), quality=quality)
    except (ValueError, KeyError, OSError, TypeError):
        return None
