"""The stages of a generation, each a function of a `Stage`, single calls of networks for nodes of others, and warming
up: what an engine runs, by name, is `WORK`.
"""

import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .. import media, tokens, versions
from ..cache.store import signature
from ..checkpoints import read_ahead as reading
from ..checkpoints import score_bound, tiny
from ..model_spec import QUALITIES, STAGES, Curve, MagCache, ModelSpec, Settings, TextEncoding
from ..programs import denoise_step, generation, network_call
from ..programs.denoise_step import StepShape
from ..programs.executables import Executable
from ..progress import TOLD
from . import conditioning
from . import denoise as denoising
from .frame_buffer import FrameBuffer, PendingFrames, as_tensor, one_behind
from .payloads import Conditioning, ImageCondition, Latent
from .program_cache import Compilation, Wanted
from .stage import Stage

log = logging.getLogger(__name__)

PROMPTS = ("prompt", "negative prompt")
MOST_WORDS = 8  # of those that a miniature does not know, in its sentence


def encode(
    stage: Stage, prompt: str, negative_prompt: str, condition: ImageCondition | None = None
) -> tuple[Conditioning, Conditioning | None]:
    """Prompt and negative prompt as CONDITIONING, from the cache where the same text was encoded before. They are about
    the pictures of a `condition`, where the text encoder looks at these.
    """
    spec = stage.spec
    prompts = (prompt, negative_prompt) if spec.recipe.guidance == "cfg" else (prompt,)
    folders = [(spec.component(text.component).folder, text.tokenizer_folder) for text in spec.text_encoders]
    parts = [tuple(stage.found.identity(folder, stage.progress) for folder in pair) for pair in folders]
    sources = (*versions.environment(), versions.source_digest())
    looking = [text for text in spec.text_encoders if text.tokenize_beside]
    width = int(stage.config(looking[0].component)["hidden_size"]) if looking else 0
    seen = conditioning.seen(spec, condition if looking else None, width)
    pictures = [(x.shape, hashlib.sha256(x.numpy().tobytes()).hexdigest()) for x in seen]
    key = signature(spec.name, parts, stage.target.precision, prompts, sources, *pictures)
    found = stage.prompt_cache.get(key, spec.family, lambda: _encode(stage, prompts, seen), stage.hosts.decide)
    if lost := [sentence for named in zip(PROMPTS, prompts, found, strict=False) for sentence in _lost(stage, *named)]:
        stage.progress.activity.remark = " ".join(lost)
        log.warning("%s", " ".join(lost), extra={TOLD: True})
    return found


def _lost(stage: Stage, name: str, prompt: str, encoded: Conditioning | None) -> Iterator[str]:
    """What of a prompt does not reach the model as it may be meant, in sentences for the user."""
    title = stage.spec.title
    if literals := ", ".join(tokens.literals(prompt)):
        yield (
            f"{title}: {literals} in the {name} is taken literally; it has no special meaning here. Describe it in "
            "words."
        )
    if name == PROMPTS[0] and (example := tiny.texts(stage.spec, stage.found.model_id).get("prompt")):
        yield from _unknown(stage, prompt, example)
    for text in stage.spec.text_encoders if encoded else ():
        assert encoded
        # Only what fills all places may have been longer.
        if encoded[0][1].get(f"{text.name}_length", text.max_length) < text.max_length:
            continue
        tokenizer = tokens.load_tokenizer(stage.found.folder(text.tokenizer_folder, stage.progress))
        number, words = tokens.cut_off(text, tokenizer, prompt)
        if number:
            encoder = text.component.replace("_", " ")
            start = f", from {tokens.shown(words)} on" if words else ""
            yield (
                f"{title}: the {name} has {text.max_length + number} tokens, and the {encoder} takes "
                f"{text.max_length}: the last {number} are cut off{start}. Shorten it."
            )


def _unknown(stage: Stage, prompt: str, example: str) -> Iterator[str]:
    """What a trained miniature never saw: its picture would look as if the pack were broken."""
    if not prompt.strip():
        yield f'The prompt is empty. The miniature knows "{example}".'
        return
    tokenizer = tokens.load_tokenizer(stage.found.folder(stage.spec.text_encoders[0].tokenizer_folder, stage.progress))
    words = list(itertools.islice(tokens.unknown(tokenizer, prompt), MOST_WORDS + 1))
    if words:
        listed = ", ".join(word[: tokens.SHOWN] for word in words[:MOST_WORDS])
        more = " and others" if len(words) > MOST_WORDS else ""
        yield f'The miniature does not know: {listed}{more}. It knows "{example}".'


