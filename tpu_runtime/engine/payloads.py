"""What travels between the stages: CPU tensors in plain dicts and lists, as ComfyUI passes them from node to node."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from ..spec import ModelSpec

if TYPE_CHECKING:
    import torch

# ComfyUI's CONDITIONING: `[[tensor [1, length, dim], info]]`. Of ours `info` has `tpu_family`, `length`, and under
# their own names the states and lengths of further text encoders.
Conditioning = list
# Every text encoder of ComfyUI's own writes it into CONDITIONING; these models have no use for it.
_UNUSED = "pooled_output"


class Carried(TypedDict):
    """Where a solver stopped, see `denoise`: of which `step` was next, with which noise."""

    solver: str  # the digest of its table
    samples: str  # of the LATENT that this belongs to
    begin: int  # the step that it began with
    step: int
    state: "torch.Tensor"  # [1 + memory, channels, ...], float32: the sample, and what it remembers
    generator: "torch.Tensor"  # the state of the generator that draws noise, uint8
    origin: "torch.Tensor"  # that which it began with


# What a LATENT with leftover noise has beside its samples; nodes that do not know it hand it on.
CARRIED = "tpu_solver"


class Latent(TypedDict):
    """ComfyUI's LATENT."""

    samples: "torch.Tensor"  # [batch, channels, (latent_frames,) latent_height, latent_width], CPU float32
    tpu_solver: NotRequired[Carried]


class ImageCondition(TypedDict):
    """An encoded image, with the size of the video it was encoded for; references have none."""

    tpu_family: str
    height: NotRequired[int]
    width: NotRequired[int]
    num_frames: NotRequired[int]
    tensors: "dict[str, torch.Tensor]"  # by the name of the denoiser's input, CPU float32


def conditioning_entry(spec: ModelSpec, name: str, given: Any) -> tuple[Any, Mapping[str, Any]]:
    """The embeddings and what is said of them, of input `name`; raises `ValueError` for what `spec` cannot follow.

    Core nodes write more into CONDITIONING: several prompts, areas, masks, ranges of steps, controls. What is not known
    here would be left out of the image in silence. ComfyUI's own CONDITIONING carries no family and may pass.
    """
    if not isinstance(given, list | tuple) or not all(
        isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[1], Mapping) for one in given
    ):
        raise ValueError(f"{spec.title}: {name} is no CONDITIONING. Connect {spec.family}TextEncoder.")
    if len(given) != 1:
        raise ValueError(
            f"{spec.title}: {name} has {len(given)} entries; combined prompts are not supported. Connect one "
            f"{spec.family}TextEncoder and write all into its prompt."
        )
    ((embeddings, info),) = given
    family = info.get("tpu_family", spec.family)
    if family != spec.family:
        raise ValueError(
            f"{spec.title}: {name} comes from a {family} text encoder; it must come from {spec.family}TextEncoder."
        )
    if unknown := [key for key, value in info.items() if value is not None and key not in _known(spec)]:
        raise ValueError(
            f"{spec.title}: {name} carries {', '.join(map(str, unknown))}; areas, masks, strengths, ranges of steps "
            f"and controls are not supported. Connect {spec.family}TextEncoder without a node between that sets them."
        )
    return embeddings, info


def _known(spec: ModelSpec) -> set[str]:
    names = [text.name for text in spec.text_encoders]
    return {"tpu_family", "length", _UNUSED, *names, *(f"{name}_length" for name in names)}


def pack_carried(carried: Carried) -> "dict[str, torch.Tensor]":
    """Tensors of a safetensors file, by the names that `Carried` has."""
    import torch

    return {
        "solver": torch.tensor(list(bytes.fromhex(carried["solver"])), dtype=torch.uint8),
        "samples": torch.tensor(list(bytes.fromhex(carried["samples"])), dtype=torch.uint8),
        "begin": torch.tensor(carried["begin"]),
        "step": torch.tensor(carried["step"]),
        "state": carried["state"],
        "generator": carried["generator"],
        "origin": carried["origin"],
    }


def unpack_carried(tensors: "Mapping[str, torch.Tensor]") -> Carried | None:
    """What `pack_carried` packed; None where it is not there, or not as that packs it."""
    try:
        return {
            "solver": bytes(tensors["solver"].tolist()).hex(),
            "samples": bytes(tensors["samples"].tolist()).hex(),
            "begin": int(tensors["begin"]),
            "step": int(tensors["step"]),
            "state": tensors["state"],
            "generator": tensors["generator"],
            "origin": tensors["origin"],
        }
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None


def pack_embeddings(
    prompt_embeds: "Conditioning", negative_prompt_embeds: "Conditioning | None"
) -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
    """Tensors and metadata of a safetensors file, named as `save_embeddings` says."""
    tensors, numbers = {}, {}
    named = {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}
    for name, conditioning in named.items():
        if conditioning is not None:
            tensors[name], info = conditioning[0]
            tensors |= {f"{name}.{key}": value for key, value in info.items() if hasattr(value, "shape")}
            numbers |= {f"{name}.{key}": str(value) for key, value in info.items() if isinstance(value, int)}
    return tensors, numbers


def unpack_embeddings(
    tensors: "Mapping[str, torch.Tensor]", numbers: Mapping[str, int], family: str
) -> "tuple[Conditioning | None, Conditioning | None]":
    """What `pack_embeddings` packed; None for what is not there."""
    values = {**tensors, **numbers}

    def conditioning(name: str) -> "Conditioning | None":
        if name not in tensors:
            return None
        info = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        return [[tensors[name], {"tpu_family": family, **info}]]

    return conditioning("prompt_embeds"), conditioning("negative_prompt_embeds")
