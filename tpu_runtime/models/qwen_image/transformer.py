"""The denoiser of Qwen-Image (https://arxiv.org/abs/2508.02324): forward pass, sizes, sharding rules.

Its modules have the names of diffusers' `QwenImageTransformer2DModel`. The steps, with the published sizes, L text
tokens and latents `[rows, 16, 1, h, w]`:

    time       sinusoids [rows, 256] -> [rows, 3072]; each block projects it to its own modulation, one per stream
    image      patches [rows, N, 16 * 2 * 2] -> [rows, N, 3072], N = h/2 * w/2, plus the tokens of reference images
    text       Qwen2.5-VL's states [rows, L, 3584] -> RMS norm -> [rows, L, 3072]
    60 blocks  two streams with weights of their own (MM-DiT, https://arxiv.org/abs/2403.03206): joint attention with 24
               heads of 128, then a feed-forward of 12288 per stream
    output     norm, scale and shift, then a projection [rows, N, 16 * 2 * 2] -> flow [rows, 16, 1, h, w]

Of a head's 128 channels, 16 are rotated by image number, 56 by row and 56 by column (MSRoPE), with a base of 10000.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig
from ...model_spec.upstream import Net
from ..common import layers

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ....attention.api import Placement
    from ...programs.sharded_ops import ShardedOps
    from ..common.layers import Modulation, ResidualNorm

# Latents of a token along frames, rows and columns.
PATCH = (1, 2, 2)
# Of the layer norms in a block; `QwenImageTransformerBlock` has it as a default, not in its config.
EPS = 1e-6
# Placement of the tokens of a block's streams: two sequences of image tokens, and the text.
PLACEMENTS: "tuple[Placement, ...]" = ("sharded", "sharded", "replicated")

# --- the denoiser -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the denoiser, for control networks."""

    dit: Net
    sample: "torch.Tensor"  # [rows, 16, 1, height, width]
    timestep: "torch.Tensor"  # [1]
    inputs: "dict[str, torch.Tensor]"
    num_tokens: int  # of the sample
    has_halves: bool  # whether its tokens are the first two streams, because there are no references; else the first
    tables: "tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]"  # cosines and sines of its tokens and the text's


class QwenImageControl(Protocol):
    """A control network."""

    def begin(self, step: Step) -> "Callable[[list[torch.Tensor]], list[torch.Tensor]]":
        """Return a function that adds to the streams of the block that is traced."""
        ...


