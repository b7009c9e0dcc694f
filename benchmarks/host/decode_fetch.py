"""Measure the host seconds for fetching decoded frames: 81 frames at 1280x720, in a TPU's layout.

`python benchmarks/host/decode_fetch.py` prints medians for the layout of the TPU's compiler (separate channels) and for
row-major frames: for copying and joining all chunks, as before, and for writing each part into one tensor. The arrays
are on the CPU, so no transfer from a chip is included.
"""

import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.engine.frame_buffer import FrameBuffer, PendingFrames
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HEIGHT, WIDTH, NUM_CHUNKS, FRAMES_A_CHUNK, NUM_FRAMES, RUNS = 720, 1280, 21, 4, 81, 3
LAYOUTS = {"channels apart, as on a TPU": (0, 3, 1, 2), "row-major": (0, 1, 2, 3)}


def make_chunk(order: tuple[int, ...], shape: MeshShape, spec: P) -> jax.Array:
    """Return a chunk `[4, 720, 1280, 3]` float32 on simulated chips."""
    mesh = make_mesh(jax.devices()[: shape.dp * shape.sp], shape)
    sharding = Format(Layout(order), NamedSharding(mesh, spec))
    size = (FRAMES_A_CHUNK, HEIGHT, WIDTH, 3)
    make = jax.jit(lambda: jnp.arange(np.prod(size), dtype=jnp.float32).reshape(size), out_shardings=sharding)
    return jax.block_until_ready(make())


def join(chunk: jax.Array) -> torch.Tensor:
    """Copy each chunk and join all of them."""
    copies = [
        torch.from_numpy(np.array(jax.device_get(chunk)))[: 1 if not index else None] for index in range(NUM_CHUNKS)
    ]
    return torch.cat(copies)


def fill(chunk: jax.Array) -> torch.Tensor:
    """Write the parts of each chunk into one tensor."""
    buffer, is_finite = FrameBuffer(NUM_FRAMES), jnp.asarray(True)
    for index in range(NUM_CHUNKS):
        buffer.add(PendingFrames(chunk, is_finite, RuntimeError)[slice(1) if not index else slice(None)])
    return buffer.frames


def main() -> None:
    for name, order in LAYOUTS.items():
        whole = make_chunk(order, MeshShape(), P())
        parts = make_chunk(order, MeshShape(dp=2, sp=4), P(None, "dp", "sp"))
        assert torch.equal(join(whole), fill(parts))
        for title, run, chunk in (("copied and joined", join, whole), ("into one tensor", fill, parts)):
            seconds = []
            for _ in range(RUNS):
                started = time.perf_counter()
                run(chunk)
                seconds.append(time.perf_counter() - started)
            print(f"{name}: {title}: {statistics.median(seconds):.2f} s for {NUM_FRAMES} frames")


if __name__ == "__main__":
    main()
