"""Parts of a model's description.

They are the published checkpoint, the recipe of a generation, and the functions of each stage.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...sharding.shape import MeshShape
from .component import Component, Json, freeze_mappings
from .control import ControlSpec
from .inputs import FLOW_SCHEDULERS, Settings
from .protocols import (
    Advice,
    ApplyKnownLatents,
    ChooseMesh,
    CombineGuidance,
    ConditionShapes,
    ControlledForward,
    Decode,
    DenormalizeLatents,
    DrawInputs,
    EncodeImages,
    EncodePixels,
    EncodeText,
    EncodeVision,
    Forward,
    GuidanceSchedule,
    KeepFeatures,
    Noise,
    PlaceImageTokens,
    ReuseFeatures,
    SolverArguments,
    Tokenize,
    TokenizeWithImages,
    WriteTokenizer,
)

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class HubCheckpoint:
    """The checkpoint on Hugging Face, and the entries of its `model_index.json` that identify the model.

    No revision is pinned: a download takes the newest commit. A `Component`'s `needs` refuse the config of another
    network.
    """

    hub_id: str
    pipeline_classes: tuple[str, ...]  # upstream's classes for it
    # further entries of `model_index.json`; the tiny model has them too
    index: Json = field(default_factory=dict)
    # further JSON files by path; the tiny model has them too
    files: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze_mappings(self)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The built-in tiny checkpoint."""

    id: str  # of the trained one if there is one, else of the one with random weights
    inputs: Mapping[str, int]  # default inputs
    texts: Mapping[str, str] = field(default_factory=dict)  # default texts for a trained one, by input
    picture: str = ""  # file of an example image for a trained one

    def __post_init__(self) -> None:
        freeze_mappings(self)

    @property
    def random_id(self) -> str:
        """Id of the checkpoint with random weights."""
        return self.id.replace("tiny/", "tiny/random-")

    @property
    def ids(self) -> tuple[str, str]:
        return self.id, self.random_id


