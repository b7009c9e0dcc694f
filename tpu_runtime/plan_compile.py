"""The compiling half of a plan: a request's programs, each compiled for the described TPU; memory and FLOPs."""

import re
import time
from dataclasses import dataclass

import jax

from ..sharding.shape import MeshShape
from . import chips, flops, programs
from .chips import Topology
from .plan_options import STAGES
from .plan_report import Memory, gib
from .precision import Precision
from .program import Program, shard_bytes
from .spec import ModelSpec, Settings


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan. `mesh_shape` None: what the runtime would choose."""

    spec: ModelSpec
    settings: Settings
    topology: Topology
    precision: Precision = "bfloat16"
    mesh_shape: MeshShape | None = None
    stages: tuple[str, ...] = STAGES

    def programs(self) -> tuple[Program, ...]:
        return programs.for_spec(
            self.spec,
            self.settings,
            chips.compile_devices(self.topology),
            precision=self.precision,
            mesh_shape=self.mesh_shape,
            stages=self.stages,
        )


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program as the compiler returned it. Where it refused for lack of memory, `text` is None and `refusal` says of
    which: the chip's, or that on the chip which one kernel may use.
    """

    program: Program
    memory: Memory
    text: str | None
    refusal: str
    flops: flops.Flops
    compile_s: float


def compile_program(program: Program, topology: Topology) -> Compiled:
    """Compiles one program; a refusal for lack of memory is a result, not an error."""
    weights = weight_bytes(program)
    arguments = sum(map(shard_bytes, jax.tree.leaves(program.args)))
    available = topology.chip.hbm_bytes
    started = time.monotonic()
    memory, text, refusal = _refused(arguments, weights, 0), None, ""
    if weights > available:
        # The compiler would say so too, after minutes.
        refusal = f"its weights alone need {gib(weights)} of {gib(available)} GiB"
    else:
        try:
            executable = program.compile()
            memory, text = _memory(executable, weights), executable.as_text()
        except jax.errors.JaxRuntimeError as error:
            needed, refusal = _refusal(str(error))
            memory = _refused(arguments, weights, needed)
    return Compiled(
        program=program,
        memory=memory,
        text=text,
        refusal=refusal,
        flops=flops.count(flops.traced(program), topology.chip.mxu_width),
        compile_s=time.monotonic() - started,
    )


def weight_bytes(program: Program) -> int:
    """Bytes of weights that the program needs on each device: its first argument."""
    return sum(map(shard_bytes, jax.tree.leaves(program.args[0]))) if program.weights else 0


def _memory(executable: jax.stages.Compiled, weights: int) -> Memory:
    stats = executable.memory_analysis()
    # Not `peak_memory_in_bytes`: that one counts on-chip memory too, and less than the arena of temporaries.
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments=stats.argument_size_in_bytes,
        weights=weights,
        temporaries=stats.temp_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        peak=held + stats.temp_size_in_bytes,
    )


def _refused(arguments: int, weights: int, needed: int) -> Memory:
    return Memory(
        arguments=arguments, weights=weights, temporaries=None, output=None, alias=0, peak=max(arguments, needed)
    )


def _refusal(message: str) -> tuple[int, str]:
    """The bytes of HBM that libtpu says the program needs (0 if it is not about them), and the refusal in a sentence.

    Raises `RuntimeError` for any other complaint.
    """
    hbm = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGT]).*?(?:HBM \(|of )([\d.]+)G", message, re.DOTALL)
    kernel = re.search(r"memory space vmem.*?%(\S+) = .*?size ([\d.]+\w) and limit ([\d.]+\w)", message, re.DOTALL)
    if "RESOURCE_EXHAUSTED" not in message or not (hbm or kernel):
        raise RuntimeError(f"the TPU's compiler failed: {message[:2000]}")
    if kernel:
        name, size, limit = kernel.groups()
        return (
            0,
            f"kernel {name} needs {size} of the {limit} on-chip memory (VMEM) a kernel may use; it wants smaller tiles",
        )
    needed = int(float(hbm.group(1)) * 1024 ** (1 + "KMGT".index(hbm.group(2))))
    return needed, f"the compiler says it needs {gib(needed)} of {hbm.group(3)} GiB"
