"""Control networks of Qwen-Image: InstantX's and alibaba-pai's ControlNets, DiffSynth-Studio's model patches.

With N image tokens, and hints that are latents `[rows, 16, 1, h, w]` of the control image, with a mask for inpainting:

    InstantX    blocks like the denoiser's, from the sum of image and hint, with embeddings of its own. Behind each, a
                projection of the image tokens is the hint of 60 / n of the denoiser's blocks. Its modules have the
                names of diffusers' `QwenImageControlNetModel`
    Fun         5 blocks like the denoiser's, from the sum of its embedded image and the hint; the hint after each is
                added after every twelfth of the denoiser's blocks
    DiffSynth   a small network after each of the denoiser's blocks, from the sum of its image tokens and the hint
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...messages import compose
from ...model_spec import Component, ControlSpec, Json
from ...model_spec.upstream import Net, UpstreamConfig
from ..common import layers
from ..common.hints import Hints
from . import transformer
from .transformer import PATCH, Step

if TYPE_CHECKING:
    import torch

    from ...programs.controls import Control
    from ...programs.sharded_ops import ShardedOps

    Streams = list[torch.Tensor]
    Add = Callable[[Streams], Streams]

# Blocks of the denoiser, over which hints are spread; ComfyUI has the number in its code.
NUM_BLOCKS = 60

# --- the networks -----------------------------------------------------------------------------------------------------


def forward(dit: Net, run: "ShardedOps", *step: Any, controls: "Sequence[Control]") -> "torch.Tensor":
    """Return the denoiser's flow with hints of `controls`. dit, run, step: arguments of the denoiser's `forward`."""
    networks = [_find_kind(control.module)(control) for control in controls]
    return transformer.forward(dit, run, *step, controls=networks)


def _find_kind(module: Net) -> "type[ControlNet | FunControlNet | BlockWise]":
    if hasattr(module, "controlnet_x_embedder"):
        return ControlNet
    return FunControlNet if hasattr(module, "control_img_in") else BlockWise


class ControlNet:
    """InstantX's ControlNet in a step."""

    def __init__(self, control: "Control") -> None:
        self.control, self.net = control, control.module

    def begin(self, step: Step) -> "Add":
        """Run the network; see `transformer.QwenImageControl`."""
        net, run = self.net, self.control.run.with_length(step.num_tokens)
        tokens = net.img_in(layers.cut_patches(step.sample, PATCH))
        tokens = tokens + net.controlnet_x_embedder(layers.cut_patches(self.control.hint, PATCH))
        time = transformer.embed_time(net, step.sample, step.timestep)
        text = net.txt_in(net.txt_norm(step.inputs["text"]))
        values = run_blocks(self.control, run, step, tokens, text, time, net.transformer_blocks)
        return add_hints(Hints(values=values, every=math.ceil(NUM_BLOCKS / len(values)), is_repeated=True))


