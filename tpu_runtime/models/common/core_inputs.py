"""Conversion of the arguments that ComfyUI ("core") passes to its networks: checks and arrays of all families."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...messages import compose
from ...model_spec import ModelSpec
from ...model_spec.core_inputs import Arguments

if TYPE_CHECKING:
    import numpy as np
    import torch

# Entry of `transformer_options`: numbers of valid tokens of padded texts, by core's names of the texts.
LENGTHS = "tpu_lengths"


@dataclass(frozen=True, kw_only=True)
class CoreNetwork:
    """A denoiser that core calls."""

    spec: ModelSpec
    config: Mapping[str, Any]  # of the checkpoint


def take(given: Arguments, *names: str) -> tuple[Any, ...]:
    """Remove the arguments `names` and return their values, None for missing ones."""
    return tuple(given.pop(name, None) for name in names)


def refuse_rest(network: CoreNetwork, given: Arguments, harmless: Collection[str] = ()) -> None:
    """Raise ValueError for arguments that are left. harmless: names that core's network ignores too."""
    for name, value in given.items():
        if value is not None and name not in {*harmless, "options"}:
            raise ValueError(compose("comfyui.conditioning_entry_unsupported", title=network.spec.title, name=name))


def pad_to_patches(x: "torch.Tensor", patch: tuple[int, ...]) -> "torch.Tensor":
    """Pad `[rows, channels, ...]` to whole patches as core does, without a copy if nothing is to be padded."""
    import torch

    missing = [-size % part for size, part in zip(x.shape[2:], patch, strict=True)]
    pads = [width for count in reversed(missing) for width in (0, count)]
    return torch.nn.functional.pad(x, pads, mode="circular") if any(missing) else x


def to_array(x: "torch.Tensor") -> "np.ndarray":
    """Return a float32 array `[...]`."""
    return x.detach().cpu().float().contiguous().numpy()


def whole_text(network: CoreNetwork, context: "torch.Tensor") -> "np.ndarray":
    """Return a text `[rows, tokens, width]` whose tokens are all valid."""
    check_width(network, 0, context)
    return to_array(context)


def pad_text(
    network: CoreNetwork, encoder: int, context: "torch.Tensor | None", lengths: Sequence[int]
) -> "dict[str, np.ndarray]":
    """Return an encoder's text `[rows, tokens, width]`, padded, and its lengths, by the network's input names."""
    import numpy as np

    text = network.spec.text_encoders[encoder]
    counted = {f"{text.name}_length": np.array(lengths, np.int32)}
    if context is not None:
        check_width(network, encoder, context)
        if context.shape[1] >= text.max_length:
            return {text.name: to_array(context), **counted}
    padded = np.zeros((len(lengths), text.max_length, int(network.config[text.width_key])), np.float32)
    if context is not None:
        padded[:, : context.shape[1]] = to_array(context)
    return {text.name: padded, **counted}


def valid_lengths(mask: "torch.Tensor") -> list[int] | None:
    """Return the number of valid tokens of each row of a mask `[rows, tokens]`; None unless they come first."""
    import torch

    lengths = mask.sum(dim=1).int()
    is_plain = torch.equal(mask.bool(), torch.arange(mask.shape[1])[None] < lengths[:, None])
    return lengths.tolist() if is_plain else None


def text_lengths(
    network: CoreNetwork, given: Arguments, context: "torch.Tensor", mask: "torch.Tensor | None" = None
) -> Sequence[int]:
    """Return the number of valid tokens of each row of `context` `[rows, tokens, width]`.

    mask: `[rows, tokens]`, None if all are valid. Raises ValueError if it leaves out tokens before the end.
    """
    lengths = given["options"].get(LENGTHS, {}).get("c_crossattn")
    if lengths or mask is None:
        return lengths or [context.shape[1]] * len(context)
    lengths = valid_lengths(mask)
    if lengths is None:
        raise ValueError(compose("comfyui.attention_mask_unsupported", title=network.spec.title))
    return lengths


def one_timestep(network: CoreNetwork, values: "torch.Tensor") -> float:
    """Return the only timestep of a call; ValueError if rows or frames `[...]` have different ones."""
    first = values.flatten()[0]
    if not (values == first).all():
        shown = ", ".join(f"{value:.4g}" for value in values.flatten().unique().tolist()[:3])
        raise ValueError(compose("comfyui.timesteps_differ", title=network.spec.title, shown=shown))
    return float(first)


def check_width(network: CoreNetwork, encoder: int, states: "torch.Tensor") -> None:
    """Raise ValueError for text states not of shape `[rows, tokens, width]` of the text encoder of number `encoder`."""
    width = int(network.config[network.spec.text_encoders[encoder].width_key])
    if states.ndim != 3 or states.shape[2] != width:
        what = compose("comfyui.glyphs_states") if encoder else compose("comfyui.prompt_states")
        raise ValueError(compose(
            "comfyui.states_width_wrong", title=network.spec.title, what=what, actual_width=states.shape[-1],
            width=width,
        ))  # fmt: skip


def check_channels(network: CoreNetwork, x: "torch.Tensor", further: int | str = 0) -> None:
    """Raise ValueError unless `x` `[rows, channels, ...]` has the sample's channels and `further` ones."""
    channels = network.spec.geometry.channels + int(further)
    if x.shape[1] != channels:
        raise ValueError(compose(
            "comfyui.sample_channels_wrong", title=network.spec.title, channel_count=x.shape[1],
            expected_channels=channels,
        ))  # fmt: skip


def check_method(network: CoreNetwork, method: str | None, own: str) -> None:
    """Raise ValueError if a conditioning's method of placing references is not the network's own."""
    if method not in (None, own):
        title = network.spec.title
        raise ValueError(compose("comfyui.reference_method_unsupported", title=title, method=method, own=own))
