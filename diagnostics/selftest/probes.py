"""Measurements that only a real machine can give.

They are transfer rates of real arrays, start times of transfers between chips, matrix products on cold and warm chips,
the attention kernel, and room between freed pieces. No check here fails because it is slow.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ...attention.api import attention
from ...sharding.mesh import Device, Mesh, make_mesh
from ...sharding.shape import MeshShape
from ...tpu_runtime import device_memory
from ...tpu_runtime.checkpoints.placement import PutsInFlight, place
from ...tpu_runtime.machine.record import MachineRecord
from ...tpu_runtime.units import GIB, MIB
from .checks import Check, Measurement

FAMILY = "probes"
FETCHES, LINKS, ROOM, PRODUCTS, ATTENTION = (
    "real arrays", "starts of transfers", "room between freed pieces", "products", "attention",
)  # fmt: skip
MB = 10**6
# Shapes of real arrays, and of those on simulated chips: frames, latents, a weight.
FRAMES, SMALL_FRAMES = (4, 720, 1280, 3), (4, 16, 16, 3)
LATENTS, SMALL_LATENTS = (1, 16, 21, 90, 160), (1, 16, 3, 8, 8)
WEIGHT, SMALL_WEIGHT = (5120, 13824), (64, 128)
# A transfer of `START_BYTES` takes no longer than its start.
LINK_BYTES, START_BYTES = MB, 4096
NUM_TRANSFERS, FEW_TRANSFERS = 1000, 10
SHORT_S, LONG_S = 1.0, 30.0
# Tokens, heads and lanes of a head: what a chip of eight has of Wan 2.1's attention at 1280x720 with 81 frames.
ATTENDED, FEW_ATTENDED = (75600, 10, 128), (256, 2, 64)
NUM_PIECES, FILLED_SHARE, TEMPORARIES_SHARE = 64, 0.6, 0.3
SIMULATED_LIMIT = 64 * MIB


def check_arrays(devices: Sequence[Device], setting: str = "") -> Iterator[Check]:
    """Yield the check of real arrays alone, which the self-test repeats with each `setting` of the runtime."""
    yield _check(f"{FETCHES}, {setting}" if setting else FETCHES, lambda: _measure_arrays(devices))


def checks(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield every probe."""
    yield from check_arrays(devices)
    yield _check(LINKS, lambda: _measure_starts(devices))
    yield _check(ROOM, lambda: _measure_room(devices[0]))
    yield _check(ATTENTION, lambda: _measure_attention(devices[0]))
    yield _check(PRODUCTS, lambda: _measure_products(devices))


def _check(stage: str, run: Callable[[], Measurement]) -> Check:
    return Check(family=FAMILY, stage=stage, precision="", run=lambda progress: run())


def _is_tpu(devices: Sequence[Device]) -> bool:
    return devices[0].platform == "tpu"


def _measure_arrays(devices: Sequence[Device]) -> Measurement:
    """Return GB/s of frames and latents from the chips, and of a weight to them, in the compiler's layouts."""
    is_tpu, mesh = _is_tpu(devices), make_mesh(devices, MeshShape(sp=len(devices)))
    whole = NamedSharding(mesh, P())
    frames, latents, weight = (FRAMES, LATENTS, WEIGHT) if is_tpu else (SMALL_FRAMES, SMALL_LATENTS, SMALL_WEIGHT)
    axis = next((axis for axis, size in enumerate(frames) if size % len(devices) == 0), None)
    split = NamedSharding(mesh, P(*(None,) * (axis or 0), "sp")) if axis is not None else whole
    values = {
        "fetch_frames_replicated_gb_per_s": _measure_fetch(frames, whole),
        "fetch_frames_split_gb_per_s": _measure_fetch(frames, split),
        "fetch_latents_gb_per_s": _measure_fetch(latents, whole),
    }
    on_host = np.ones(weight, jnp.bfloat16)
    one = SingleDeviceSharding(devices[0])
    started = time.perf_counter()
    jax.block_until_ready(jax.device_put(on_host, one))
    values["put_weight_gb_per_s"] = _gb_per_s(on_host.nbytes, started)
    jax.block_until_ready(place(weight, whole, lambda index: on_host, PutsInFlight()))  # compiles the gather
    started = time.perf_counter()
    jax.block_until_ready(place(weight, whole, lambda index: on_host, PutsInFlight()))
    values["put_weight_on_every_chip_gb_per_s"] = _gb_per_s(on_host.nbytes, started)
    return Measurement(values=values)


def _measure_fetch(shape: tuple[int, ...], sharding: Sharding) -> float:
    """Return the GB/s of fetching an array that a program made; copies on further chips do not count."""
    make = jax.jit(lambda seed: jnp.full(shape, seed, jnp.float32), out_shardings=sharding)
    jax.device_get(make(0.0))
    made = jax.block_until_ready(make(1.0))
    started = time.perf_counter()
    made.copy_to_host_async()
    fetched = np.ascontiguousarray(made)
    return _gb_per_s(fetched.nbytes, started)


def _gb_per_s(size_bytes: int, started: float) -> float:
    return round(size_bytes / 1e9 / max(time.perf_counter() - started, 1e-9), 3)


