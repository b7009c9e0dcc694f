"""The denoiser of Z-Image (https://arxiv.org/abs/2511.22699): forward pass, sizes, sharding, original keys.

Its modules have the names of diffusers' `ZImageTransformer2DModel`. The steps, with the published sizes, L text tokens
and latents `[rows, 16, h, w]`:

    time                sinusoids [rows, 256] -> [rows, 256]; each block projects them to its own modulation
    text                Qwen3's states [rows, L, 2560] -> [rows, L, 3840], padded with a learnt token
    image               patches [rows, N, 2 * 2 * 16] -> [rows, N, 3840], N = h/2 * w/2, padded with a learnt token
    2 noise refiners    blocks of the image tokens alone, modulated by the time
    2 context refiners  blocks of the text tokens alone, without modulation
    30 layers           image, then text, in one sequence (S3-DiT), modulated by the time
    output              layer norm and scale, then a projection [rows, N, 2 * 2 * 16] -> flow [rows, 16, h, w]

A block is attention with 30 heads of 128 and a SwiGLU feed-forward of 10240, with RMS norms before and after both. Of a
head's 128 channels, 32 are rotated by text position, 48 by row and 48 by column, with a base of 256.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig, split_rows
from ...model_spec.upstream import Net
from ..common import layers

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

    from ...programs.sharded_ops import ShardedOps
    from ..common.hints import Hints
    from ..common.layers import Pair

# Sequences are padded to a multiple of this (upstream's `SEQ_MULTI_OF`) with learnt tokens, which are attended to like
# any other.
SEQ_MULTIPLE = 32
# Latents on a side of a token.
PATCH = 2

# --- the denoiser -----------------------------------------------------------------------------------------------------


class ZImageControl(Protocol):
    """A control network (see `control`)."""

    def begin(self, image: "torch.Tensor", num_patches: int, tables: "Pair", time: "torch.Tensor") -> "Sequence[Hints]":
        """Return the hints of the noise refiners, from the embedded image `[rows, tokens, dim]`."""
        ...

    def finish(self, image: "torch.Tensor", num_tokens: int) -> "Hints":
        """Return the hints of the layers from the refined image `[rows, tokens, dim]`.

        num_tokens: of the layers' sequence.
        """
        ...


def forward(
    dit: Net,
    run: "ShardedOps",
    sample: "torch.Tensor",
    timestep: "torch.Tensor",
    inputs: "dict[str, torch.Tensor]",
    controls: "Sequence[ZImageControl]" = (),
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 16, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `ZImageTransformer2DModel`. run: operations on the mesh.
    inputs: `text` `[rows, tokens, cap_feat_dim]`, and `text_length` `[rows]`, its number of valid tokens.
    controls: control networks, whose hints are added to the image tokens (see `control`).

    Upstream's time runs the other way, from noise at 0 to the image at 1. So does its flow, whose sign is changed here.
    """
    import torch

    rows, _, height, width = sample.shape
    time = dit.t_embedder((1000 - timestep.expand(rows)) / 1000 * dit.t_scale).type_as(sample)  # [rows, 256]
    text, text_length = embed_text(dit, inputs["text"], inputs["text_length"])  # [rows, L, dim], [rows]
    image, num_patches = embed_image(dit, sample)  # [rows, N, dim], padded
    image_size, grid = image.shape[1], (height // PATCH, width // PATCH)
    image_tables, text_tables = rotary_tables(dit.rope_embedder, grid, image_size, text.shape[1], text_length)

    hints = [hint for control in controls for hint in control.begin(image, num_patches, image_tables, time)]
    image = run_stack(dit.noise_refiner, run.with_length(image_size), image, image_tables, None, time, hints)
    text = run_stack(dit.context_refiner, run.with_length(text.shape[1]), text, text_tables, text_length, None)

    x = torch.cat([image, text], dim=1)
    tables = [torch.cat(pair, dim=1) for pair in zip(image_tables, text_tables, strict=True)]
    hints = [control.finish(image, x.shape[1]) for control in controls]
    x = run_stack(dit.layers, run.with_length(x.shape[1]), x, tables, image_size + text_length, time, hints)
    patches = dit.all_final_layer["2-1"](x[:, :num_patches], c=time)  # [rows, num_patches, 2 * 2 * 16]
    return -join_patches(patches, grid)


def embed_text(dit: Net, states: "torch.Tensor", length: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Embed the prompts: tokens `[rows, tokens, dim]`, and how many of each row are attended to, `[rows]`.

    dit: diffusers' module. states: `[rows, tokens, cap_feat_dim]`. length: valid tokens `[rows]`. Learnt padding up to
    a multiple of `SEQ_MULTIPLE` is attended to.
    """
    import torch

    is_valid = torch.arange(states.shape[1], device=states.device)[None] < length[:, None]
    text = torch.where(is_valid[..., None], dit.cap_embedder(states), dit.cap_pad_token)
    return text, (length + SEQ_MULTIPLE - 1) // SEQ_MULTIPLE * SEQ_MULTIPLE


def embed_image(dit: Net, sample: "torch.Tensor") -> "tuple[torch.Tensor, int]":
    """Embed the patches of `sample` `[rows, 16, height, width]`. Returns tokens and the number of patches.

    The features of a patch are ordered by row, column and channel. Tokens `[rows, tokens, dim]` are padded to a
    multiple of `SEQ_MULTIPLE` with the learnt token of `dit`.
    """
    import torch

    rows, channels, height, width = sample.shape
    patches = sample.view(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    x = dit.all_x_embedder["2-1"](patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
    padding = dit.x_pad_token.expand(rows, -x.shape[1] % SEQ_MULTIPLE, -1)
    return torch.cat([x, padding.type_as(x)], dim=1), x.shape[1]


def rotary_tables(
    embedder: Net, grid: tuple[int, int], image_size: int, text_size: int, text_length: "torch.Tensor"
) -> "tuple[Pair, Pair]":
    """Return `RopeEmbedder`'s cosines and sines `[rows, tokens, head_dim]` of the image's tokens and of the text's.

    embedder: diffusers' `RopeEmbedder`. grid: (height, width) in patches. image_size, text_size: numbers of tokens,
    padding included. text_length: tokens of each text that are attended to, `[rows]`.

    The axes are text position, row and column. On the first, upstream puts the image's padding at 0, the text from 1
    on, and the image after the text. Attention depends only on differences of positions, so all are given relative to
    the image here. The positions of the image itself, which are most of them, are then the same for every text.
    """
    import jax.numpy as jnp
    import numpy as np

    from ...programs import torch_bridge

    image = np.indices((1, *grid)).reshape(3, -1)
    is_image = np.arange(image_size) < image.shape[1]
    image = np.pad(image, ((0, 0), (0, image_size - image.shape[1])))

    def tables(length: "jax.Array") -> "tuple[tuple[jax.Array, ...], ...]":
        distance = length[:, None] + 1  # from the image back to its padding
        image_positions = (jnp.where(is_image, 0, distance), image[1], image[2])
        text_positions = (jnp.clip(distance - 1 - np.arange(text_size), 0), *np.zeros((2, text_size), int))
        return tuple(
            gather_axis_tables(embedder, positions, text_size) for positions in (image_positions, text_positions)
        )

    return torch_bridge.call_jax(tables, text_length)


def gather_axis_tables(
    embedder: Net, positions: "tuple[jax.Array | np.ndarray, ...]", longest: int
) -> "tuple[jax.Array, ...]":
    """Return cosines and sines `[rows, tokens, head_dim]` at `positions` on the three axes.

    embedder: diffusers' `RopeEmbedder`. positions: `[rows, tokens]` or `[tokens]` per axis. Those of the first axis
    count backwards and are at most `longest + 1`. Angles are rounded to float32, as upstream's.
    """
    import jax.numpy as jnp
    import numpy as np

    rows, tables = len(positions[0]), ([], [])
    for axis, (dim, position) in enumerate(zip(embedder.axes_dims, positions, strict=True)):
        numbers = -np.arange(longest + 2) if axis == 0 else np.arange(np.max(position) + 1)
        angles = layers.rotary_angles(embedder.theta, dim, numbers).astype(np.float32).astype(np.float64)
        for table, function in zip(tables, (np.cos, np.sin), strict=True):
            values = jnp.asarray(function(angles), jnp.float32)[jnp.asarray(position, jnp.int32)]
            table.append(jnp.broadcast_to(values, (rows, *values.shape[-2:])))
    return tuple(jnp.concatenate(table, axis=-1) for table in tables)


def run_stack(
    blocks: Net,
    run: "ShardedOps",
    x: "torch.Tensor",
    tables: "Pair | list[torch.Tensor]",
    length: "torch.Tensor | None",
    time: "torch.Tensor | None",
    hints: "Sequence[Hints]" = (),
) -> "torch.Tensor":
    """Run a stack of `blocks` on `x` `[rows, tokens, dim]`, and return it in the same shape.

    run: operations on the mesh. tables: cosines and sines `[rows, tokens, head_dim]`.
    length: valid tokens `[rows]`; None: all. time: time embedding `[rows, 256]`; None: blocks without modulation.
    hints: added after the blocks.
    """
    rotary = tuple(run.tokens(table) for table in tables)

    def body(block: Net, x: "torch.Tensor") -> "torch.Tensor":
        x = run_block(block, run, x, rotary, length, time)
        for hint in hints:
            x = x + hint.select()
        return x

    # By index for hints, which are added by the number of the block.
    return run.remove_padding(run.scan(blocks, run.tokens(x), body, layers=slice(None) if hints else None))


def run_block(
    block: Net,
    run: "ShardedOps",
    x: "torch.Tensor",
    rotary: "tuple[torch.Tensor, ...]",
    length: "torch.Tensor | None",
    time: "torch.Tensor | None",
) -> "torch.Tensor":
    """Run one `ZImageTransformerBlock` on `x` `[rows, tokens, dim]`: attention, then feed-forward.

    Each update is `x + tanh(gate) * norm(f(norm(x) * (1 + scale)))`, with RMS norms.

    block: diffusers' module. run: operations on the mesh. rotary: cosines and sines `[rows, tokens, head_dim]`.
    length: valid tokens `[rows]`; None: all. time: time embedding `[rows, 256]`; None: no modulation.
    """
    scale, gate, ffn_scale, ffn_gate = (1, 1, 1, 1) if time is None else modulate(block, time)
    update = self_attention(block.attention, run, block.attention_norm1(x) * scale, rotary, length)
    x = x + gate * block.attention_norm2(update)
    update = feed_forward(block.feed_forward, run, block.ffn_norm1(x) * ffn_scale)
    return x + ffn_gate * block.ffn_norm2(update)


def modulate(block: Net, time: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """Return 1 + scale and tanh(gate) of the attention, then of the feed-forward, `[rows, 1, dim]` each.

    block: diffusers' module. time: time embedding `[rows, 256]`.
    """
    scale, gate, ffn_scale, ffn_gate = block.adaLN_modulation(time)[:, None].chunk(4, dim=2)
    return 1 + scale, gate.tanh(), 1 + ffn_scale, ffn_gate.tanh()


def self_attention(
    attn: Net, run: "ShardedOps", x: "torch.Tensor", rotary: "tuple[torch.Tensor, ...]", length: "torch.Tensor | None"
) -> "torch.Tensor":
    """Return the self-attention update of `x` `[rows, tokens, dim]`.

    attn: diffusers' module. run: operations on the mesh. rotary: cosines and sines `[rows, tokens, head_dim]`.
    length: valid tokens `[rows]`; None: all.
    """
    query, key, value = layers.project_heads(run, attn, x, attn.to_q, attn.to_k, attn.to_v)
    attended = run.self_attention(query, key, value, layers.make_prologue(attn.norm_q, attn.norm_k, rotary), length)
    return next(run.products(attended.flatten(2), attn.to_out[0]))


def feed_forward(ff: Net, run: "ShardedOps", x: "torch.Tensor") -> "torch.Tensor":
    """Return the SwiGLU feed-forward `ff` of `x` `[rows, tokens, dim]`."""
    (hidden,) = run.products(x, ff.w1, ff.w3, activation="silu")
    return next(run.products(hidden, ff.w2))


def join_patches(patches: "torch.Tensor", grid: tuple[int, int]) -> "torch.Tensor":
    """Unpatchify `[rows, tokens, 2 * 2 * channels]` to `[rows, channels, 2 * height, 2 * width]`.

    grid: (height, width) in patches.
    """
    cells = patches.unflatten(1, grid).unflatten(3, (PATCH, PATCH, -1))
    return cells.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


# --- the component ---------------------------------------------------------------------------------------------------

STACKS = ("noise_refiner", "context_refiner", "layers")

# All weights are replicated where they fit: 12.3 GB in bfloat16. In a step each of eight chips has 576 tokens, 15 ms of
# work; gathering the blocks' weights would take four times that.
_RULES = (
    Rule("*.*.attention.to_*.weight", REPLICATED, over=(2,)),
    Rule("*.*.attention.to_out.0.weight", REPLICATED, over=(2,)),
    Rule("*.*.feed_forward.*.weight", REPLICATED, over=(2,)),
    Rule("**", REPLICATED),
)

# Tongyi-MAI's keys; see `diffusers.loaders.single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers`.
ORIGINAL_KEYS = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
} | {
    f"{stack}.*.attention.{theirs}": keys
    for stack in STACKS
    for theirs, keys in {
        "qkv": split_rows(*(f"{stack}.*.attention.to_{name}" for name in "qkv")),
        "out": f"{stack}.*.attention.to_out.0",
        "q_norm": f"{stack}.*.attention.norm_q",
        "k_norm": f"{stack}.*.attention.norm_k",
    }.items()
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="ZImageTransformer2DModel",
    config={
        "all_f_patch_size": (1,),
        "all_patch_size": (2,),
        "axes_dims": (32, 48, 48),
        "axes_lens": (1536, 512, 512),
        "cap_feat_dim": 2560,
        "dim": 3840,
        "in_channels": 16,
        "n_heads": 30,
        "n_kv_heads": 30,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "norm_eps": 1e-5,
        "qk_norm": True,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
    },
    tiny={"axes_dims": (8, 6, 6), "cap_feat_dim": 40, "dim": 60, "n_heads": 3, "n_kv_heads": 3, "n_layers": 3},
    needs={
        "all_f_patch_size": ConfigRequirement(((1,),)),
        "all_patch_size": ConfigRequirement(((2,),)),
        "cap_feat_dim": EqualsConfig("text_encoder", "hidden_size"),
        "in_channels": ConfigRequirement((16,)),
        "qk_norm": ConfigRequirement((True,)),
        # Set in Z-Image Omni, which takes images.
        "siglip_feat_dim": ConfigRequirement((None,)),
    },
    blocks=STACKS,
    rules=_RULES,
    original_keys=ORIGINAL_KEYS,
    lora_prefixes=("diffusion_model.", "transformer.", "lycoris_", ""),
)
