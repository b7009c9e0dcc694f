"""Memory under pressure: what the compiler refuses, what leaves when there is no room."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime import memory_errors
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.engine import device_cache
from comfyui_tpu.tpu_runtime.engine.device_cache import DeviceCache
from comfyui_tpu.tpu_runtime.engine.memory_advice import HBM_VARIABLE, OutOfMemory
from comfyui_tpu.tpu_runtime.memory_errors import CompileOutOfMemory
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.plan import compile
from comfyui_tpu.tpu_runtime.programs import executables
from comfyui_tpu.tpu_runtime.programs.program import Program
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from comfyui_tpu.tpu_runtime.units import MIB
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SPEC = SPECS[0]
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id)


# --- what the compiler refuses ----------------------------------------------------------------------------------------


def _double(x: Any, result: Any) -> None:
    result[...] = x[...] * 2


def large_blocks(x: jax.Array) -> jax.Array:
    return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="wide")(x)


def _through_scratch(x: Any, result: Any, scratch: Any) -> None:
    scratch[...] = jnp.broadcast_to(x[:1, :1], scratch.shape)
    result[...] = scratch[:8, :128]


def large_scratch(x: jax.Array) -> jax.Array:
    shapes = [pltpu.VMEM((16384, 4096), jnp.float32)]
    return pl.pallas_call(_through_scratch, out_shape=x, scratch_shapes=shapes, name="deep")(x)


def tpu_program(function: Any, shape: tuple[int, ...]) -> Program:
    mesh = Mesh(np.array(chips.compile_devices(chips.topology("v6e-1"))), ("sp",))
    arg = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P()))
    return Program(name="small", fn=function, args=(arg,), mesh=mesh, precision="bfloat16")


@pytest.mark.parametrize(
    ("function", "shape", "memory", "sentence"),
    [
        # Of 31.25 GiB, of which libtpu 0.0.50 keeps 0.01 for itself.
        (lambda x: x * 2, (12 * 1024, 1024, 1024), "HBM", "according to the compiler it needs 96.00 of 31.2"),
        (large_blocks, (8192, 1024), "VMEM", "kernel wide.1 needs 64.00M of the 32.00M on-chip memory (VMEM)"),
        (large_scratch, (8, 128), "VMEM", "kernel deep.1 needs 256.00M of the 128.00M on-chip memory (VMEM)"),
    ],
    ids=["HBM", "VMEM of blocks", "VMEM of scratch"],
)
def test_compile_or_load_oversized_program_names_exhausted_memory(
    function: Any, shape: tuple[int, ...], memory: str, sentence: str
):
    program = tpu_program(function, shape)
    with pytest.raises(CompileOutOfMemory) as refused:
        executables.compile_or_load(program)
    assert refused.value.refused.memory == memory
    assert str(refused.value).startswith(sentence)


TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (64.06G) exceeds "
    "available HBM (31.25G)."
)
STACK = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
    "stack for %splash.2 = (f32[2048,128]) custom-call(%x). Scoped allocation with size 21.51M and limit 16.00M "
    "exceeded scoped vmem limit by 5.51M."
)
FULL = (
    "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 12.50G at the bottom of memory. That "
    "was not possible. There are 7.20G free, 0B reserved, and 7.20G reservable."
)


@pytest.mark.parametrize(
    ("message", "tries", "expected"),
    [
        (
            TEMPORARIES,
            1,
            Expected(
                "memory.program_does_not_fit",
                stage="warmup",
                sentence=Expected("memory.compiler_needs", needed="64.06", limit="31.25"),
                advice=["memory.fewer_frames"],
            ),
        ),
        (
            STACK,
            1,
            Expected(
                "memory.tiles_do_not_fit",
                stage="warmup",
                sentence=re.compile("kernel splash.2 needs 21.51M"),
                advice=["memory.fewer_frames"],
            ),
        ),
        (FULL, 2, Expected("memory.out_of_memory", stage="warmup", reason=re.compile("There are 7.20G free"))),
    ],
    ids=["HBM", "VMEM", "memory that is full only now"],
)
def test_warmup_compiler_refusal_raises_out_of_memory_without_retry(
    message: str, tries: int, expected: Expected, monkeypatch: pytest.MonkeyPatch
):
    tried = []

    def compile_(program: Program) -> None:
        tried.append(program.name)
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(Program, "compile", compile_)
    runner = Runner(jax.devices())
    with raises_message(OutOfMemory, expected):
        runner.warmup(MODEL, SPEC.settings(**SPEC.miniature.inputs), SilentProgress())
    assert len(tried) == tries, tried


def test_parse_compile_error_reads_older_messages():
    nameless = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 16.75M of 16.00M vmem."
    assert memory_errors.parse_compile_error(nameless).sentence.startswith(
        "a kernel needs 16.75M of the 16.00M on-chip memory (VMEM)"
    )
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 54.12G of 31.25G hbm. Exceeded by 22.87G."
    assert memory_errors.parse_compile_error(used).needed_bytes == int(54.12 * 2**30)
    assert memory_errors.parse_compile_error("INTERNAL: something used (1.0G)") is None


# --- what leaves ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Loaded:
    """A program in MiB: what its code takes while it is loaded, and what it needs beside that when it runs."""

    code: int
    workspace: int = 0

    @property
    def parts(self) -> "tuple[Loaded, ...]":
        return (self,)

    @property
    def code_bytes(self) -> int:
        return self.code * MIB

    @property
    def workspace_bytes(self) -> int:
        return self.workspace * MIB


class Chip:
    """A `DeviceCache` with a budget of 100 MiB, in which components and programs have names of one letter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(HBM_VARIABLE, str(100 / 1024))
        self.device_cache = DeviceCache(jax.devices()[0])
        self.loads: list[str] = []

    def run(self, component: str, size: int, running: Loaded, **beside: int) -> None:
        def load(held: object) -> tuple[dict[str, jax.Array], frozenset[str]]:
            self.loads.append(component)
            return {}, frozenset()

        others = {(name,): number * MIB for name, number in beside.items()}
        self.device_cache.get(
            (component,), component=component, model="m", size_bytes=size * MIB, running=running, load=load,
            companions=others,
        )  # fmt: skip

    @property
    def held(self) -> str:
        return "".join(resident.component for resident in self.device_cache.list())


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Chip:
    return Chip(monkeypatch)


