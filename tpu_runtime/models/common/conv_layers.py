"""Layers of autoencoders for images that are split over chips, in forms that move little data on a TPU.

Dimensions are `[1, channels, frames, height, width]`; an image has no frames.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from ...model_spec.upstream import Net

if TYPE_CHECKING:
    import jax
    import torch

# Padding around an image: zeros, or its outermost pixels.
Edges = Literal["zero", "replicate"]
# The most bytes of float32 attention scores that exist at once, summed over all chips.
SCORES_BYTES = 2**28


def apply_convolution(
    conv: Net,
    input: "torch.Tensor",
    edges: Edges = "zero",
    doubled: bool = False,
    halved: bool = False,
    past: "Sequence[torch.Tensor]" = (),
    past_at: int = 0,
    kernel: bool = False,
    norm: Net = None,
    onto: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """Apply an upstream convolution to a video or image, with our padding instead of upstream's.

    conv: the module, or an object with its `weight` and `bias`. input: `[1, channels, (frames,) height, width]`.
    edges: padding of rows and columns, which keeps height and width. Frames are not padded.
    doubled: repeat each pixel as two rows and two columns first. halved: stride 2, with zero padding after the last row
        and column only.
    past, past_at: frames `[1, channels, 1, height, width]` inserted before frame `past_at`.
    kernel: use our kernel where it supports the shape. norm: an upstream group norm, or an RMS norm over channels; it
        is applied with SiLU to all frames before the convolution. onto: added to the result, of its shape.
    """
    from ...programs import torch_bridge

    gain = shift = None
    if hasattr(norm, "num_groups"):
        affine = partial(group_affine, groups=norm.num_groups, eps=norm.eps)
        gain, shift = torch_bridge.call_jax(affine, input, norm.weight, norm.bias)
    elif norm is not None:
        gain = norm.gamma.flatten() * norm.scale
    weight = conv.weight if conv.weight.ndim == 5 else conv.weight[:, :, None]
    how = partial(convolution, edges=edges, doubled=doubled, halved=halved, past_at=past_at, kernel=kernel)
    if input.ndim == 5:
        return torch_bridge.call_jax(how, input, weight, conv.bias, tuple(past), gain, shift, onto)
    onto = None if onto is None else onto[:, :, None]
    return torch_bridge.call_jax(how, input[:, :, None], weight, conv.bias, (), gain, shift, onto)[:, :, 0]


def order_computation(*values: "torch.Tensor") -> "list[torch.Tensor]":
    """Return `values` `[...]` unchanged, but compute everything that uses them only after all of them."""
    import jax

    from ...programs import torch_bridge

    return torch_bridge.call_jax(lambda *all: jax.lax.optimization_barrier(list(all)), *values)


def apply_group_norm(norm: Net, input: "torch.Tensor") -> "torch.Tensor":
    """Apply an upstream group norm to `input` `[1, channels, ..., height, width]`."""
    from ...programs import torch_bridge

    return torch_bridge.call_jax(
        partial(group_norm, groups=norm.num_groups, eps=norm.eps), input, norm.weight, norm.bias
    )


def convolution(
    x: "jax.Array",
    weight: "jax.Array",
    bias: "jax.Array | None",
    past: "tuple[jax.Array, ...]" = (),
    gain: "jax.Array | None" = None,
    shift: "jax.Array | None" = None,
    onto: "jax.Array | None" = None,
    *,
    edges: Edges = "zero",
    doubled: bool = False,
    halved: bool = False,
    past_at: int = 0,
    kernel: bool = False,
) -> "jax.Array":
    """Convolve `x` with `weight` `[out, in, time, rows, columns]`: stride 1, odd rows and columns.

    x: `[1, in, frames, height, width]`. bias: `[out]`. past: frames `[1, in, 1, height, width]` inserted before frame
        `past_at`. gain, shift: `[in]`, of the norm that is applied with SiLU first; gain None: no norm, shift None: RMS
        norm.
    onto: added to the result. edges, doubled, halved, kernel: as in `apply_convolution`.

    A TPU needs a batch of at least 8, but a video is a batch of 1: XLA splits its width in 8 and moves every pixel
    twice. So columns are the batch here, and the columns that a kernel spans are shifted copies, concatenated as
    channels. The sums are the same. Where width is split over chips, only the outer columns move.

    With `kernel` our own kernel computes it, if it supports the shape (see `kernels.convolution`); a pointwise
    convolution is a matrix product.
    """
    import jax
    import jax.numpy as jnp

    from ....kernels import convolution as ours
    from ....kernels import dispatch

    is_product = kernel and max(weight.shape[2:]) == 1
    if kernel and not is_product and dispatch.should_use(ours.check_support(weight)):
        return ours.convolution(
            x, weight, bias, repeats=edges == "replicate", gain=gain, shift=shift, onto=onto, doubled=doubled,
            halved=halved, past=past, past_at=past_at,
        )  # fmt: skip
    x = ours.join_past(x, past, past_at)
    if gain is not None:
        x = ours.norm_silu(x, gain, shift)
    if doubled:
        x = repeat_to_size(x, size=(x.shape[2], 2 * x.shape[3], 2 * x.shape[4]))

    def add_residual(out: "jax.Array") -> "jax.Array":
        out = out if bias is None else out + bias[:, None, None, None]
        return out if onto is None else out + onto

    if is_product:
        return add_residual(jnp.einsum("oi,bi...->bo...", weight[:, :, 0, 0, 0], x))
    rows, columns = weight.shape[3:]
    assert len(x) == 1 and rows % 2 == columns % 2 == 1
    if halved:
        assert rows == columns == 3 and edges == "zero"
        return add_residual(jax.lax.conv_general_dilated(x, weight, (1, 2, 2), [(0, 0), (0, 1), (0, 1)]))
    above, reach = rows // 2, columns // 2
    if edges == "replicate" and above:
        # Pad before shifting columns: with padding of the stacked copies the convolution takes twice as long.
        x, above = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (above, above), (0, 0)), mode="edge"), 0
    shifted = [_shift(x[0], -by, edges) for by in range(-reach, reach + 1)]
    stacked = jnp.concatenate(shifted, axis=0)
    # [out, columns * in, time, rows], in the order of `shifted`.
    stacked_weight = jnp.moveaxis(weight, 4, 1).reshape(len(weight), -1, *weight.shape[2:4])
    out = jax.lax.conv_general_dilated(
        stacked, stacked_weight, (1, 1), [(0, 0), (above, above)], dimension_numbers=("CDHN", "OIDH", "CDHN")
    )
    return add_residual(out[None])


def _shift(x: "jax.Array", by: int, edges: Edges) -> "jax.Array":
    """Shift the columns of `x` `[..., width]` right by `by`, which is -1, 0 or 1, and pad as `edges` says."""
    import jax
    import jax.numpy as jnp

    if not by:
        return x
    assert abs(by) == 1
    moved = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(by, -by, 0)])
    if edges == "zero":
        return moved
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(column == (0 if by > 0 else x.shape[-1] - 1), x, moved)


def group_norm(x: "jax.Array", weight: "jax.Array", bias: "jax.Array", *, groups: int, eps: float) -> "jax.Array":
    """Apply group norm to `x` `[1, channels, ..., height, width]`, with sums in float32.

    weight, bias: `[channels]`. groups: number of groups. eps: added to the variance.
    """
    import jax.numpy as jnp

    beyond = (...,) + (None,) * (x.ndim - 2)
    factor, shift = (vector[beyond] for vector in group_affine(x, weight, bias, groups=groups, eps=eps))
    return (x.astype(jnp.float32) * factor + shift).astype(x.dtype)


def group_affine(
    x: "jax.Array", weight: "jax.Array", bias: "jax.Array", *, groups: int, eps: float
) -> "tuple[jax.Array, jax.Array]":
    """Return group norm as a factor and an offset per channel, `[channels]` float32 each.

    x: `[1, channels, ..., height, width]`. weight, bias: `[channels]`. groups, eps: as in `group_norm`.
    """
    import jax.numpy as jnp

    mean, factor = group_moments(x, groups=groups, eps=eps)
    factor = factor * weight.astype(jnp.float32)
    return factor, bias.astype(jnp.float32) - mean * factor


def group_moments(
    x: "jax.Array", counted: "jax.Array | None" = None, *, groups: int, eps: float
) -> "tuple[jax.Array, jax.Array]":
    """Return mean and reciprocal standard deviation of each channel's group, `[channels]` float32 each.

    x: `[1, channels, (frames,) height, width]`. counted: `[frames]`, true for frames that count; None: all.
    groups, eps: as in `group_norm`.

    The sums of pixels and of squares are one pass. Both are of differences from the mean of one row: otherwise a mean
    far above the deviation would cost digits. A single pixel could be just as far away, and a row of another chip would
    move half of the image. Channels are never reshaped into groups, which would move them: sums over pixels come first.
    """
    import jax
    import jax.numpy as jnp

    channels, beyond = x.shape[1], (...,) + (None,) * (x.ndim - 2)
    near = x[0, ..., 0, :].astype(jnp.float32).mean(-1)
    if x.ndim == 5:
        near = near[:, 0] if counted is None else jnp.take(near, jnp.argmax(counted), axis=1)

    def of_channels(x: "jax.Array") -> "jax.Array":
        return x.mean((0, -2, -1)).reshape(channels, -1).mean(1, where=counted)  # of each frame first

    def of_groups(x: "jax.Array") -> "jax.Array":
        return jnp.repeat(x.reshape(groups, -1).mean(1), channels // groups)

    difference = x.astype(jnp.float32) - near[beyond]
    first, second = of_channels(difference), of_channels(jnp.square(difference))
    means = near + first
    mean = of_groups(means)
    return mean, jax.lax.rsqrt(of_groups(second - jnp.square(first) + jnp.square(means - mean)) + eps)


def image_attention(q: "jax.Array", k: "jax.Array", v: "jax.Array") -> "jax.Array":
    """Return exact self-attention of the pixels of `q`, `k`, `v` `[batch, height, width, dim]`, in one head.

    The head is too wide for the attention kernel. The softmax is carried over some rows of keys at a time, so all
    scores never exist at once.
    """
    import jax
    import jax.numpy as jnp

    batch, height, width, _ = q.shape
    most = SCORES_BYTES // (4 * batch * height * width * width)
    rows = max(n for n in range(1, height + 1) if height % n == 0 and (n == 1 or n <= most))

    def some_rows(carry: tuple, keys: tuple) -> tuple[tuple, None]:
        top, total, out = carry
        key, value = keys
        scores = jnp.einsum("bhwd,bnd->bhwn", q, key, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, decay = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        update = jnp.einsum("bhwn,bnd->bhwd", weights.astype(v.dtype), value, preferred_element_type=jnp.float32)
        return (higher, total * decay + weights.sum(axis=-1), out * decay[..., None] + update), None

    shape = q.shape[:-1]
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    keys = tuple(jnp.moveaxis(x.reshape(batch, height // rows, rows * width, -1), 1, 0) for x in (k, v))
    (_, total, out), _ = jax.lax.scan(some_rows, start, keys)
    return (out / total[..., None]).astype(q.dtype)


def repeat_to_size(x: "jax.Array", *, size: tuple[int, ...]) -> "jax.Array":
    """Repeat the elements of `x` `[1, channels, frames, height, width]` up to `size` (frames, height, width).

    The first of an odd number of frames corresponds to one frame of the result, so it is not repeated in time.
    """
    import jax.numpy as jnp

    frames, height, width = size
    alone = x.shape[2] % 2
    if x.shape[2] > alone:
        times = (frames - alone) // (x.shape[2] - alone)
        x = jnp.concatenate([x[:, :, :alone], jnp.repeat(x[:, :, alone:], times, axis=2)], axis=2)
    x = jnp.repeat(x, height // x.shape[3], axis=3)
    return jnp.repeat(x, width // x.shape[4], axis=4)