@dataclass(frozen=True, kw_only=True)
class LatentGeometry:
    """Sizes of latents and tokens relative to pixels."""

    channels: int
    stride_t: int  # frames per latent frame; 0 for an image model, whose latents have no frame dimension
    stride_hw: int  # pixels per latent
    patch_thw: tuple[int, int, int]  # latents per token, along frames, height and width

    def latent_frames(self, num_frames: int) -> int:
        """Return the latent frames of a video, padded to whole patches.

        The first frame is a latent frame of its own.
        """
        return (num_frames - 1) // self.stride_t + 1 + self.padding_frames(num_frames)

    def padding_frames(self, num_frames: int) -> int:
        """Return how many of a video's first latent frames only fill up whole patches."""
        return -((num_frames - 1) // self.stride_t + 1) % self.patch_thw[0] if self.stride_t else 0

    def latent_shape(self, settings: Settings) -> tuple[int, ...]:
        """Return `[1, channels, latent_frames, latent_height, latent_width]`; images have no frame dimension."""
        frames = (self.latent_frames(settings.num_frames),) if self.stride_t else ()
        return (1, self.channels, *frames, settings.height // self.stride_hw, settings.width // self.stride_hw)

    def num_tokens(self, latent_shape: tuple[int, ...]) -> int:
        patch = self.patch_thw if self.stride_t else self.patch_thw[1:]
        return math.prod(size // part for size, part in zip(latent_shape[2:], patch, strict=True))

    def frame_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return the tokens of an image, or of as many latent frames of a video as a patch has."""
        return math.prod(size // part for size, part in zip(latent_shape[-2:], self.patch_thw[1:], strict=True))


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """One text encoder's part in the conditioning."""

    name: str = "text"  # of the denoiser's input
    component: str = "text_encoder"  # the network
    tokenizer_folder: str = "tokenizer"
    tokenizer_class: str  # of the tiny model
    max_length: int  # tokens
    width_key: str  # key of the states' width in the denoiser's config
    tokenize: Tokenize
    encode: EncodeText
    write_tokenizer: WriteTokenizer
    prefix: int = 0  # tokens before every prompt; their states are dropped
    tokenize_beside: TokenizeWithImages | None = (
        None  # for prompts with image embeddings; None if the encoder takes none
    )
    place_beside: PlaceImageTokens | None = None  # places image embeddings among given ids
    # key of the number of layers in the encoder's config, if every layer's state is normalised as the last one is
    depth_key: str = ""


def draw_noise(latent_shape: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
    """Return standard normal noise in the layout of the latents."""
    import torch

    return torch.randn(latent_shape, generator=generator, dtype=torch.float32)


def keep_inputs(inputs: "Mapping[str, np.ndarray]", generator: "torch.Generator") -> "Mapping[str, np.ndarray]":
    """Return `inputs` as they are; values may be of any shape `[...]`."""
    return inputs


def no_arguments(
    scheduler_config: Json, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    return {}


def classifier_free_guidance(prompt: "torch.Tensor", negative: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """Return classifier-free guidance of predictions `[1, *latent]`, https://arxiv.org/abs/2207.12598.

    prompt, negative: predictions for both texts.
    scale: 1 for the prompt's prediction alone.
    """
    return negative + scale * (prompt - negative)


def no_advice(settings: Settings) -> None:
    return None


def make_distilled_advice(steps: int, guidance: str) -> Advice:
    """Return the advice of a model that is distilled to this number of steps.

    guidance: words on guidance in that model.
    """

    def advise(settings: Settings) -> str | None:
        sentences = []
        if settings.guidance_scale > 1:
            sentences.append(f"guidance_scale is {settings.guidance_scale}, but it is distilled and {guidance}")
        if settings.num_inference_steps != steps:
            sentences.append(f"num_inference_steps is {settings.num_inference_steps}, but it is distilled to {steps}")
        return f"{'; '.join(sentences)}." if sentences else None

    return advise


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The sampling of a generation: schedule, noise and guidance."""

    scheduler: Json  # the published config
    # alternatives by name, with the changes to the config
    schedulers: Mapping[str, Json] = field(default_factory=lambda: FLOW_SCHEDULERS)
    shift_key: str | None = None  # the config's name for the shift that a widget overrides
    # "cfg": two branches while `guidance_scale` is above 1, row 0 the prompt and row 1 the negative prompt; "embedded":
    # one branch, and the scale is an input of the network if it has one
    guidance: Literal["cfg", "embedded"] = "cfg"
    guidance_at: GuidanceSchedule | None = None  # for models with the input `use_dynamic_cfg`
    guide: CombineGuidance = classifier_free_guidance  # combines the predictions of both branches
    noise: Noise = draw_noise
    draw_inputs: DrawInputs = keep_inputs
    solver_arguments: SolverArguments = no_arguments
    advice: Advice = no_advice

    def __post_init__(self) -> None:
        freeze_mappings(self)


@dataclass(frozen=True, kw_only=True)
class FeatureReuse:
    """Functions for a denoising step that starts from inner features of an earlier one.

    Features have a row per branch first.
    """

    keep: KeepFeatures
    reuse: ReuseFeatures
    tokens: tuple[str, ...]  # features `[rows, tokens, dim]`, split over the chips as `run.tokens` does it
    whole: tuple[str, ...] = ()  # features that are replicated on every chip


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """Names of the norms of queries and keys of one stack of blocks; `*` stands for a layer.

    Every query of a layer may meet every key of it. A text's queries and keys have norms of their own.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DenoiserSpec:
    """The denoising network.

    A model with a step cache has the inputs of `MAG_CACHE_INPUTS`, and with a `step_reuse` also `cache_start`,
    `cache_end` and `cache_interval` (see `StepCache`).
    """

    forward: Forward
    experts: tuple[str, ...] = ("transformer",)  # component names; two experts run one part of the steps each
    step_reuse: FeatureReuse | None = None  # for DeepCache; None if it is not supported
    # norms that bound the attention scores, of every stack of blocks; () without such
    head_norms: tuple[HeadNorms, ...] = ()
    # approximate tokens of a tile along frames, rows and columns for sparse attention (see `attention.tiles`); None
    # without it
    tile: tuple[int, int, int] | None = None
    controls: tuple[ControlSpec, ...] = ()  # its control networks
    controlled: ControlledForward | None = None  # `forward` with such networks; None without any


def split_guidance_first(num_devices: int, branches: int) -> MeshShape:
    """Return a mesh with both guidance branches in parallel if the count is even.

    All other chips share the sequence.
    """
    dp = 2 if branches == 2 and num_devices % 2 == 0 else 1
    return MeshShape(dp=dp, sp=num_devices // dp)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The division of the denoiser over chips."""

    mesh: ChooseMesh = split_guidance_first
    # key of the number of heads in the config; the part of `tp` that does not divide it goes to `sp`
    heads_key: str = "num_attention_heads"

    def mesh_shape(self, num_devices: int, branches: int, config: Json) -> MeshShape:
        """Return the mesh of a denoiser with this `config`, for `num_devices` chips and `branches` of guidance."""
        shape = self.mesh(num_devices, branches)
        return shape.fit_heads(int(config.get(self.heads_key, shape.tp)))


@dataclass(frozen=True, kw_only=True)
class LightVae:
    """A smaller decoder for the same latents; replaces a model's VAE decoder if the user names a file of it.

    It has a folder of its own, because the VAE may be needed to encode images.
    """

    component: Component
    decode: Decode


@dataclass(frozen=True, kw_only=True)
class VaeSpec:
    """The decoding of the solver's last sample to pixels, and the encoding of pixels."""

    component: str = "vae_decoder"  # the decoder
    latent_format: str  # ComfyUI's name for the layout and scale of the denoiser's sample, for previews
    denormalize: DenormalizeLatents
    decode: Decode
    encode: EncodePixels | None = None  # None if it is not available
    light: LightVae | None = None  # a smaller decoder; None without such a decoder


def no_conditions(latent_shape: tuple[int, ...]) -> Mapping[str, tuple[int | str, ...]]:
    return {}


@dataclass(frozen=True, kw_only=True)
class ImageConditioning:
    """The use of images by a model; the default takes no image."""

    encode: EncodeImages | None = None
    look: EncodeVision | None = None  # image encoder for single calls of ComfyUI's own nodes
    numbers: tuple[int, ...] = (1,)  # allowed numbers of images: a first frame, or a first and a last one
    condition_shapes: ConditionShapes = no_conditions  # of the arrays of encoded images
    are_references: bool = False  # optional images of any number and size
    # shapes of references that are assumed in plans and background compilations
    planned_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # if set, the model also runs without an image, and the arrays of `condition_shapes` are zeros
    put_given: ApplyKnownLatents | None = None