def test_device_cache_counts_program_code_in_budget(chip: Chip):
    old, new = Loaded(code=30), Loaded(code=10, workspace=20)
    chip.device_cache.add_program("old", old)
    chip.run("a", 30, old)
    chip.device_cache.add_program("new", new)
    chip.run("b", 10, new)  # 30 + 30 + 10 + 10 + 20: just enough
    assert (chip.held, chip.device_cache.programs()) == ("ab", (old, new))
    chip.run("c", 20, new)  # the longest unused leaves, and that is a program
    assert (chip.held, chip.device_cache.programs()) == ("abc", (new,))
    assert chip.device_cache.code_bytes == 10 * MIB and chip.device_cache.size_bytes == 60 * MIB


def test_device_cache_evicts_least_recently_used_weights_or_program(chip: Chip):
    first, second = Loaded(code=20), Loaded(code=20)
    chip.device_cache.add_program("first", first)
    chip.run("a", 20, first)
    chip.device_cache.add_program("second", second)
    chip.run("b", 20, second)
    assert chip.device_cache.program("first") is first  # used again
    chip.run("c", 30, second)
    assert (chip.held, chip.device_cache.programs()) == ("bc", (second, first))
    chip.run("a", 20, first)
    assert chip.loads == ["a", "b", "c", "a"]


def test_device_cache_keeps_running_program_or_raises_out_of_memory(chip: Chip):
    running = Loaded(code=40, workspace=30)
    chip.device_cache.add_program("running", running)
    chip.run("a", 30, running)
    with raises_message(OutOfMemory, "memory.weights_do_not_fit", size_bytes="31.0 MiB", needed="70.0 MiB"):
        chip.run("b", 31, running)
    assert chip.device_cache.programs() == (running,) and chip.held == "a"


def test_device_cache_keeps_components_of_one_program_together(chip: Chip):
    """A denoiser and the networks beside it: neither leaves for the other, and all others do."""
    running = Loaded(code=0, workspace=10)
    chip.run("z", 40, running)
    chip.run("a", 50, running, b=30)  # 50 + 30 + 10, so that z leaves before b is loaded
    assert chip.held == "a"
    chip.run("b", 30, running, a=50, b=30)
    assert chip.held == "ab"
    with raises_message(OutOfMemory, "memory.weights_do_not_fit", size_bytes="91.0 MiB", needed="10.0 MiB"):
        chip.run("c", 11, running, a=50, b=30)
    assert chip.held == "ab" and chip.loads == ["z", "a", "b"]


