"""The stages of a generation, single calls of networks, and warming up.

They are functions of a `StageContext`, by name in `STAGE_FUNCTIONS`.
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

from .. import media, tokenization, versions
from ..cache.store import signature
from ..checkpoints import score_bound, tiny
from ..messages import compose, compose_list, compose_term
from ..model_spec import STAGES, MagCache, MagCacheCurve, ModelSpec, Quality, Settings, TextEncoding
from ..model_spec.control import ControlInput
from ..model_spec.core_inputs import PredictionRequest
from ..programs import denoise_step, denoising_plan, network_call
from ..programs.controls import ControlShape
from ..programs.denoise_step import StepShape
from ..programs.executables import Executable
from ..progress import SHOWN_TO_USER
from . import conditioning
from . import denoise as denoising
from .frame_buffer import FrameBuffer, PendingFrames, consume_with_lookahead, to_tensor
from .program_cache import PendingCompilation, ProgramRequest
from .stage_context import StageContext
from .stage_values import Conditioning, ImageCondition, Latent

log = logging.getLogger(__name__)

PROMPT_NAMES = (compose("stage.prompt"), compose("stage.negative_prompt"))
MAX_WORDS = 8  # unknown words listed in a warning of a tiny model


def encode(
    stage: StageContext, prompt: str, negative_prompt: str, condition: ImageCondition | None = None
) -> tuple[Conditioning, Conditioning | None]:
    """Return prompt and negative prompt as CONDITIONING, cached by content.

    There is no negative one if the model has no guidance.

    stage: the context of the stage.
    negative_prompt: ignored if the model has no guidance.
    condition: an encoded image for a text encoder that takes image embeddings.
    """
    spec = stage.spec
    prompts = (prompt, negative_prompt) if spec.recipe.guidance == "cfg" else (prompt,)
    folders = [(spec.component(text.component).folder, text.tokenizer_folder) for text in spec.text_encoders]
    identities = [tuple(stage.found.identity(folder, stage.progress) for folder in pair) for pair in folders]
    sources = (*versions.list_program_environment(), versions.source_digest())
    looking = [text for text in spec.text_encoders if text.tokenize_beside]
    width = int(stage.config(looking[0].component)["hidden_size"]) if looking else 0
    embeddings = conditioning.get_image_embeddings(spec, condition if looking else None, width)
    embedding_digests = [(x.shape, hashlib.sha256(x.numpy().tobytes()).hexdigest()) for x in embeddings]
    key = signature(spec.name, identities, stage.target.precision, prompts, sources, *embedding_digests)
    encoded = stage.prompt_cache.get(
        key, spec.family, lambda: _encode(stage, prompts, embeddings), stage.hosts.broadcast
    )
    if warnings := [
        sentence
        for named in zip(PROMPT_NAMES, prompts, encoded, strict=False)
        for sentence in _prompt_warnings(stage, *named)
    ]:
        stage.progress.activity.remark = compose_list(warnings, "space")
        log.warning("%s", " ".join(warnings), extra={SHOWN_TO_USER: True})
    return encoded


def _prompt_warnings(stage: StageContext, name: str, prompt: str, encoded: Conditioning | None) -> Iterator[str]:
    """Yield sentences about parts of a prompt that do not reach the model as they may be meant.

    name: one of `PROMPTS`.
    """
    title = stage.spec.title
    if literals := ", ".join(tokenization.find_literal_syntax(prompt)):
        yield compose("stage.syntax_taken_literally", title=title, literals=literals, name=name)
    if name == PROMPT_NAMES[0] and (example := tiny.find_trained_texts(stage.spec, stage.found.model_id).get("prompt")):
        yield from _warn_unknown_words(stage, prompt, example)
    for text in stage.spec.text_encoders if encoded else ():
        assert encoded
        # Only a prompt that fills all tokens may have been longer.
        if encoded[0][1].get(f"{text.name}_length", text.max_length) < text.max_length:
            continue
        tokenizer = tokenization.load_tokenizer(stage.found.folder(text.tokenizer_folder, stage.progress))
        number, words = tokenization.count_truncated(text, tokenizer, prompt)
        if number:
            encoder = compose_term("component", text.component)
            start = compose("stage.cut_off_from", words=tokenization.quote_truncated(words)) if words else ""
            more = "+" if len(prompt) > tokenization.MAX_COUNTED else ""
            total, truncated = f"{text.max_length + number}{more}", f"{number}{more}"
            yield compose(
                "stage.prompt_cut_off", title=title, name=name, total=total, encoder=encoder,
                max_length=text.max_length, truncated=truncated, start=start,
            )  # fmt: skip


def _warn_unknown_words(stage: StageContext, prompt: str, example: str) -> Iterator[str]:
    """Yield sentences about words that a trained tiny model never saw and cannot draw.

    example: a prompt that it knows.
    """
    if not prompt.strip():
        yield compose("stage.prompt_empty", example=example)
        return
    tokenizer = tokenization.load_tokenizer(
        stage.found.folder(stage.spec.text_encoders[0].tokenizer_folder, stage.progress)
    )
    words = list(itertools.islice(tokenization.find_unknown_words(tokenizer, prompt), MAX_WORDS + 1))
    if words:
        listed = ", ".join(word[: tokenization.MAX_QUOTE_LENGTH] for word in words[:MAX_WORDS])
        more = compose("stage.and_others") if len(words) > MAX_WORDS else ""
        yield compose("stage.words_unknown", listed=listed, more=more, example=example)


def _encode(
    stage: StageContext, prompts: Sequence[str], seen: Sequence[torch.Tensor]
) -> tuple[Conditioning, Conditioning | None]:
    """Return CONDITIONING of one or two prompts.

    seen: image embeddings `[1, rows, columns, width]` each.
    """
    encoded = [_encode_text(stage, text, prompts, seen) for text in stage.spec.text_encoders]
    rows = [conditioning.build_conditioning(stage.spec, encoded, row) for row in range(len(prompts))]
    stage.counts["encode"] += 1
    return rows[0], rows[1] if len(rows) > 1 else None


def _encode_text(
    stage: StageContext, text: TextEncoding, prompts: Sequence[str], seen: Sequence[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Return states `[rows, max_length, dim]` and lengths `[rows]` of one text encoder.

    seen: image embeddings `[1, rows, columns, width]` each.
    """
    tokenizer = tokenization.load_tokenizer(stage.found.folder(text.tokenizer_folder, stage.progress))
    tokenize_with_images = text.tokenize_beside if seen else None
    ids, mask, *more = (
        tokenize_with_images(tokenizer, prompts, seen) if tokenize_with_images else text.tokenize(tokenizer, prompts)
    )
    stage.progress.text(compose("stage.encoding_prompt"))
    states, _ = stage.call(text.component, text.encode, ids, mask, *more)
    return states, mask.sum(axis=1).astype(np.int32)


