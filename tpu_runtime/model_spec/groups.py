"""The groups of a model's description: what is published, the recipe of a generation, and each stage's functions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...sharding.shape import MeshShape
from .component import Component, freeze
from .functions import (
    Advice,
    ArrangeChips,
    ConditionShapes,
    Decode,
    DenormalizeLatents,
    DrawInputs,
    EncodePictures,
    EncodePixels,
    EncodeText,
    Forward,
    GuidanceAt,
    Guide,
    KeepFeatures,
    Look,
    Noise,
    PlaceBeside,
    PutGiven,
    ReuseFeatures,
    SolverArguments,
    Tokenize,
    TokenizeBeside,
    WriteTokenizer,
)
from .limits import FLOW_SCHEDULERS, Settings

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class Published:
    """The checkpoint on Hugging Face: its id, and what of its `model_index.json` identifies the model.

    `pipeline_classes` are upstream's classes for it. `index` holds further entries of `model_index.json` and `files`
    further JSON files by path; the miniature has them too.
    """

    hub_id: str
    pipeline_classes: tuple[str, ...]
    index: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self)


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """The built-in checkpoint: `inputs` that fit it, and `texts` and an example's `picture` that fit a trained one."""

    id: str
    inputs: Mapping[str, int]
    texts: Mapping[str, str] = field(default_factory=dict)
    picture: str = ""

    def __post_init__(self) -> None:
        freeze(self)

    @property
    def random_id(self) -> str:
        """The id of the checkpoint with random weights; `id` is a trained one where there is one."""
        return self.id.replace("tiny/", "tiny/random-")

    @property
    def ids(self) -> tuple[str, str]:
        return self.id, self.random_id


