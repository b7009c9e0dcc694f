"""The compiling half of a plan: a request's programs, each compiled for the described TPU; memory and FLOPs."""

import json
import time
import zlib
from dataclasses import asdict, dataclass

import jax

from ...sharding.shape import MeshShape
from .. import refusal as refusals
from .. import versions
from ..cache.store import Store, signature
from ..cost_model import chips, flops
from ..cost_model.chips import Topology
from ..model_spec import STAGES, ModelSpec, Settings
from ..precision import Precision
from ..programs import generation
from ..programs.program import Program, shard_bytes
from .report import Memory, gib

STORE = Store("plans")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan. `mesh_shape` None: what the runtime would choose; `pictures`: see `Target`."""

    spec: ModelSpec
    settings: Settings
    topology: Topology
    precision: Precision = "bfloat16"
    pictures: Precision | None = None
    mesh_shape: MeshShape | None = None
    stages: tuple[str, ...] = STAGES

    def programs(self) -> tuple[Program, ...]:
        return generation.for_spec(
            self.spec,
            self.settings,
            chips.compile_devices(self.topology),
            precision=self.precision,
            pictures=self.pictures,
            mesh_shape=self.mesh_shape,
            stages=self.stages,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The compiler's result for a program: kept on disk, because families share programs and plans are repeated.

    Where it refused for lack of memory, `text` is None and `refusal` says of which: the chip's, or that on the chip
    which one kernel may use.
    """

    memory: Memory
    text: str | None
    refusal: str
    compile_s: float

    def pack(self) -> bytes:
        return zlib.compress(json.dumps(asdict(self)).encode())

    @classmethod
    def unpack(cls, content: bytes) -> "Outcome":
        """Raises `ValueError`, `TypeError` or `zlib.error` for what another version wrote."""
        values = json.loads(zlib.decompress(content))
        return cls(**{**values, "memory": Memory(**values["memory"])})


@dataclass(frozen=True, kw_only=True)
class Compiled(Outcome):
    """A program with its outcome."""

    program: Program
    flops: flops.Flops


def compile_program(program: Program, topology: Topology) -> Compiled:
    """Compiles one program, or takes what an earlier plan learned of the same; a refusal for lack of memory is a
    result, not an error.
    """
    weights, available = weight_bytes(program), topology.chip.hbm_bytes
    if weights > available:
        # The compiler would say so too, after minutes.
        refusal = f"its weights alone need {gib(weights)} of {gib(available)} GiB"
        found = Outcome(memory=_refused(program, 0), text=None, refusal=refusal, compile_s=0.0)
    else:
        found = _outcome(program, topology)
    counted = flops.count(flops.traced(program), topology.chip.mxu_width)
    return Compiled(program=program, flops=counted, **vars(found))


def _outcome(program: Program, topology: Topology) -> Outcome:
    started = time.monotonic()
    lowered = program.lower()
    options = sorted(program.compiler_options.items())
    key = signature(lowered.as_text(), topology.name, versions.environment(), options)
    if content := STORE.get(key):
        try:
            return Outcome.unpack(content)
        except (ValueError, TypeError, KeyError, zlib.error) as error:
            STORE.discard(key, f"it cannot be read ({error})")
    memory, text, refusal = None, None, ""
    try:
        executable = program.compile(lowered)
        memory, text = memory_of(program, executable), executable.as_text()
    except jax.errors.JaxRuntimeError as error:
        refused = refusals.parse(str(error))
        if refused is None:
            raise RuntimeError(f"the TPU's compiler failed: {str(error)[:2000]}") from error
        memory, refusal = _refused(program, refused.needed_bytes), refused.sentence
    found = Outcome(memory=memory, text=text, refusal=refusal, compile_s=time.monotonic() - started)
    STORE.put(key, found.pack())
    return found


def compiled(program: Program, executable: jax.stages.Compiled, topology: Topology, compile_s: float) -> Compiled:
    """The outcome of a program that was compiled for the devices of this machine, which are those of `topology`."""
    return Compiled(
        memory=memory_of(program, executable),
        text=executable.as_text(),
        refusal="",
        compile_s=compile_s,
        program=program,
        flops=flops.count(flops.traced(program), topology.chip.mxu_width),
    )


def weight_bytes(program: Program) -> int:
    """Bytes of weights that the program needs on each device: its first argument."""
    return sum(map(shard_bytes, jax.tree.leaves(program.weights)))


def memory_of(program: Program, executable: jax.stages.Compiled) -> Memory:
    """What each device holds while the compiled program runs: all of its component's weights, used or not."""
    weights, stats = weight_bytes(program), executable.memory_analysis()
    assert stats is not None  # the TPU's compiler returns it, and the CPU's
    # Not `peak_memory_in_bytes`: that one counts on-chip memory too, and less than the arena of temporaries.
    others = stats.argument_size_in_bytes - program.weight_bytes_in(executable)
    held = weights + others + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments=stats.argument_size_in_bytes,
        weights=weights,
        temporaries=stats.temp_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        peak=held + stats.temp_size_in_bytes,
    )


def _refused(program: Program, needed: int) -> Memory:
    arguments = sum(map(shard_bytes, jax.tree.leaves(program.arguments)))
    return Memory(
        arguments=arguments,
        weights=weight_bytes(program),
        temporaries=None,
        output=None,
        alias=0,
        peak=max(arguments, needed),
    )
