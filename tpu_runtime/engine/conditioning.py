"""Checks and conversions of the values between nodes and the denoiser: CONDITIONING, image conditions and LATENT."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..checkpoints.controls import ControlFile
from ..messages import compose, compose_term
from ..model_spec import SIZE_INPUTS, Json, ModelSpec, Settings
from ..model_spec.core_inputs import PredictionRequest
from ..models import SPECS
from ..programs import finite_check
from ..programs.denoising_plan import DenoisingPlan
from .stage_values import Conditioning, ImageCondition, unpack_conditioning

# Names of the arrays of image embeddings that a text encoder takes, with the image's index.
IMAGE_EMBEDDING_NAME = r"seen_\d+"


def build_conditioning(spec: ModelSpec, encoded: Sequence[tuple[np.ndarray, np.ndarray]], row: int) -> Conditioning:
    """Return one prompt's CONDITIONING: the first encoder's states, with all lengths and the other states in its dict.

    spec: the model that encoded it.
    encoded: for each text encoder its states `[rows, max_length, dim]` float32 and lengths `[rows]`.
    row: the prompt's row in these arrays.
    """
    info: dict[str, Any] = {"tpu_family": spec.family}
    for text, (states, lengths) in zip(spec.text_encoders, encoded, strict=True):
        info[text.name] = torch.from_numpy(np.array(states[row : row + 1]))
        info[f"{text.name}_length"] = int(lengths[row])
    main = spec.text_encoders[0].name
    return [[info.pop(main), {**info, "length": info[f"{main}_length"]}]]


def check_image_count(spec: ModelSpec, settings: Settings, number: int) -> None:
    """Raise `ValueError` if the model does not support `number` images of the sizes in `settings`.

    spec: the model's description.
    number: 1 for a first frame, 2 for a first and a last frame.
    """
    if spec.pictures.encode is None:
        raise ValueError(compose("condition.image_unsupported", title=spec.title))
    if spec.pictures.are_references:
        return
    if number not in spec.pictures.numbers:
        siblings = (
            other
            for other in SPECS
            if other.family == spec.family and other.pictures.encode and number in other.pictures.numbers
        )
        other = next((compose("condition.or_use_model", hub_id=sibling.published.hub_id) for sibling in siblings), "")
        end = compose("condition.the_last_image")
        if number > 1:
            raise ValueError(compose("condition.last_image_unused", title=spec.title, end=end, other=other))
        raise ValueError(compose("condition.last_image_missing", title=spec.title, end=end, other=other))
    least = spec.geometry.stride_t + 1
    if number > 1 and settings.num_frames < least:
        raise ValueError(
            compose(
                "condition.too_few_frames_for_last_image", title=spec.title, num_frames=settings.num_frames, least=least
            )
        )


def build_condition(
    spec: ModelSpec, settings: Settings, tensors: Mapping[str, torch.Tensor | np.ndarray]
) -> ImageCondition:
    """Return an encoded image with the size that it was encoded for; references have no size.

    spec, settings: the model, and the generation's settings.
    tensors: the arrays of `condition_shapes` by name, of any shape `[...]`; each is copied.
    """
    size = {} if spec.pictures.are_references else {name: getattr(settings, name) for name in SIZE_INPUTS}
    owned = {name: _copy_to_torch(x) for name, x in tensors.items()}
    return ImageCondition(tpu_family=spec.family, **size, tensors=owned)


def _copy_to_torch(x: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Return a tensor with memory of its own. A program's result is shared and read-only.

    x: a tensor or array of any shape `[...]`.
    """
    return x.clone() if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x))


def build_denoiser_inputs(
    plan: DenoisingPlan, prompt: Conditioning, negative: Conditioning | None, condition: ImageCondition | None
) -> dict[str, np.ndarray]:
    """Return the text inputs of all guidance branches, the own inputs and the condition's arrays, by name.

    plan: of the generation.
    prompt, negative: CONDITIONING; `negative` may be None if there is one branch.
    condition: an encoded image or None.
    Raises `ValueError` if a value does not fit the model.
    """
    named = {"prompt_embeds": prompt, "negative_prompt_embeds": negative}
    rows = [_text_row(plan, name, named[name]) for name in list(named)[: plan.largest_group.branches]]
    arrays = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    own = {name: np.array([value], np.float32) for name, value in plan.spec.own_values(plan.settings).items()}
    return {**arrays, **own, **_condition_arrays(plan, condition)}


