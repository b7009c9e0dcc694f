"""The functions that a model's file supplies, as types: what each takes, in which shape, and what it returns.

All are pure. Those that compute are called inside a traced program and see upstream's torch modules. Arguments are
passed by position, so an implementation may call the network what its paper calls it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...sharding.shape import MeshShape
from .limits import Settings

if TYPE_CHECKING:
    import numpy as np
    import torch

# (done, total) -> None: moves the bar and lets the host cancel.
Report = Callable[[int, int], None]


class Call(Protocol):
    """How a stage's host code runs a network: `function(module, *args) -> (result, carried)`, compiled once per shape.

    `result` comes back on the host; `carried` stays on the devices, to be passed to the next call (and is donated by
    it when it is the last argument). With `partition="spatial"` the last two dimensions of every argument are an
    image's height and width (or multiples of the smallest one's) and are split over the chips; with `"replicated"`
    every chip gets everything. With `defers` the result is frames `[n, height, width, 3]`, which stay split over the
    chips: it is returned before it is computed, and fetched while the next call runs (see `engine.frame_buffer`).
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
    """Ids and mask of prompts, `[rows, length]` int32 each; a `length` beyond `max_length` shows what is cut off."""

    def __call__(
        self, tokenizer: Any, prompts: Sequence[str], /, *, length: int = ...
    ) -> "tuple[np.ndarray, np.ndarray]": ...


class TokenizeBeside(Protocol):
    """As `Tokenize`, of prompts about pictures, of which a model's text encoder takes the arrays `seen`; and whatever
    else `EncodeText` then takes.
    """

    def __call__(
        self, tokenizer: Any, prompts: Sequence[str], seen: "Sequence[torch.Tensor]", /
    ) -> "tuple[np.ndarray, ...]": ...


class PlaceBeside(Protocol):
    """What `EncodeText` takes more, of tokens that are of pictures where `is_seen` `[rows, length]`, and of the arrays
    `seen` that these are.
    """

    def __call__(self, is_seen: "np.ndarray", seen: "Sequence[torch.Tensor]", /) -> "tuple[np.ndarray, ...]": ...


class EncodeText(Protocol):
    """`encoder`, `ids` and `mask` `[rows, max_length]` to states `[rows, max_length, dim]`; the second result is None.
    Further arguments are what `TokenizeBeside` gives.
    """

    def __call__(self, *arguments: Any, **named: Any) -> "tuple[torch.Tensor, None]": ...


class WriteTokenizer(Protocol):
    """Writes the miniature's tokenizer into `folder`."""

    def __call__(self, folder: Path, /) -> None: ...


class Forward(Protocol):
    """The prediction for `sample` `[branches, *latent]` at `timestep` `[1]`, of the sample's shape.

    `denoiser` holds upstream's modules; `run`, a `programs.denoiser_run.DenoiserRun`, is what the mesh adds. `inputs`
    holds `[branches, length, dim]` and `<name>_length` `[branches]` of every text encoding, the arrays of
    `condition_shapes`, `guidance` `[1]`, and `next_timestep` `[1]`, which is 0 after the last step.
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


class KeepFeatures(Protocol):
    """`Forward`'s prediction of a full step, and the features by name that `ReuseFeatures` starts from."""

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
    """`Forward`'s prediction from the `features` of an earlier step."""

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
    """The first sample of `latent_shape`, float32 on the CPU, drawn in upstream's order."""

    def __call__(self, latent_shape: tuple[int, ...], generator: "torch.Generator", /) -> "torch.Tensor": ...


class DrawInputs(Protocol):
    """The denoiser's inputs with those that upstream draws before the noise."""

    def __call__(
        self, inputs: "Mapping[str, np.ndarray]", generator: "torch.Generator", /
    ) -> "Mapping[str, np.ndarray]": ...


class SolverArguments(Protocol):
    """The arguments of upstream's `set_timesteps` besides the number of steps; `shift` is the user's."""

    def __call__(
        self, scheduler_config: Mapping[str, Any], latent_shape: tuple[int, ...], num_steps: int, shift: float | None, /
    ) -> dict[str, Any]: ...


class GuidanceAt(Protocol):
    """With `use_dynamic_cfg` the guidance scale of the step at `timestep`, of so many, from the user's `scale`."""

    def __call__(self, scale: float, timestep: float, num_steps: int, /) -> float: ...


class Guide(Protocol):
    """What becomes of the predictions for the prompt and the negative prompt, `[1, *latent]` each, float32."""

    def __call__(
        self, prompt: "torch.Tensor", negative: "torch.Tensor", scale: "torch.Tensor", /
    ) -> "torch.Tensor": ...


class Advice(Protocol):
    """A sentence about settings that are allowed but that the model's authors do not publish; None for others."""

    def __call__(self, settings: Settings, /) -> str | None: ...


class ArrangeChips(Protocol):
    """How the denoiser's chips are arranged, for so many branches of guidance."""

    def __call__(self, num_devices: int, branches: int, /) -> MeshShape: ...


class Decode(Protocol):
    """LATENT samples of one video, `[1, channels, ...]` float32 on the CPU, to chunks of its frames.

    A chunk is `[frames, height, width, 3]` float32 in 0..1, numpy or torch.
    """

    def __call__(self, call: Call, latents: "torch.Tensor", report: Report, /) -> Iterator[Any]: ...


class EncodePixels(Protocol):
    """Frames of one video, `[1, 3, frames, height, width]` float32 in -1..1, to LATENT samples `[1, channels, ...]`."""

    def __call__(self, call: Call, pixels: "torch.Tensor", report: Report, /) -> "torch.Tensor": ...


class DenormalizeLatents(Protocol):
    """The solver's last sample in LATENT's scale and layout."""

    def __call__(self, sample: "torch.Tensor", vae_config: Mapping[str, Any], /) -> "torch.Tensor": ...


class ConditionShapes(Protocol):
    """The shape of each array that a picture becomes. A dimension may be a key of the denoiser's config."""

    def __call__(self, latent_shape: tuple[int, ...], /) -> Mapping[str, tuple[int | str, ...]]: ...


class EncodePictures(Protocol):
    """Pictures `[number, height, width, 3]` in 0..1 to the arrays of `condition_shapes`.

    Reference pictures have no `condition_shapes`: there is one array for each, `reference_<index>`, and one that the
    text encoder takes, `seen_<index>`, where it looks at them (see `TokenizeBeside`).
    """

    def __call__(
        self, call: Call, image: "torch.Tensor", settings: Settings, vae_config: Mapping[str, Any], /
    ) -> "dict[str, np.ndarray]": ...


class Look(Protocol):
    """What a model's image encoder makes, by a `Call`, of a picture that is prepared for it: `[rows, tokens, dim]`,
    or one of the arrays `seen` of `TokenizeBeside`.
    """

    def __call__(self, *call_and_prepared: Any, **named: Any) -> "np.ndarray": ...


class PutGiven(Protocol):
    """`sample` with the latents that a picture supplies; before a step and after it."""

    def __call__(self, sample: "torch.Tensor", inputs: "dict[str, torch.Tensor]", /) -> "torch.Tensor": ...