def encode_image(stage: StageContext, image: torch.Tensor, settings: Settings) -> ImageCondition:
    """Return an IMAGE `[N, height, width, 3]` in 0..1, CPU float32, as the denoiser's condition.

    stage: the context of the stage.
    image: the first frame, or the first and the last; or reference images.
    settings: with the size of the result.
    """
    images = media.to_rgb(image)
    conditioning.check_image_count(stage.spec, settings, len(images))
    assert stage.spec.pictures.encode is not None
    stage.progress.text(compose("stage.encoding_image"))
    tensors = stage.spec.pictures.encode(stage.call, images, settings, stage.config(stage.spec.vae.component))
    return conditioning.build_condition(stage.spec, settings, tensors)


def denoise(
    stage: StageContext,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    condition: ImageCondition | None = None,
    latents: Mapping[str, Any] | None = None,
) -> Latent:
    """Return the LATENT of a generation.

    stage, settings: the context of the stage, and the generation's settings.
    prompt_embeds, negative_prompt_embeds: CONDITIONING; the negative one may be None without guidance.
    condition: an encoded image or None.
    latents: a LATENT to start from; None for noise.
    """
    plan = denoising.make_plan(stage, settings)
    inputs = conditioning.build_denoiser_inputs(plan, prompt_embeds, negative_prompt_embeds, condition)
    standing = denoising.initial_state(plan, inputs, latents, stage.progress.text)
    return denoising.to_latent(plan, *denoising.run_steps(stage, plan, standing))


