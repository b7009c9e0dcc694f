"""Z-Image's Fun ControlNets (alibaba-pai's union, versions 1 to 2.1 and lite), as ComfyUI runs them.

Their modules have the names of diffusers' `ZImageControlNetModel`. A control network has blocks like the denoiser's for
the image tokens alone; after each, `after_proj` makes a hint. With N image tokens without padding:

    hint          latents [rows, 16, h, w] of the control image; from version 2 on also a mask and 16 latents of the
                  image to be inpainted -> [rows, N, 3840]
    2 refiners    version 1: plain blocks. Later: control blocks from the sum with the image's embedding; their hints
                  are added after the denoiser's 2 noise refiners. In version 2.0 the layers below serve instead
    n layers      control blocks from the sum with the denoiser's refined image; their hints are added after every
                  (30 / n)th of its layers

Diffusers also runs the text and the padding through these blocks. ComfyUI does not, and this pack follows it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...files import CheckpointError
from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...messages import compose
from ...model_spec import Component, ControlSpec, Json
from ...model_spec.upstream import Net, UpstreamConfig
from ..common import hints
from ..common.hints import Hints
from . import transformer
from .transformer import PATCH

if TYPE_CHECKING:
    import torch

    from ...programs.controls import Control
    from ...programs.sharded_ops import ShardedOps

    Tables = Sequence[torch.Tensor]

# Layers of the denoiser, over which ComfyUI spreads the hints.
NUM_LAYERS = 30
# Numbers of control layers that ComfyUI knows: lite, version 1, version 2.
LAYER_COUNTS = (3, 6, 15)
# Key of the config in version 2.0: its layers also refine, and its refiners, which are zero, do not run.
BY_LAYERS = "_refined_by_layers"

# --- the network ------------------------------------------------------------------------------------------------------


def forward(dit: Net, run: "ShardedOps", *step: Any, controls: "Sequence[Control]") -> "torch.Tensor":
    """Return the denoiser's flow with hints of `controls`. dit, run, step: arguments of the denoiser's `forward`."""
    return transformer.forward(dit, run, *step, controls=[ControlStack(control) for control in controls])


class ControlStack:
    """A control network in a step: its tokens, from the refiners to the layers."""

    def __init__(self, control: "Control") -> None:
        self.control, self.net = control, control.module

    def begin(self, image: "torch.Tensor", num_patches: int, tables: "Tables", time: "torch.Tensor") -> "list[Hints]":
        """Embed the hint and refine it. Returns the hints of the denoiser's noise refiners.

        image: embedded tokens `[rows, tokens, dim]`, of which the first `num_patches` are the image's.
        tables: cosines and sines `[rows, tokens, head_dim]`. time: time embedding `[rows, 256]`.
        """
        self.num_patches, self.time = num_patches, time
        self.run = self.control.run.with_length(num_patches)
        self.tables = [table[:, :num_patches] for table in tables]
        self.state = self._embed()
        if not hasattr(self.net, "refiner_before_proj"):
            blocks = self.net.control_noise_refiner
            self.state = transformer.run_stack(blocks, self.run, self.state, self.tables, None, time)
            return []
        if self.control.config[BY_LAYERS]:
            values = self._run(self.net.control_layers, self.net.before_proj, image, image.shape[1])
            values = values[: self.control.config["n_refiner_layers"]]
        else:
            values = self._run(self.net.control_noise_refiner, self.net.refiner_before_proj, image, image.shape[1])
        return [Hints(values=values, every=1)]

    def finish(self, image: "torch.Tensor", num_tokens: int) -> Hints:
        """Run the layers. Returns the hints of the denoiser's layers, whose sequence has `num_tokens`.

        image: refined tokens `[rows, tokens, dim]`.
        """
        values = self._run(self.net.control_layers, self.net.before_proj, image, num_tokens)
        return Hints(values=values, every=round(NUM_LAYERS / len(values)))

    def _embed(self) -> "torch.Tensor":
        """Return the tokens `[rows, num_patches, dim]` of the hint. A patch is ordered by row, column and channel."""
        rows, channels, height, width = self.control.hint.shape
        patches = self.control.hint.view(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        return self.net.control_all_x_embedder["2-1"](patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))

    def _run(self, blocks: Net, before: Net, image: "torch.Tensor", num_tokens: int) -> "torch.Tensor":
        """Run control blocks from the state and `image` `[rows, tokens, dim]`; keep the new state.

        blocks, before: upstream's modules. num_tokens: of the sequence that gets the hints.
        Returns the hints, `[blocks, rows, num_tokens, dim]`, placed as its tokens.
        """
        run, target = self.run, self.control.run.with_length(num_tokens)
        rotary = tuple(run.tokens(table) for table in self.tables)

        def body(block: Net, carry: "tuple[torch.Tensor, torch.Tensor]") -> "tuple[torch.Tensor, torch.Tensor]":
            state = transformer.run_block(block, run, carry[1], rotary, None, self.time)
            hint = self.control.scale(run.remove_padding(block.after_proj(state)))
            return hints.place(target, hint, num_tokens), state

        state = before(self.state) + image[:, : self.num_patches]
        first = hints.place(target, state * 0, num_tokens)
        (_, state), values = run.collect(blocks, (first, run.tokens(state)), body)
        self.state = run.remove_padding(state)
        return values


# --- the component ----------------------------------------------------------------------------------------------------


def trim(module: Net) -> None:
    """Move the projections that only the first block has out of it, so that all blocks are equal."""
    for blocks, name in ((module.control_layers, "before_proj"), (module.control_noise_refiner, "refiner_before_proj")):
        if hasattr(blocks[0], "before_proj"):
            setattr(module, name, blocks[0].before_proj)
            del blocks[0].before_proj


def control_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of a control network from its tensors' shapes; `base` is the published config."""
    dim, patch = shapes.require("control_all_x_embedder.2-1.weight", 2)
    (head_dim,) = shapes.require("control_layers.0.attention.norm_q.weight", 1)
    count = shapes.count("control_layers")
    if count not in LAYER_COUNTS:
        raise CheckpointError(compose(
            "control.layer_count_unsupported", path=shapes.path, count=count, allowed=", ".join(map(str, LAYER_COUNTS)),
        ))  # fmt: skip
    refines = "control_noise_refiner.0.after_proj.weight" in shapes
    return {
        "add_control_noise_refiner": "control_noise_refiner" if refines else None,
        "control_in_dim": patch // PATCH**2,
        "control_layers_places": [index * round(NUM_LAYERS / count) for index in range(count)],
        "dim": dim,
        "n_heads": dim // head_dim,
        "n_kv_heads": dim // head_dim,
        "n_refiner_layers": shapes.count("control_noise_refiner"),
    }


