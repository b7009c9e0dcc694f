"""Checks of the chips without models: each stores data, computes the same as the others, and reaches all others."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding.mesh import Device, make_mesh
from ...sharding.shape import MeshShape
from ...tpu_runtime import device_memory
from ...tpu_runtime.machine.record import MachineRecord
from ...tpu_runtime.progress import Progress
from .checks import Check, CheckFailed, Measurement

FAMILY = "chips"
WRITTEN_BYTES, WRITTEN_ON_TPU = 16 * 2**20, 2**30  # per chip
SIZE = 256  # of the matrices that are multiplied


def check_devices(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield the check of the devices' kinds, order and coordinates."""
    yield _check("devices", lambda progress: _devices(devices))


def check_transfers(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield the check of transfers between the host and every chip."""
    yield _check("transfers", lambda progress: _transfers(devices))


def check_collectives(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield the checks of collectives and of equal results on all chips."""
    yield _check("exchange", lambda progress: _exchange(devices))
    yield _check("products", lambda progress: _products(devices))


def _check(stage: str, run: Callable[[Progress], Measurement | None]) -> Check:
    return Check(family=FAMILY, stage=stage, precision="", run=run)


def _devices(devices: Sequence[Device]) -> Measurement:
    """Check that the chips are of one kind, each listed once, in the order of hosts and links."""
    places = [tuple(place) for device in devices if (place := getattr(device, "coords", None)) is not None]
    cores = [(place, getattr(device, "core_on_chip", 0)) for place, device in zip(places, devices, strict=False)]
    if len({device.device_kind for device in devices}) > 1:
        kinds = sorted({device.device_kind for device in devices})
        raise CheckFailed(f"The chips are of several kinds: {', '.join(kinds)}.")
    if len(set(cores)) != len(cores):
        raise CheckFailed("Two devices have one place on the links between chips.")
    hosts = [device.process_index for device in devices]
    if hosts != sorted(hosts):
        raise CheckFailed(f"JAX lists the chips of hosts {hosts}, not one host's after the other's.")
    on_tpu = [device for device in devices if device.platform == "tpu"]
    silent = [str(device.id) for device in on_tpu if not device_memory.memory_stats(device).limit_bytes]
    if silent:
        raise CheckFailed(f"Chips {', '.join(silent)} do not report the size of their memory.")
    order = ", ".join(f"{device.id} at {place}" for device, place in zip(devices, places, strict=False))
    return Measurement(
        note=f"{len(devices)} x {devices[0].device_kind}, hosts {sorted(set(hosts))}; {order or 'no places'}"
    )


def _transfers(devices: Sequence[Device]) -> Measurement:
    """Check that data written to every chip is read back bit for bit. Also measures GB/s of all chips together."""
    written_bytes = WRITTEN_ON_TPU if devices[0].platform == "tpu" else WRITTEN_BYTES
    random = np.random.default_rng(0)
    written = [random.integers(0, 2**32, written_bytes // 4, np.uint32) for _ in devices]
    jax.block_until_ready([jax.device_put(words[:1], device) for words, device in zip(written, devices, strict=True)])
    started = time.perf_counter()
    there = [jax.device_put(words, device) for words, device in zip(written, devices, strict=True)]
    jax.block_until_ready(there)
    between = time.perf_counter()
    with ThreadPoolExecutor(len(devices)) as threads:
        back = list(threads.map(_read, there))
    ended = time.perf_counter()
    for device, words, read in zip(devices, written, back, strict=True):
        if wrong := int(np.count_nonzero(words != read)):
            raise CheckFailed(f"Chip {device.id} returns {wrong} of {words.size} words changed.")
    total = len(devices) * written_bytes / 1e9
    rates = {"to_chips": total / max(between - started, 1e-9), "from_chips": total / max(ended - between, 1e-9)}
    learnt = MachineRecord(rates=rates if devices[0].platform == "tpu" else {})
    return Measurement(values={f"{name}_gb_per_s": round(rate, 3) for name, rate in rates.items()}, learnt=learnt)


def _exchange(devices: Sequence[Device]) -> None:
    """Check psum, all-to-all and a ring step, with an integer per pair of chips."""
    count = len(devices)
    mesh = make_mesh(devices, MeshShape(sp=count))
    sent = np.arange(count * count, dtype=np.int32).reshape(count, count)  # [from, to]
    ring = [(chip, (chip + 1) % count) for chip in range(count)]

    def exchange(x: jax.Array) -> tuple[jax.Array, ...]:
        return (jax.lax.psum(x, "sp"), jax.lax.all_to_all(x, "sp", 1, 1, tiled=True), jax.lax.ppermute(x, "sp", ring))

    mapped = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"), check_vma=False))
    got = mapped(jax.device_put(sent, NamedSharding(mesh, P("sp"))))
    expected = np.broadcast_to(sent.sum(0), sent.shape), sent.T, np.roll(sent, 1, axis=0)
    for what, actual, want in zip(("sum over all", "all-to-all", "ring"), got, expected, strict=True):
        wrong = (_read(actual) != want).any(axis=1)
        if wrong.any():
            raise CheckFailed(f"The {what} is wrong on {_format_chips(devices, wrong)}.")


def _products(devices: Sequence[Device]) -> None:
    """Check that all chips return the same bits for a matrix product, and the right ones."""
    mesh = make_mesh(devices, MeshShape(sp=len(devices)))
    left, right = np.random.default_rng(1).normal(size=(2, SIZE, SIZE)).astype(np.float32)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)[None]

    mapped = jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P("sp"), check_vma=False)
    products = _read(jax.jit(mapped)(*jax.device_put((left, right), NamedSharding(mesh, P()))))
    expected = left.astype(np.float64) @ right
    close = np.abs(products - expected).max(axis=(1, 2)) < 1e-5 * np.abs(expected).max()  # NaN is not close
    if not close.all():
        raise CheckFailed(f"A product of matrices is wrong on {_format_chips(devices, ~close)}.")
    other = (products != products[:1]).any(axis=(1, 2))
    if other.any():
        raise CheckFailed(
            f"The same product differs on {_format_chips(devices, other)} from that of chip {devices[0].id}."
        )


def _read(array: jax.Array) -> np.ndarray:
    return np.asarray(array)


def _format_chips(devices: Sequence[Device], wrong: np.ndarray) -> str:
    ids = [str(device.id) for device, is_wrong in zip(devices, wrong, strict=True) if is_wrong]
    return f"chip{'s' * (len(ids) > 1)} {', '.join(ids)}"
