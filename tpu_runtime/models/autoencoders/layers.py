"""Layers of autoencoders in the forms that a TPU computes with little moving, each chip its part of the picture.

Dimensions are `[1, channels, frames, height, width]`; a picture has no frames.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import jax
    import torch

# What is beyond a picture: nothing, or its outermost pixels again.
Edges = Literal["zero", "replicate"]
# Of attention's scores in float32 that exist at once, on all chips together.
SCORES_BYTES = 2**28


# Both stand for a module's `forward`, and name their input as torch does.


def convolved(
    conv: Any,
    input: "torch.Tensor",
    edges: Edges = "zero",
    doubled: bool = False,
    halved: bool = False,
    past: "Sequence[torch.Tensor]" = (),
    past_at: int = 0,
    kernel: bool = False,
    norm: Any = None,
    onto: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """An upstream convolution applied to a video or picture, without upstream's padding: height and width stay, of
    frames as many are lost as its kernel has, less one. `doubled`: of each pixel as two rows and two columns. `halved`:
    every second row and column of the result, the first left out. Frames of the `past` stand before frame `past_at`.
    `kernel`: by our kernel where it can. `norm`: an upstream group norm, or RMS norm over channels; what is convolved
    is SiLU of what it makes of all frames. The result is added `onto` what has its shape.
    """
    from ...programs import torch_bridge

    gain = shift = None
    if hasattr(norm, "num_groups"):
        of = partial(group_affine, groups=norm.num_groups, eps=norm.eps)
        gain, shift = torch_bridge.call_jax(of, input, norm.weight, norm.bias)
    elif norm is not None:
        gain = norm.gamma.flatten() * norm.scale
    weight = conv.weight if conv.weight.ndim == 5 else conv.weight[:, :, None]
    how = partial(convolution, edges=edges, doubled=doubled, halved=halved, past_at=past_at, kernel=kernel)
    if input.ndim == 5:
        return torch_bridge.call_jax(how, input, weight, conv.bias, tuple(past), gain, shift, onto)
    onto = None if onto is None else onto[:, :, None]
    return torch_bridge.call_jax(how, input[:, :, None], weight, conv.bias, (), gain, shift, onto)[:, :, 0]


def in_turn(*values: "torch.Tensor") -> "list[torch.Tensor]":
    """The same, but what is computed of them is computed after all of them."""
    import jax

    from ...programs import torch_bridge

    return torch_bridge.call_jax(lambda *all: jax.lax.optimization_barrier(list(all)), *values)


def normed(norm: Any, input: "torch.Tensor") -> "torch.Tensor":
    """An upstream group norm."""
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
    """`[1, in, frames, height, width]` by `[out, in, time, rows, columns]`, stride 1, odd rows and columns.

    A TPU wants a batch of at least 8, which one video is not; XLA then cuts its width in 8 and moves every pixel twice.
    So columns are the batch, and what a kernel's columns see are shifted copies, side by side as channels: the same
    sums. Where width is split over chips, only the outer columns move.

    With `kernel` our own computes it instead, unless it refuses (see `kernels.convolution`), and of one place it is a
    product.
    """
    import jax
    import jax.numpy as jnp

    from ....kernels import choice
    from ....kernels import convolution as ours

    is_product = kernel and max(weight.shape[2:]) == 1
    if kernel and not is_product and choice.accepted(ours.refusal(weight)):
        return ours.convolution(
            x, weight, bias, repeats=edges == "replicate", gain=gain, shift=shift, onto=onto, doubled=doubled,
            halved=halved, past=past, past_at=past_at,
        )  # fmt: skip
    x = ours.in_order(x, past, past_at)
    if gain is not None:
        x = ours.normed_silu(x, gain, shift)
    if doubled:
        x = enlarged(x, size=(x.shape[2], 2 * x.shape[3], 2 * x.shape[4]))

    def added(out: "jax.Array") -> "jax.Array":
        out = out if bias is None else out + bias[:, None, None, None]
        return out if onto is None else out + onto

    if is_product:
        return added(jnp.einsum("oi,bi...->bo...", weight[:, :, 0, 0, 0], x))
    rows, columns = weight.shape[3:]
    assert len(x) == 1 and rows % 2 == columns % 2 == 1
    if halved:
        assert rows == columns == 3 and edges == "zero"
        return added(jax.lax.conv_general_dilated(x, weight, (1, 2, 2), [(0, 0), (0, 1), (0, 1)]))
    above, reach = rows // 2, columns // 2
    if edges == "replicate" and above:
        # Before columns are shifted: padding what was stacked takes the convolution more than twice as long.
        x, above = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (above, above), (0, 0)), mode="edge"), 0
    shifted = [_shift(x[0], -by, edges) for by in range(-reach, reach + 1)]
    stacked = jnp.concatenate(shifted, axis=0)
    # [out, columns * in, time, rows], in the order of `shifted`.
    stacked_weight = jnp.moveaxis(weight, 4, 1).reshape(len(weight), -1, *weight.shape[2:4])
    out = jax.lax.conv_general_dilated(
        stacked, stacked_weight, (1, 1), [(0, 0), (above, above)], dimension_numbers=("CDHN", "OIDH", "CDHN")
    )
    return added(out[None])


def _shift(x: "jax.Array", by: int, edges: Edges) -> "jax.Array":
    """Columns `[..., width]` moved `by` to the right, one at most; what comes in is what `edges` says."""
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
    """Group norm with its sums in float32."""
    import jax.numpy as jnp

    beyond = (...,) + (None,) * (x.ndim - 2)
    factor, shift = (each[beyond] for each in group_affine(x, weight, bias, groups=groups, eps=eps))
    return (x.astype(jnp.float32) * factor + shift).astype(x.dtype)


def group_affine(
    x: "jax.Array", weight: "jax.Array", bias: "jax.Array", *, groups: int, eps: float
) -> "tuple[jax.Array, jax.Array]":
    """What group norm multiplies each channel of `x` by, and what it then adds, in float32."""
    import jax.numpy as jnp

    middle, factor = group_moments(x, groups=groups, eps=eps)
    factor = factor * weight.astype(jnp.float32)
    return factor, bias.astype(jnp.float32) - middle * factor


def group_moments(
    x: "jax.Array", counted: "jax.Array | None" = None, *, groups: int, eps: float
) -> "tuple[jax.Array, jax.Array]":
    """What group norm takes off each channel, and what it multiplies it by; of a video perhaps without the frames that
    are not `counted` `[frames]`.

    Sums of pixels and of their squares are one pass; both are of what pixels differ by from the mean of one row, lest a
    mean far above the deviation take their digits. One pixel in its place may be as far away, and a row of another
    chip would move half of the picture. Channels are never reshaped into groups, which would move them: sums over
    pixels come first.
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

    away = x.astype(jnp.float32) - near[beyond]
    first, second = of_channels(away), of_channels(jnp.square(away))
    own = near + first
    middle = of_groups(own)
    return middle, jax.lax.rsqrt(of_groups(second - jnp.square(first) + jnp.square(own - middle)) + eps)


