"""Attention on one chip, to keys that it has: by the kernel with the policy's configuration, or by the reference."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ..kernels import attention, attention_reference, registry
from ..kernels.attention_config import AttentionConfig, Scores, choose_config, kernel_name
from ..kernels.attention_reference import Int8Keys, Keys
from ..kernels.dispatch import KernelUnsupported, should_use
from ..kernels.hardware import LANES, round_up
from ..kernels.number_formats import EXACT, SCORES
from .policy import AttentionPolicy
from .prologue import HeadLayout

# (q, keys, log_sums=...) -> (out, log-sum-exp[batch, heads, q_seq] or None)
LocalAttention = Callable[..., tuple[Array, Array | None]]


def choose_attention(policy: AttentionPolicy, mesh: Mesh | None, head_dim: int) -> tuple[LocalAttention, HeadLayout]:
    """Return how each chip of `mesh` attends, and how it prepares its arrays.

    policy: choice of kernel and precision. mesh: None: the default device. head_dim: lanes of a head.
    """
    device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
    interpret = device.platform != "tpu"
    kernels = policy.uses_kernels(device.platform)
    by_kernels = kernels and should_use(KernelUnsupported(kernel=registry.ATTENTION))
    layout = HeadLayout(
        head_dim=head_dim, kernel=kernels, interpret=interpret and kernels,
        scores_of=functools.partial(select_scores, policy, device_kind=device.device_kind if by_kernels else None),
    )  # fmt: skip
    if not by_kernels:
        return functools.partial(attend_with_reference, head_dim=head_dim, policy=policy), layout
    attend = functools.partial(
        attend_with_kernel, head_dim=head_dim, policy=policy, device_kind=device.device_kind, interpret=interpret
    )
    return attend, layout


def select_scores(policy: AttentionPolicy, num_keys: int, device_kind: str | None) -> Scores:
    """Return how `policy` computes scores of `num_keys` keys: on chips `device_kind`, or by the reference if None.

    Scores are exact where the kernel of their format is switched off; the fallback has been logged.
    """
    scores = policy.choose_scores(num_keys, device_kind)
    return EXACT if device_kind is not None and KernelUnsupported(kernel=kernel_name(scores)) else scores


def attend_with_reference(
    q: Float[Array, "batch q_seq lanes"],
    keys: Sequence[Keys],
    *,
    head_dim: int,
    log_sums: bool,
    policy: AttentionPolicy,
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Return the attention of `q` and, if `log_sums`, its log-sum-exp, as `attention_reference.flat_attention` does.

    keys: arrays of keys and values. head_dim: lanes of a head. policy: decides the format of scores.
    """
    scores = "int8" if _are_quantized(keys) else policy.choose_scores(sum(part.rows for part in keys))
    if scores == EXACT:
        return attention_reference.flat_attention(q, keys, head_dim=head_dim, log_sums=log_sums)
    rounded, keys = SCORES[scores].fake_quantize(q, keys, head_dim, head_dim**-0.5)
    out, log_sum = attention_reference.flat_attention(rounded, keys, head_dim=head_dim, log_sums=log_sums)
    return out.astype(q.dtype), log_sum


def attend_with_kernel(
    q: Float[Array, "batch q_seq lanes"],
    keys: Sequence[Keys],
    *,
    head_dim: int,
    log_sums: bool,
    policy: AttentionPolicy,
    device_kind: str,
    interpret: bool = False,
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Return the same as `attend_with_reference`, by the kernel. Heads of an unsupported size are padded with zeros.

    q, keys, head_dim, log_sums, policy: as for `attend_with_reference`.
    device_kind: JAX's name of the chip. interpret: whether to run in Pallas' interpret mode.
    """
    unpadded, heads = (q, keys), q.shape[2] // head_dim
    padded = LANES // 2 if head_dim <= LANES // 2 and heads % 2 == 0 else round_up(head_dim, LANES)
    if padded != head_dim:
        resize = functools.partial(_resize, head_dim=head_dim, wanted=padded)
        q, keys = resize(q), [replace(part, **_resize_fields(part, resize)) for part in keys]
    rows = [part.rows for part in keys]
    scores = "int8" if _are_quantized(keys) else select_scores(policy, sum(rows), device_kind)
    form = _form(policy, device_kind, q.shape[1], rows, scores, heads=heads, head_dim=padded, itemsize=q.dtype.itemsize)
    if keys[0].blocks is not None and not should_use(attention.check_support(heads, padded, keys[0].blocks, form)):
        return attend_with_reference(*unpadded, head_dim=head_dim, log_sums=log_sums, policy=policy)
    out, log_sum = attention.flat_attention(
        q, keys, head_dim=padded, form=form, log_sums=log_sums, scale=head_dim**-0.5, interpret=interpret
    )
    return out if padded == head_dim else _resize(out, padded, head_dim), log_sum


def all_keys_fit_vmem(
    policy: AttentionPolicy, device_kind: str, rows: int, *, heads: int, head_dim: int, itemsize: int
) -> bool:
    """Return whether all keys fit in a TPU's VMEM at once, as block sparsity requires.

    policy, device_kind: as for `by_kernel`. rows: number of keys. heads, head_dim: of one chip. itemsize: bytes of an
      element.
    """
    size = {"heads": heads, "head_dim": round_up(head_dim, LANES // 2), "itemsize": itemsize}
    return _form(policy, device_kind, rows, [rows], select_scores(policy, rows, device_kind), **size).block_kv is None


def _are_quantized(keys: Sequence[Keys]) -> bool:
    """Return whether the keys are quantized already."""
    return isinstance(keys[0].keys, Int8Keys)


def _form(
    policy: AttentionPolicy, device_kind: str, q_rows: int, kv_rows: Sequence[int], scores: Scores, **size: int
) -> AttentionConfig:
    """Return the policy's form, or the fastest for a call of this size (see `attention_form.fastest`)."""
    return policy.form or choose_config(
        device_kind, policy.maximum(scores), scores=scores, q_seq=q_rows, kv_rows=kv_rows, **size
    )


def _resize_fields(part: Keys, resize: Callable[[Array], Array]) -> dict[str, Array | Int8Keys]:
    """Return the fields of `part` that change if `resize` is applied to its heads."""
    keys = part.keys
    if not isinstance(keys, Int8Keys):
        return {"keys": resize(keys), "values": resize(part.values)}
    mean = resize(keys.mean[:, None])[:, 0]
    return {"keys": replace(keys, numbers=resize(keys.numbers), mean=mean), "values": resize(part.values)}


def _resize(x: Array, head_dim: int, wanted: int) -> Array:
    """Return `x` with heads of `wanted` lanes instead of `head_dim`: zeros are added, or lanes are cut off."""
    heads = x.reshape(*x.shape[:2], -1, head_dim)[..., :wanted]
    return jnp.pad(heads, ((0, 0),) * 3 + ((0, max(0, wanted - head_dim)),)).reshape(*x.shape[:2], -1)
