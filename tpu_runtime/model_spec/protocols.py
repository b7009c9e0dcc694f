"""Types of the functions that a model's file supplies: their arguments with shapes, and their results.

All are pure. Functions that compute are called inside a traced program and see upstream's torch modules. Arguments are
passed by position, so an implementation may call the network what its paper calls it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...sharding.shape import MeshShape
from .component import Json
from .inputs import Settings

if TYPE_CHECKING:
    import numpy as np
    import torch

# (done, total) -> None: moves the progress bar and raises if the user cancelled.
Report = Callable[[int, int], None]


class Call(Protocol):
    """A function that runs a network from a stage's host code.

    It calls `function(module, *args) -> (result, carried)`, compiled once per shape.

    `result` is returned on the host. `carried` stays on the devices, to be passed to the next call, which is donated it
    if it is the last argument.
    partition: "spatial" splits the last two dimensions of every argument over the chips; they are an image's height and
        width, or multiples of the smallest one's. "replicated" gives every chip everything.
    carries: whether there is a carried value.
    defers: the result is frames `[n, height, width, 3]` that stay split over the chips. It is returned before it is
        computed and fetched while the next call runs (see `engine.frame_buffer`).
    """

    def __call__(
        self,
        component: str,
        function: Callable[..., tuple[Any, Any]],
        *args: Any,
        partition: Literal["replicated", "spatial"] = "replicated",
        carries: bool = False,
        defers: bool = False,
    ) -> tuple[Any, Any]: ...


class Tokenize(Protocol):
    """Tokenizer of prompts: returns ids and mask, `[rows, length]` int32 each.

    A `length` above `max_length` shows the truncated tokens.
    """

    def __call__(
        self, tokenizer: Any, prompts: Sequence[str], /, *, length: int = ...
    ) -> "tuple[np.ndarray, np.ndarray]": ...


class TokenizeWithImages(Protocol):
    """A `Tokenize` for prompts about images.

    It also takes the images' embeddings `seen`, and returns further arguments of `EncodeText`.
    """

    def __call__(
        self, tokenizer: Any, prompts: Sequence[str], seen: "Sequence[torch.Tensor]", /
    ) -> "tuple[np.ndarray, ...]": ...


class PlaceImageTokens(Protocol):
    """A function that returns further arguments of `EncodeText` for image tokens.

    `is_seen` `[rows, length]` marks these tokens, and `seen` are the embeddings in their order.
    """

    def __call__(self, is_seen: "np.ndarray", seen: "Sequence[torch.Tensor]", /) -> "tuple[np.ndarray, ...]": ...


class EncodeText(Protocol):
    """A text encoder: maps `encoder`, `ids` and `mask` `[rows, max_length]` to states and None.

    The states are `[rows, max_length, dim]`.

    Further arguments are those of `TokenizeWithImages`.
    """

    def __call__(self, *arguments: Any, **named: Any) -> "tuple[torch.Tensor, None]": ...


class WriteTokenizer(Protocol):
    """A function that writes the tiny model's tokenizer into `folder`."""

    def __call__(self, folder: Path, /) -> None: ...


class Forward(Protocol):
    """A denoiser: returns the prediction for `sample` `[branches, *latent]` at `timestep` `[1]`, of the sample's shape.

    `denoiser` is upstream's module. `run`, a `programs.sharded_ops.ShardedOps`, adds the mesh. `inputs` has
    `[branches, length, dim]` and `<name>_length` `[branches]` of every text encoding, the arrays of `condition_shapes`,
    `guidance` `[1]`, and `next_timestep` `[1]`, which is 0 after the last step. Own inputs (see `Settings.own`) are
    `[branches]`. Calls of ComfyUI's samplers lack these; `comfyui_positions` `[1]` is there in their calls to networks
    whose tokens have other positions in ComfyUI than upstream.
    """

    def __call__(
        self,
        denoiser: Any,
        run: Any,
        sample: "torch.Tensor",
        timestep: "torch.Tensor",
        inputs: "dict[str, torch.Tensor]",
        /,
    ) -> "torch.Tensor": ...


class ControlledForward(Protocol):
    """A `Forward` with control networks, each a `programs.controls.Control`."""

    def __call__(
        self,
        denoiser: Any,
        run: Any,
        sample: "torch.Tensor",
        timestep: "torch.Tensor",
        inputs: "dict[str, torch.Tensor]",
        /,
        *,
        controls: Sequence[Any],
    ) -> "torch.Tensor": ...


