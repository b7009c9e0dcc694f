"""The first step of a new program against its form without overlap, with fakes of the compiler and the chips."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.engine.overlap_check import OverlapChecks, have_same_bits
from comfyui_tpu.tpu_runtime.engine.program_cache import PendingCompilation, ProgramRequest
from comfyui_tpu.tpu_runtime.machine import record
from comfyui_tpu.tpu_runtime.machine.fallbacks import OVERLAP, WITHOUT_OVERLAP, option_prefixes
from comfyui_tpu.tpu_runtime.machine.policy import FallbackPolicy
from comfyui_tpu.tpu_runtime.programs.executables import Executable
from comfyui_tpu.tpu_runtime.programs.program import Program

OPTIONS = {"xla_tpu_enable_async_all_to_all": "true", "xla_tpu_scoped_vmem_limit_kib": "65536"}
X = np.arange(8, dtype=np.float32)


def executable(fn: Callable[..., Any], options: dict[str, str]) -> Executable:
    """A program on the CPU that says that it was compiled with these options."""
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))
    program = Program(
        name="denoise_step", fn=fn, args=(shape,), weights={"w": shape}, mesh=mesh, precision="float32", donate=(0,)
    )
    return Executable(program=replace(program, compiler_options=options), compiled=program.compile())


def right(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * weights["w"], jnp.isfinite(x).all()


def wrong(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One bit of one value is another."""
    flipped = jax.lax.bitcast_convert_type(x * weights["w"], jnp.int32) ^ jnp.asarray([0] * 7 + [1])
    return jax.lax.bitcast_convert_type(flipped, jnp.float32), jnp.isfinite(x).all()


def request_for(overlaps: bool) -> ProgramRequest:
    return ProgramRequest(title="the denoiser", key=("step", overlaps), build=lambda: pytest.fail("built here"))


class Programs:
    """A compiler that is done when it is told to be."""

    def __init__(self, other: Executable | None) -> None:
        self.other, self.noted = other, list[ProgramRequest]()

    def note(self, wanted: ProgramRequest) -> PendingCompilation:
        self.noted.append(wanted)
        coming = PendingCompilation(wanted=wanted, digest=wanted.digest, found=self.other)
        coming.done.set()
        return coming


class Chips:
    def __init__(self, has_room: bool = True) -> None:
        self.room, self.dropped = has_room, list[str]()

    def has_room(self, program: Executable, *, runs: bool = False) -> bool:
        return self.room

    def drop_program(self, digest: str) -> None:
        self.dropped.append(digest)


@pytest.fixture
def ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FallbackPolicy:
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path))
    return FallbackPolicy(jax.devices()[:1])


def compare_first_step(
    ladder: FallbackPolicy, ours: Callable[..., Any], other: Callable[..., Any] | None, *, room: bool = True,
    delete: bool = False,
) -> tuple[Programs, Chips]:  # fmt: skip
    """What the fakes saw after a step of `ours`, once the comparison has ended."""
    programs, chips = Programs(other and executable(other, {})), Chips(room)
    checks = OverlapChecks(programs=programs, chips=chips, verdicts=ladder, lock=threading.RLock())
    program, weights = executable(ours, OPTIONS), {"w": jnp.full(8, 3.0)}
    x = jax.device_put(X)
    step = checks.first_step(program, (x,), request_for)
    assert step is not None
    assert checks.first_step(program, (x,), request_for) is None, "it was begun"
    results = program(weights, x)  # may overwrite x
    if delete:
        weights["w"].delete()
    checks.compare(step, weights, results)
    until = time.monotonic() + 20
    while any(thread.name == "comfyui-tpu-compare" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return programs, chips


def test_overlap_check_equal_bits_are_recorded_for_the_machine(ladder: FallbackPolicy):
    programs, chips = compare_first_step(ladder, right, right)
    digest = request_for(True).digest
    assert ladder.record.overlap == {digest: True} and not ladder.fallbacks
    assert [one.digest for one in programs.noted] == chips.dropped == [request_for(False).digest]
    again = FallbackPolicy(jax.devices()[:1])  # the next process
    checks = OverlapChecks(programs=programs, chips=chips, verdicts=again, lock=threading.RLock())
    assert checks.first_step(executable(right, OPTIONS), (X,), request_for) is None


@pytest.mark.parametrize(("ours", "other"), [(wrong, right), (right, wrong)])
def test_overlap_check_different_bit_disables_overlap(ladder: FallbackPolicy, ours: Any, other: Any):
    compare_first_step(ladder, ours, other)
    again = FallbackPolicy(jax.devices()[:1])
    for one in (ladder, again):
        assert one.fallbacks == WITHOUT_OVERLAP and one.fallbacks.options == option_prefixes(OVERLAP)
        assert one.record.overlap == {request_for(True).digest: False}
        (sentence,) = one.sentences
        assert "had other bits than without" in sentence and "generate them again" in sentence
    assert again.fallbacks.left(OPTIONS) == {"xla_tpu_scoped_vmem_limit_kib": "65536"}


@pytest.mark.parametrize(
    "case", [{"other": None}, {"other": right, "room": False}, {"other": right, "delete": True}],
    ids=["refused by the compiler", "no room", "weights are gone"],
)  # fmt: skip
def test_overlap_check_without_comparison_records_no_verdict(ladder: FallbackPolicy, case: dict[str, Any]):
    compare_first_step(ladder, right, **case)
    assert ladder.record.overlap == {} and not ladder.fallbacks


@pytest.mark.parametrize("options", [{}, {"xla_tpu_scoped_vmem_limit_kib": "65536"}])
def test_overlap_check_program_without_overlap_is_skipped(ladder: FallbackPolicy, options: dict[str, str]):
    checks = OverlapChecks(programs=Programs(None), chips=Chips(), verdicts=ladder, lock=threading.RLock())
    assert checks.first_step(executable(right, options), (X,), request_for) is None
    assert checks.first_step(object(), (X,), request_for) is None  # a step cache's two programs


def test_have_same_bits_compares_bits_and_dtypes():
    nan = np.array([np.nan], np.float32)
    other = (nan.view(np.uint32) ^ 1).view(np.float32)
    assert have_same_bits((nan, X), (nan.copy(), X)) and not have_same_bits(nan, other)
    assert not have_same_bits(np.float32(0.0), np.float32(-0.0))
    assert not have_same_bits((X,), (X, X)) and not have_same_bits(X, X.astype(np.float64))


def test_parse_record_keeps_newest_verdicts():
    many = record.MachineRecord(overlap={f"{number:016x}": True for number in range(200)})
    kept = record.parse_record(many.to_json()).overlap
    assert len(kept) == record.MAX_VERDICTS and list(kept)[-1] == f"{199:016x}"
    assert len(record.parse_record({"overlap": dict(many.overlap)}).overlap) == record.MAX_VERDICTS
