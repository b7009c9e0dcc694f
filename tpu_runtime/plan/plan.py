"""Compile a model's real programs for a described TPU, and report whether they fit and how long they would take.

No TPU, weights or network are needed: shapes come from the spec, and libtpu runs on this machine's CPU. Programs are
compiled one after another; only the text and the numbers of each are kept.
"""

import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from ...sharding.mesh import mesh_shape
from ...sharding.shape import MeshShape
from .. import precision as precisions
from ..cache import magcache_curves
from ..checkpoints import file_resolution
from ..cost_model import chips, flops, hlo, interconnect, kernels, step_time
from ..cost_model.bundles import Cost
from ..cost_model.chips import Topology
from ..machine import record as machine_record
from ..messages import compose, find_messages
from ..model_spec import STAGES
from . import advice, findings, report
from .compile import CompiledProgram, PlanRequest, compile_program
from .report import Plan, ProgramPlan, TransferStart

Write = Callable[[str], None]

# Kernels below this share of a program's cycles have no share of the peak in the report.
KERNELS_OF_NOTE = 0.2


def make_plan(request: PlanRequest, write: Write = lambda line: None) -> Plan:
    """Compile and time every program of a request. `write` gets a line as each is done."""
    compiled, programs = [], request.programs()
    many = "s" if len(programs) > 1 else ""
    write(
        f"compiles {len(programs)} program{many} for {request.topology.name}, which may take minutes{many and ' each'}"
    )
    for index, program in enumerate(programs, 1):
        compiled.append(compile_program(program, request.topology))
        done = compiled[-1]
        result = "compiled" if done.text else "does not fit"
        write(f"{index} of {len(programs)}, {program.name}: {result}, {done.compile_s:.0f} s")
    start = transfer_start(request.topology)
    rows = predict_programs(compiled, request.topology, write, start.seconds)
    residency = advice.residency_bytes(rows)
    return Plan(
        model=request.spec.name,
        title=request.spec.title,
        topology=request.topology,
        settings=request.settings,
        precision=precisions.precision_label(request.precision, request.pictures),
        programs=rows,
        residency_bytes=residency,
        advice=advice.give_advice(request, rows),
        compiler=f"libtpu {importlib.metadata.version('libtpu')}, jax {jax.__version__}",
        host_peak_bytes=host_peak_bytes(),
        transfer_start=start,
    )


def transfer_start(topology: Topology) -> TransferStart:
    """Return the start time of a collective on these chips: measured here by the self-test, or assumed."""
    key = machine_record.machine_key(topology.chip.device_kind, topology.num_devices)
    measured = machine_record.read_record(key).transfer_start_s
    if measured is None:
        return TransferStart(seconds=interconnect.START_S, is_measured=False)
    return TransferStart(seconds=measured, is_measured=True)


def predict_programs(
    compiled: Sequence[CompiledProgram], topology: Topology, write: Write, start_s: float = interconnect.START_S
) -> tuple[ProgramPlan, ...]:
    """Return the predictions for compiled programs. Each distinct kernel is timed once.

    compiled: the programs. topology: that they are compiled for. write: gets a line of progress.
    start_s: seconds before a collective's first byte.
    """
    modules = [hlo.parse_module(done.text) if done.text else None for done in compiled]
    kernel_calls = [kernel for module in modules if module for kernel in kernels.find_kernels(module)]
    if kernel_calls:
        write(f"counting the cycles of {len({kernel.key for kernel in kernel_calls})} kernels")
    costs = kernels.measure_kernels(kernel_calls, topology)
    pairs = zip(compiled, modules, strict=True)
    return tuple(plan_program(done, module, costs, topology, start_s) for done, module in pairs)