def calibrate(
    stage: StageContext,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    condition: ImageCondition | None = None,
) -> MagCacheCurve:
    """Return MagCache's curve of a model, measured in one generation of full steps without sparse attention.

    stage, settings: as for `denoise`.
    prompt_embeds, negative_prompt_embeds, condition: as for `denoise`.
    """
    quality = Quality(settings.quality).dense
    plan = denoising.make_plan(stage, replace(settings, step_cache=MagCache(threshold=0.0), quality=quality))
    inputs = conditioning.build_denoiser_inputs(plan, prompt_embeds, negative_prompt_embeds, condition)
    return MagCacheCurve(
        ratios=denoising.measure_magcache(stage, plan, denoising.initial_state(plan, inputs, None, stage.progress.text))
    )


def decode(stage: StageContext, latents: Mapping[str, Any]) -> torch.Tensor:
    """Return the samples `[batch, channels, ...]` of a LATENT as IMAGE frames `[n, height, width, 3]`."""
    samples = conditioning.get_latent_samples(stage.spec, latents)
    stage.progress.text(compose("stage.decoding"))
    geometry, num_latent_frames = stage.spec.geometry, samples.shape[2] if samples.ndim == 5 else 1
    buffer = FrameBuffer(len(samples) * ((num_latent_frames - 1) * geometry.stride_t + 1))
    spends = stage.progress.activity.timed

    def take(chunk: PendingFrames) -> None:
        with spends("running_s"):
            if stage.hosts.is_leader:
                buffer.add(chunk)
            else:
                chunk.wait()

    for sample in samples:
        report = stage.report("chunk")
        count = consume_with_lookahead(stage.spec.vae.decode(stage.call, sample[None], report), take)
        report(count, count)
    return buffer.frames


def warm_up(stage: StageContext, settings: Settings) -> int:
    """Compile every program of a generation with these settings without loading weights; return how many were new."""
    before = stage.counts["compile"]
    _each_program(stage, settings, STAGES, lambda wanted: stage.program_cache.get(wanted, stage.progress))
    return stage.counts["compile"] - before


# --- single calls of networks, for nodes of ComfyUI -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _BranchBatch:
    """Rows of a prediction that share a call, as many as guidance has branches. Values common to all are one row."""

    sample: np.ndarray  # [1 or rows, *latent] float32
    inputs: Mapping[str, np.ndarray]  # by name, 1 or `rows` rows each
    rows: int  # 1 or 2
    controls: tuple[ControlInput, ...]  # their hints have 1 or `rows` rows


def _split_branches(spec: ModelSpec, prediction: PredictionRequest) -> Iterator[_BranchBatch]:
    """Yield the rows of a prediction in batches."""
    sample = prediction.sample.numpy()
    hints = [control.hint for control in prediction.controls]
    number = max(len(sample), *(len(x) for x in (*prediction.inputs.values(), *hints)))
    most = 2 if spec.recipe.guidance == "cfg" else 1

    def select(x: np.ndarray, part: slice) -> np.ndarray:
        return np.ascontiguousarray(x if len(x) == 1 else x[part])

    for start in range(0, number, most):
        rows = slice(start, min(start + most, number))
        inputs = {name: select(x, rows) for name, x in prediction.inputs.items()}
        controls = tuple(replace(control, hint=select(control.hint, rows)) for control in prediction.controls)
        yield _BranchBatch(sample=select(sample, rows), inputs=inputs, rows=rows.stop - start, controls=controls)


def predict(stage: StageContext, prediction: PredictionRequest) -> torch.Tensor:
    """Return the prediction `[rows, *latent]` float32. Rows are independent."""
    name, results = stage.spec.denoiser.experts[prediction.expert], []
    conditioning.check_call_inputs(stage.spec, stage.config(name), prediction.sample, prediction.inputs)
    conditioning.check_hints(stage.spec, stage.controls, prediction)
    for part in _split_branches(stage.spec, prediction):
        wanted = _prediction_request(stage, name, part)
        executable = stage.executable(wanted)
        weights = stage.weights(name, executable)
        stage.check(f"a prediction of {name}")
        args = (part.sample, np.float32(prediction.timestep), part.inputs)
        if part.controls:
            hints = tuple(control.hint for control in part.controls)
            args = (*args, hints, tuple(np.float32(control.strength) for control in part.controls))

        def request(form: StageContext, part: _BranchBatch = part, wanted: ProgramRequest = wanted) -> ProgramRequest:
            return wanted if form is stage else _prediction_request(form, name, part)

        first = stage.first_step(executable, args, request)
        result, is_finite = executable(weights, *args)
        if first is not None and stage.overlap is not None:
            stage.overlap.compare(first, weights, (result, is_finite))
        results.append(to_tensor(np.asarray(result)))
        if not is_finite:
            raise stage.not_finite_error(compose("stage.values_of_denoiser"), stage.model.loras)
    return results[0] if len(results) == 1 else torch.cat(results)