def _encode(
    stage: Stage, prompts: Sequence[str], seen: Sequence[torch.Tensor]
) -> tuple[Conditioning, Conditioning | None]:
    encoded = [_encode_text(stage, text, prompts, seen) for text in stage.spec.text_encoders]
    rows = [conditioning.conditioning(stage.spec, encoded, row) for row in range(len(prompts))]
    stage.counts["encode"] += 1
    return rows[0], rows[1] if len(rows) > 1 else None


def _encode_text(
    stage: Stage, text: TextEncoding, prompts: Sequence[str], seen: Sequence[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """States `[rows, max_length, dim]` and lengths `[rows]` of one text encoder."""
    tokenizer = tokens.load_tokenizer(stage.found.folder(text.tokenizer_folder, stage.progress))
    beside = text.tokenize_beside if seen else None
    ids, mask, *more = beside(tokenizer, prompts, seen) if beside else text.tokenize(tokenizer, prompts)
    stage.progress.text("Encoding the prompt")
    states, _ = stage.call(text.component, text.encode, ids, mask, *more)
    return states, mask.sum(axis=1).astype(np.int32)


def encode_image(stage: Stage, image: torch.Tensor, settings: Settings) -> ImageCondition:
    """An IMAGE `[N, height, width, 3]` in 0..1, CPU float32, as the denoiser's condition."""
    seen = media.pictures(image)
    conditioning.check_pictures(stage.spec, settings, len(seen))
    assert stage.spec.pictures.encode is not None
    stage.progress.text("Encoding the image")
    tensors = stage.spec.pictures.encode(stage.call, seen, settings, stage.config(stage.spec.vae.component))
    return conditioning.condition(stage.spec, settings, tensors)


def denoise(
    stage: Stage,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    condition: ImageCondition | None = None,
    latents: Mapping[str, Any] | None = None,
) -> Latent:
    """From noise, or from latents, to a LATENT."""
    plan = denoising.plan_of(stage, settings)
    inputs = conditioning.denoiser_inputs(plan, prompt_embeds, negative_prompt_embeds, condition)
    standing = denoising.begin(plan, inputs, latents, stage.progress.text)
    return denoising.end(plan, *denoising.denoise(stage, plan, standing))


def calibrate(
    stage: Stage,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    condition: ImageCondition | None = None,
) -> Curve:
    """The curve of a model, measured in one generation of full steps. None of these leaves blocks out."""
    quality = min(settings.quality, QUALITIES[1], key=QUALITIES.index)
    plan = denoising.plan_of(stage, replace(settings, step_cache=MagCache(threshold=0.0), quality=quality))
    inputs = conditioning.denoiser_inputs(plan, prompt_embeds, negative_prompt_embeds, condition)
    return Curve(ratios=denoising.measured(stage, plan, denoising.begin(plan, inputs, None, stage.progress.text)))


def decode(stage: Stage, latents: Mapping[str, Any]) -> torch.Tensor:
    """The samples `[batch, channels, ...]` of a LATENT to IMAGE frames of all of them."""
    samples = conditioning.latent_samples(stage.spec, latents)
    stage.progress.text("Decoding")
    geometry, num_latent_frames = stage.spec.geometry, samples.shape[2] if samples.ndim == 5 else 1
    buffer = FrameBuffer(len(samples) * ((num_latent_frames - 1) * geometry.stride_t + 1))
    spends = stage.progress.activity.spends

    def take(chunk: PendingFrames) -> None:
        with spends("running_s"):
            if stage.hosts.is_leader:
                buffer.add(chunk)
            else:
                chunk.wait()

    for sample in samples:
        report = stage.report("chunk")
        count = one_behind(stage.spec.vae.decode(stage.call, sample[None], report), take)
        report(count, count)
    return buffer.frames


def warm(stage: Stage, settings: Settings) -> int:
    """Compiles every program of a generation of this size, loading no weights; how many were not compiled yet."""
    before = stage.counts["compile"]
    _each_program(stage, settings, STAGES, lambda wanted: stage.program_cache.get(wanted, stage.progress))
    return stage.counts["compile"] - before


# --- single calls of networks, for nodes of others --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is asked: a denoiser's prediction for rows of a sample, all at one timestep.

    `sample` is `[rows, *latent]` float32, `timestep` as the denoiser takes it, and `inputs` are those of
    `model_spec.Forward`, each with one row for all or one for each; what is absent the network does without. `expert`
    is the number of the denoiser.
    """

    sample: torch.Tensor
    timestep: float
    inputs: Mapping[str, np.ndarray]
    expert: int = 0


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Rows of a prediction that share a call, as many as guidance has branches: what all have in common is one row."""

    sample: np.ndarray
    inputs: Mapping[str, np.ndarray]
    rows: int


def _parts(spec: ModelSpec, prediction: Prediction) -> Iterator[_Part]:
    sample = prediction.sample.numpy()
    number = max(len(sample), *(len(x) for x in prediction.inputs.values()))
    most = 2 if spec.recipe.guidance == "cfg" else 1

    def chosen(x: np.ndarray, part: slice) -> np.ndarray:
        return np.ascontiguousarray(x if len(x) == 1 else x[part])

    for start in range(0, number, most):
        part = slice(start, min(start + most, number))
        inputs = {name: chosen(x, part) for name, x in prediction.inputs.items()}
        yield _Part(sample=chosen(sample, part), inputs=inputs, rows=part.stop - start)


def predict(stage: Stage, prediction: Prediction) -> torch.Tensor:
    """`[rows, *latent]` float32. Rows are independent."""
    name, found = stage.spec.denoiser.experts[prediction.expert], []
    conditioning.check_asked(stage.spec, stage.config(name), prediction.sample, prediction.inputs)
    for part in _parts(stage.spec, prediction):
        executable = stage.executable(_wanted(stage, name, part))
        weights = stage.weights(name, executable)
        stage.check(f"a prediction of {name}")
        result, is_finite = executable(weights, part.sample, np.float32(prediction.timestep), part.inputs)
        found.append(as_tensor(np.asarray(result)))
        if not is_finite:
            raise stage.not_finite("values of the denoiser", stage.model.loras)
    return found[0] if len(found) == 1 else torch.cat(found)


def states(
    stage: Stage,
    encoder: int,
    ids: np.ndarray,
    mask: np.ndarray,
    seen: Sequence[torch.Tensor] = (),
    layers: int | None = None,
) -> torch.Tensor:
    """The states `[rows, length, dim]` of a text encoder, by its number, for tokens and their mask, `[rows, length]`
    each. What stands before a prompt is not cut off. Tokens below 0 are those of pictures `seen`, as `look` gives them.
    With `layers`, of an encoder that has a `depth_key`, its later ones are left out.
    """
    text = stage.spec.text_encoders[encoder]
    more = text.place_beside(ids < 0, seen) if text.place_beside and seen else ()
    if layers is not None:
        stage = _shallower(stage, text.component, {text.depth_key: layers})
    found, _ = stage.call(text.component, text.encode, np.maximum(ids, 0), mask, *more)
    return torch.from_numpy(np.array(found))


def _shallower(stage: Stage, component: str, depth: Mapping[str, int]) -> Stage:
    configs = {**stage.resolved.configs, component: {**stage.config(component), **depth}}
    return replace(stage, resolved=replace(stage.resolved, configs=configs))


def look(stage: Stage, prepared: Sequence[Any]) -> torch.Tensor:
    """What the image encoder makes of a picture that is prepared for it, see `model_spec.functions.Look`."""
    if stage.spec.pictures.look is None:
        raise ValueError(f"{stage.spec.title} has no image encoder.")
    return torch.from_numpy(np.array(stage.spec.pictures.look(stage.call, *prepared)))


def latents(stage: Stage, pixels: torch.Tensor) -> torch.Tensor:
    """A video's frames `[1, 3, frames, height, width]` in -1..1, or a picture as one frame, to samples of a LATENT."""
    encode = stage.spec.vae.encode
    if encode is None:
        raise ValueError(f"{stage.spec.title}: its VAE's encoder is not available on the TPU.")
    return encode(stage.call, pixels, stage.report("chunk"))


def _wanted(stage: Stage, name: str, part: _Part) -> Wanted:
    spec, config, component = stage.spec, stage.config(name), stage.spec.component(name)
    folder = stage.fetched(component)
    bounded = score_bound.is_bounded(spec, component, folder, stage.added_to_norms(component))
    shape = StepShape(
        latent_shape=(1, *part.sample.shape[1:]), branches=part.rows, quality=stage.model.quality, bounded=bounded,
        num_memory=0, timestep_dtype=np.dtype(np.float32),
    )  # fmt: skip
    shapes = {name: (x.shape, x.dtype) for name, x in part.inputs.items()}
    return Wanted(
        title=f"the denoiser for {_size(spec, part.sample.shape)}",
        key=(
            "predict",
            spec.name,
            config,
            stage.target,
            part.sample.shape,
            bounded,
            shape.quality,
            *sorted((n, str(s)) for n, s in shapes.items()),
        ),
        build=lambda: denoise_step.prediction_program(spec, config, stage.target, shape, part.sample.shape, shapes),
    )


def _size(spec: ModelSpec, shape: tuple[int, ...]) -> str:
    """What latents of this shape are of, in words."""
    geometry, (*frames, height, width) = spec.geometry, shape[2:]
    number = (frames[0] - 1) * geometry.stride_t + 1 if frames else 1
    return f"{width * geometry.stride_hw}x{height * geometry.stride_hw}, {number} frames"


def note_call(stage: Stage, prediction: Prediction | None = None, decoded: tuple[int, ...] = ()) -> None:
    """Lets the programs of single calls be compiled behind what runs: those of a prediction like this one, and of
    decoding samples of this shape; of a model without either those of its text encoders.
    """
    spec = stage.spec
    call = network_call.caller(lambda request: _note(stage, stage.wanted(request)).program, generation.zeros)
    if prediction is not None:
        name = spec.denoiser.experts[prediction.expert]
        # Its program depends on some of the weights, and a download belongs to the stage, which shows it.
        if stage.found.weights_here(spec.component(name)):
            for part in _parts(spec, prediction):
                _note(stage, _wanted(stage, name, part))
    elif decoded:
        for _ in spec.vae.decode(call, torch.zeros(decoded), lambda done, total: None):
            pass
    else:
        for text in spec.text_encoders:
            ids = np.zeros((1, text.prefix + text.max_length), np.int32)
            call(text.component, text.encode, ids, ids)


# --- what runs --------------------------------------------------------------------------------------------------------

_STAGES = (encode, encode_image, denoise, decode)
# What nodes of ComfyUI's own ask for.
CALLS: Mapping[str, Callable[..., Any]] = {work.__name__: work for work in (predict, states, look, latents)}
WORK: Mapping[str, Callable[..., Any]] = {
    **dict(zip(STAGES, _STAGES, strict=True)),
    **CALLS,
    "warmup": warm,
    "calibrate": calibrate,
}


def _note(stage: Stage, wanted: Wanted) -> Compilation | Executable:
    stage.progress.check_cancelled()
    return stage.program_cache.note(wanted)


def note(stage: Stage, settings: Settings, stages: Sequence[str]) -> None:
    """Lets the programs of later stages (some of `model_spec.STAGES`) be compiled behind the one that runs."""
    # Its program depends on some of the weights, and a download belongs to the stage, which shows it.
    is_here = all(stage.found.weights_here(stage.spec.component(name)) for name in stage.spec.denoiser.experts)
    wanted = [name for name in stages if is_here or name != "denoise"]
    _each_program(stage, settings, wanted, functools.partial(_note, stage))


def read_ahead(stage: Stage, stages: Sequence[str]) -> None:
    """Lets the weights of the denoiser and the decoder be in the kernel's page cache when these stages load them."""
    names = [
        *(stage.spec.denoiser.experts if "denoise" in stages else ()),
        *((stage.spec.vae.component,) if "decode" in stages else ()),
    ]
    loaded = [(one.component, one.model) for one in stage.device_cache.list()]
    files = [
        stage.found.weights_here(stage.spec.component(name))
        for name in names
        if (name, stage.found.model_id) not in loaded
    ]
    reading.read_ahead(itertools.chain.from_iterable(files), stage.progress.check_cancelled)


def _each_program(
    stage: Stage, settings: Settings, stages: Sequence[str], prepare: Callable[[Wanted], Compilation | Executable]
) -> None:
    """Passes every program of these stages to `prepare`, in the order in which they run; loads no weights."""
    plan = denoising.plan_of(stage, settings)
    call = network_call.caller(lambda request: prepare(stage.wanted(request)).program, generation.zeros)
    for name in STAGES:
        if name in stages and name != "denoise":
            generation.rehearse(plan, call, (name,))
        elif name in stages:
            usual = stage.spec.pictures.usual.items()
            inputs = {name: np.broadcast_to(np.float32(0), shape) for name, shape in usual}
            for wanted in itertools.chain.from_iterable(denoising.programs_wanted(stage, plan, inputs).values()):
                prepare(wanted)