def plan_program(
    done: CompiledProgram, module: hlo.Module | None, costs: Mapping[str, Cost], topology: Topology,
    start_s: float = interconnect.START_S,
) -> ProgramPlan:  # fmt: skip
    """Return the prediction for a compiled program.

    done: the compiled program. module: its parsed text; None if it does not fit. costs: of its kernels, by key.
    topology: that it is compiled for. start_s: seconds before a collective's first byte.
    """
    program, chip = done.program, topology.chip
    timing = best = None
    if module is not None:
        devices = tuple(program.mesh.devices.flat)
        timing, best = (
            step_time.predict_timing(
                module,
                step_time.TimingTarget(chip=chip, devices=devices, kernels=costs, at_best=at_best, start_s=start_s),
            )
            for at_best in (False, True)
        )
        missing = _time_below_peak(timing, done.flops, topology)
        timing, best = timing + missing, best + missing
    seconds = timing.cycles / chip.clock_hz if timing else None
    peak_flop_s = chip.peak_tflop_s * 1e12 * topology.num_chips
    ceiling_share = done.flops.charged / (seconds * peak_flop_s) if seconds else None
    kernels_share = _kernels_share(timing, done.flops, topology) if timing else None
    return ProgramPlan(
        name=program.name,
        runs=program.runs,
        mesh="x".join(str(size) for size in mesh_shape(program.mesh).sizes.values()),
        components=program.components,
        memory=done.memory,
        fits=module is not None and done.memory.peak <= chip.hbm_bytes,
        compile_s=done.compile_s,
        flops=done.flops,
        timing=timing,
        predicted_s=seconds,
        best_s=best.cycles / chip.clock_hz if best else None,
        rerun_s=(timing.cycles + timing.reruns) / chip.clock_hz if timing else None,
        mfu=done.flops.total / (seconds * peak_flop_s) if seconds else None,
        ceiling_share=ceiling_share,
        kernels_share=kernels_share,
        findings=_findings(done, module, timing, costs) if module and timing else {},
        notes=tuple(
            [
                *_floor_notes(ceiling_share, kernels_share),
                *_notes(module, timing, costs),
                *_sparse_steps(module, best.cycles / chip.clock_hz),
            ]
            if module and timing and best
            else [f"does not compile: {done.refusal}", *findings.find_huge_matmuls(program)]
        ),
    )


def _time_below_peak(timing: step_time.Timing, counted: flops.Flops, topology: Topology) -> step_time.Timing:
    """Return the time that kernels lack at the peak: bundles are too low a bound if one takes many cycles (TPU7x)."""
    least = counted.kernels / topology.num_devices / topology.chip.flop_per_cycle
    return step_time.Timing(kernels=max(0.0, least - timing.kernels))


def _kernels_share(timing: step_time.Timing, counted: flops.Flops, topology: Topology) -> float | None:
    """Return the share of the peak at which the kernels' products run; None where kernels are little of the program."""
    if timing.kernels < KERNELS_OF_NOTE * timing.cycles:
        return None
    return counted.kernels / topology.num_devices / topology.chip.flop_per_cycle / timing.kernels


def _floor_notes(ceiling_share: float | None, kernels_share: float | None) -> list[str]:
    if not report.is_floor(ceiling_share, kernels_share):
        return []
    share = 100 * max(ceiling_share or 0.0, kernels_share or 0.0)
    return [compose("plan.floor", share=f"{share:.0f}")]


def _sparse_steps(module: hlo.Module, seconds: float) -> list[str]:
    if not any(kernel.skipped for kernel in kernels.find_kernels(module)):
        return []
    return [
        f"a step that skips blocks in every layer takes {seconds:.2f} s; other figures are for a step that skips none"
    ]


def _findings(
    done: CompiledProgram, module: hlo.Module, timing: step_time.Timing, costs: Mapping[str, Cost]
) -> dict[str, list[str]]:
    assert done.text is not None  # the module's
    return {
        "kernels": findings.describe_kernel_costs(module, timing, costs),
        "copies between kernels and computation": findings.truncate_list(
            findings.find_layout_copies(done.text, timing), 12
        ),
        "float32 results of bfloat16 inputs": findings.truncate_list(findings.find_float32_arrays(done.text), 12),
        "float32 matrix products": findings.find_float32_scores(done.text),
        "collectives that are waited for": findings.truncate_list(findings.find_exposed_collectives(timing), 12),
        "scatters": findings.find_scatters(done.text),
        "replicated weights": findings.find_replicated_weights(done.program),
    }


