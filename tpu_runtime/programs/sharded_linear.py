"""Products of tokens and weights on the mesh: quantized weights, and sums that stay split over the chips of `tp`."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ...attention.policy import AttentionPolicy
from ...kernels.linear_int8 import Activation, GatedResidual, Int8Tokens, Int8Weight, rotation_block
from ...kernels.number_formats import BY_DTYPE


def quantized_linear(
    mesh: Mesh,
    policy: AttentionPolicy,
    tokens: P,
    weights: Sequence[Int8Weight],
    *parts: Float[Array, "batch tokens _"] | Int8Tokens,
    activation: Activation | None = None,
    turned: bool = False,
    split: Literal["outs", "ins"] | None = None,
    layer: Int[Array, ""] | None = None,
    onto: GatedResidual | None = None,
) -> list[Array]:
    """Return the lanes of all `parts` times each of `weights`, `[batch, tokens, outs]`, in the weights' format.

    mesh, policy: of the program. tokens: sharding of `[batch, tokens, dim]`.
    parts: `[batch, tokens, lanes]` each. activation, turned, layer, onto: see `linear_int8`.
    split: dimension of the weights that is split over `tp`. "outs": results are split, too. "ins": partial sums,
      `[tp, batch, tokens, outs]`, see `partial_sums`. None: not split.
    """
    platform = mesh.devices.flat[0].platform
    run = functools.partial(
        BY_DTYPE[weights[0].numbers.dtype].multiply,
        block=rotation_block(*(part.shape[-1] for part in parts), chips=mesh.shape["tp"]),
        activation=activation, turned=turned, kernel=policy.uses_kernels(platform),
        interpret=platform != "tpu",
    )  # fmt: skip
    outs, ins = ("tp" if split == dim else None for dim in ("outs", "ins"))
    matrix = P(*[None] * (layer is not None), *((ins, outs) if turned else (outs, ins)))
    specs = [Int8Weight(matrix, P(outs), None if weight.bias is None else P(outs)) for weight in weights]
    results = P(*tokens[:2], outs) if ins is None else P("tp", *tokens)

    def products(
        weights: Sequence[Int8Weight], parts: Sequence[Any], layer: Array | None, onto: GatedResidual | None
    ) -> list[Array]:
        results = run(parts, weights, layer=layer, onto=onto)
        return results if ins is None else [result[None] for result in results]

    assert onto is None or split is None
    added = None if onto is None else GatedResidual(tokens, P("dp" if len(onto.gate) > 1 else None, None))
    in_specs = specs, (P(*tokens[:2], ins),) * len(parts), None if layer is None else P(), added
    mapped = jax.shard_map(products, mesh=mesh, in_specs=in_specs, out_specs=results, check_vma=False)
    return mapped(list(weights), parts, layer, onto)


def partial_sums(
    mesh: Mesh, tokens: P, weight: Float[Array, "lanes dim"], *parts: Float[Array, "batch tokens _"]
) -> Float[Array, "tp batch tokens dim"]:
    """Return the concatenated lanes of all `parts` times `weight`, not summed over `tp`: one addend per chip.

    Each chip multiplies its own lanes by its rows of the weight. tokens: sharding of `[batch, tokens, dim]` on `mesh`.
    """

    def product(weight: Array, parts: tuple[Array, ...]) -> Array:
        return (jnp.concatenate(parts, axis=-1) @ weight)[None]

    specs, out_specs = (P("tp", None), (P(*tokens[:2], "tp"),) * len(parts)), P("tp", *tokens)
    mapped = jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return mapped(weight, parts)
