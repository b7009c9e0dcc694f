"""Advice for a generation that does not fit: changes, estimated from compiled programs and confirmed by a compile."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from ..cost_model import chips
from ..messages import compose, compose_list
from ..model_spec import IntInput, Settings
from ..programs.program import Program
from .compile import PlanRequest, compile_program, weight_bytes
from .report import ProgramPlan, format_gib

_TRIES = 3  # compiles per kind of change, because estimates may be wrong
_SCALES = (0.9, 0.8, 2 / 3, 0.5, 0.4, 0.3, 0.2, 1 / 8)


def residency_bytes(programs: Sequence[ProgramPlan]) -> int:
    """Return the bytes per device with the weights of every component loaded and the most demanding program running."""
    weights = {component: program.memory.weights for program in programs for component in program.components}
    return sum(weights.values()) + max((program.memory.without_weights for program in programs), default=0)


def give_advice(request: PlanRequest, programs: Sequence[ProgramPlan]) -> tuple[str, ...]:
    """Return sentences on programs that do not fit and on a change that would; none if everything fits at once."""
    available = request.topology.chip.hbm_bytes
    needed = residency_bytes(programs)
    refused = [program for program in programs if not program.fits]
    if needed <= available and not refused:
        return ()
    if not refused:
        largest = max(programs, key=lambda program: program.memory.peak)
        return (compose(
            "plan.fits_by_evicting", needed=format_gib(needed), available=format_gib(available),
            name=largest.name, peak=format_gib(largest.memory.peak),
        ),)  # fmt: skip
    culprit = max(refused, key=lambda program: program.memory.peak)
    sentence = compose(
        "plan.component_does_not_fit", name=culprit.name, peak=format_gib(culprit.memory.peak),
        available=format_gib(available), weights=format_gib(culprit.memory.weights),
    )  # fmt: skip
    return (sentence, _find_change(request, culprit, available))


@dataclass(frozen=True, kw_only=True)
class _Alternative:
    """Changed request, and the words that describe the change."""

    request: PlanRequest
    words: str


def _request_stage(culprit: ProgramPlan, request: PlanRequest) -> PlanRequest:
    """Return the request of the culprit's stage alone."""
    alone = (replace(request, stages=(stage,)) for stage in request.stages)
    return next(stage for stage in alone if any(program.name == culprit.name for program in stage.programs()))


def _find_change(request: PlanRequest, culprit: ProgramPlan, available: int) -> str:
    """Return the first change whose estimate fits and whose compile confirms it, as a sentence."""
    alone = _request_stage(culprit, request)
    before = _program(alone, culprit.name)
    kinds = [_more_chips(alone)]
    if weight_bytes(before) < available:
        kinds = [_fewer_frames(alone), _smaller(alone), *kinds]
    tried = []
    for changes in kinds:
        promising = (change for change in changes if _estimate(change.request, culprit, before) <= available)
        for change in itertools.islice(promising, _TRIES):
            compiled = compile_program(_program(change.request, culprit.name), change.request.topology)
            if compiled.text is not None and compiled.memory.peak <= available:
                total = compiled.memory.peak + _other_weights(replace(change.request, stages=request.stages), culprit)
                return compose(
                    "plan.would_fit", words=change.words, name=culprit.name,
                    peak=format_gib(compiled.memory.peak), total=format_gib(total), available=format_gib(available),
                )  # fmt: skip
            tried.append(f"{change.words} ({compiled.refusal or format_gib(compiled.memory.peak) + ' GiB per device'})")
    return compose(
        "plan.nothing_tried_fits", tried=compose_list(tried or [compose("plan.no_larger_slice")], "semicolon")
    )


def _other_weights(request: PlanRequest, culprit: ProgramPlan) -> int:
    """Return the bytes per device of all weights except those that the culprit uses at a time."""
    weights = {name: weight_bytes(program) for program in request.programs() for name in program.components}
    return sum(weights.values()) - max((weights[name] for name in culprit.components), default=0)


def _program(request: PlanRequest, name: str) -> Program:
    return next(program for program in request.programs() if program.name == name)


def _estimate(request: PlanRequest, culprit: ProgramPlan, before: Program) -> float:
    """Return the bytes per device that the culprit would need: its weights, and the rest scaled like its inputs."""
    after = _program(request, culprit.name)
    rest = culprit.memory.without_weights * _growth(before, after)
    return weight_bytes(after) + rest * before.mesh.size / after.mesh.size


def _growth(before: Program, after: Program) -> float:
    """Return the ratio of the sizes of arguments whose shapes differ, without weights; 1 if none differs."""
    pairs = zip(*(jax.tree.leaves(tuple(program.args)) for program in (before, after)), strict=True)
    changed = [(old.size, new.size) for old, new in pairs if old.shape != new.shape]
    return sum(new for _, new in changed) / sum(old for old, _ in changed) if changed else 1.0


def _fewer_frames(request: PlanRequest) -> Iterator[_Alternative]:
    limit, settings = request.spec.inputs.get("num_frames"), request.settings
    if not isinstance(limit, IntInput):
        return
    for frames in _falling_values(limit, settings.num_frames):
        yield _replace_settings(
            request,
            replace(settings, num_frames=frames),
            compose("plan.fewer_frames", frames=frames, num_frames=settings.num_frames),
        )


def _smaller(request: PlanRequest) -> Iterator[_Alternative]:
    height, width = map(request.spec.whole_numbers, ("height", "width"))
    settings = request.settings
    for scale in _SCALES:
        tall, wide = _nearest(height, settings.height * scale), _nearest(width, settings.width * scale)
        if (tall, wide) != (settings.height, settings.width):
            yield _replace_settings(
                request,
                replace(settings, height=tall, width=wide),
                compose("plan.smaller_size", wide=wide, tall=tall, width=settings.width, height=settings.height),
            )


def _more_chips(request: PlanRequest) -> Iterator[_Alternative]:
    for topology in chips.larger(request.topology):
        # A requested mesh has the wrong size for another topology.
        now, more = request.topology.num_chips, topology.num_chips
        words = compose("plan.more_chips", num_chips=more, name=topology.name, current_chips=now)
        yield _Alternative(request=replace(request, topology=topology, mesh_shape=None), words=words)


def _replace_settings(request: PlanRequest, settings: Settings, words: str) -> _Alternative:
    return _Alternative(request=replace(request, settings=settings), words=words)


def _falling_values(limit: IntInput, below: int) -> Iterator[int]:
    """Yield some allowed values smaller than `below`, in falling order."""
    values = [value for value in range(limit.low, below) if limit.problem(value) is None]
    for share in _SCALES:
        nearest = [value for value in values if value <= below * share]
        if nearest:
            yield nearest[-1]


def _nearest(limit: IntInput, value: float) -> int:
    return limit.largest_allowed(int(value)) or limit.low