def _notes(module: hlo.Module, timing: step_time.Timing, costs: Mapping[str, Cost]) -> list[str]:
    notes: list[str] = [compose("plan.no_estimate", name=name) for name in dict.fromkeys(timing.uncounted)]
    if timing.reruns:
        notes.append(
            f"kernels repeat their work in an exact, slower form where their flag says so: {timing.reruns / 1e6:.1f} "
            "Mcycles more if all of it were, none of which is counted"
        )
    for kernel in kernels.find_kernels(module):
        cost = costs[kernel.key]
        if cost.unknown_loops:
            notes.append(f"kernel {kernel.name} has {cost.unknown_loops} loops without a constant count, counted once")
        if cost.error:
            notes.append(f"kernel {kernel.name} does not compile alone: {cost.error}")
    return notes


def host_peak_bytes() -> int:
    """Return the peak memory of this process, plus that of its largest child."""
    import resource  # exists where libtpu does

    return sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024


# --- the command ------------------------------------------------------------------------------------------------------


def parse_request(
    *, model: str, topology: str, models: Sequence[str] = (), inputs: Mapping[str, Any] = {},
    precision: str = "bfloat16", mesh: str | None = None, stages: str = ",".join(STAGES),
) -> PlanRequest:  # fmt: skip
    """Return the request for these values. Raises `ValueError` with a sentence for the user.

    model, topology, precision: by name. models: folders of files. inputs: of the model, by name.
    mesh: sizes dp,sp,tp separated by commas; None: the runtime's choice. stages: names separated by commas.
    """
    spec = file_resolution.resolve_spec(model, models)
    settings = spec.settings(**{"guidance_scale_2": inputs.get("guidance_scale"), **inputs})
    names = tuple(name.strip() for name in stages.split(",") if name.strip())
    unknown = [name for name in names if name not in STAGES]
    if unknown or not names:
        raise ValueError(compose("plan.stages_unknown", stages=repr(stages), allowed=", ".join(STAGES)))
    return PlanRequest(
        spec=spec,
        settings=replace(
            settings, step_cache=magcache_curves.attach_curve(spec, spec.published.hub_id, settings.step_cache)
        ),
        topology=chips.topology(topology),
        precision=precisions.resolve_precision(precision, "tpu"),
        pictures=precisions.resolve_image_precision(precision, "tpu"),
        mesh_shape=_parse_mesh(mesh),
        stages=names,
    )


def _parse_mesh(text: str | None) -> MeshShape | None:
    """Return the mesh shape of the text dp,sp,tp. Raises `ValueError` for another text."""
    if text is None:
        return None
    try:
        dp, sp, tp = (int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(compose("plan.mesh_malformed", text=repr(text))) from None
    return MeshShape(dp=dp, sp=sp, tp=tp)


def make_report(write: Write, *, explain: bool = False, json_file: str | None = None, **asked: Any) -> str:
    """Return the report of `request_of(**asked)`; write it as JSON too if `json_file` is given.

    write: gets lines of progress. explain: see `report.text`. Raises `ValueError` for wrong options.
    """
    plan = make_plan(parse_request(**asked), write)
    if json_file:
        Path(json_file).write_text(json.dumps(plan.to_json(), indent=1) + "\n")
        write(f"written: {json_file}")
    return report.format_plan(plan, explain=explain)


def main(say: Callable[..., None], asked: Mapping[str, Any]) -> None:
    """Run a plan in its own process, for `process`. say: sends one message. asked: arguments of `make_report`."""
    try:
        report = make_report(lambda line: say(line=line), **asked)
        say(report=report, messages=find_messages(report))
    except (ValueError, RuntimeError, OSError) as error:
        say(error=str(error), messages=find_messages(str(error)), is_users=isinstance(error, ValueError))
