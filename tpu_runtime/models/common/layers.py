"""Functions that several denoisers share: heads and attention prologues, patches, modulation, overlapped halves."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ....sharding.rules import REPLICATED, Rule
from ...model_spec.upstream import Net

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

    from ....attention.prologue import Prologue
    from ...programs.sharded_ops import ShardedOps

    Pair = tuple[torch.Tensor, torch.Tensor]  # latents and text, two halves of a sequence, or cosines and sines
    ResidualNorm = Callable[..., Pair]  # `ShardedOps.residual_norm` of tokens that are spread over `tp`

# For the vision towers of the library transformers: heads and feed-forward columns are split over all chips.
VISION_RULES = (
    Rule("embeddings.*.weight", REPLICATED),
    Rule("encoder.layers.*.self_attn.out_proj.weight", (None, None, "all_heads")),
    Rule("encoder.layers.*.self_attn.*.weight", (None, "all_heads", None)),
    Rule("encoder.layers.*.mlp.fc1.weight", (None, "all_mlp", None)),
    Rule("encoder.layers.*.mlp.fc2.weight", (None, None, "all_mlp")),
)


def make_prologue(query_norm: Net, key_norm: Net, tables: Any = None) -> "Prologue":
    """Return what happens to queries and keys before attention: norms, then rotation.

    query_norm, key_norm: upstream's modules. tables: cosines and sines `[rows, ..., head_dim]` of all tokens, where
    rows is 1 or that of the queries; None: no rotation.
    """
    from ....attention.prologue import Prologue
    from ....kernels.prologue import Norm
    from ...programs import torch_bridge

    def norm(module: Net) -> Norm:
        weight, bias = torch_bridge.to_jax((module.weight, getattr(module, "bias", None)))
        return Norm(weight=weight, bias=bias, eps=module.eps)

    if tables is not None:
        tables = tuple(table.reshape(len(table), -1, table.shape[-1]) for table in torch_bridge.to_jax(tables))
    return Prologue(query_norm=norm(query_norm), key_norm=norm(key_norm), tables=tables)


def rotary_angles(theta: float, dim: int, positions: "np.ndarray") -> "np.ndarray":
    """Return the angles `[tokens, dim]`, float64, of rotary position embedding (https://arxiv.org/abs/2104.09864).

    Channels are rotated in pairs of neighbours, whose angles are equal.

    theta: base of the frequencies. dim: number of channels. positions: `[tokens]`.
    """
    import numpy as np

    frequencies = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    return np.repeat(np.outer(positions, frequencies), 2, axis=1)


def rotary_tables(theta: float, dims: "Sequence[int]", positions: "np.ndarray") -> "Pair":
    """Return cosines and sines `[1, tokens, head_dim]` of tokens at `positions` `[axes, tokens]`.

    theta: base of the frequencies. dims: a head's channels per axis, in their order. Angles are computed in float64,
    once per distinct position.
    """
    import jax.numpy as jnp
    import numpy as np

    from ...programs import torch_bridge

    tables: list[list[jax.Array]] = [[], []]
    for dim, axis_positions in zip(dims, positions, strict=True):
        numbers, index = np.unique(axis_positions, return_inverse=True)
        angles = rotary_angles(theta, dim, numbers)
        for table, function in zip(tables, (np.cos, np.sin), strict=True):
            table.append(jnp.asarray(function(angles), jnp.float32)[jnp.asarray(index, jnp.int32)])
    return torch_bridge.to_torch(tuple(jnp.concatenate(table, axis=1)[None] for table in tables))


def project_heads(
    run: "ShardedOps", attn: Net, x: "torch.Tensor", *projections: Any, **how: Any
) -> "tuple[torch.Tensor, ...]":
    """Project `x` `[rows, tokens, dim]` with each of `projections`: `[rows, tokens, heads, head_dim]` each.

    run: operations on the mesh. attn: upstream's module. how: keywords of `ShardedOps.products`.
    """
    return tuple(product.unflatten(2, (attn.heads, -1)) for product in run.products(x, *projections, **how))


def cut_patches(latents: "torch.Tensor", patch_size: tuple[int, int, int]) -> "torch.Tensor":
    """Patchify `latents` `[rows, channels, frames, height, width]` to `[rows, tokens, channels * pt * ph * pw]`.

    Tokens are ordered by frame, row and column; a token's features by channel, then by place in the patch.
    """
    pt, ph, pw = patch_size
    rows, channels, frames, height, width = latents.shape
    patches = latents.reshape(rows, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def join_patches(patches: "torch.Tensor", latents: "torch.Tensor", patch_size: tuple[int, int, int]) -> "torch.Tensor":
    """Undo `cut_patches`: `[rows, tokens, channels * pt * ph * pw]` to `[rows, channels, frames, height, width]`.

    latents: `[rows, channels, frames, height, width]` whose size the result has. patch_size: (frames, height, width).
    """
    sizes = [size // patch for size, patch in zip(latents.shape[2:], patch_size, strict=True)]
    cells = patches.reshape(len(patches), *sizes, -1, *patch_size)
    return cells.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def embed_patches(embedding: Net, latents: "torch.Tensor") -> "torch.Tensor":
    """Apply the patch `embedding`, a convolution, as one matrix product over patches: `[rows, tokens, dim]`.

    latents: `[rows, channels, frames, height, width]`. A convolution's output cannot be split by tokens; the patches
    can, and are 80 times smaller.
    """
    patches = cut_patches(latents, embedding.kernel_size)
    return patches.to(embedding.weight.dtype) @ embedding.weight.flatten(1).T + embedding.bias


def in_float32(forward: "Callable[..., torch.Tensor]") -> "Callable[..., torch.Tensor]":
    """Wrap a module's `forward`, `[...] -> [...]`, so that it multiplies in float32, also on a TPU in bfloat16."""
    import jax

    return jax.default_matmul_precision("highest")(forward)


class Modulation(NamedTuple):
    """Modulation of one update: its norm's scale and shift, and the gate. float32 `[rows, dim]` each."""

    scale: "torch.Tensor"
    shift: "torch.Tensor"
    gate: "torch.Tensor"


def make_modulation(shift: "torch.Tensor", scale: "torch.Tensor", gate: "torch.Tensor", norm: Net = None) -> Modulation:
    """Return the modulation of `shift`, `scale` and `gate` `[rows, dim]` of adaLN-Zero (https://arxiv.org/abs/2212.09748).

    norm: a module whose weight and bias are folded into scale and shift; None: a norm without them.
    """
    factor, shift = 1 + scale.float(), shift.float()
    if norm is not None:
        factor, shift = factor * norm.weight, factor * norm.bias + shift
    return Modulation(factor, shift, gate.float())


def pack_valid_tokens(
    parts: "tuple[jax.Array, ...]", lengths: "tuple[jax.Array, ...]"
) -> "tuple[jax.Array, jax.Array]":
    """Concatenate sequences so that the valid tokens of all come first, in order.

    parts: `[rows, size, dim]` each. lengths: valid tokens `[rows]` of each. Returns the joined tokens and the total
    lengths `[rows]`. Tokens after these are undefined.
    """
    import jax.numpy as jnp

    position = jnp.arange(sum(part.shape[1] for part in parts))[None, :]
    source = jnp.zeros_like(position)
    start, offset = jnp.zeros_like(lengths[0]), 0
    for part, length in zip(parts, lengths, strict=True):
        # A later sequence overrides all positions from its start.
        source = jnp.where(position >= start[:, None], offset + position - start[:, None], source)
        start, offset = start + length, offset + part.shape[1]
    joined = jnp.concatenate(parts, axis=1)
    source = jnp.clip(source, 0, joined.shape[1] - 1)
    return jnp.take_along_axis(joined, source[:, :, None], axis=1), start


class OverlappedHalves(NamedTuple):
    """A sequence in two halves, so that the exchange of one half overlaps the products of the other.

    This is intra-sequence overlap (https://arxiv.org/abs/2409.11155). It suits blocks whose updates are
    `x + gate * update(norm(x))`, with weights that stay split over the chips of `tp`. Each chip has some of the heads
    and feed-forward columns, so an update is a sum over chips; between updates each chip has some of the tokens (see
    `sharded_ops`). `start_overlap` begins a stack of blocks, `join` ends it. In a block an update is
    `apply_pending_update`, then the products that make its sums, then `add_update`.

    The first half has its last update added, and its next norm computed. The second half has only each chip's partial
    sums of its last update; they are exchanged during the first half's next products.
    """

    first: "torch.Tensor"  # [rows, tokens / 2, dim], spread over `tp`
    normed: "torch.Tensor"  # the norm of the first half, on every chip of `tp`
    second: "torch.Tensor"  # as the first half
    sums: "torch.Tensor"  # [tp, rows, tokens / 2, dim]


def halve_tables(run: "ShardedOps", tables: "Sequence[torch.Tensor]") -> "list[Pair]":
    """Split `tables`, cosines and sines `[1, tokens, head_dim]`, into those of each half."""
    return [*zip(*map(run.halves, tables), strict=True)]


def start_overlap(run: "ShardedOps", norm: "ResidualNorm", x: "torch.Tensor", after: Modulation) -> OverlappedHalves:
    """Start overlapping: split `x` `[rows, tokens, dim]` before its first update.

    run: operations on the mesh. norm: the residual norm. after: modulation of the first update.
    """
    first, second = map(run.spread, run.halves(x))
    _, normed = norm(first, None, None, after.scale, after.shift)
    return OverlappedHalves(first, normed, second, run.zero_partial_sums(second))


def apply_pending_update(
    run: "ShardedOps", norm: "ResidualNorm", x: OverlappedHalves, before: Modulation, now: Modulation
) -> "tuple[Pair, Pair]":
    """Add the second half's pending update. Returns both halves and their norms, `[rows, tokens / 2, dim]` each.

    run: operations on the mesh. norm: the residual norm. x: both halves. before: modulation of the pending update.
    now: modulation of the next update.
    """
    second, normed = norm(x.second, run.scatter(x.sums), before.gate, now.scale, now.shift)
    return (x.first, second), (x.normed, normed)


def add_update(
    run: "ShardedOps",
    norm: "ResidualNorm",
    halves: "Pair",
    sums: "list[torch.Tensor]",
    now: Modulation,
    after: Modulation,
) -> OverlappedHalves:
    """Add an update to the first half and norm it for the next one; the second half's update stays pending.

    run: operations on the mesh. norm: the residual norm. halves: `[rows, tokens / 2, dim]` each.
    sums: each chip's partial sums of both halves, `[tp, rows, tokens / 2, dim]`. now: modulation of this update.
    after: modulation of the next one.
    """
    first, normed = norm(halves[0], run.scatter(sums[0]), now.gate, after.scale, after.shift)
    return OverlappedHalves(first, normed, halves[1], sums[1])


def join_halves(run: "ShardedOps", x: OverlappedHalves, before: Modulation) -> "torch.Tensor":
    """End overlapping: add the pending update and return `[rows, padded tokens, dim]`.

    run: operations on the mesh. x: both halves. before: modulation of the pending update.
    """
    import torch

    return torch.cat([x.first, run.add_gated(x.second, run.scatter(x.sums), before.gate)], dim=1)