def test_device_cache_limits_number_of_programs(chip: Chip, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(HBM_VARIABLE)
    monkeypatch.setattr(device_cache, "MAX_PROGRAMS", 2)
    for name in "abc":
        chip.device_cache.add_program(name, Loaded(code=1))
        chip.device_cache.program("a")
    assert [name for name in "abc" if chip.device_cache.program(name)] == ["a", "c"]


class Array:
    """Stands for weights on a device."""

    def __init__(self) -> None:
        self.is_deleted = False

    def delete(self) -> None:
        self.is_deleted = True


def resident(cache: DeviceCache, name: str, **more: Any) -> device_cache.ResidentWeights:
    """A component of one mebibyte, loaded if it is not there."""
    options = {"component": name, "model": "m", "size_bytes": MIB, "running": Loaded(code=0), **more}
    return cache.get((name,), **{"load": lambda held: ({name: Array()}, frozenset()), **options})


def test_device_cache_drop_deletes_weights(chip: Chip):
    cache = chip.device_cache
    one, two = resident(cache, "a"), resident(cache, "b")
    assert (one.title, one.size_bytes, one.variant, one.changed) == ("a of m", MIB, "", frozenset())
    assert one.id != two.id and resident(cache, "a") is one
    cache.drop([one.id, "not there"])
    assert chip.held == "b" and one.weights["a"].is_deleted and not two.weights["b"].is_deleted
    cache.drop([])
    assert chip.held == "b"
    cache.clear()
    assert cache.list() == () and two.weights["b"].is_deleted


def test_device_cache_clear_drops_programs_and_workspace(chip: Chip):
    running = Loaded(code=30, workspace=40)
    chip.device_cache.add_program("a", running)
    chip.run("x", 20, running)
    beside = Loaded(code=11)
    assert not chip.device_cache.has_room(beside) and chip.device_cache.has_room(Loaded(code=10))
    chip.device_cache.clear()
    assert chip.device_cache.programs() == () and chip.device_cache.has_room(Loaded(code=100))
    assert not chip.device_cache.has_room(Loaded(code=101))


def test_device_cache_without_budget_never_evicts(chip: Chip, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(HBM_VARIABLE)
    assert chip.device_cache.has_room(Loaded(code=10**9))
    chip.run("a", 10**6, Loaded(code=10**6))
    chip.run("b", 10**6, Loaded(code=10**6))
    assert chip.held == "ab"


def test_device_cache_new_variant_replaces_resident_weights(chip: Chip):
    cache, given = chip.device_cache, []

    def load(held: device_cache.ResidentWeights | None) -> tuple[dict[str, Any], frozenset[str]]:
        given.append(held)
        return {"w": Array()}, frozenset({"w"})

    plain = resident(cache, "a")
    assert [cache.state(("a",), variant) for variant in ("", "lora")] == ["resident", "another"]
    assert cache.state(("b",), "") == "absent"
    changed = resident(cache, "a", variant="lora", load=load)
    assert given == [plain] and (changed.variant, changed.changed) == ("lora", frozenset({"w"}))
    assert resident(cache, "a", variant="lora", load=load) is changed and len(given) == 1
    assert chip.held == "a" and cache.state(("a",), "lora") == "resident"


def test_device_cache_failed_load_leaves_no_weights(chip: Chip):
    def fails(held: object) -> Any:
        raise KeyboardInterrupt

    plain = resident(chip.device_cache, "a")
    with pytest.raises(KeyboardInterrupt):
        resident(chip.device_cache, "a", variant="lora", load=fails)
    assert chip.held == "" and plain.weights["a"].is_deleted
    with pytest.raises(KeyboardInterrupt):
        resident(chip.device_cache, "b", load=fails)
    assert chip.held == ""


def test_device_cache_drop_program_removes_only_that_program(chip: Chip):
    chip.device_cache.add_program("a", Loaded(code=1))
    chip.device_cache.add_program("b", keeps := Loaded(code=2))
    chip.device_cache.drop_program("a")
    chip.device_cache.drop_program("never there")
    assert chip.device_cache.program("a") is None and chip.device_cache.program("b") is keeps


def test_device_cache_get_updates_last_used(chip: Chip):
    first = resident(chip.device_cache, "a")
    first.last_used = 0.0
    resident(chip.device_cache, "b")
    assert resident(chip.device_cache, "a").last_used > 0
    chip.run("c", 98, Loaded(code=1))
    assert chip.held == "ac"


def test_budget_bytes_uses_device_limit_or_environment(monkeypatch: pytest.MonkeyPatch):
    class Device:
        platform = "tpu"
        stats: Any = {"bytes_limit": 1000}

        def memory_stats(self) -> Any:
            return self.stats

    device: Any = Device()
    monkeypatch.delenv(HBM_VARIABLE, raising=False)
    assert device_cache.budget_bytes(device) == 960
    monkeypatch.setenv(HBM_VARIABLE, "1.5")
    assert device_cache.budget_bytes(device) == 1536 * MIB
    monkeypatch.setenv(HBM_VARIABLE, "much")
    with raises_message(ValueError, "memory.limit_not_number", hbm_variable=HBM_VARIABLE, limit="'much'"):
        device_cache.budget_bytes(device)
    monkeypatch.delenv(HBM_VARIABLE)
    for device.stats in ({}, None):
        assert device_cache.budget_bytes(device) is None
    device.stats, device.platform = {"bytes_limit": 1000}, "cpu"
    assert device_cache.budget_bytes(device) is None


def test_executable_code_bytes_match_compiler_analysis():
    program = tpu_program(lambda x: x + 1, (8, 128))
    executable = executables.Executable(program=program, compiled=program.compile())
    stats = executable.compiled.memory_analysis()
    assert executable.code_bytes == stats.generated_code_size_in_bytes > 0
    held = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
    assert executable.workspace_bytes == sum(held)


def matmul_times_two(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ weights["used"] * 2


def test_workspace_bytes_ignore_unused_weights():
    """JAX drops them from what the program takes; as much was taken off its results."""
    mesh = Mesh(np.array(jax.devices()), ("sp",))

    def shaped(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("sp")))

    def workspace(**weights: jax.ShapeDtypeStruct) -> set[int]:
        """Of the program as it was compiled, as it is loaded again, and as a plan has it."""
        program = Program(
            name="doubled",
            fn=matmul_times_two,
            weights=weights,
            args=(shaped(512, 64),),
            mesh=mesh,
            precision="float32",
        )
        compiled, loaded = (executables.compile_or_load(program)[0] for _ in range(2))
        planned = compile.measure_memory(program, compiled.compiled).without_weights
        return {compiled.workspace_bytes, loaded.workspace_bytes, planned}

    (alone,) = workspace(used=shaped(64, 32))
    assert alone >= 512 * (64 + 32) * 4 // len(mesh.devices)
    assert workspace(used=shaped(64, 32), unused=shaped(1024, 1024)) == {alone}


def test_unload_in_stages_frees_programs_then_other_models_then_all(monkeypatch: pytest.MonkeyPatch):
    """Programs reload in a second, other models' weights may not be needed again, and the own ones certainly are."""
    monkeypatch.setenv(HBM_VARIABLE, "1")
    cache = DeviceCache(jax.devices()[0])
    for component, model in [("a", "old"), ("b", "mine"), ("c", "older"), ("d", "old")]:
        cache.get(
            (component, model), component=component, model=model, size_bytes=MIB, running=Loaded(code=1),
            load=lambda held: ({}, frozenset()),
        )  # fmt: skip
    cache.add_program("p", Loaded(code=1))
    held = [
        (unloaded, "".join(resident.component for resident in cache.list()), len(cache.programs()))
        for unloaded in cache.unload_in_stages("mine")
    ]
    assert held == [
        ("compiled programs", "abcd", 0), ("a of old", "bcd", 0), ("c of older", "bd", 0), ("d of old", "b", 0),
        ("everything else", "", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stats", "budget"),
    [
        ({"bytes_limit": 1000, "bytes_reservable_limit": 900}, 900),  # as a v6e reports them
        ({"bytes_limit": 1000, "bytes_reservable_limit": 990}, 960),
        ({"bytes_limit": 1000}, 960),
        ({}, None),
    ],
)
def test_budget_bytes_is_bounded_by_reservable_limit(stats: dict[str, int], budget: int | None):
    class Chip:
        platform = "tpu"

        def memory_stats(self) -> dict[str, int]:
            return stats

    assert device_cache.budget_bytes(Chip()) == budget