@dataclass(frozen=True, kw_only=True)
class LatentGeometry:
    """How pixels become latents and tokens. An image model has `stride_t` 0 and latents without a frame dimension."""

    channels: int
    stride_t: int
    stride_hw: int
    patch_thw: tuple[int, int, int]

    def latent_frames(self, num_frames: int) -> int:
        """Latent frames of a video whose first frame is a latent frame of its own, padded to whole patches."""
        return (num_frames - 1) // self.stride_t + 1 + self.padding_frames(num_frames)

    def padding_frames(self, num_frames: int) -> int:
        """How many of a video's first latent frames only fill up whole patches."""
        return -((num_frames - 1) // self.stride_t + 1) % self.patch_thw[0] if self.stride_t else 0

    def latent_shape(self, settings: Settings) -> tuple[int, ...]:
        """`[1, channels, latent_frames, latent_height, latent_width]`, for an image without the frames."""
        frames = (self.latent_frames(settings.num_frames),) if self.stride_t else ()
        return (1, self.channels, *frames, settings.height // self.stride_hw, settings.width // self.stride_hw)

    def num_tokens(self, latent_shape: tuple[int, ...]) -> int:
        patch = self.patch_thw if self.stride_t else self.patch_thw[1:]
        return math.prod(size // part for size, part in zip(latent_shape[2:], patch, strict=True))

    def frame_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Tokens of an image, or of as many latent frames of a video as a patch has."""
        return math.prod(size // part for size, part in zip(latent_shape[-2:], self.patch_thw[1:], strict=True))


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """One text encoder's part in the conditioning.

    With a `prefix`, ids start with that many more tokens, which are always there and whose states are dropped. With a
    `tokenize_beside` and a `place_beside` it may look at pictures. `width_key` is where the denoiser's config names the
    states' width, and `depth_key` where that of an encoder does its layers, whose every state is normed as the last is.
    `tokenizer_class` is that of the miniature.
    """

    name: str = "text"
    component: str = "text_encoder"
    tokenizer_folder: str = "tokenizer"
    tokenizer_class: str
    max_length: int
    width_key: str
    tokenize: Tokenize
    encode: EncodeText
    write_tokenizer: WriteTokenizer
    prefix: int = 0
    tokenize_beside: TokenizeBeside | None = None
    place_beside: PlaceBeside | None = None
    depth_key: str = ""


def plain_noise(latent_shape: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
    """Standard normal noise in the layout of the latents."""
    import torch

    return torch.randn(latent_shape, generator=generator, dtype=torch.float32)


def nothing_drawn(inputs: "Mapping[str, np.ndarray]", generator: "torch.Generator") -> "Mapping[str, np.ndarray]":
    return inputs


def no_arguments(
    scheduler_config: Mapping[str, Any], latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    return {}


def plain_guidance(prompt: "torch.Tensor", negative: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """Classifier-free guidance, https://arxiv.org/abs/2207.12598."""
    return negative + scale * (prompt - negative)


def no_advice(settings: Settings) -> None:
    return None


def distilled(steps: int, guidance: str) -> Advice:
    """Advice of a model that its makers distilled to so many steps; `guidance` is what became of that there."""

    def advise(settings: Settings) -> str | None:
        found = []
        if settings.guidance_scale > 1:
            found.append(f"guidance_scale is {settings.guidance_scale}, but it is distilled and {guidance}")
        if settings.num_inference_steps != steps:
            found.append(f"num_inference_steps is {settings.num_inference_steps}, but it is distilled to {steps}")
        return f"{'; '.join(found)}." if found else None

    return advise


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a sample is drawn: the schedule, the noise and guidance.

    `scheduler` is the published config. `schedulers` may run in its place: what is to change in the config, by name.
    `shift_key` is the config's name for the shift that a widget overrides. `guidance` is "cfg" (two branches while
    `guidance_scale` is above 1: row 0 the prompt, row 1 the negative prompt; `guide` makes one of their predictions) or
    "embedded" (one branch; the network is told the scale if it takes one). A model with the input `use_dynamic_cfg` has
    a `guidance_at`.
    """

    scheduler: Mapping[str, Any]
    schedulers: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: FLOW_SCHEDULERS)
    shift_key: str | None = None
    guidance: Literal["cfg", "embedded"] = "cfg"
    guidance_at: GuidanceAt | None = None
    guide: Guide = plain_guidance
    noise: Noise = plain_noise
    draw_inputs: DrawInputs = nothing_drawn
    solver_arguments: SolverArguments = no_arguments
    advice: Advice = no_advice

    def __post_init__(self) -> None:
        freeze(self)


@dataclass(frozen=True, kw_only=True)
class StepReuse:
    """How a denoiser starts a step from the inner features of an earlier one.

    Features have a row for each branch first. Those named in `tokens` are `[rows, tokens, dim]` as `run.tokens` places
    them; those in `whole` every chip has.
    """

    keep: KeepFeatures
    reuse: ReuseFeatures
    tokens: tuple[str, ...]
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """The norms of queries and keys, head by head, of one stack of blocks, by name; `*` stands for a layer.

    Every query of a layer may meet every key of it: those of a text have norms of their own.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Denoiser:
    """The network that denoises. `experts` are its components, where there are two each for its part of the steps.

    A model with a step cache has among its `inputs` those of `MAG_CACHE`, and with a `step_reuse` `cache_start`,
    `cache_end` and `cache_interval` (see `StepCache`). `head_norms` are the norms that bound attention's scores, of
    every stack of blocks; empty where none do. `tile`: about how many tokens along frames, rows and columns a tile has
    where attention leaves some out, see `attention.tiles`; None where none are.
    """

    forward: Forward
    experts: tuple[str, ...] = ("transformer",)
    step_reuse: StepReuse | None = None
    head_norms: tuple[HeadNorms, ...] = ()
    tile: tuple[int, int, int] | None = None


def guidance_first(num_devices: int, branches: int) -> MeshShape:
    """Guidance's two branches side by side where the count is even; all other chips share the sequence."""
    dp = 2 if branches == 2 and num_devices % 2 == 0 else 1
    return MeshShape(dp=dp, sp=num_devices // dp)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How the denoiser is divided. What of `tp` does not divide the heads, the config's `heads_key`, goes to `sp`."""

    mesh: ArrangeChips = guidance_first
    heads_key: str = "num_attention_heads"

    def arranged(self, num_devices: int, branches: int, config: Mapping[str, Any]) -> MeshShape:
        """The mesh for a denoiser of that `config`."""
        shape = self.mesh(num_devices, branches)
        return shape.for_heads(int(config.get(self.heads_key, shape.tp)))


@dataclass(frozen=True, kw_only=True)
class LightVae:
    """A smaller decoder of the same latents, which is in the place of a model's component `vae_decoder` where the user
    names a file of it. It has a folder of its own: the VAE's may be needed for pictures.
    """

    component: Component
    decode: Decode


@dataclass(frozen=True, kw_only=True)
class Vae:
    """From the solver's last sample to pixels, by the component of that name.

    `latent_format` is ComfyUI's name for the layout and scale of the denoiser's sample, for previews.
    """

    component: str = "vae_decoder"
    latent_format: str
    denormalize: DenormalizeLatents
    decode: Decode
    encode: EncodePixels | None = None
    light: LightVae | None = None


def no_conditions(latent_shape: tuple[int, ...]) -> Mapping[str, tuple[int | str, ...]]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """What a model takes of pictures; the default takes none.

    `numbers` are how many it may get: a first frame, or a first and a last one. With `are_references` they are optional
    and of any number and size; `usual` are the shapes of those that are planned with, and compiled ahead for. With
    `put_given` the model runs without a picture too: the arrays of `condition_shapes`
    are zeros then. `look` is its image encoder's, of which nodes of ComfyUI's own ask single calls.
    """

    encode: EncodePictures | None = None
    look: Look | None = None
    numbers: tuple[int, ...] = (1,)
    condition_shapes: ConditionShapes = no_conditions
    are_references: bool = False
    usual: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    put_given: PutGiven | None = None