def forward(
    dit: Net,
    run: "ShardedOps",
    sample: "torch.Tensor",
    timestep: "torch.Tensor",
    inputs: "dict[str, torch.Tensor]",
    controls: "Sequence[QwenImageControl]" = (),
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 16, 1, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `QwenImageTransformer2DModel`. run: operations on the mesh.
    inputs: `text` `[rows, tokens, joint_attention_dim]`, its valid tokens `text_length` `[rows]`, and reference latents
        `reference_0`, `reference_1`, ... `[1, 16, 1, height, width]`, which are more tokens. Models with `zero_cond_t`
        embed them at timestep 0. With `comfyui_positions`, whose value is ignored, tokens have ComfyUI's positions.
    controls: control networks, which add to the sample's tokens after the blocks (see `control`).

    The image tokens are always two sequences: the sample and its references, or the two halves of a sample without any.
    So the sums of one sequence are exchanged between chips while the other's products are computed.
    """
    import torch

    names = sorted((name for name in inputs if name.startswith("reference_")), key=lambda name: int(name[10:]))
    all_latents = [sample, *(inputs[name].expand(len(sample), -1, -1, -1, -1) for name in names)]
    sizes = [latents.shape[3:] for latents in all_latents]
    positions = number_positions(sizes, inputs["text"].shape[1], as_comfyui="comfyui_positions" in inputs)
    # Cosines and sines [1, tokens, head_dim] of both.
    image_tables, text_tables = (
        layers.rotary_tables(dit.pos_embed.theta, dit.pos_embed.axes_dim, x) for x in positions
    )
    tokens = [dit.img_in(layers.cut_patches(latents, PATCH)) for latents in all_latents]  # [rows, tokens, dim] each
    size = tokens[0].shape[1]
    run = run.with_length(size)

    text = run.spread(run.replicate(dit.txt_in(dit.txt_norm(inputs["text"]))), placement="replicated")
    times = [embed_time(dit, sample, timestep)] * 2  # [rows, dim], of the two sequences
    if names:
        sequences = [tokens[0], torch.cat(tokens[1:], dim=1)]
        tables = [[table[:, rows] for table in image_tables] for rows in (slice(size), slice(size, None))]
        lengths = [sequence.shape[1] for sequence in sequences]
        if dit.zero_cond_t:
            times[1] = embed_time(dit, sample, timestep * 0)
    else:
        sequences, tables = run.halves(tokens[0]), layers.halve_tables(run, image_tables)
        lengths = run.half_lengths(sequences[0].shape[1])
    rotary = [[*map(run.pad, pair)] for pair in (*tables, text_tables)]
    step = Step(
        dit=dit, sample=sample, timestep=timestep, inputs=inputs, num_tokens=size, has_halves=not names,
        tables=([table[:, :size] for table in image_tables], text_tables),
    )  # fmt: skip
    additions = [control.begin(step) for control in controls]

    def body(block: Net, streams: "list[torch.Tensor]") -> "list[torch.Tensor]":
        streams = run_block(block, run, streams, [*lengths, inputs["text_length"]], times, rotary)
        for add in additions:
            streams = add(streams)
        return streams

    # By index for additions, which depend on the number of the block.
    layers_run = slice(None) if controls else None
    streams = [*map(run.spread, sequences), text]
    first, second, _ = run.scan(dit.transformer_blocks, streams, body, layers=layers_run)
    image = first if names else torch.cat([first, second], dim=1)
    flow = dit.proj_out(dit.norm_out(run.remove_padding(image), times[0]))
    return layers.join_patches(flow, sample, PATCH)


def embed_time(dit: Net, sample: "torch.Tensor", timestep: "torch.Tensor") -> "torch.Tensor":
    """Return the time embedding `[rows, dim]` of `timestep` `[1]` for every row of `sample` `[rows, ...]`.

    `dit` embeds 1000 times its input. Upstream's pipeline divides by 1000 first, both in the network's dtype.
    """
    return dit.time_text_embed(timestep.to(sample.dtype).expand(len(sample)) / 1000, sample)


def number_positions(
    sizes: "Sequence[Sequence[int]]", num_text_tokens: int, *, as_comfyui: bool
) -> "tuple[np.ndarray, np.ndarray]":
    """Return `QwenEmbedRope`'s positions `[3, tokens]`: number, row and column, of all image tokens and of the text.

    sizes: (height, width) of each image's latents, the sample's first.
    as_comfyui: the positions of ComfyUI's network, which differ for odd grids and for references that are larger than
        the sample.

    Numbers count images; rows and columns count from the image's middle. The text continues along the diagonal from
    the end of the largest image. In ComfyUI an odd grid has its middle one cell earlier, and the text continues from
    the end of the sample.
    """
    import numpy as np

    grids = [(height // PATCH[1], width // PATCH[2]) for height, width in sizes]
    odd = 0 if as_comfyui else 1
    middles = [[number, (height + odd) // 2, (width + odd) // 2] for number, (height, width) in enumerate(grids)]
    cells = [np.indices((1, *grid)).reshape(3, -1) for grid in grids]
    positions = [indices + [[n], [-row], [-column]] for indices, (n, row, column) in zip(cells, middles, strict=True)]
    start = max(size // 2 for grid in grids[: 1 if as_comfyui else None] for size in grid)
    return np.hstack(positions), np.tile(start + np.arange(num_text_tokens), (3, 1))


def run_block(
    block: Net,
    run: "ShardedOps",
    streams: "list[torch.Tensor]",
    lengths: "list[Any]",
    times: "list[torch.Tensor]",
    rotary: "list[list[torch.Tensor]]",
) -> "list[torch.Tensor]":
    """Run one `QwenImageTransformerBlock`: joint attention, then a feed-forward per stream. Returns the streams.

    Each stream's updates are `x + gate * f(norm(x) * (1 + scale) + shift)`, with a layer norm.

    block: diffusers' module. run: operations on the mesh.
    streams: two image sequences and the text, `[rows, tokens, dim]` each; the text has weights of its own.
    lengths: valid tokens of each stream, a number or `[rows]`. times: time embeddings `[rows, dim]` of the two
        sequences.
    rotary: cosines and sines `[1, tokens, head_dim]` of each stream.
    """
    attn = block.attn
    norm: ResidualNorm = partial(run.residual_norm, eps=EPS, spread=True)
    first = modulate(run, block.img_mod, times[0])
    second = first if times[1] is times[0] else modulate(run, block.img_mod, times[1])
    modulations = first, second, modulate(run, block.txt_mod, times[0])
    image_norms, text_norms = (attn.norm_q, attn.norm_k), (attn.norm_added_q, attn.norm_added_k)

    normed = [
        norm(x, None, None, msa.scale, msa.shift, placement=place)[1]
        for x, (msa, _), place in zip(streams, modulations, PLACEMENTS, strict=True)
    ]
    added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    heads = [
        *(layers.project_heads(run, attn, y, attn.to_q, attn.to_k, attn.to_v, split="outs") for y in normed[:2]),
        layers.project_heads(run, attn, normed[2], *added, placement="replicated", split="outs"),
    ]
    norms = image_norms, image_norms, text_norms
    prologues = [layers.make_prologue(*pair, tables) for pair, tables in zip(norms, rotary, strict=True)]
    attended = run.streams_attention(*heads, lengths=lengths, prologues=prologues)

    updated = []
    outs, feeds = [attn.to_out[0]] * 2 + [attn.to_add_out], [block.img_mlp] * 2 + [block.txt_mlp]
    for x, y, (msa, mlp), place, out, ff in zip(streams, attended, modulations, PLACEMENTS, outs, feeds, strict=True):
        x, y = norm(x, project(run, out, y.flatten(2), place), msa.gate, mlp.scale, mlp.shift, placement=place)
        (hidden,) = run.products(y, ff.net[0].proj, activation="gelu", placement=place, split="outs")
        updated.append(run.add_gated(x, project(run, ff.net[2], hidden, place), mlp.gate))
    return updated


def modulate(run: "ShardedOps", module: Net, temb: "torch.Tensor") -> "tuple[Modulation, Modulation]":
    """Return the modulation of the attention and of the feed-forward, `[rows, dim]` each.

    module: diffusers' `img_mod` or `txt_mod`. temb: time embedding `[rows, dim]`.
    """
    chunks = run.gather_vector(module(temb)).chunk(6, dim=1)
    return layers.make_modulation(*chunks[:3]), layers.make_modulation(*chunks[3:])


def project(run: "ShardedOps", linear: Net, x: "torch.Tensor", placement: "Placement") -> "torch.Tensor":
    """Apply `linear` to `x` `[rows, tokens, in]`, whose features are split over chips; sums are scattered by tokens."""
    return run.sum_products(linear, x, placement=placement) + linear.bias


# --- the component ----------------------------------------------------------------------------------------------------

# Each group of `tp` holds all weights; eight chips are two groups (see `shard_heads_in_pairs`). A step would take 1.5
# times as long if weights were gathered from the other group.
_RULES = (
    Rule("transformer_blocks.**.bias", REPLICATED),
    Rule("transformer_blocks.*.attn.to_out.0.weight", (None, None, "heads"), over=(2,)),
    Rule("transformer_blocks.*.attn.to_add_out.weight", (None, None, "heads"), over=(2,)),
    Rule("transformer_blocks.*.attn.*_proj.weight", (None, "heads", None), over=(2,)),
    Rule("transformer_blocks.*.attn.to_*.weight", (None, "heads", None), over=(2,)),
    Rule("transformer_blocks.*.*.net.0.proj.weight", (None, "mlp", None), over=(2,)),
    Rule("transformer_blocks.*.*.net.2.weight", (None, None, "mlp"), over=(2,)),
    # Used on one vector or, outside the blocks, on the text: outputs are gathered instead of weights.
    Rule("transformer_blocks.*.*_mod.1.weight", (None, "all_mlp", None)),
    Rule("time_text_embed.*.linear_1.weight", REPLICATED),
    Rule("time_text_embed.*.linear_2.weight", ("all_mlp", None)),
    Rule("norm_out.linear.weight", ("all_mlp", None)),
    Rule("txt_in.weight", ("all_mlp", None)),
)

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="QwenImageTransformer2DModel",
    config={
        "attention_head_dim": 128,
        "axes_dims_rope": (16, 56, 56),
        "guidance_embeds": False,
        "in_channels": 64,
        "joint_attention_dim": 3584,
        "num_attention_heads": 24,
        "num_layers": 60,
        "out_channels": 16,
        "patch_size": 2,
    },
    tiny={
        "attention_head_dim": 24,
        "axes_dims_rope": (4, 10, 10),
        "joint_attention_dim": 60,
        "num_attention_heads": 6,
        "num_layers": 3,
    },
    needs={
        "guidance_embeds": ConfigRequirement((False,)),
        "in_channels": ConfigRequirement((64,)),
        "joint_attention_dim": EqualsConfig("text_encoder", "hidden_size"),
        "out_channels": ConfigRequirement((16,)),
        "patch_size": ConfigRequirement((2,)),
        # True in Qwen-Image-Layered.
        "use_additional_t_cond": ConfigRequirement((False,)),
        "use_layer3d_rope": ConfigRequirement((False,)),
        # True in Edit models from 2511 on, which embed reference latents at timestep 0.
        "zero_cond_t": ConfigRequirement((False,)),
    },
    blocks=("transformer_blocks",),
    rules=_RULES,
    lora_prefixes=("", "transformer.", "lycoris_"),
)
