"""Times of a model's real programs on this machine, beside the compiler's predictions."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..tpu_runtime import device_memory
from ..tpu_runtime.device_memory import DeviceMemory
from ..tpu_runtime.model_spec import ModelSpec, Quality, Settings
from ..tpu_runtime.precision import precision_label as precision_title
from ..tpu_runtime.precision import resolve_image_precision as resolve_pictures
from ..tpu_runtime.precision import resolve_precision
from .random_inputs import random_arguments, random_array, time_runs

if TYPE_CHECKING:
    from ..sharding.mesh import Device
    from ..tpu_runtime.plan.compile import CompiledProgram

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class MeasuredProgram:
    """Times of one program, in seconds."""

    name: str
    runs: int  # in one generation
    mesh: str  # its sizes, such as 2x4
    compile_s: float
    median_s: float  # of one run
    least_s: float
    most_s: float
    predicted_s: float | None  # by the compiler, of one run; None: not requested
    peak_bytes: int  # on one device while it runs, according to the compiler
    predicts_floor: bool = False  # the prediction is the chip's peak, so real times are longer


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Times of a model's programs on one machine, without paths and machine names."""

    model: str
    title: str
    settings: Mapping[str, Any]  # as `Settings` has them
    device_kind: str
    num_devices: int
    precision: str
    versions: Mapping[str, str]
    is_tiny: bool  # of the tiny model, whose times mean nothing
    hbm_peak_bytes: int | None  # in use on the fullest device; None: devices do not report it
    programs: tuple[MeasuredProgram, ...]
    hbm_reserved_peak_bytes: int | None = None  # reserved for programs there, in addition
    hbm_limit_bytes: int | None = None

    @property
    def total_s(self) -> float:
        """Return the seconds of one generation's programs, without loading and work on the host."""
        return sum(program.median_s * program.runs for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        """Return the record, as written to a file."""
        return {"schema": SCHEMA, "label": "measured", **asdict(self), "total_s": self.total_s}


# Runs of a program in a profiler trace.
TRACED_RUNS = 3


def measure(
    spec: ModelSpec, settings: Settings, devices: "Sequence[Device]", *, is_tiny: bool, choice: str,
    stages: Sequence[str], runs: int, predicts: bool, report: Callable[[str], None], trace: Path | None = None,
) -> BenchResult:  # fmt: skip
    """Compile and time every program of a generation, the programs of one network after another.

    spec, settings: of the model. devices: to run on.
    is_tiny: whether `spec` is the tiny model's.
    choice: the precision as a node has it.
    stages: to time. runs: of each program.
    predicts: whether to add the compiler's predictions.
    report: takes a line for each program as soon as it is timed.
    trace: folder for profiler traces, one per program; None: no traces.
    """
    from ..sharding.mesh import mesh_shape
    from ..tpu_runtime import versions
    from ..tpu_runtime.cost_model import chips
    from ..tpu_runtime.plan import compile as compiling
    from ..tpu_runtime.plan import plan
    from ..tpu_runtime.programs import denoising_plan

    topology = chips.find_topology(devices[0].device_kind, len(devices)) if predicts else None
    rows: list[MeasuredProgram] = []
    compiled: list[CompiledProgram] = []
    platform = devices[0].platform
    precision, pictures = resolve_precision(choice, platform), resolve_pictures(choice, platform)
    programs = denoising_plan.list_programs(
        spec, settings, devices, precision=precision, pictures=pictures, stages=stages
    )
    for _, same in itertools.groupby(programs, key=lambda program: (program.components, program.weights)):
        weights = None
        for program in same:
            started = time.monotonic()
            executable = program.compile()
            compile_s = time.monotonic() - started
            weights = weights or {name: random_array(want, 0.02) for name, want in (program.weights or {}).items()}
            _, seconds = time_runs(executable, weights, functools.partial(random_arguments, program), runs)
            if trace is not None:
                _trace(trace / program.name, executable, weights, functools.partial(random_arguments, program))
            report(f"{program.name}: compiled in {compile_s:.0f} s, {statistics.median(seconds):.4f} s")
            row = MeasuredProgram(
                name=program.name, runs=program.runs, compile_s=compile_s, predicted_s=None,
                mesh="x".join(str(size) for size in mesh_shape(program.mesh).sizes.values()),
                median_s=statistics.median(seconds), least_s=min(seconds), most_s=max(seconds),
                peak_bytes=compiling.measure_memory(program, executable).peak,
            )  # fmt: skip
            rows.append(row)
            if topology:
                compiled.append(compiling.record_compiled(program, executable, topology, compile_s))
    if topology:  # the predictions of `plan` for the programs that ran
        plans = plan.predict_programs(compiled, topology, report)
        rows = [
            replace(row, predicted_s=planned.predicted_s, predicts_floor=planned.is_floor)
            for row, planned in zip(rows, plans, strict=True)
        ]
    memory = device_memory.max_memory_stats(devices)
    return BenchResult(
        model=spec.name, title=spec.title, settings=asdict(settings), device_kind=devices[0].device_kind,
        num_devices=len(devices), precision=precision_title(precision, pictures),
        versions=versions.list_result_versions(),
        is_tiny=is_tiny,
        hbm_peak_bytes=memory.peak_in_use_bytes, programs=tuple(rows),
        hbm_reserved_peak_bytes=memory.peak_reserved_bytes, hbm_limit_bytes=memory.limit_bytes,
    )  # fmt: skip


def _trace(folder: Path, executable: Any, weights: Any, make: Callable[[], Any]) -> None:
    """Write a profiler trace of a few runs, after the timed ones: tracing costs time itself."""
    import jax

    with jax.profiler.trace(folder):
        time_runs(executable, weights, make, TRACED_RUNS - 1)


def format_report(found: BenchResult) -> str:
    """Return the readable report."""
    from ..tpu_runtime.plan import report

    head = ("program", "runs", "mesh", "compile", "GiB", "median", "least", "most", "x runs", "predicted", "of it")
    rows = [
        (
            row.name, str(row.runs), row.mesh, f"{row.compile_s:.0f} s", report.format_gib(row.peak_bytes),
            *(f"{value:.4f}" for value in (row.median_s, row.least_s, row.most_s, row.median_s * row.runs)),
            "-" if row.predicted_s is None else f"{row.predicted_s:.4f}" + f" {report.FLOOR}" * row.predicts_floor,
            "-" if not row.predicted_s else f"{100 * row.median_s / row.predicted_s:.0f} %",
        )
        for row in found.programs
    ]  # fmt: skip
    size, steps = found.settings, found.settings["num_inference_steps"]
    quality = size.get("quality", Quality.EXACT)  # missing in older records
    is_sparse = any(known == quality and known.is_sparse for known in Quality)
    what = "the tiny model of " * found.is_tiny + found.title
    memory = DeviceMemory(
        limit_bytes=found.hbm_limit_bytes, peak_in_use_bytes=found.hbm_peak_bytes,
        peak_reserved_bytes=found.hbm_reserved_peak_bytes,
    )  # fmt: skip
    return "\n".join(
        [
            f"{what} on {found.num_devices} x {found.device_kind}: {size['width']}x{size['height']}, "
            f"{size['num_frames']} frames, {steps} steps, {found.precision}, {quality}. Seconds are measured"
            + (", not on a TPU: they do not indicate speed." if found.is_tiny else "; predicted is by the compiler."),
            "",
            *report.format_table([head, *rows]),
            "",
            f"One generation{' of the tiny model, not on a TPU' * found.is_tiny}, measured: {found.total_s:.2f} s of "
            "programs, without loading weights.",
            f"Fullest device: {memory}.",
            *([f"The timed step skips nothing; steps of {quality} that skip blocks take less."] * is_sparse),
            *([f"This was not {found.title} but its tiny model: the times do not apply to a TPU."] * found.is_tiny),
        ]
    )