def _measure_starts(devices: Sequence[Device]) -> Measurement:
    """Return microseconds of an all-to-all and of a permute of 1 MB, and of tiny ones, which are their start.

    Each transfer waits for the one before. The longer start goes into the machine's record.
    """
    count = len(devices)
    if count == 1:
        return Measurement(note="one chip has no links")
    mesh, times = make_mesh(devices, MeshShape(sp=count)), NUM_TRANSFERS if _is_tpu(devices) else FEW_TRANSFERS
    ring = [(chip, (chip + 1) % count) for chip in range(count)]
    exchanges: Mapping[str, Callable[[jax.Array], jax.Array]] = {
        "all_to_all": lambda x: jax.lax.all_to_all(x, "sp", 0, 0, tiled=True),
        "permute": lambda x: jax.lax.ppermute(x, "sp", ring),
    }
    values, starts = dict[str, float](), list[float]()
    for name, exchange in exchanges.items():
        values[f"{name}_us"] = round(1e6 * _time_exchange(mesh, exchange, times, LINK_BYTES), 3)
        starts.append(_time_exchange(mesh, exchange, times, START_BYTES))
        values[f"{name}_start_us"] = round(1e6 * starts[-1], 3)
    return Measurement(values=values, learnt=MachineRecord(transfer_start_s=max(starts) if _is_tpu(devices) else None))


def _time_exchange(mesh: Mesh, exchange: Callable[[jax.Array], jax.Array], times: int, size_bytes: int) -> float:
    """Return the seconds of one exchange of `size_bytes` per chip, as the mean of `times` in one program."""
    count = mesh.size
    words = size_bytes // 4 // count * count
    sharding = NamedSharding(mesh, P("sp"))
    chain = jax.shard_map(
        lambda x: jax.lax.fori_loop(0, times, lambda turn, x: exchange(x), x),
        mesh=mesh, in_specs=P("sp"), out_specs=P("sp"), check_vma=False,
    )  # fmt: skip
    program = jax.jit(chain)
    x = jax.block_until_ready(program(jax.device_put(np.zeros(count * words, np.float32), sharding)))
    started = time.perf_counter()
    jax.block_until_ready(program(x))
    return (time.perf_counter() - started) / times


def _measure_room(device: Device) -> Measurement:
    """Find out whether a program with large temporaries runs between pieces of which every second one was freed."""
    memory = device_memory.memory_stats(device)
    limit_bytes = memory.limit_bytes or SIMULATED_LIMIT
    rows = int(limit_bytes * FILLED_SHARE) // NUM_PIECES // 512
    make = jax.jit(lambda: jnp.ones((rows, 128), jnp.float32), out_shardings=SingleDeviceSharding(device))
    held = [jax.block_until_ready(make()) for _ in range(NUM_PIECES)]
    temporary_rows = int(limit_bytes * TEMPORARIES_SHARE) // 512

    def large(seed: jax.Array) -> jax.Array:
        filled = jax.lax.optimization_barrier(jnp.full((temporary_rows, 128), seed))
        return filled[0, 0] + filled[-1, -1]

    values = {
        "pieces_gib": round(NUM_PIECES * rows * 512 / GIB, 4), "temporaries_gib": round(temporary_rows * 512 / GIB, 4),
        **{f"{name.removesuffix('_bytes')}_gib": round(value / GIB, 4) for name, value in memory.known.items()},
    }  # fmt: skip
    try:
        for array in held[::2]:
            array.delete()
        ran = float(jax.jit(large)(jax.device_put(np.float32(1.0), device))) == 2.0
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).partition("\n")[0][:200]
        return Measurement(values=values | {"runs": 0.0}, note=f"finds no room: {reason}")
    finally:
        for array in held[1::2]:
            array.delete()
    return Measurement(values=values | {"runs": float(ran)})


def _measure_products(devices: Sequence[Device]) -> Measurement:
    """Return TF/s of bfloat16 products on all chips, cold and warm; clock and power make the difference."""
    is_tpu = _is_tpu(devices)
    size, turns = (8192, 64) if is_tpu else (64, 2)
    mesh = make_mesh(devices, MeshShape(sp=len(devices)))

    def chain(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda turn, x: (x @ y).astype(jnp.bfloat16), x)

    program = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=(P("sp"), P()), out_specs=P("sp"), check_vma=False))
    # Zeros would take less power. The scale keeps a product's values as large as its operands'.
    x = _random((len(devices) * size, size), 1.0, NamedSharding(mesh, P("sp")))
    y = _random((size, size), size**-0.5, NamedSharding(mesh, P()))
    flop = 2.0 * size**3 * turns * len(devices)
    jax.block_until_ready(program(x, y))
    values = dict[str, float]()
    for name, wanted_s in (("1_s", SHORT_S), ("30_s", LONG_S)):
        limit_s = wanted_s if is_tpu else 0.0
        count, started, ended = 0, time.perf_counter(), 0.0
        while not count or ended < limit_s:
            x = jax.block_until_ready(program(x, y))
            count, ended = count + 1, time.perf_counter() - started
        values[f"products_{name}_tflop_per_s"] = round(flop * count / ended / 1e12, 4)
    return Measurement(values=values)


def _random(shape: tuple[int, ...], scale: float, sharding: Sharding) -> jax.Array:
    """Return normal bfloat16 values `[*shape]`, made on the devices."""
    make: Any = jax.jit(
        lambda: scale * jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), out_shardings=sharding
    )
    return make()


def _measure_attention(device: Device) -> Measurement:
    """Return seconds and TF/s of the attention kernel at the size of a real step, on one chip."""
    is_tpu = device.platform == "tpu"
    tokens, heads, head_dim = ATTENDED if is_tpu else FEW_ATTENDED
    mesh = make_mesh([device], MeshShape())
    q = _random((1, tokens, heads, head_dim), 1.0, SingleDeviceSharding(device))
    program = jax.jit(lambda q: attention(q, q, q, mesh=mesh))
    with jax.set_mesh(mesh):
        jax.block_until_ready(program(q))
        started = time.perf_counter()
        jax.block_until_ready(program(q))
        seconds = time.perf_counter() - started
    flop = 4.0 * tokens**2 * heads * head_dim
    values = {"attention_tflop_per_s": round(flop / seconds / 1e12, 4), "attention_s": round(seconds, 6)}
    return Measurement(values=values)
