"""What travels between the stages: CPU tensors in plain dicts and lists, as ComfyUI passes them from node to node, and
the same as the bytes of a safetensors file.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from ..files import parse_json
from ..model_spec import SIZE, ModelSpec

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


# --- as bytes: a folder of stage files and the cache of prompts hold them ---------------------------------------------

# The mark of this pack's own files, in their metadata.
MADE_BY = {"made_by": "comfyui-tpu"}
_PROMPTS, _CONDITION, _SOLVER = ("prompt_embeds", "negative_prompt_embeds"), "condition", "solver"


def pack_embeddings(
    prompt_embeds: Conditioning, negative_prompt_embeds: Conditioning | None, condition: ImageCondition | None = None
) -> bytes:
    """Encoded prompts, and an encoded picture if there is one.

    Tensor names are `prompt_embeds`, `negative_prompt_embeds`, and with a dot and their name after it what further text
    encoders gave; those of a picture are `condition.<name>`. Whole numbers (lengths, the size that a picture was
    encoded for) are metadata under the same kind of name.
    """
    tensors, numbers = {}, {}
    for name, conditioning in zip(_PROMPTS, (prompt_embeds, negative_prompt_embeds), strict=True):
        if conditioning is not None:
            tensors[name], info = conditioning[0]
            tensors |= {f"{name}.{key}": value for key, value in info.items() if hasattr(value, "shape")}
            numbers |= {f"{name}.{key}": value for key, value in info.items() if isinstance(value, int)}
    if condition is not None:
        tensors |= {f"{_CONDITION}.{key}": value for key, value in condition["tensors"].items()}
        numbers |= {f"{_CONDITION}.{key}": value for key, value in condition.items() if isinstance(value, int)}
    return _packed(tensors, numbers)


def unpack_embeddings(
    content: bytes, family: str
) -> tuple[Conditioning | None, Conditioning | None, ImageCondition | None]:
    """What `pack_embeddings` packed; None for what is not there. `ValueError` for what is no such file."""
    tensors, numbers = _unpacked(content)

    def below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(f"{prefix}."): value for key, value in values.items() if key.startswith(f"{prefix}.")}

    def conditioning(name: str) -> Conditioning | None:
        if name not in tensors:
            return None
        return [[tensors[name], {"tpu_family": family, **below(name, tensors), **below(name, numbers)}]]

    size = {name: number for name, number in below(_CONDITION, numbers).items() if name in SIZE}
    pictures = below(_CONDITION, tensors)
    condition = ImageCondition(tpu_family=family, **size, tensors=pictures) if pictures else None
    return conditioning(_PROMPTS[0]), conditioning(_PROMPTS[1]), condition


def pack_latents(latents: Mapping[str, Any]) -> bytes:
    """A LATENT: `latents`, and `solver.<name>` of what one with leftover noise carries."""
    import torch

    tensors = {"latents": latents["samples"]}
    for name, value in latents.get(CARRIED, {}).items():
        if isinstance(value, str):
            value = torch.tensor(list(bytes.fromhex(value)), dtype=torch.uint8)
        tensors[f"{_SOLVER}.{name}"] = torch.tensor(value) if isinstance(value, int) else value
    return _packed(tensors, {})


def unpack_latents(content: bytes) -> Latent | None:
    """What `pack_latents` packed; None where it is not there. `ValueError` for what is no such file."""
    tensors, _ = _unpacked(content)
    if "latents" not in tensors:
        return None
    carried: dict[str, Any] = {}
    try:
        for name, kind in Carried.__annotations__.items():
            tensor = tensors[f"{_SOLVER}.{name}"]
            carried[name] = bytes(tensor.tolist()).hex() if kind is str else int(tensor) if kind is int else tensor
    except (KeyError, TypeError, ValueError, RuntimeError):  # not there, or not as it was packed
        return {"samples": tensors["latents"]}
    return {"samples": tensors["latents"], CARRIED: cast(Carried, carried)}


def _packed(tensors: "Mapping[str, torch.Tensor]", numbers: Mapping[str, int]) -> bytes:
    from safetensors.torch import save

    # Copies: safetensors refuses tensors that share memory, and one CONDITIONING may be on both inputs.
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save(owned, metadata={**{name: str(number) for name, number in numbers.items()}, **MADE_BY})


def _unpacked(content: bytes) -> "tuple[dict[str, torch.Tensor], dict[str, int]]":
    """Tensors, and the whole numbers in the metadata that are ours; `ValueError` for what is no safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        # safetensors has them in an order of its own; shorter names first, and so the tenth picture behind the second.
        tensors = dict(sorted(load(content).items(), key=lambda item: (len(item[0]), item[0])))
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    numbers = {}
    # The header is JSON, after its length in eight bytes.
    metadata = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
    for key, value in metadata.items():
        if key.startswith(tuple(f"{name}." for name in (*_PROMPTS, _CONDITION))):
            try:
                numbers[key] = int(value)
            except ValueError:
                raise ValueError(f"its {key} is {value[:40]!r}, not a whole number") from None
    return tensors, numbers
