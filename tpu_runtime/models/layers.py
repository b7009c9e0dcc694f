"""What several denoisers share: the way into attention, patches, attention of latents and text that stay apart."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...sharding.rules import REPLICATED, Rule

if TYPE_CHECKING:
    import jax
    import torch

    from ...attention.prologue import Prologue
    from ..programs.denoiser_run import DenoiserRun

    Fuse = Callable[..., tuple[torch.Tensor, torch.Tensor]]
    Pair = tuple[torch.Tensor, torch.Tensor]  # of the halves of a sequence, or cosines and sines
    ResidualNorm = Callable[..., Pair]  # `DenoiserRun.residual_norm` of tokens that are spread over `tp`

# Weights of one layer, or of scanned blocks, that are split over `fsdp` and gathered for use: layout and fallback.
GATHERED = (("fsdp", None), ((None, "fsdp"),))
BLOCK_GATHERED = ((None, "fsdp", None), ((None, None, "fsdp"),))

# Of the towers of transformers that look at a picture: heads and feed-forward columns lie over all chips.
VISION_RULES = (
    Rule("embeddings.*.weight", REPLICATED),
    Rule("encoder.layers.*.self_attn.out_proj.weight", (None, None, "all_heads")),
    Rule("encoder.layers.*.self_attn.*.weight", (None, "all_heads", None)),
    Rule("encoder.layers.*.mlp.fc1.weight", (None, "all_mlp", None)),
    Rule("encoder.layers.*.mlp.fc2.weight", (None, None, "all_mlp")),
)


def prologue(query_norm: Any, key_norm: Any, tables: Any = None) -> "Prologue":
    """What upstream's norm modules and rotary `tables` (cosines, sines: `[..., head_dim]`) do before attention."""
    from ...attention.prologue import Prologue
    from ...kernels.prologue import Norm
    from ..programs import torch_bridge

    def norm(module: Any) -> Norm:
        weight, bias = torch_bridge.to_jax((module.weight, getattr(module, "bias", None)))
        return Norm(weight=weight, bias=bias, eps=module.eps)

    if tables is not None:
        tables = tuple(table.reshape(-1, table.shape[-1]) for table in torch_bridge.to_jax(tables))
    return Prologue(query_norm=norm(query_norm), key_norm=norm(key_norm), tables=tables)


def embed_patches(embedding: Any, latents: "torch.Tensor") -> "torch.Tensor":
    """The patch convolution as one matrix product over patches: `[rows, tokens, dim]`.

    A convolution's output cannot be split by tokens; the patches can, and are 80 times smaller.
    """
    pt, ph, pw = embedding.kernel_size
    rows, channels, frames, height, width = latents.shape
    patches = latents.reshape(rows, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    patches = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
    return patches.to(embedding.weight.dtype) @ embedding.weight.flatten(1).T + embedding.bias


def unrounded(forward: "Callable[..., torch.Tensor]") -> "Callable[..., torch.Tensor]":
    """`forward` of a module that stays in float32 when the rest is bfloat16, as which a TPU would multiply it too."""
    import jax

    return jax.default_matmul_precision("highest")(forward)


def enter_joint(sequence: Any, tables: str, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of blocks that keep latents and text apart: latents and the rotary `tables` split by tokens."""
    rotary = tuple(
        sequence.constrain(sequence.pad_tokens(table[None, :, None]), None, "sp", None, None)
        for table in values[tables]
    )
    return {
        **values,
        "hidden_states": sequence.shard_tokens(values["hidden_states"]),
        "encoder_hidden_states": sequence.constrain(values["encoder_hidden_states"], "dp", None, None),
        tables: rotary,
    }


def fused_norms(sequence: Any, eps: float, spread: bool = False) -> "tuple[Fuse, Fuse]":
    """`sequence.residual_norm` for torch: of latents, and of a replicated text."""
    import functools

    from ..programs import torch_bridge

    fuses = (
        functools.partial(sequence.residual_norm, eps=eps, placement=placement, spread=spread)
        for placement in ("sharded", "replicated")
    )
    latent, text = (functools.partial(torch_bridge.call_jax, fuse) for fuse in fuses)
    return latent, text


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


def add_gated(hidden: "torch.Tensor", update: "torch.Tensor", gate: "torch.Tensor") -> "torch.Tensor":
    """`hidden + gate * update` in float32; the gate is `[..., dim]` for each row."""
    gate = gate.reshape(-1, 1, gate.shape[-1])
    return (hidden.float() + gate * update.float()).type_as(hidden)


def run_joint_block(
    fuses: "tuple[Fuse, Fuse]",
    attend: "Callable[..., tuple[torch.Tensor, torch.Tensor]]",
    hidden: "tuple[torch.Tensor, torch.Tensor]",
    modulations: "Sequence[tuple[Modulation, Modulation]]",
    feed_forwards: tuple[Any, Any],
) -> "tuple[torch.Tensor, torch.Tensor]":
    """A block of latents and text: joint attention, then a feed-forward each, both in gated residuals of modulated
    norms. Of each stream its norm (see `fused_norms`), tokens, modulation of attention and of feed-forward, and that.
    """
    first = [fuse(x, None, None, *into[:2])[1] for fuse, x, (into, _) in zip(fuses, hidden, modulations, strict=True)]
    left = []
    for fuse, x, update, (before, within), feed_forward in zip(
        fuses, hidden, attend(*first), modulations, feed_forwards, strict=True
    ):
        x, normed = fuse(x, update, before[2], *within[:2])
        left.append(add_gated(x, feed_forward(normed), within[2]))
    return left[0], left[1]


class JointProcessor:
    """Attention of latents and text that stay apart, each with projections and norms of its own, in JAX.

    As `HunyuanVideo15AttnProcessor2_0`, whose mask is the text's length here and whose text has no positions.
    """

    def __init__(self, attend: "Callable[..., tuple[jax.Array, jax.Array]]") -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: "torch.Tensor",
        encoder_hidden_states: "torch.Tensor",
        attention_mask: "torch.Tensor | None",
        image_rotary_emb: tuple,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """`image_rotary_emb`: cosines and sines for the latents."""
        import functools

        from ..programs import torch_bridge

        def heads(source: "torch.Tensor", projections: tuple) -> "tuple[Any, ...]":
            return tuple(project(source).unflatten(2, (attn.heads, -1)) for project in projections)

        text_projections, text_norms, text_out = self.of_text(attn)
        prologues = prologue(attn.norm_q, attn.norm_k, image_rotary_emb), prologue(text_norms[0], text_norms[1])
        latent = heads(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        text = heads(encoder_hidden_states, text_projections)
        attend = functools.partial(self.attend, prologues=prologues)
        outputs = torch_bridge.call_jax(attend, latent, text, attention_mask)
        return attn.to_out[0](outputs[0].flatten(2)), text_out(outputs[1].flatten(2))

    def of_text(self, attn: Any) -> tuple[tuple, tuple, Any]:
        """The text's projections and norms, and what its output goes through."""
        return (
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
            attn.to_add_out,
        )


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
