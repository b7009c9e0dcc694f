"""Checks of compiled programs: loading one that another process stored, and compiling while a stage runs."""

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ...kernels import dispatch, residual_norm
from ...sharding.mesh import Device, make_mesh
from ...sharding.shape import MeshShape
from ...tpu_runtime.cache import xla_cache
from ...tpu_runtime.machine import record
from ...tpu_runtime.machine.record import MachineRecord
from ...tpu_runtime.progress import run_in_daemon_thread
from .checks import Check, CheckFailed, Measurement

FAMILY = "programs"
LANES, TOKENS = 256, 64
# Pairs: the largest slowdown of a running step by one compilation, and the background compilations allowed up to it.
BACKGROUND_LIMITS = ((1.1, 2), (1.5, 1))
NUM_ALONE, MAX_COMPILE_S = 12, 60.0
UNROLLED = 60  # products that are unrolled, so that compiling takes a while


def check_store(devices: Sequence[Device], folder: Path) -> Iterator[Check]:
    """Compile a program that no cache has, and write the digest of its result into `folder`."""
    yield _check("stored by a process", lambda progress: _store_program(devices, folder))


def check_stored(devices: Sequence[Device], folder: Path) -> Iterator[Check]:
    """Load that program from the cache in another process, and compare its result's digest."""
    yield _check(
        "run by another", lambda progress: _check_stored_program(devices, folder), MachineRecord(keeps_programs=False)
    )


def check_background_compilation(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield the check of compiling while the chips compute."""
    yield _check("compiling while computing", lambda progress: _measure_overlap(devices))


def _check(stage: str, run: Any, if_lost: MachineRecord = MachineRecord()) -> Check:  # noqa: B008 (it is frozen)
    return Check(family=FAMILY, stage=stage, precision="", run=run, if_lost=if_lost)


def _store_program(devices: Sequence[Device], folder: Path) -> Measurement:
    nonce = time.time_ns() % 2**20
    digest, is_cached, seconds = _run_program(devices, nonce)
    if is_cached:
        raise CheckFailed("A new program was found in the cache.")
    (folder / "stored").write_text(f"{nonce} {digest}")
    return Measurement(values={"compile_s": round(seconds, 2)})


def _check_stored_program(devices: Sequence[Device], folder: Path) -> Measurement:
    if not (folder / "stored").is_file():
        return Measurement(note="nothing was stored")
    nonce, expected = (folder / "stored").read_text().split()
    digest, is_cached, seconds = _run_program(devices, int(nonce))
    if digest != expected:
        raise CheckFailed(
            "A program from the cache returns other bits than the one that was stored.",
            MachineRecord(keeps_programs=False),
        )
    if not is_cached:
        # Correct, but slower at each start.
        return Measurement(
            note="it was compiled again: the cache does not hold it", values={"load_s": round(seconds, 2)}
        )
    return Measurement(values={"load_s": round(seconds, 2)})


def _run_program(devices: Sequence[Device], nonce: int) -> tuple[str, bool, float]:
    """Return the digest of a program's result, whether it was cached, and the seconds until it was loaded."""
    xla_cache.use_persistent_cache()
    xla_cache.count_compilations()
    mesh = make_mesh(devices, MeshShape(sp=len(devices)))
    interpret = devices[0].platform != "tpu"

    def step(x: jax.Array) -> jax.Array:
        ones = jnp.ones((1, LANES), jnp.float32)
        _, y = residual_norm.residual_norm(x, x, None, ones, ones * nonce, eps=1e-6, kernel=True, interpret=interpret)
        return jax.lax.all_gather(y, "sp", axis=0, tiled=True)

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("sp"), out_specs=P(), check_vma=False))
    x = np.random.default_rng(8).normal(size=(len(devices), TOKENS, LANES)).astype(np.float32)
    placed = jax.device_put(x, NamedSharding(mesh, P("sp")))
    known = record.read_record(record.machine_key(devices[0].device_kind, len(devices))).fallbacks
    with dispatch.use_fallbacks(known.kernels), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = mapped.lower(placed)
    before, started = xla_cache.count_thread_hits(), time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - started
    result = np.asarray(program(placed))
    return hashlib.sha256(result.tobytes()).hexdigest(), xla_cache.count_thread_hits() > before, seconds


def _measure_overlap(devices: Sequence[Device]) -> Measurement:
    """Measure the median step alone, and while another program compiles. The results must be equal."""
    size = 4096 if devices[0].platform == "tpu" else 256
    x = jax.device_put(np.random.default_rng(9).normal(size=(size, size)).astype(np.float32), devices[0])
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ x), x))
    expected = np.asarray(step(x))
    alone = [_time_step(step, x, expected) for _ in range(NUM_ALONE)]
    compilation, begun = (
        run_in_daemon_thread(lambda: _compile_unrolled(devices[0]), "comfyui-tpu-selftest"),
        time.monotonic(),
    )
    meanwhile: list[float] = []
    while not compilation.done() and time.monotonic() - begun < MAX_COMPILE_S:
        meanwhile.append(_time_step(step, x, expected))
    compile_s = time.monotonic() - begun
    compilation.result(timeout=max(1.0, 5 * MAX_COMPILE_S))
    ratio = statistics.median(meanwhile) / statistics.median(alone) if meanwhile else 1.0
    values = {"step_alone_s": statistics.median(alone), "ratio": ratio, "compile_s": compile_s}
    # Simulated chips are the compiler's own cores.
    learnt = (
        MachineRecord(compilers_behind=count_background_compilers(ratio))
        if devices[0].platform == "tpu"
        else MachineRecord()
    )
    return Measurement(values={name: round(value, 4) for name, value in values.items()}, learnt=learnt)


def count_background_compilers(ratio: float) -> int:
    """Return how many background compilations are allowed if one makes a step `ratio` times as long."""
    return next((number for most, number in BACKGROUND_LIMITS if ratio <= most), 0)


def _time_step(step: Any, x: jax.Array, expected: np.ndarray) -> float:
    started = time.perf_counter()
    result = jax.block_until_ready(step(x))
    seconds = time.perf_counter() - started
    if not np.array_equal(result, expected):
        raise CheckFailed("A step returns other bits while a program compiles.")
    return seconds


def _compile_unrolled(device: Device) -> None:
    def long(x: jax.Array) -> jax.Array:
        for index in range(UNROLLED):
            x = jnp.sin(x @ x) + index * jnp.roll(x, index, axis=0)
        return x

    jax.jit(long).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=SingleDeviceSharding(device))).compile()
