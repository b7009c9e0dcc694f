"""Frames come back one call behind, from every chip, into one tensor, whatever the chips' layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.engine.frame_buffer import FrameBuffer, PendingFrames, consume_with_lookahead
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# Row-major; and the order in which the TPU's compiler leaves decoded frames, channels apart: major to minor 0, 3, 1, 2.
LAYOUTS = [(0, 1, 2, 3), (0, 3, 1, 2)]


class NotFinite(Exception):
    pass


def frames_on_chips(values: np.ndarray, shape: MeshShape, order: tuple[int, ...]) -> jax.Array:
    mesh = make_mesh(jax.devices()[: shape.dp * shape.sp * shape.tp], shape)
    sharding = Format(Layout(order), NamedSharding(mesh, P(None, "dp", "sp")))
    return jax.jit(lambda x: x + 0, out_shardings=sharding)(values)


def pending_frames(array: jax.Array, is_finite: bool = True) -> PendingFrames:
    return PendingFrames(array, jnp.asarray(is_finite), lambda: NotFinite("not finite"))


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(sp=3), MeshShape(dp=2, sp=2, tp=2), MeshShape(sp=8)])
def test_frame_buffer_joins_shards_of_all_chips(shape: MeshShape, order: tuple[int, ...]):
    values = np.random.default_rng(0).random((5, 6, 24, 3), np.float32)
    array = frames_on_chips(values, shape, order)
    buffer = FrameBuffer(expected=7)
    for kept in (slice(1), slice(None), slice(3, 4)):
        buffer.add(pending_frames(array)[kept])
    expected = np.concatenate([values[:1], values, values[3:4]])
    assert buffer.frames.numpy().tobytes() == expected.tobytes()
    assert buffer.frames.is_contiguous()


def test_frame_buffer_known_frame_count_allocates_once():
    array = frames_on_chips(np.ones((2, 4, 4, 3), np.float32), MeshShape(), LAYOUTS[0])
    buffer = FrameBuffer(expected=4)
    buffer.add(pending_frames(array))
    first = buffer.frames.data_ptr()
    buffer.add(pending_frames(array))
    assert buffer.frames.data_ptr() == first and buffer.frames.shape == (4, 4, 4, 3)
    buffer.add(pending_frames(array))
    assert torch.equal(buffer.frames, torch.ones(6, 4, 4, 3))


def test_consume_with_lookahead_fetches_after_next_launch():
    events: list[str] = []

    def chunks():
        for index in range(3):
            events.append(f"launch {index}")
            yield index

    assert consume_with_lookahead(chunks(), lambda index: events.append(f"fetch {index}")) == 3
    assert events == ["launch 0", "launch 1", "fetch 0", "launch 2", "fetch 1", "fetch 2"]


def test_frame_buffer_non_finite_frames_raise_on_add():
    array = frames_on_chips(np.ones((2, 4, 4, 3), np.float32), MeshShape(), LAYOUTS[0])
    chunk = pending_frames(array, is_finite=False)
    with pytest.raises(NotFinite):
        FrameBuffer(expected=2).add(chunk)