def _text_row(plan: DenoisingPlan, name: str, given: Conditioning | None) -> dict[str, np.ndarray]:
    """Return one branch's states `[1, max_length, dim]` and lengths `[1]` of every text encoder, by name."""
    spec, config = plan.spec, plan.config
    if given is None:
        raise ValueError(compose(
            "condition.negative_not_connected", title=spec.title, name=compose_term("input", name),
            guidance_scale=plan.largest_group.guidance_scale,
        ))  # fmt: skip
    main, info = unpack_conditioning(spec, name, given)
    row: dict[str, np.ndarray] = {}
    for index, text in enumerate(spec.text_encoders):
        tensor = main if index == 0 else info.get(text.name)
        shape = (1, text.max_length, int(config[text.width_key]))
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            actual_shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None
            raise ValueError(compose(
                "condition.embedding_shape_wrong", title=spec.title, name=compose_term("input", name),
                encoder=text.name, actual_shape=actual_shape, shape=shape, family=spec.family,
            ))  # fmt: skip
        finite_check.check_finite(spec.title, name, tensor)
        row[text.name] = tensor.to(torch.float32).cpu().numpy()
        length = info.get(f"{text.name}_length", text.max_length)
        if not isinstance(length, int) or not 0 <= length <= text.max_length:
            raise ValueError(compose(
                "condition.token_count_wrong", title=spec.title, name=compose_term("input", name), encoder=text.name,
                length=length, max_length=text.max_length, family=spec.family,
            ))  # fmt: skip
        row[f"{text.name}_length"] = np.array([length], np.int32)
    return row


def _condition_arrays(plan: DenoisingPlan, given: ImageCondition | None) -> dict[str, np.ndarray]:
    """Return the denoiser's arrays of an encoded image by name.

    They are zeros if `given` is None and the model runs without an image.
    """
    spec = plan.spec
    shapes = spec.condition_shapes(plan.config, plan.latent_shape)
    if given is not None and spec.pictures.are_references:
        references = {name: x for name, x in given["tensors"].items() if not re.fullmatch(IMAGE_EMBEDDING_NAME, name)}
        shapes = {name: _reference_shape(plan, name, x) for name, x in references.items()}
    if not shapes:
        return {}
    if given is None and spec.needs_condition:
        raise ValueError(compose("condition.not_connected", title=spec.title, family=spec.family))
    if given is None:
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    if given["tpu_family"] != spec.family:
        raise ValueError(compose(
            "condition.of_another_image_encoder", title=spec.title, tpu_family=given["tpu_family"], family=spec.family,
        ))  # fmt: skip
    is_of_size = all(given.get(name) == getattr(plan.settings, name) for name in SIZE_INPUTS)
    for name, shape in shapes.items():
        tensor = given["tensors"].get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            size = f"{given.get('width')}x{given.get('height')}, {given.get('num_frames')} frames"
            actual_shape = None if tensor is None else tuple(tensor.shape)
            if not is_of_size:
                raise ValueError(compose("condition.of_another_size", title=spec.title, size=size))
            raise ValueError(compose(
                "condition.shape_of_another_model", title=spec.title, name=name, actual_shape=actual_shape, shape=shape,
                family=spec.family,
            ))  # fmt: skip
        finite_check.check_finite(spec.title, "condition", tensor)
    return {name: given["tensors"][name].to(torch.float32).cpu().numpy() for name in shapes}


def get_image_embeddings(spec: ModelSpec, given: ImageCondition | None, width: int) -> list[torch.Tensor]:
    """Return the image embeddings for the text encoder in their order, `[1, rows, columns, width]` float32 each.

    spec: the model's description.
    given: an encoded image, or None for no embeddings.
    width: of the text encoder's states.
    Raises `ValueError` for the condition of another model.
    """
    if given is None:
        return []
    embeddings = {name: x for name, x in given["tensors"].items() if re.fullmatch(IMAGE_EMBEDDING_NAME, name)}
    if given["tpu_family"] != spec.family or not embeddings:
        raise ValueError(compose(
            "condition.of_another_model", title=spec.title, tpu_family=given["tpu_family"], family=spec.family,
        ))  # fmt: skip
    for name, x in embeddings.items():
        if x.ndim != 4 or len(x) != 1 or 0 in x.shape or x.shape[3] != width:
            raise ValueError(compose(
                "condition.embeddings_shape_wrong", title=spec.title, name=name, shape=tuple(x.shape), width=width,
                family=spec.family,
            ))  # fmt: skip
        finite_check.check_finite(spec.title, "condition", x)
    return [
        embeddings[name].to(torch.float32).cpu().contiguous()
        for name in sorted(embeddings, key=lambda name: int(name[5:]))
    ]