class FunControlNet:
    """alibaba-pai's Fun ControlNet in a step."""

    def __init__(self, control: "Control") -> None:
        self.control, self.net = control, control.module

    def begin(self, step: Step) -> "Add":
        """Run the network; see `transformer.QwenImageControl`. Image, text and time are embedded by the denoiser."""
        net, dit, run = self.net, step.dit, self.control.run.with_length(step.num_tokens)
        tokens = net.before_proj(net.control_img_in(layers.cut_patches(self.control.hint, PATCH)))
        tokens = tokens + dit.img_in(layers.cut_patches(step.sample, PATCH))
        time = transformer.embed_time(dit, step.sample, step.timestep)
        text = dit.txt_in(dit.txt_norm(step.inputs["text"]))
        values = run_blocks(self.control, run, step, tokens, text, time, net.control_blocks)
        return add_hints(Hints(values=values, every=NUM_BLOCKS // len(values)))


def run_blocks(
    control: "Control",
    run: "ShardedOps",
    step: Step,
    tokens: "torch.Tensor",
    text: "torch.Tensor",
    time: "torch.Tensor",
    blocks: Net,
) -> "torch.Tensor":
    """Run a network's blocks, and return the hint of each, `[blocks, 1 or 2, rows, tokens, dim]`.

    They are placed as the denoiser's streams. The image tokens here are always two halves.
    control, run: the network, and its operations. step: of the denoiser. tokens: embedded image `[rows, tokens, dim]`.
    text: embedded, `[rows, tokens, dim]`. time: embedded, `[rows, dim]`. blocks: with `after_proj`.
    """
    import torch

    halves = run.halves(tokens)
    lengths = [*run.half_lengths(halves[0].shape[1]), step.inputs["text_length"]]
    rotary = [[*map(run.pad, pair)] for pair in (*layers.halve_tables(run, step.tables[0]), step.tables[1])]

    def arrange(hint: "Streams") -> "torch.Tensor":
        if step.has_halves:
            return torch.stack(hint)
        return run.spread(run.remove_padding(torch.cat(hint, dim=1)))[None]

    def body(block: Net, carry: "tuple[torch.Tensor, Streams]") -> "tuple[torch.Tensor, Streams]":
        streams = transformer.run_block(block, run, carry[1], lengths, [time, time], rotary)
        return arrange([control.scale(block.after_proj(x)) for x in streams[:2]]), streams

    streams = [*map(run.spread, halves), run.spread(run.replicate(text), placement="replicated")]
    return run.collect(blocks, (arrange([x * 0 for x in streams[:2]]), streams), body)[1]


def add_hints(hints: Hints) -> "Add":
    """Return the function that adds the hint of the block that is traced."""

    def add(streams: "Streams") -> "Streams":
        added = hints.select()
        return [x + hint for x, hint in zip(streams, added, strict=False)] + streams[len(added) :]

    return add


class BlockWise:
    """DiffSynth-Studio's ControlNet in a step."""

    def __init__(self, control: "Control") -> None:
        self.control, self.net = control, control.module

    def begin(self, step: Step) -> "Add":
        """Embed the hint; see `transformer.QwenImageControl`."""
        control, run = self.control, self.control.run.with_length(step.num_tokens)
        tokens = self.net.img_in(layers.cut_patches(control.hint, PATCH))
        parts = [*map(run.spread, run.halves(tokens) if step.has_halves else [tokens])]

        def compute(block: Net, x: "torch.Tensor", hint: "torch.Tensor") -> "torch.Tensor":
            import torch

            hidden = block.input_proj(block.x_rms(x) + block.y_rms(hint))
            return control.scale(block.output_proj(torch.nn.functional.gelu(hidden)))

        def add(streams: "Streams") -> "Streams":
            blocks = self.net.controlnet_blocks
            added = [x + control.at_layer(blocks, compute, x, hint) for x, hint in zip(streams, parts, strict=False)]
            return added + streams[len(parts) :]

        return add


# --- the components ---------------------------------------------------------------------------------------------------


def trim(module: Net) -> None:
    """Move the projection of each of InstantX's hints into its block, so that one scan runs both."""
    for block, projection in zip(module.transformer_blocks, module.controlnet_blocks, strict=True):
        block.after_proj = projection
    del module.controlnet_blocks


def control_net_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of InstantX's ControlNet from its tensors' shapes; `base` is the published config."""
    dim, in_channels = shapes.require("img_in.weight", 2)
    (head_dim,) = shapes.require("transformer_blocks.0.attn.norm_q.weight", 1)
    return {
        "attention_head_dim": head_dim,
        "extra_condition_channels": shapes.require("controlnet_x_embedder.weight", 2)[1] - in_channels,
        "in_channels": in_channels,
        "joint_attention_dim": shapes.require("txt_in.weight", 2)[1],
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("transformer_blocks"),
    }


def fun_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of alibaba-pai's ControlNet from its tensors' shapes; `base` is the published config."""
    dim, in_features = shapes.require("control_img_in.weight", 2)
    (head_dim,) = shapes.require("control_blocks.0.attn.norm_q.weight", 1)
    return {
        "attention_head_dim": head_dim,
        "in_features": in_features,
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("control_blocks"),
    }


def block_wise_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of DiffSynth-Studio's ControlNet from its tensors' shapes; `base` is the published config."""
    dim, in_features = shapes.require("img_in.weight", 2)
    return {"dim": dim, "in_features": in_features, "num_layers": shapes.count("controlnet_blocks")}


def _find_size_problem(denoiser: Json, control: Json, *names: str) -> str | None:
    for name in names:
        if control[name] != denoiser[name]:
            return compose("control.size_differs", name=name, own=control[name], needed=denoiser[name])
    return None


def find_control_net_problem(denoiser: Json, control: Json) -> str | None:
    """Return why InstantX's ControlNet does not fit the denoiser, by their configs; None if it does."""
    names = "attention_head_dim", "in_channels", "joint_attention_dim", "num_attention_heads"
    if problem := _find_size_problem(denoiser, control, *names):
        return problem
    if control["extra_condition_channels"] not in (0, 4):
        return compose("control.channels_unknown", count=control["extra_condition_channels"], allowed="0, 4")
    if not 0 < control["num_layers"] <= NUM_BLOCKS:
        return compose("control.block_count_wrong", count=control["num_layers"], allowed=f"1 - {NUM_BLOCKS}")
    return None


def find_fun_problem(denoiser: Json, control: Json) -> str | None:
    """Return why alibaba-pai's ControlNet does not fit the denoiser, by their configs; None if it does."""
    if problem := _find_size_problem(denoiser, control, "attention_head_dim", "num_attention_heads"):
        return problem
    if control["in_features"] != _FUN_CHANNELS * 4:
        return compose("control.channels_unknown", count=control["in_features"], allowed=_FUN_CHANNELS * 4)
    if control["num_layers"] != _FUN_LAYERS:
        return compose("control.block_count_wrong", count=control["num_layers"], allowed=_FUN_LAYERS)
    return None


def find_block_wise_problem(denoiser: Json, control: Json) -> str | None:
    """Return why DiffSynth-Studio's ControlNet does not fit the denoiser, by their configs; None if it does."""
    dim = denoiser["num_attention_heads"] * denoiser["attention_head_dim"]
    if control["dim"] != dim:
        return compose("control.size_differs", name="dim", own=control["dim"], needed=dim)
    if control["in_features"] not in (64, 68):
        return compose("control.channels_unknown", count=control["in_features"], allowed="64, 68")
    if not denoiser["num_layers"] <= control["num_layers"] <= NUM_BLOCKS:
        allowed = f"{denoiser['num_layers']} - {NUM_BLOCKS}"
        return compose("control.block_count_wrong", count=control["num_layers"], allowed=allowed)
    return None


def _import_module(name: str) -> Callable[[], type]:
    def load() -> Any:
        from . import control_modules

        return getattr(control_modules, name)

    return load


# Channels of a Fun hint: 16 of the image; in ComfyUI the mask and the 16 of an image to be inpainted are 0.
_FUN_CHANNELS, _FUN_LAYERS = 33, 5

CONTROL_NET = ControlSpec(
    title="Qwen-Image InstantX ControlNet",
    component=Component(
        name="control",
        library="diffusers",
        class_name="QwenImageControlNetModel",
        config={
            "attention_head_dim": 128,
            "axes_dims_rope": (16, 56, 56),
            "extra_condition_channels": 0,
            "in_channels": 64,
            "joint_attention_dim": 3584,
            "num_attention_heads": 24,
            "num_layers": 5,
            "out_channels": 16,
            "patch_size": 2,
        },
        tiny={},
        blocks=("transformer_blocks",),
        rules=(
            Rule("transformer_blocks.*.after_proj.weight", REPLICATED),
            Rule("controlnet_x_embedder.weight", REPLICATED),
            *(rule for rule in transformer.TRANSFORMER.rules if not rule.pattern.startswith("norm_out")),
        ),
        aliases={f"controlnet_blocks.{i}.": f"transformer_blocks.{i}.after_proj." for i in range(NUM_BLOCKS)},
        trim=trim,
    ),
    hint_channels=lambda config: (config["in_channels"] + config["extra_condition_channels"]) // 4,
    problem=find_control_net_problem,
)

FUN = ControlSpec(
    title="Qwen-Image Fun ControlNet",
    component=Component(
        name="control",
        library="diffusers",
        class_name="QwenImageFunControlNetModel",
        config={"attention_head_dim": 128, "in_features": 132, "num_attention_heads": 24, "num_layers": 5},
        tiny={},
        blocks=("control_blocks",),
        rules=(
            Rule("*.weight", REPLICATED),
            Rule("control_blocks.*.after_proj.weight", REPLICATED),
            *(
                Rule(rule.pattern.replace("transformer_blocks", "control_blocks"), rule.axes, over=rule.over)
                for rule in transformer.TRANSFORMER.rules
                if rule.pattern.startswith("transformer_blocks")
            ),
        ),
        aliases={"control_blocks.0.before_proj.": "before_proj."},
        own_class=_import_module("FunNetwork"),
    ),
    hint_channels=lambda config: config["in_features"] // 4,
    problem=find_fun_problem,
)

BLOCK_WISE = ControlSpec(
    title="Qwen-Image DiffSynth ControlNet",
    component=Component(
        name="control",
        library="diffusers",
        class_name="QwenImageBlockWiseControlNet",
        config={"dim": 3072, "in_features": 64, "num_layers": NUM_BLOCKS},
        tiny={},
        blocks=("controlnet_blocks",),
        rules=(Rule("**", REPLICATED),),
        own_class=_import_module("BlockWiseNetwork"),
    ),
    hint_channels=lambda config: config["in_features"] // 4,
    problem=find_block_wise_problem,
)

CONTROLS = (CONTROL_NET, FUN, BLOCK_WISE)

LAYOUTS = (
    FileLayout(
        class_name="QwenImageControlNetModel",
        marks=(("controlnet_x_embedder.weight", "controlnet_blocks.0.weight", "txt_norm.weight"),),
        config=control_net_config,
    ),
    FileLayout(
        class_name="QwenImageFunControlNetModel",
        marks=(("control_img_in.weight", "control_blocks.0.after_proj.weight"),),
        config=fun_config,
    ),
    FileLayout(
        class_name="QwenImageBlockWiseControlNet",
        marks=(("controlnet_blocks.0.y_rms.weight", "img_in.weight"),),
        config=block_wise_config,
    ),
)
