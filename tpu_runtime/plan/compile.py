"""The compiling half of a plan: every program of a request, compiled for the described TPU, its memory and FLOPs."""

import json
import time
import zlib
from dataclasses import asdict, dataclass

import jax

from ...sharding.shape import MeshShape
from .. import memory_errors as refusals
from .. import versions
from ..cache.store import Store, signature
from ..cost_model import chips, flops
from ..cost_model.chips import Topology
from ..model_spec import STAGES, ModelSpec, Settings
from ..precision import Precision
from ..programs import denoising_plan
from ..programs.program import Program, shard_bytes
from .report import Memory, format_gib

STORE = Store("plans")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Generation and hardware to plan."""

    spec: ModelSpec
    settings: Settings
    topology: Topology
    precision: Precision = "bfloat16"
    pictures: Precision | None = None  # see `CompileTarget`
    mesh_shape: MeshShape | None = None  # of the denoiser; None: the runtime's choice
    stages: tuple[str, ...] = STAGES

    def programs(self) -> tuple[Program, ...]:
        return denoising_plan.list_programs(
            self.spec,
            self.settings,
            chips.compile_devices(self.topology),
            precision=self.precision,
            pictures=self.pictures,
            mesh_shape=self.mesh_shape,
            stages=self.stages,
        )


@dataclass(frozen=True, kw_only=True)
class CompileOutcome:
    """The compiler's result for a program, stored on disk: families share programs, and plans are repeated."""

    memory: Memory
    text: str | None  # of the compiled program; None if the compiler rejected it for lack of memory
    refusal: str  # which memory was lacking: the chip's, or the on-chip memory of a kernel; else ""
    compile_s: float

    def pack(self) -> bytes:
        return zlib.compress(json.dumps(asdict(self)).encode())

    @classmethod
    def unpack(cls, content: bytes) -> "CompileOutcome":
        """Return the stored outcome. Raises `ValueError`, `TypeError` or `zlib.error` for one of another version."""
        values = json.loads(zlib.decompress(content))
        return cls(**{**values, "memory": Memory(**values["memory"])})


@dataclass(frozen=True, kw_only=True)
class CompiledProgram(CompileOutcome):
    """Program with its outcome."""

    program: Program
    flops: flops.Flops


def compile_program(program: Program, topology: Topology) -> CompiledProgram:
    """Return the outcome of a program, compiled now or stored by an earlier plan.

    A program that is rejected for lack of memory is a result, not an error. Raises `RuntimeError` if the compiler
    fails.
    """
    weights, available = weight_bytes(program), topology.chip.hbm_bytes
    if weights > available:
        # The compiler would reject it too, after minutes.
        refusal = f"its weights alone need {format_gib(weights)} of {format_gib(available)} GiB"
        outcome = CompileOutcome(memory=_rejected_memory(program, 0), text=None, refusal=refusal, compile_s=0.0)
    else:
        outcome = _outcome(program, topology)
    counted = flops.count_flops(flops.trace_program(program), topology.chip.mxu_width)
    return CompiledProgram(program=program, flops=counted, **vars(outcome))


def _outcome(program: Program, topology: Topology) -> CompileOutcome:
    """Return the stored outcome of a program, or compile it and store the outcome."""
    started = time.monotonic()
    lowered = program.lower()
    options = sorted(program.compiler_options.items())
    key = signature(lowered.as_text(), topology.name, versions.list_program_environment(), options)
    if content := STORE.get(key):
        try:
            return CompileOutcome.unpack(content)
        except (ValueError, TypeError, KeyError, zlib.error) as error:
            STORE.discard(key, f"it cannot be read ({error})")
    memory, text, refusal = None, None, ""
    try:
        executable = program.compile(lowered)
        memory, text = measure_memory(program, executable), executable.as_text()
    except jax.errors.JaxRuntimeError as error:
        refused = refusals.parse_compile_error(str(error))
        if refused is None:
            raise RuntimeError(f"the TPU's compiler failed: {str(error)[:2000]}") from error
        memory, refusal = _rejected_memory(program, refused.needed_bytes), refused.sentence
    outcome = CompileOutcome(memory=memory, text=text, refusal=refusal, compile_s=time.monotonic() - started)
    STORE.put(key, outcome.pack())
    return outcome


def record_compiled(
    program: Program, executable: jax.stages.Compiled, topology: Topology, compile_s: float
) -> CompiledProgram:
    """Return the outcome of a program that was compiled for the devices of this machine, which are those of `topology`.

    program, executable: before and after compilation. compile_s: seconds that it took.
    """
    return CompiledProgram(
        memory=measure_memory(program, executable),
        text=executable.as_text(),
        refusal="",
        compile_s=compile_s,
        program=program,
        flops=flops.count_flops(flops.trace_program(program), topology.chip.mxu_width),
    )


def weight_bytes(program: Program) -> int:
    """Return the bytes of weights, the program's first argument, on each device."""
    return sum(map(shard_bytes, jax.tree.leaves(program.weights)))


def measure_memory(program: Program, executable: jax.stages.Compiled) -> Memory:
    """Return the memory of each device while the compiled program runs, with all weights of its component."""
    weights, stats = weight_bytes(program), executable.memory_analysis()
    assert stats is not None  # the TPU's compiler returns it, and the CPU's
    # Not `peak_memory_in_bytes`: it includes on-chip memory, and less than the arena of temporaries.
    others = stats.argument_size_in_bytes - program.used_weight_bytes(executable)
    total = weights + others + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments=stats.argument_size_in_bytes,
        weights=weights,
        temporaries=stats.temp_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        peak=total + stats.temp_size_in_bytes,
    )


def _rejected_memory(program: Program, needed: int) -> Memory:
    """Return the memory of a program that the compiler rejected; needed: bytes according to the compiler, or 0."""
    arguments = sum(map(shard_bytes, jax.tree.leaves(program.arguments)))
    return Memory(
        arguments=arguments,
        weights=weight_bytes(program),
        temporaries=None,
        output=None,
        alias=0,
        peak=max(arguments, needed),
    )