def attend_to_picture(q: "jax.Array", k: "jax.Array", v: "jax.Array") -> "jax.Array":
    """Exact attention of `[batch, height, width, dim]` to itself, in one head, which is too wide for the attention
    kernel. The softmax is carried over some rows of keys at a time, so that scores are never complete.
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
        weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        part = jnp.einsum("bhwn,bnd->bhwd", weights.astype(v.dtype), value, preferred_element_type=jnp.float32)
        return (higher, total * kept + weights.sum(axis=-1), out * kept[..., None] + part), None

    shape = q.shape[:-1]
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    keys = tuple(jnp.moveaxis(x.reshape(batch, height // rows, rows * width, -1), 1, 0) for x in (k, v))
    (_, total, out), _ = jax.lax.scan(some_rows, start, keys)
    return (out / total[..., None]).astype(q.dtype)


def enlarged(x: "jax.Array", *, size: tuple[int, ...]) -> "jax.Array":
    """`[1, channels, frames, height, width]` with each element repeated up to `size` (frames, height, width).

    The first of an odd number of frames stands for one frame, not for several, and is not repeated in time.
    """
    import jax.numpy as jnp

    frames, height, width = size
    alone = x.shape[2] % 2
    if x.shape[2] > alone:
        times = (frames - alone) // (x.shape[2] - alone)
        x = jnp.concatenate([x[:, :, :alone], jnp.repeat(x[:, :, alone:], times, axis=2)], axis=2)
    x = jnp.repeat(x, height // x.shape[3], axis=3)
    return jnp.repeat(x, width // x.shape[4], axis=4)
