"""What several denoisers share: heads and the way into attention, patches, modulation, a sequence in two halves."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ....sharding.rules import REPLICATED, Rule

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

    from ....attention.prologue import Prologue
    from ...programs.denoiser_run import DenoiserRun

    Pair = tuple[torch.Tensor, torch.Tensor]  # of latents and text, of halves of a sequence, or cosines and sines
    ResidualNorm = Callable[..., Pair]  # `DenoiserRun.residual_norm` of tokens that are spread over `tp`

# Of the towers of transformers that look at a picture: heads and feed-forward columns lie over all chips.
VISION_RULES = (
    Rule("embeddings.*.weight", REPLICATED),
    Rule("encoder.layers.*.self_attn.out_proj.weight", (None, None, "all_heads")),
    Rule("encoder.layers.*.self_attn.*.weight", (None, "all_heads", None)),
    Rule("encoder.layers.*.mlp.fc1.weight", (None, "all_mlp", None)),
    Rule("encoder.layers.*.mlp.fc2.weight", (None, None, "all_mlp")),
)


def prologue(query_norm: Any, key_norm: Any, tables: Any = None) -> "Prologue":
    """What upstream's norm modules and rotary `tables` do before attention. Tables are cosines and sines, `[rows, ...,
    head_dim]` of a row's tokens, of each row or, where there is one, of all.
    """
    from ....attention.prologue import Prologue
    from ....kernels.prologue import Norm
    from ...programs import torch_bridge

    def norm(module: Any) -> Norm:
        weight, bias = torch_bridge.to_jax((module.weight, getattr(module, "bias", None)))
        return Norm(weight=weight, bias=bias, eps=module.eps)

    if tables is not None:
        tables = tuple(table.reshape(len(table), -1, table.shape[-1]) for table in torch_bridge.to_jax(tables))
    return Prologue(query_norm=norm(query_norm), key_norm=norm(key_norm), tables=tables)


def rotary_angles(theta: float, dim: int, places: "np.ndarray") -> "np.ndarray":
    """`[places, dim]` in float64: how far each of a head's `dim` lanes is turned, those of a pair alike."""
    import numpy as np

    frequencies = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    return np.repeat(np.outer(places, frequencies), 2, axis=1)


def rotary_tables(theta: float, dims: "Sequence[int]", places: "np.ndarray") -> "Pair":
    """Cosines and sines `[1, tokens, head_dim]` of tokens at `places` `[axes, tokens]`, of which an axis has so many of
    a head's lanes as `dims` say. Angles are in float64; a table has a row for each number there is.
    """
    import jax.numpy as jnp
    import numpy as np

    from ...programs import torch_bridge

    tables: list[list[jax.Array]] = [[], []]
    for dim, at in zip(dims, places, strict=True):
        numbers, index = np.unique(at, return_inverse=True)
        angles = rotary_angles(theta, dim, numbers)
        for table, function in zip(tables, (np.cos, np.sin), strict=True):
            table.append(jnp.asarray(function(angles), jnp.float32)[jnp.asarray(index, jnp.int32)])
    return torch_bridge.to_torch(tuple(jnp.concatenate(table, axis=1)[None] for table in tables))


def heads(
    run: "DenoiserRun", attn: Any, x: "torch.Tensor", *projections: Any, **how: Any
) -> "tuple[torch.Tensor, ...]":
    """What each of `projections` makes of `[rows, tokens, dim]`, head by head: `[rows, tokens, heads, head_dim]`. `how`
    is that of `DenoiserRun.products`.
    """
    return tuple(each.unflatten(2, (attn.heads, -1)) for each in run.products(x, *projections, **how))


def cut_patches(latents: "torch.Tensor", patch_size: tuple[int, int, int]) -> "torch.Tensor":
    """`[rows, channels, frames, height, width]` to `[rows, tokens, channels * patch_size]`."""
    pt, ph, pw = patch_size
    rows, channels, frames, height, width = latents.shape
    patches = latents.reshape(rows, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def join_patches(patches: "torch.Tensor", latents: "torch.Tensor", patch_size: tuple[int, int, int]) -> "torch.Tensor":
    """The other way, to frames of the number and size of `latents`."""
    sizes = [size // part for size, part in zip(latents.shape[2:], patch_size, strict=True)]
    parts = patches.reshape(len(patches), *sizes, -1, *patch_size)
    return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def embed_patches(embedding: Any, latents: "torch.Tensor") -> "torch.Tensor":
    """The patch convolution as one matrix product over patches: `[rows, tokens, dim]`.

    A convolution's output cannot be split by tokens; the patches can, and are 80 times smaller.
    """
    patches = cut_patches(latents, embedding.kernel_size)
    return patches.to(embedding.weight.dtype) @ embedding.weight.flatten(1).T + embedding.bias


def unrounded(forward: "Callable[..., torch.Tensor]") -> "Callable[..., torch.Tensor]":
    """`forward` of a module that stays in float32 when the rest is bfloat16, as which a TPU would multiply it too."""
    import jax

    return jax.default_matmul_precision("highest")(forward)


class Modulation(NamedTuple):
    """Of an update: what its norm is multiplied by, what is added to the norm, and the gate. float32, `[rows, dim]`."""

    scale: "torch.Tensor"
    shift: "torch.Tensor"
    gate: "torch.Tensor"


def modulated(shift: "torch.Tensor", scale: "torch.Tensor", gate: "torch.Tensor", norm: Any = None) -> Modulation:
    """What a norm is multiplied by and what is added to it, with its own weight and bias if it has them; the gate."""
    factor, shift = 1 + scale.float(), shift.float()
    if norm is not None:
        factor, shift = factor * norm.weight, factor * norm.bias + shift
    return Modulation(factor, shift, gate.float())


def valid_first(parts: "tuple[jax.Array, ...]", lengths: "tuple[jax.Array, ...]") -> "tuple[jax.Array, jax.Array]":
    """Joins sequences `[rows, size, dim]` so that the first `lengths` tokens of each come first, in order.

    What follows them is not defined. Gives the total lengths too, `[rows]`.
    """
    import jax.numpy as jnp

    position = jnp.arange(sum(part.shape[1] for part in parts))[None, :]
    source = jnp.zeros_like(position)
    start, offset = jnp.zeros_like(lengths[0]), 0
    for part, length in zip(parts, lengths, strict=True):
        # The later part overrides from where it starts on.
        source = jnp.where(position >= start[:, None], offset + position - start[:, None], source)
        start, offset = start + length, offset + part.shape[1]
    joined = jnp.concatenate(parts, axis=1)
    source = jnp.clip(source, 0, joined.shape[1] - 1)
    return jnp.take_along_axis(joined, source[:, :, None], axis=1), start


class Staggered(NamedTuple):
    """A sequence in two halves, so that what chips exchange of one half runs next to products of the other:
    intra-sequence overlap, https://arxiv.org/abs/2409.11155.

    It is for blocks of updates `x + gate * update(norm(x))` whose weights stay split over the chips of `tp`. Each chip
    has some of the heads and of the feed-forward's columns, so an update is a sum over chips; between updates each has
    some of the tokens (see `token_layout`). `stagger` begins a stack of blocks, `join` ends it. In a block an update is
    `catch_up`, then the products that make its sums, then `add_update`.

    The last update is added to the first half, whose norm for the next is there. Of the second half's last update there
    are only the sums of each chip, which are exchanged next to the first half's next products.
    """

    first: "torch.Tensor"  # [rows, tokens / 2, dim], spread over `tp`
    normed: "torch.Tensor"  # the norm of the first half, on every chip of `tp`
    second: "torch.Tensor"  # as the first half
    sums: "torch.Tensor"  # [tp, rows, tokens / 2, dim]


def halve(run: "DenoiserRun", tables: "Sequence[torch.Tensor]") -> "list[Pair]":
    """Cosines and sines `[1, tokens, head_dim]` of each half."""
    return [*zip(*map(run.halves, tables), strict=True)]


def stagger(run: "DenoiserRun", norm: "ResidualNorm", x: "torch.Tensor", after: Modulation) -> Staggered:
    """`[rows, tokens, dim]` before its first update, whose modulation is `after`: there are no sums yet."""
    first, second = map(run.spread, run.halves(x))
    _, normed = norm(first, None, None, after.scale, after.shift)
    return Staggered(first, normed, second, run.no_sums(second))


def catch_up(
    run: "DenoiserRun", norm: "ResidualNorm", x: Staggered, before: Modulation, now: Modulation
) -> "tuple[Pair, Pair]":
    """Adds the update `before` to the second half. Returns both halves, and both norms for the update `now`."""
    second, normed = norm(x.second, run.scatter(x.sums), before.gate, now.scale, now.shift)
    return (x.first, second), (x.normed, normed)


def add_update(
    run: "DenoiserRun",
    norm: "ResidualNorm",
    halves: "Pair",
    sums: "list[torch.Tensor]",
    now: Modulation,
    after: Modulation,
) -> Staggered:
    """Adds the update `now` to the first half, and norms it for the one after. `sums` are those of both halves."""
    first, normed = norm(halves[0], run.scatter(sums[0]), now.gate, after.scale, after.shift)
    return Staggered(first, normed, halves[1], sums[1])


def join(run: "DenoiserRun", x: Staggered, before: Modulation) -> "torch.Tensor":
    """`[rows, padded tokens, dim]`: the last update, whose modulation is `before`, is added to the second half too."""
    import torch

    return torch.cat([x.first, run.add_gated(x.second, run.scatter(x.sums), before.gate)], dim=1)
