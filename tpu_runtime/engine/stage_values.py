"""Values that pass between stages.

They are CPU tensors in plain dicts and lists as in ComfyUI, or safetensors bytes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from ..files import parse_json
from ..messages import compose, compose_term
from ..model_spec import SIZE_INPUTS, ModelSpec

if TYPE_CHECKING:
    import torch

# ComfyUI's CONDITIONING: `[[tensor [1, length, dim], info]]`. This pack's `info` has `tpu_family`, `length`, and the
# states and lengths of further text encoders by their names.
Conditioning = list
# Written into CONDITIONING by every text encoder of ComfyUI; these models do not use it.
_IGNORED = "pooled_output"


class SolverCheckpoint(TypedDict):
    """Solver state in a LATENT, from which another sampler resumes (see `denoise`)."""

    solver: str  # digest of the solver's table
    samples: str  # digest of the samples that it belongs to
    begin: int  # the first step that ran
    step: int  # the next step
    state: "torch.Tensor"  # [1 + memory, channels, ...] float32: the sample, then the solver's memory
    generator: "torch.Tensor"  # uint8 state of the generator that draws noise
    origin: "torch.Tensor"  # uint8 state of the generator before anything was drawn


# Key of the solver's state in a LATENT with leftover noise; other nodes pass it on.
SOLVER_KEY = "tpu_solver"


class Latent(TypedDict):
    """ComfyUI's LATENT."""

    samples: "torch.Tensor"  # [batch, channels, (latent_frames,) latent_height, latent_width], CPU float32
    tpu_solver: NotRequired[SolverCheckpoint]


class ImageCondition(TypedDict):
    """An encoded image with the size of the video it was encoded for; reference images have no size."""

    tpu_family: str
    height: NotRequired[int]
    width: NotRequired[int]
    num_frames: NotRequired[int]
    tensors: "dict[str, torch.Tensor]"  # by the name of the denoiser's input, CPU float32


def unpack_conditioning(spec: ModelSpec, name: str, given: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the embeddings `[1, length, dim]` and the dict of input `name`.

    Raises `ValueError` for unsupported content.

    spec: the model that gets it.
    given: a CONDITIONING. One of ComfyUI's own has no family, which is accepted.
    Core nodes add further content: several prompts, areas, masks, ranges of steps, controls. Ignoring such content
        would give a wrong image silently.
    """
    if not isinstance(given, list | tuple) or not all(
        isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[1], Mapping) for entry in given
    ):
        raise ValueError(
            compose(
                "condition.not_conditioning", title=spec.title, name=compose_term("input", name), family=spec.family
            )
        )
    if len(given) != 1:
        raise ValueError(compose(
            "condition.combined_prompts_unsupported", title=spec.title, name=compose_term("input", name),
            count=len(given), family=spec.family,
        ))  # fmt: skip
    ((embeddings, info),) = given
    family = info.get("tpu_family", spec.family)
    if family != spec.family:
        raise ValueError(compose(
            "condition.of_another_text_encoder", title=spec.title, name=compose_term("input", name),
            source_family=family, family=spec.family,
        ))  # fmt: skip
    if unknown := [key for key, value in info.items() if value is not None and key not in _list_allowed_keys(spec)]:
        raise ValueError(compose(
            "condition.options_unsupported", title=spec.title, name=compose_term("input", name),
            unknown=", ".join(map(str, unknown)), family=spec.family,
        ))  # fmt: skip
    return embeddings, info


def _list_allowed_keys(spec: ModelSpec) -> set[str]:
    names = [text.name for text in spec.text_encoders]
    return {"tpu_family", "length", _IGNORED, *names, *(f"{name}_length" for name in names)}


# --- as bytes: a folder of stage files and the cache of prompts hold them ---------------------------------------------

# The mark of this pack's own files, in their metadata.
MADE_BY = {"made_by": "comfyui-tpu"}
_PROMPTS, _CONDITION, _SOLVER = ("prompt_embeds", "negative_prompt_embeds"), "condition", "solver"


def pack_embeddings(
    prompt_embeds: Conditioning, negative_prompt_embeds: Conditioning | None, condition: ImageCondition | None = None
) -> bytes:
    """Return encoded prompts, and an encoded image if there is one, as the bytes of a safetensors file.

    prompt_embeds, negative_prompt_embeds: CONDITIONING of one entry.
    Tensor names are `prompt_embeds`, `negative_prompt_embeds`, `<either>.<name>` for further text encoders, and
    `condition.<name>` for an image. Integers (lengths, the image's size) are metadata with the same form of name.
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
    return _pack(tensors, numbers)


def unpack_embeddings(
    content: bytes, family: str
) -> tuple[Conditioning | None, Conditioning | None, ImageCondition | None]:
    """Return prompt, negative prompt and condition of `pack_embeddings`, each None if absent.

    Raises `ValueError` for other content.
    """
    tensors, numbers = _unpack(content)

    def below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(f"{prefix}."): value for key, value in values.items() if key.startswith(f"{prefix}.")}

    def conditioning(name: str) -> Conditioning | None:
        if name not in tensors:
            return None
        return [[tensors[name], {"tpu_family": family, **below(name, tensors), **below(name, numbers)}]]

    size = {name: number for name, number in below(_CONDITION, numbers).items() if name in SIZE_INPUTS}
    arrays = below(_CONDITION, tensors)
    condition = ImageCondition(tpu_family=family, **size, tensors=arrays) if arrays else None
    return conditioning(_PROMPTS[0]), conditioning(_PROMPTS[1]), condition


def pack_latents(latents: Mapping[str, Any]) -> bytes:
    """Return a LATENT as the bytes of a safetensors file: `latents`, and `solver.<name>` for its solver state."""
    import torch

    tensors = {"latents": latents["samples"]}
    for name, value in latents.get(SOLVER_KEY, {}).items():
        if isinstance(value, str):
            value = torch.tensor(list(bytes.fromhex(value)), dtype=torch.uint8)
        tensors[f"{_SOLVER}.{name}"] = torch.tensor(value) if isinstance(value, int) else value
    return _pack(tensors, {})


def unpack_latents(content: bytes) -> Latent | None:
    """Return the LATENT of `pack_latents`, None if absent. Raises `ValueError` for other content."""
    tensors, _ = _unpack(content)
    if "latents" not in tensors:
        return None
    carried: dict[str, Any] = {}
    try:
        for name, kind in SolverCheckpoint.__annotations__.items():
            tensor = tensors[f"{_SOLVER}.{name}"]
            carried[name] = bytes(tensor.tolist()).hex() if kind is str else int(tensor) if kind is int else tensor
    except (KeyError, TypeError, ValueError, RuntimeError):  # not there, or not as it was packed
        return {"samples": tensors["latents"]}
    return {"samples": tensors["latents"], SOLVER_KEY: cast(SolverCheckpoint, carried)}


def _pack(tensors: "Mapping[str, torch.Tensor]", numbers: Mapping[str, int]) -> bytes:
    """Return the bytes of a safetensors file with `tensors` of any shape `[...]` and `numbers` as metadata."""
    from safetensors.torch import save

    # Copies: safetensors refuses tensors that share memory, and one CONDITIONING may be on both inputs.
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save(owned, metadata={**{name: str(number) for name, number in numbers.items()}, **MADE_BY})


def _unpack(content: bytes) -> "tuple[dict[str, torch.Tensor], dict[str, int]]":
    """Return tensors and this pack's integers in the metadata, by name. Raises `ValueError` for other content."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        # safetensors has its own order. Here shorter names come first, so that image 10 follows image 2.
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