def read_values(tensors: Mapping[str, Any], read: Callable[[Any], Any]) -> Json:
    """Return whether the file is version 2.0: its refiners' first projection is zero, as ComfyUI tells it."""
    projection = tensors.get("control_noise_refiner.0.after_proj.weight")
    is_large = "control_layers.14.adaLN_modulation.0.weight" in tensors
    return {BY_LAYERS: bool(is_large and projection is not None and not read(projection).any())}


def find_problem(denoiser: Json, control: Json) -> str | None:
    """Return why a control network does not fit the denoiser, by their configs; None if it does."""
    places = control["control_layers_places"]
    sizes = {name: (control[name], denoiser[name]) for name in ("dim", "n_heads", "n_refiner_layers")}
    for name, (size, needed) in sizes.items():
        if size != needed:
            return compose("control.size_differs", name=name, own=size, needed=needed)
    if places[-1] >= denoiser["n_layers"]:
        return compose("control.too_few_layers", needed=places[-1] + 1, count=denoiser["n_layers"])
    return None


CONTROL = ControlSpec(
    title="Z-Image Fun ControlNet",
    component=Component(
        name="control",
        library="diffusers",
        class_name="ZImageControlNetModel",
        config={
            "add_control_noise_refiner": "control_noise_refiner",
            "all_f_patch_size": (1,),
            "all_patch_size": (2,),
            "control_in_dim": 33,
            "control_layers_places": tuple(range(0, NUM_LAYERS, 2)),
            "dim": 3840,
            "n_heads": 30,
            "n_kv_heads": 30,
            "n_refiner_layers": 2,
            "norm_eps": 1e-5,
            "qk_norm": True,
        },
        tiny={},
        blocks=("control_layers", "control_noise_refiner"),
        rules=(Rule("**", REPLICATED),),
        aliases={
            "control_layers.0.before_proj.": "before_proj.",
            "control_noise_refiner.0.before_proj.": "refiner_before_proj.",
        },
        trim=trim,
    ),
    hint_channels=lambda config: config["control_in_dim"],
    read_values=read_values,
    problem=find_problem,
)

LAYOUT = FileLayout(
    class_name="ZImageControlNetModel",
    marks=(("control_all_x_embedder.2-1.weight", "control_layers.0.attention.to_q.weight", "!x_pad_token"),),
    config=control_config,
)
