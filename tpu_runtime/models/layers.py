"""What several denoisers share: the way into attention, patches, attention of latents and text that stay apart."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...sharding.rules import REPLICATED, Rule

if TYPE_CHECKING:
    import jax
    import torch

    from ...attention.prologue import Prologue

    Fuse = Callable[..., tuple[torch.Tensor, torch.Tensor]]
    Modulation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

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


def project_by(product: "Callable[[jax.Array, jax.Array], jax.Array]", *linears: Any) -> None:
    """Linear layers without bias compute `product(weight, hidden)`, with the weight as `[in, out]`."""
    import functools

    from ..programs import torch_bridge

    def forward(linear: Any, hidden: "torch.Tensor") -> "torch.Tensor":
        return torch_bridge.call_jax(product, linear.weight.T, hidden)

    for linear in linears:
        linear.forward = functools.partial(forward, linear)


class Staggered:
    """Gated residuals of modulated norms over two halves of a sequence: what chips exchange of one half runs beside
    products of the other.

    Between them there are both residual streams, the first half's norm, and the second's update before its sums over
    chips: these are exchanged beside the next products for the first half.
    """

    def __init__(self, sequence: Any, eps: float) -> None:
        import functools

        from ..programs import torch_bridge

        self.sequence = sequence
        self.fuse, self.fuse_text = fused_norms(sequence, eps, spread=True)
        of = sequence.halves, sequence.spread_tokens, sequence.no_sums, sequence.partial_sums, sequence.scatter
        self.halves, self.spread, self.no_sums, self.partial_sums, self.scatter = (
            functools.partial(torch_bridge.call_jax, function) for function in of
        )

    def surround(self, scan: Any, vector: str, modulations: "Callable[[torch.Tensor], Sequence[Modulation]]") -> Any:
        """`scan` with its argument `hidden_states` staggered behind `enter`, and joined again in front of `leave`.

        `modulations` are those of a block's updates, made of its argument `vector`, which is the same for all.
        """
        from dataclasses import replace

        from ..programs import torch_bridge

        def start(hidden: "torch.Tensor", vector: "torch.Tensor") -> "dict[str, torch.Tensor]":
            first, second = map(self.spread, self.halves(hidden))
            _, normed = self.fuse(first, None, None, *modulations(vector)[0][:2])
            return {"first": first, "normed": normed, "second": second, "sums": self.no_sums(second)}

        def join(state: "dict[str, torch.Tensor]", vector: "torch.Tensor") -> "torch.Tensor":
            import torch

            second = add_gated(state["second"], self.scatter(state["sums"]), modulations(vector)[-1][2])
            return torch.cat([state["first"], second], dim=1)

        def enter(values: dict[str, Any]) -> dict[str, Any]:
            values = scan.enter(values)
            return {**values, "hidden_states": torch_bridge.call(start, values["hidden_states"], values[vector])}

        def leave(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
            whole = self.sequence.constrain(before[vector], "dp")
            return scan.leave(
                {**after, "hidden_states": torch_bridge.call(join, after["hidden_states"], whole)}, before
            )

        return replace(scan, enter=enter, leave=leave)

    def run(
        self,
        state: "dict[str, torch.Tensor]",
        modulations: "tuple[Modulation, Modulation, Modulation]",
        update: Callable[..., Any],
    ) -> "dict[str, torch.Tensor]":
        """`update` gives, for the norms of both halves, the partial sums of both updates (see `token_layout`).

        `modulations` of the update before, of this one and of the next.
        """
        (_, _, gate_before), (scale, shift, gate), following = modulations
        second, normed = self.fuse(state["second"], self.scatter(state["sums"]), gate_before, scale, shift)
        first_sums, sums = update(state["normed"], normed)
        first, normed = self.fuse(state["first"], self.scatter(first_sums), gate, *following[:2])
        return {"first": first, "normed": normed, "second": second, "sums": sums}


def modulated(shift: "torch.Tensor", scale: "torch.Tensor", gate: "torch.Tensor", norm: Any = None) -> "Modulation":
    """What a norm is multiplied by and what is added to it, with its own weight and bias if it has them; the gate."""
    factor, shift = 1 + scale.float(), shift.float()
    if norm is not None:
        factor, shift = factor * norm.weight, factor * norm.bias + shift
    return factor, shift, gate.float()


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


def heads(attn: Any, hidden: "torch.Tensor", weights: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, ...]":
    """Projections `[batch, tokens, heads, head_dim]`, without bias."""
    from torch.nn.functional import linear

    return tuple(linear(hidden, weight).unflatten(2, (-1, attn.head_dim)) for weight in weights)


def attended(attend: Callable[..., Any], streams: Any, norms: Any, tables: Any) -> "list[torch.Tensor]":
    """`attend` on `heads` of several streams, which have norms (of queries, of keys) and rotary tables each."""
    import functools

    from ..programs import torch_bridge

    prologues = [prologue(query, key, each) for (query, key), each in zip(norms, tables, strict=True)]
    outs = torch_bridge.call_jax(functools.partial(attend, prologues=prologues), *streams)
    return [out.flatten(2) for out in outs]


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