class KeepFeatures(Protocol):
    """A `Forward` of a full step that also returns the features by name that `ReuseFeatures` starts from."""

    def __call__(
        self,
        denoiser: Any,
        run: Any,
        sample: "torch.Tensor",
        timestep: "torch.Tensor",
        inputs: "dict[str, torch.Tensor]",
        /,
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]": ...


class ReuseFeatures(Protocol):
    """A `Forward` that starts from the `features` of an earlier step."""

    def __call__(
        self,
        denoiser: Any,
        run: Any,
        features: "dict[str, torch.Tensor]",
        sample: "torch.Tensor",
        timestep: "torch.Tensor",
        inputs: "dict[str, torch.Tensor]",
        /,
    ) -> "torch.Tensor": ...


class Noise(Protocol):
    """A function that draws the first sample of `latent_shape`, float32 on the CPU, in upstream's order."""

    def __call__(self, latent_shape: tuple[int, ...], generator: "torch.Generator", /) -> "torch.Tensor": ...


class DrawInputs(Protocol):
    """A function that returns the denoiser's inputs with those that upstream draws before the noise."""

    def __call__(
        self, inputs: "Mapping[str, np.ndarray]", generator: "torch.Generator", /
    ) -> "Mapping[str, np.ndarray]": ...


class SolverArguments(Protocol):
    """A function that returns the arguments of upstream's `set_timesteps` other than the number of steps.

    `shift` is the user's.
    """

    def __call__(
        self, scheduler_config: Json, latent_shape: tuple[int, ...], num_steps: int, shift: float | None, /
    ) -> dict[str, Any]: ...


class GuidanceSchedule(Protocol):
    """A function that returns the guidance scale of the step at `timestep` with `use_dynamic_cfg`.

    `scale` is the user's.
    """

    def __call__(self, scale: float, timestep: float, num_steps: int, /) -> float: ...


class CombineGuidance(Protocol):
    """A function that combines the predictions for prompt and negative prompt, `[1, *latent]` float32 each."""

    def __call__(
        self, prompt: "torch.Tensor", negative: "torch.Tensor", scale: "torch.Tensor", /
    ) -> "torch.Tensor": ...


class Advice(Protocol):
    """A function that returns a sentence about allowed settings that the model's authors do not publish.

    None for other settings.
    """

    def __call__(self, settings: Settings, /) -> str | None: ...


class ChooseMesh(Protocol):
    """A function that returns the mesh of the denoiser's chips for this number of guidance branches."""

    def __call__(self, num_devices: int, branches: int, /) -> MeshShape: ...


class Decode(Protocol):
    """A decoder of LATENT samples of one video that yields chunks of its frames.

    The samples are `[1, channels, ...]` float32 on the CPU.

    A chunk is `[frames, height, width, 3]` float32 in 0..1, numpy or torch.
    """

    def __call__(self, call: Call, latents: "torch.Tensor", report: Report, /) -> Iterator[Any]: ...


class EncodePixels(Protocol):
    """An encoder of one video's frames to LATENT samples `[1, channels, ...]`.

    The frames are `[1, 3, frames, height, width]` float32 in -1..1.
    """

    def __call__(self, call: Call, pixels: "torch.Tensor", report: Report, /) -> "torch.Tensor": ...


class DenormalizeLatents(Protocol):
    """A function that returns the solver's last sample in LATENT's scale and layout."""

    def __call__(self, sample: "torch.Tensor", vae_config: Json, /) -> "torch.Tensor": ...


class ConditionShapes(Protocol):
    """A function that returns the shape of each array of an encoded image.

    A dimension may be a key of the denoiser's config.
    """

    def __call__(self, latent_shape: tuple[int, ...], /) -> Mapping[str, tuple[int | str, ...]]: ...


class EncodeImages(Protocol):
    """An encoder of images `[number, height, width, 3]` in 0..1 to the arrays of `condition_shapes`.

    References have no `condition_shapes`. Each becomes one array `reference_<index>`, and an embedding `seen_<index>`
    if the text encoder takes these (see `TokenizeWithImages`).
    """

    def __call__(
        self, call: Call, image: "torch.Tensor", settings: Settings, vae_config: Json, /
    ) -> "dict[str, np.ndarray]": ...


class EncodeVision(Protocol):
    """An image encoder: returns `[rows, tokens, dim]`, or one of the arrays `seen` of `TokenizeWithImages`.

    Its arguments are a `Call` and a preprocessed image.
    """

    def __call__(self, *call_and_prepared: Any, **named: Any) -> "np.ndarray": ...


class ApplyKnownLatents(Protocol):
    """A function that returns `sample` with an image's latents put in; applied before and after a step."""

    def __call__(self, sample: "torch.Tensor", inputs: "dict[str, torch.Tensor]", /) -> "torch.Tensor": ...