def _reference_shape(plan: DenoisingPlan, name: str, reference: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a reference image's latents, `[1, channels, height, width]`.

    A reference image has a size of its own.
    """
    spec, shape, latent = plan.spec, tuple(reference.shape), plan.latent_shape
    if not re.fullmatch(r"reference_\d+", name) or len(shape) != len(latent) or shape[:2] != latent[:2] or 0 in shape:
        raise ValueError(compose(
            "condition.references_shape_wrong", title=spec.title, name=name, shape=shape, batch=latent[0],
            channels=latent[1], family=spec.family,
        ))  # fmt: skip
    return shape


def get_latent_samples(spec: ModelSpec, latents: Mapping[str, Any]) -> torch.Tensor:
    """Return the samples of a LATENT, `[batch, channels, (frames,) height, width]` float32 on the CPU.

    Raises `ValueError` for the LATENT of another model.
    """
    samples = latents["samples"]
    stride, channels = spec.geometry.stride_hw, spec.geometry.channels
    names = ["batch", str(channels), *(["frames"] if spec.geometry.stride_t else [])]
    if samples.ndim != len(names) + 2 or samples.shape[1] != channels:
        raise ValueError(compose(
            "condition.latent_shape_wrong", title=spec.title, shape=tuple(samples.shape), names=", ".join(names),
            stride=stride,
        ))  # fmt: skip
    if not samples.numel():
        raise ValueError(compose("condition.latent_empty", title=spec.title, shape=tuple(samples.shape)))
    finite_check.check_finite(spec.title, "the LATENT", samples)
    return samples.to(torch.float32).cpu()


# --- single calls of the denoiser by ComfyUI's samplers ---------------------------------------------------------------

# Inputs with one number per row, or one number shared by all rows.
_NUMBERS = ("guidance", "next_timestep", "comfyui_positions")
_PICTURES = compose("condition.encode_with_own_vae")
_SEEN = compose("condition.encode_with_own_image_encoder")


def check_call_inputs(spec: ModelSpec, config: Json, sample: torch.Tensor, inputs: Mapping[str, np.ndarray]) -> None:
    """Raise `ValueError` if a denoiser does not accept a sample or an input.

    spec: the model's description.
    config: the denoiser's own.
    sample: `[rows, channels, (frames,) height, width]`.
    inputs: arrays of 1 or `rows` rows, by name (see `model_spec.Forward`).
    """
    geometry, shape = spec.geometry, tuple(sample.shape)
    frames = ("frames",) if geometry.stride_t else ()
    names = ("rows", geometry.channels, *frames, "height", "width")
    advice = compose("condition.make_with_own_vae")
    _check_shape(spec, "the sample", shape, names, advice)
    patch = geometry.patch_thw[-len(shape[2:]) :]
    if any(size % part for size, part in zip(shape[2:], patch, strict=True)):
        raise ValueError(compose("condition.sample_not_in_patches", title=spec.title, shape=shape, patch=patch))
    rows = max(len(x) for x in (sample, *inputs.values()))
    for text in spec.text_encoders:
        width = int(config[text.width_key])
        advice = compose("condition.encode_with_own_text_encoder")
        states = inputs.get(text.name)
        if states is None:
            raise ValueError(compose(
                "condition.states_missing", title=spec.title, name=text.name, width=width, advice=advice,
            ))  # fmt: skip
        _check_shape(spec, text.name, states.shape, ("rows", "tokens", width), advice)
    condition_shapes = spec.condition_shapes(config, (1, *shape[1:]))
    for name, x in inputs.items():
        if len(x) not in (1, rows):
            raise ValueError(compose("condition.rows_wrong", title=spec.title, name=name, count=len(x), rows=rows))
        if name in condition_shapes:
            sizes = (
                ("rows", "tokens", condition_shapes[name][2])
                if name == "image_embeds"
                else ("rows", *condition_shapes[name][1:])
            )
            _check_shape(spec, name, x.shape, sizes, _SEEN if name == "image_embeds" else _PICTURES)
        elif re.fullmatch(r"reference_\d+", name):
            frame_size = (1,) if frames else ()
            _check_shape(spec, name, x.shape, ("rows", geometry.channels, *frame_size, "height", "width"), _PICTURES)
        elif name in _NUMBERS:
            _check_shape(spec, name, x.shape, ("rows",), compose("condition.give_a_number_for_each_row"))


def check_hints(spec: ModelSpec, files: Sequence[ControlFile], prediction: PredictionRequest) -> None:
    """Raise `ValueError` if the hints of control networks do not fit a request.

    spec: the model's description. files: the networks, in the order of the request's `controls`.
    """
    if len(files) != len(prediction.controls):
        raise ValueError(compose(
            "control.count_differs", title=spec.title, files=len(files), hints=len(prediction.controls),
        ))  # fmt: skip
    size = tuple(prediction.sample.shape[2:])
    rows = max(len(x) for x in (prediction.sample, *prediction.inputs.values()))
    advice = compose("control.advice_about_hint")
    for file, control in zip(files, prediction.controls, strict=True):
        sizes = ("rows", file.spec.hint_channels(file.config), *size)
        _check_shape(spec, file.path.name, control.hint.shape, sizes, advice)
        if len(control.hint) not in (1, rows):
            raise ValueError(compose(
                "condition.rows_wrong", title=spec.title, name=file.path.name, count=len(control.hint), rows=rows,
            ))  # fmt: skip


def _check_shape(spec: ModelSpec, name: str, shape: tuple[int, ...], sizes: tuple[int | str, ...], advice: str) -> None:
    """Raise `ValueError` if an array does not have these sizes. A size that is a word stands for any size but 0."""
    fits = len(shape) == len(sizes) and all(
        size > 0 if isinstance(needed, str) else size == needed for size, needed in zip(shape, sizes, strict=True)
    )
    if not fits:
        shown = ", ".join(map(str, sizes))
        raise ValueError(compose(
            "condition.input_shape_wrong", title=spec.title, name=name, shape=tuple(shape), shown=shown, advice=advice,
        ))  # fmt: skip
