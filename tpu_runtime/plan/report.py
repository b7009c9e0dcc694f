"""Results of a plan, as records, as JSON and as text. All times are predicted by the compiler, none is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..cost_model import step_time
from ..cost_model.chips import Topology
from ..cost_model.flops import Flops
from ..cost_model.step_time import Timing
from ..messages import compose, compose_list
from ..model_spec import Settings
from ..programs.program import DENOISE_STEP
from ..units import GIB

LABEL = compose("plan.predicted_by_compiler")
# A prediction at this share of the peak is a floor: published kernels of this kind reach 90 % of their ceiling.
FLOOR_SHARE = 0.95
FLOOR = "floor"


def is_floor(ceiling_share: float | None, kernels_share: float | None) -> bool:
    """Return whether a prediction is a floor.

    ceiling_share: of the peak that the program's shapes allow. kernels_share: of the peak, for its kernels. None:
        unknown.
    """
    return max(ceiling_share or 0.0, kernels_share or 0.0) >= FLOOR_SHARE


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a program in bytes per device."""

    arguments: int
    weights: int
    temporaries: int | None  # None if the compiler rejected the program
    output: int | None  # with `alias`; None if the compiler rejected the program
    alias: int  # output that reuses arguments
    peak: int  # of a rejected program: the size that the compiler reported, or the arguments alone

    @property
    def without_weights(self) -> int:
        return self.peak - self.weights


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """Prediction for one program. Times are None if it does not compile."""

    name: str
    runs: int  # executions in one generation
    mesh: str  # sizes of the axes, such as "2x4x1"
    components: tuple[str, ...]  # whose weights it takes
    memory: Memory
    fits: bool
    compile_s: float
    flops: Flops
    timing: Timing | None
    predicted_s: float | None
    best_s: float | None  # if the cheaper of all alternatives runs
    rerun_s: float | None  # if kernels repeat everything that they may have to repeat
    mfu: float | None  # model FLOPs utilization
    ceiling_share: float | None  # like `mfu`, of the peak that the shapes allow
    findings: Mapping[str, Sequence[str]]  # title -> sentences
    notes: tuple[str, ...] = ()  # what the figures do not include
    kernels_share: float | None = None  # of the peak, predicted for the kernels' products; None without kernels

    @property
    def is_floor(self) -> bool:
        """Return whether the program or its kernels are predicted at the chip's peak: real times will be longer."""
        return is_floor(self.ceiling_share, self.kernels_share)

    def to_json(self) -> dict[str, Any]:
        timing = self.timing or Timing()
        return {
            "name": self.name,
            "runs": self.runs,
            "mesh": self.mesh,
            "weights": list(self.components),
            "memory": asdict(self.memory),
            "fits": self.fits,
            "compile_s": round(self.compile_s, 1),
            "xla_cycles": round(timing.xla),
            "kernel_cycles": round(timing.kernels),
            "collectives": [
                {name: getattr(collective, name) for name in ("kind", "seconds", "exposed_s", "overlapped")}
                | {"bytes": round(collective.bytes), "times": round(collective.times)}
                for collective in step_time.merge_collectives(timing.collectives)
            ],
            "collectives_exposed_s": sum(collective.exposed_s for collective in timing.collectives),
            "predicted_s": self.predicted_s,
            "predicted_best_branch_s": self.best_s,
            "predicted_with_all_reruns_s": self.rerun_s,
            "model_flops": self.flops.total,
            "mfu": self.mfu,
            "ceiling_share": self.ceiling_share,
            "kernels_share": self.kernels_share,
            "is_floor": self.is_floor,
            "findings": {title: list(sentences) for title, sentences in self.findings.items()},
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class TransferStart:
    """The `seconds` that a plan counts before a collective's first byte; `is_measured` on chips of this machine."""

    seconds: float
    is_measured: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Prediction for all programs of one generation."""

    model: str
    title: str
    topology: Topology
    settings: Settings
    precision: str
    programs: tuple[ProgramPlan, ...]
    residency_bytes: int  # per device: every component's weights, and the rest of the largest program
    advice: tuple[str, ...]
    compiler: str  # versions of libtpu and jax
    host_peak_bytes: int  # memory of this process and its children
    transfer_start: TransferStart

    @property
    def fits(self) -> bool:
        return self.residency_bytes <= self.topology.chip.hbm_bytes and all(program.fits for program in self.programs)

    @property
    def mean_step_s(self) -> float | None:
        """Return the mean seconds of a step if several programs alternate; None for one, or if one does not compile."""
        steps = [program for program in self.programs if program.name.startswith(DENOISE_STEP)]
        seconds = [step.predicted_s * step.runs for step in steps if step.predicted_s is not None]
        return sum(seconds) / sum(step.runs for step in steps) if len(seconds) == len(steps) > 1 else None

    @property
    def predicted_total_s(self) -> float | None:
        """Return the seconds of one generation, without loading and host work; None if a program does not compile."""
        known = [program.predicted_s * program.runs for program in self.programs if program.predicted_s is not None]
        return sum(known) if len(known) == len(self.programs) else None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "topology": self.topology.name,
            "chips": self.topology.num_chips,
            "chip": asdict(self.topology.chip),
            "settings": asdict(self.settings),
            "mesh": {program.name: program.mesh for program in self.programs},
            "precision": self.precision,
            "programs": [program.to_json() for program in self.programs],
            "residency_bytes": self.residency_bytes,
            "fits": self.fits,
            "predicted_total_s": self.predicted_total_s,
            "label": LABEL,
            "advice": list(self.advice),
            "compiler": self.compiler,
            "host_peak_bytes": self.host_peak_bytes,
            "transfer_start": asdict(self.transfer_start),
        }


_COLUMNS = (
    "program", "runs", "mesh", "weights", "temps", "output", "peak", "fits", "compile",
    "XLA Mcyc", "kernel Mcyc", "waiting", "seconds", "x runs", "MFU", "of ceiling",
)  # fmt: skip


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns as wide as their widest cell; the first column is aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join((first.ljust(widths[0]), *map(str.rjust, rest, widths[1:]))).rstrip() for first, *rest in rows]


def format_gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _row(program: ProgramPlan) -> tuple[str, ...]:
    timing, memory = program.timing, program.memory
    waiting = None if timing is None else sum(collective.exposed_s for collective in timing.collectives)
    total = None if program.predicted_s is None else program.predicted_s * program.runs
    return (
        program.name, str(program.runs), program.mesh, format_gib(memory.weights), format_gib(memory.temporaries),
        format_gib(memory.output), format_gib(memory.peak), "yes" if program.fits else "NO",
        f"{program.compile_s:.0f} s",
        "-" if timing is None else f"{timing.xla / 1e6:.1f}", "-" if timing is None else f"{timing.kernels / 1e6:.1f}",
        _seconds(waiting), _seconds(program.predicted_s) + f" {FLOOR}" * program.is_floor, _seconds(total),
        _percent(program.mfu), _percent(program.ceiling_share),
    )  # fmt: skip


def _verdict(plan: Plan) -> str:
    if plan.fits:
        return compose("plan.fits")
    return (
        compose("plan.fits_stage_by_stage")
        if all(program.fits for program in plan.programs)
        else compose("plan.does_not_fit")
    )


def _basis(plan: Plan) -> str:
    """Return the sentences that state the basis of the figures of `plan`."""
    start_us, is_measured = 1e6 * plan.transfer_start.seconds, plan.transfer_start.is_measured
    figures = compose("plan.basis_predicted", label=LABEL, compiler=plan.compiler)
    start = compose("plan.transfer_start_assumed", start_us=f"{start_us:.1f}")
    if is_measured:
        figures = compose("plan.basis_predicted_start_measured", label=LABEL, compiler=plan.compiler)
        start = compose("plan.transfer_start_measured", start_us=f"{start_us:.1f}")
    columns = compose("plan.columns")
    return compose_list([figures, columns, start], "space")


def format_plan(plan: Plan, explain: bool = False) -> str:
    """Return the readable report. explain: with the most expensive operations and the findings."""
    settings, chip = plan.settings, plan.topology.chip
    total = plan.predicted_total_s
    headline = compose(
        "plan.headline", title=plan.title, name=plan.topology.name, num_chips=plan.topology.num_chips,
        device_kind=chip.device_kind, width=settings.width, height=settings.height, num_frames=settings.num_frames,
        num_inference_steps=settings.num_inference_steps, guidance_scale=f"{settings.guidance_scale:g}",
        precision=plan.precision, quality=settings.quality,
    )  # fmt: skip
    memory = compose(
        "plan.memory_of_all_components", residency_bytes=format_gib(plan.residency_bytes), hbm_gib=f"{chip.hbm_gib:g}",
        verdict=_verdict(plan),
    )  # fmt: skip
    lines = [
        headline,
        _basis(plan),
        "",
        *format_table([_COLUMNS, *map(_row, plan.programs)]),
        "",
        memory,
        compose("plan.one_generation", label=LABEL, total="-" if total is None else f"{_seconds(total)} s"),
        compose("plan.host_memory_used", host_peak_bytes=format_gib(plan.host_peak_bytes)),
    ]
    if plan.mean_step_s is not None:
        lines.append(compose("plan.mean_step", mean_step_s=_seconds(plan.mean_step_s)))
    for program in plan.programs:
        lines += [compose("plan.note", name=program.name, note=note) for note in program.notes]
    lines += [compose("plan.advice", sentence=sentence) for sentence in plan.advice]
    if explain:
        lines += [line for program in plan.programs for line in format_explanation(program)]
    return compose_list(lines, "line")


def format_explanation(program: ProgramPlan) -> list[str]:
    """Return the most expensive operations and the findings of one program, as lines."""
    if program.timing is None:
        return []
    timing = program.timing
    rows = [("share", "Mcyc", "times", "operation", "result", "from", "at")]
    for operation in step_time.most_expensive(timing, 12):
        rows.append(
            (
                f"{100 * operation.cycles / timing.cycles:.1f} %",
                f"{operation.cycles / 1e6:.1f}",
                f"{operation.times:.0f}",
                operation.name,
                operation.shape[:60],
                operation.op_name[-60:],
                operation.source[-70:],
            )
        )
    lines = ["", f"{program.name}: the most expensive operations, {LABEL}", *format_table(rows)]
    for title, sentences in program.findings.items():
        lines += ["", f"{program.name}: {title}", *(sentences or ["none"])]
    return lines
