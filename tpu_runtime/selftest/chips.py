"""The chips by themselves: each keeps what is written to it, computes the same, and reaches all others."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding.mesh import Device, make_mesh
from ...sharding.shape import MeshShape
from .checks import Check, Wrong

FAMILY = "chips"
WRITTEN_BYTES = 16 * 2**20  # to each chip
SIZE = 256  # of the matrices that are multiplied


def checks(devices: Sequence[Device]) -> Iterator[Check]:
    def check(stage: str, run: Any) -> Check:
        return Check(family=FAMILY, stage=stage, precision="", run=run)

    yield check("memory", lambda progress: _memory(devices))
    yield check("exchange", lambda progress: _exchange(devices))
    yield check("products", lambda progress: _products(devices))


def memory_bytes(device: Device) -> int | None:
    """What a chip says that it has; None where it says nothing, as a CPU does."""
    stats = device.memory_stats() if device.platform == "tpu" else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def _memory(devices: Sequence[Device]) -> None:
    """What is written comes back, to the bit; a TPU says how much memory it has."""
    random = np.random.default_rng(0)
    for device in devices:
        if device.platform == "tpu" and not memory_bytes(device):
            raise Wrong(f"Chip {device.id} does not say how much memory it has.")
        written = random.integers(0, 2**32, WRITTEN_BYTES // 4, np.uint32)
        read = _read(jax.device_put(written, device))
        if wrong := int(np.count_nonzero(written != read)):
            raise Wrong(f"Chip {device.id} returns {wrong} of {written.size} words changed.")


def _exchange(devices: Sequence[Device]) -> None:
    """Sums over all chips, all-to-alls, and a step of a ring: whole numbers, of which every pair has its own."""
    count = len(devices)
    mesh = make_mesh(devices, MeshShape(sp=count))
    sent = np.arange(count * count, dtype=np.int32).reshape(count, count)  # [from, to]
    ring = [(chip, (chip + 1) % count) for chip in range(count)]

    def exchange(x: jax.Array) -> tuple[jax.Array, ...]:
        return (jax.lax.psum(x, "sp"), jax.lax.all_to_all(x, "sp", 1, 1, tiled=True), jax.lax.ppermute(x, "sp", ring))

    mapped = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"), check_vma=False))
    got = mapped(jax.device_put(sent, NamedSharding(mesh, P("sp"))))
    expected = np.broadcast_to(sent.sum(0), sent.shape), sent.T, np.roll(sent, 1, axis=0)
    for what, found, want in zip(("sum over all", "all-to-all", "ring"), got, expected, strict=True):
        wrong = (_read(found) != want).any(axis=1)
        if wrong.any():
            raise Wrong(f"The {what} is wrong on {_named(devices, wrong)}.")


def _products(devices: Sequence[Device]) -> None:
    """Every chip multiplies the same matrices: the same bits on all, and right."""
    mesh = make_mesh(devices, MeshShape(sp=len(devices)))
    left, right = np.random.default_rng(1).normal(size=(2, SIZE, SIZE)).astype(np.float32)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)[None]

    mapped = jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P("sp"), check_vma=False)
    found = _read(jax.jit(mapped)(*jax.device_put((left, right), NamedSharding(mesh, P()))))
    expected = left.astype(np.float64) @ right
    close = np.abs(found - expected).max(axis=(1, 2)) < 1e-5 * np.abs(expected).max()  # NaN is not close
    if not close.all():
        raise Wrong(f"A product of matrices is wrong on {_named(devices, ~close)}.")
    other = (found != found[:1]).any(axis=(1, 2))
    if other.any():
        raise Wrong(f"The same product differs on {_named(devices, other)} from that of chip {devices[0].id}.")


def _read(array: jax.Array) -> np.ndarray:
    return np.asarray(array)


def _named(devices: Sequence[Device], wrong: np.ndarray) -> str:
    ids = [str(device.id) for device, is_wrong in zip(devices, wrong, strict=True) if is_wrong]
    return f"chip{'s' * (len(ids) > 1)} {', '.join(ids)}"