def encode_tokens(
    stage: StageContext,
    encoder: int,
    ids: np.ndarray,
    mask: np.ndarray,
    seen: Sequence[torch.Tensor] = (),
    layers: int | None = None,
) -> torch.Tensor:
    """Return a text encoder's states `[rows, length, dim]`; the prefix of a prompt is kept.

    stage: the context of the stage.
    encoder: index of the text encoder.
    ids, mask: `[rows, length]` int32; ids below 0 stand for image embeddings.
    seen: image embeddings as returned by `encode_vision`, in the order of these ids.
    layers: how many of the first layers run; None for all. Needs an encoder with a `depth_key`.
    """
    text = stage.spec.text_encoders[encoder]
    more = text.place_beside(ids < 0, seen) if text.place_beside and seen else ()
    if layers is not None:
        stage = _with_depth(stage, text.component, {text.depth_key: layers})
    states_, _ = stage.call(text.component, text.encode, np.maximum(ids, 0), mask, *more)
    return torch.from_numpy(np.array(states_))


def _with_depth(stage: StageContext, component: str, depth: Mapping[str, int]) -> StageContext:
    """Return the stage with values of a component's config replaced."""
    configs = {**stage.resolved.configs, component: {**stage.config(component), **depth}}
    return replace(stage, resolved=replace(stage.resolved, configs=configs))


def encode_vision(stage: StageContext, prepared: Sequence[Any]) -> torch.Tensor:
    """Return the image encoder's output `[rows, tokens, dim]` for a preprocessed image.

    prepared: arguments of `model_spec.protocols.EncodeVision` after the call.
    """
    if stage.spec.pictures.look is None:
        raise ValueError(compose("stage.no_image_encoder", title=stage.spec.title))
    return torch.from_numpy(np.array(stage.spec.pictures.look(stage.call, *prepared)))


def encode_pixels(stage: StageContext, pixels: torch.Tensor) -> torch.Tensor:
    """Return samples of a LATENT `[1, channels, ...]` for frames `[1, 3, frames, height, width]` in -1..1.

    An image is one frame.
    """
    encode = stage.spec.vae.encode
    if encode is None:
        raise ValueError(compose("stage.no_vae_encoder", title=stage.spec.title))
    return encode(stage.call, pixels, stage.report("chunk"))


def _prediction_request(stage: StageContext, name: str, part: _BranchBatch) -> ProgramRequest:
    """Return the program request of a batch of a prediction by the denoiser `name`."""
    spec, config, component = stage.spec, stage.config(name), stage.spec.component(name)
    folder = stage.fetch_weights(component)
    bounded = score_bound.is_bounded(spec, component, folder, stage.norm_deltas(component))
    controls = tuple(
        ControlShape(spec=file.spec, config=file.config, hint_shape=control.hint.shape)
        for file, control in zip(stage.controls, part.controls, strict=True)
    )
    shape = StepShape(
        latent_shape=(1, *part.sample.shape[1:]), branches=part.rows, quality=stage.model.quality, bounded=bounded,
        num_memory=0, timestep_dtype=np.dtype(np.float32), controls=controls,
    )  # fmt: skip
    shapes = {name: (x.shape, x.dtype) for name, x in part.inputs.items()}
    return ProgramRequest(
        title=compose("stage.the_denoiser", size=describe_size(spec, part.sample.shape)),
        key=(
            "predict",
            spec.name,
            config,
            stage.target,
            part.sample.shape,
            bounded,
            shape.quality,
            *sorted((n, str(s)) for n, s in shapes.items()),
            *(control.key for control in controls),
        ),
        build=lambda: denoise_step.build_prediction_program(
            spec, config, stage.target, shape, part.sample.shape, shapes
        ),
        model=spec.name,
    )


