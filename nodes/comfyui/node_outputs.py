"""What is known of the outputs that ComfyUI's nodes have returned: numbers, texts and sizes of tensors."""

from collections.abc import Sequence
from typing import Any

from ..graphs.known import UNKNOWN, Conditioning, ImageSize, Known, LatentSize, Outputs

# Entries of a conditioning that change no shape, or are known in `Conditioning`.
_OF_CONDITIONINGS = frozenset(
    "pooled_output attention_mask guidance reference_latents reference_latents_method concat_latent_image concat_mask "
    "clip_vision_output conditioning_byt5small".split()
)

_COMPARED = (bool, int, float, str, ImageSize)


def read_output(values: Any) -> Known:
    """Return the known part of an output, a list with one value for each run of its node."""
    if not isinstance(values, list | tuple) or len(values) != 1:
        return UNKNOWN
    (value,) = values
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return _latent(value.get("samples"), value.get("downscale_ratio_spacial"))
    if isinstance(value, list):
        return _conditioning(value[0]) if len(value) == 1 else UNKNOWN
    shape = _shape(value)
    return ImageSize(batch=shape[0], height=shape[1], width=shape[2]) if len(shape) in (3, 4) else UNKNOWN


def _shape(value: Any) -> Sequence[int]:
    """Return a tensor's shape; () for any other value, and for tensors of several sizes in one.

    The attribute is looked up on the type, because other outputs are created when an attribute of theirs is read.
    """
    shape = getattr(value, "shape", ()) if hasattr(type(value), "is_nested") and not value.is_nested else ()
    return tuple(shape) if all(isinstance(size, int) for size in shape) else ()


def _latent(samples: Any, ratio: Any) -> Known:
    """Return the size of latents `[batch, channels, (frames,) height, width]`.

    ratio: pixels per latent, for models that have others and scale them; None for latents that no model scales.
    """
    shape = _shape(samples)
    if len(shape) not in (4, 5):
        return UNKNOWN
    *_, height, width = shape
    frames = shape[2] if len(shape) == 5 else 1
    stride = int(ratio) if isinstance(ratio, int | float) and ratio >= 1 else 1
    return LatentSize(
        height=height * stride, width=width * stride, num_frames=4 * (frames - 1) + 1, batch=shape[0],
        stride=stride, is_rescaled=stride > 1,
    )  # fmt: skip


def _conditioning(entry: Any) -> Known:
    """Return a CONDITIONING of one prompt, `[states, further entries]`; UNKNOWN with an entry that is not known."""
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[1], dict):
        return UNKNOWN
    more = {name: value for name, value in entry[1].items() if value is not None}
    latents = more.get("reference_latents", ())
    references = tuple(size for latent in latents if isinstance(size := _latent(latent, None), LatentSize))
    if more.keys() - _OF_CONDITIONINGS or len(references) < len(latents):
        return UNKNOWN
    pictures = {"concat_latent_image": "start_image", "clip_vision_output": "clip_vision_output"}
    return Conditioning(pictures=frozenset(pictures[name] for name in more.keys() & pictures), references=references)


def differ(predicted: Outputs, actual: Outputs) -> bool:
    """Return whether numbers, texts or sizes of images are others than predicted."""
    pairs = zip(predicted, actual, strict=False)
    return any(isinstance(one, _COMPARED) and other is not UNKNOWN and one != other for one, other in pairs)