def describe_size(spec: ModelSpec, shape: tuple[int, ...]) -> str:
    """Return the size of the result of latents `[rows, channels, (frames,) height, width]`, as text."""
    geometry, (*frames, height, width) = spec.geometry, shape[2:]
    number = (frames[0] - 1) * geometry.stride_t + 1 if frames else 1
    return f"{width * geometry.stride_hw}x{height * geometry.stride_hw}, {number} frames"


def precompile_call(
    stage: StageContext,
    prediction: PredictionRequest | None = None,
    decoded: tuple[int, ...] = (),
    encoded: tuple[int, ...] = (),
) -> None:
    """Compile the programs of single calls in the background.

    stage: the context of the stage.
    prediction: a prediction like the one to come.
    decoded: shape of samples to be decoded.
    encoded: shape of pixels to be encoded, see `encode_pixels`.
    With none of them, the programs of the text encoders.
    """
    spec = stage.spec
    call = network_call.make_call(
        lambda request: _note(stage, stage.make_request(request)).program, denoising_plan.zero_results
    )
    if prediction is not None:
        name = spec.denoiser.experts[prediction.expert]
        # The program depends on some of the weights, and downloads belong to the stage, which reports them.
        if stage.found.local_weight_files(spec.component(name)):
            for part in _split_branches(spec, prediction):
                _note(stage, _prediction_request(stage, name, part))
    elif decoded:
        for _ in spec.vae.decode(call, torch.zeros(decoded), lambda done, total: None):
            pass
    elif encoded:
        if spec.vae.encode is not None:
            spec.vae.encode(call, torch.zeros(()).expand(encoded), lambda done, total: None)
    else:
        for text in spec.text_encoders:
            ids = np.zeros((1, text.prefix + text.max_length), np.int32)
            call(text.component, text.encode, ids, ids)


# --- the functions by name --------------------------------------------------------------------------------------------

_STAGES = (encode, encode_image, denoise, decode)
# Calls of ComfyUI's own nodes.
CALL_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "predict": predict,
    "states": encode_tokens,
    "look": encode_vision,
    "latents": encode_pixels,
}
STAGE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **dict(zip(STAGES, _STAGES, strict=True)),
    **CALL_FUNCTIONS,
    "warmup": warm_up,
    "calibrate": calibrate,
}


def _note(stage: StageContext, wanted: ProgramRequest) -> PendingCompilation | Executable:
    stage.progress.check_cancelled()
    return stage.program_cache.note(wanted)


def precompile_stages(stage: StageContext, settings: Settings, stages: Sequence[str]) -> None:
    """Compile the programs of later stages (names of `model_spec.STAGES`) in the background.

    stage, settings: the context of a stage, and the generation's settings.
    """
    # The program depends on some of the weights, and downloads belong to the stage, which reports them.
    is_here = all(stage.found.local_weight_files(stage.spec.component(name)) for name in stage.spec.denoiser.experts)
    names = [name for name in stages if is_here or name != "denoise"]
    _each_program(stage, settings, names, functools.partial(_note, stage))


def _each_program(
    stage: StageContext,
    settings: Settings,
    stages: Sequence[str],
    prepare: Callable[[ProgramRequest], PendingCompilation | Executable],
) -> None:
    """Pass every program of these stages to `prepare`, in the order in which they run. Loads no weights."""
    plan = denoising.make_plan(stage, settings)
    call = network_call.make_call(
        lambda request: prepare(stage.make_request(request)).program, denoising_plan.zero_results
    )
    for name in STAGES:
        if name in stages and name != "denoise":
            denoising_plan.dry_run(plan, call, (name,))
        elif name in stages:
            usual = stage.spec.pictures.planned_shapes.items()
            inputs = {name: np.broadcast_to(np.float32(0), shape) for name, shape in usual}
            for wanted in itertools.chain.from_iterable(denoising.denoiser_requests(stage, plan, inputs).values()):
                prepare(wanted)
