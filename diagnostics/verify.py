"""`comfyui-tpu bench MODEL --verify`: a few blocks of a denoiser at their real size, in every variant of a step.

Each group of compiler options and each kernel is left out in turn. Results must agree; the times show how much each
saves on this machine. Weights are random, created on the chips; nothing is downloaded. With `--topology` the variants
are compiled for described chips, and times are the compiler's predictions.
"""

import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ..nodes.declare import Json
from ..tpu_runtime import device_memory
from ..tpu_runtime.device_memory import DeviceMemory
from ..tpu_runtime.machine import fallbacks
from ..tpu_runtime.model_spec import ModelSpec, Settings
from ..tpu_runtime.precision import resolve_precision as resolve
from .random_inputs import random_arguments, random_array, time_runs

if TYPE_CHECKING:
    import jax
    import numpy as np

    from ..sharding.mesh import Device
    from ..tpu_runtime.cost_model.chips import Topology
    from ..tpu_runtime.plan.compile import CompiledProgram
    from ..tpu_runtime.precision import Precision
    from ..tpu_runtime.programs.denoise_step import StepArgs
    from ..tpu_runtime.programs.program import Program

SCHEMA = 1
# Runs a program: (weights, number of runs) -> results, whether they are finite, seconds of each run.
Run = Callable[["Mapping[str, jax.Array]", int], "tuple[np.ndarray, bool, list[float]]"]
# Largest relative RMS difference of variants: rounding over a few blocks in this precision, at least 4 times the
# largest seen.
BOUNDS = {"bfloat16": 2**-5, "float32": 2**-14}
# A kernel's fault of 1 % is smaller than bfloat16's rounding. But rounding errors have random directions, while a
# kernel's fault has the direction in which results move as the weights before it grow. So the difference is projected
# onto that direction and bounded there.
ERROR_DIRECTIONS = {
    "attention's results": re.compile(r"\b(to_v|add_v_proj|in_value)\b"),
    "queries": re.compile(r"\bnorm(_added)?_q\b"),
}
# Queries move results less than attention's results do, so rounding has a larger share of the projection.
FACTORS = {
    "bfloat16": {"attention's results": 2**-8, "queries": 2**-6},
    "float32": {"attention's results": 2**-14, "queries": 2**-14},
}
# Relative growth of the weights for that, enough to exceed rounding.
GROWTH = 0.25
# Deviation of the gains of queries' and keys' norms; scores then have deviation 3.2 in base e.
HEAD_NORMS = 1.8
_HEAD_NORM = re.compile(r"\bnorm(_added)?_[qk]\b")
# Steps of the loop; its first one is not timed.
LOOP_STEPS = 6
# Frames of a video on which XLA computes instead of kernels: all tokens may not fit in memory.
PART_FRAMES = 17
# Blocks of each kind. Three are the minimum for which XLA keeps the real step's loop, in which one block's weights are
# gathered during the previous block's attention. One block is straight-line code.
NUM_BLOCKS, NUM_PART_BLOCKS = 3, 1
CHOSEN, PART = "as chosen", " (part)"
# The entries of configs that count a denoiser's blocks.
LAYERS = re.compile(r"num_(single_)?layers|n_(refiner_)?layers")
# Switches of the denoisers' kernels; other kernels belong to autoencoders.
KERNELS = ("attention", "prologue", "residual_norm")


@dataclass(frozen=True, kw_only=True)
class StepVariant:
    """A variant of the step."""

    name: str
    without: fallbacks.Fallbacks  # options and kernels that it does not use
    is_part: bool = False  # whether it has only the first frames


@dataclass(frozen=True, kw_only=True)
class FormResult:
    """The outcome of a variant."""

    name: str
    compile_s: float
    median_s: float | None  # of one run; None: did not run
    predicted_s: float | None  # by the compiler; None: not predicted
    peak_bytes: int | None  # on one device; None: did not compile
    difference: float | None  # relative RMS from the chosen variant of the same size; None: the chosen one, or no run
    problem: str  # "" without one
    factors: Mapping[str, float] = field(
        default_factory=dict
    )  # growth along each of `ERROR_DIRECTIONS`, for variants of a part


def verify(
    spec: ModelSpec,
    settings: Settings,
    devices: "Sequence[Device]",
    choice: str,
    runs: int,
    described: "Topology | None",
    report: Callable[[str], None],
) -> tuple[dict[str, Json], tuple[FormResult, ...]]:
    """Return the record and its variants; with `described` chips, predictions.

    spec, settings: of the model. devices: to run on. runs: of each variant.
    choice: the precision as a node has it.
    described: chips to compile for; None: measure on `devices`.
    report: takes a line for each variant as soon as it has run.
    """
    from ..tpu_runtime import versions

    precision = resolve(choice, devices[0].platform)
    is_tiny = devices[0].platform != "tpu"
    check = StepVariants(spec, devices, precision, runs, report)
    variants = list_variants(
        check.program(settings, StepVariant(name=CHOSEN, without=fallbacks.fallbacks_from_environment())), is_tiny
    )
    sizes = {False: settings, True: take_first_frames(spec, settings)}
    rows = tuple(check.predict(variants, sizes, described) if described else check.measure(variants, sizes))
    loop = None if described else check.loop(settings)
    record = {
        "schema": SCHEMA, "label": "predicted" if described else "measured", "model": spec.name, "is_tiny": is_tiny,
        "settings": asdict(settings), "device_kind": devices[0].device_kind, "num_devices": len(devices),
        "precision": precision, "versions": versions.list_result_versions(), "forms": [asdict(row) for row in rows],
        "loop": loop, "memory": asdict(DeviceMemory() if described else device_memory.max_memory_stats(devices)),
    }  # fmt: skip
    return record, rows


def with_blocks(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the model with at most `count` blocks of each kind in its denoisers, as wide as they are."""

    def shorten(config: Mapping[str, Json]) -> dict[str, Json]:
        return {**config, **{key: min(count, config[key]) for key in config if LAYERS.fullmatch(key)}}

    parts = tuple(
        replace(part, config=shorten(part.config)) if part.name in spec.denoiser.experts else part
        for part in spec.components
    )
    return replace(spec, components=parts)


def take_first_frames(spec: ModelSpec, settings: Settings) -> Settings:
    """Return settings with the first frames of a video; those of an image are unchanged."""
    if spec.is_image:
        return settings
    limit = spec.inputs["num_frames"]
    frames = next(count for count in range(min(PART_FRAMES, settings.num_frames), 0, -1) if not limit.problem(count))
    return replace(settings, num_frames=frames)


def list_variants(chosen: "Program", is_tiny: bool) -> Iterator[StepVariant]:
    """Yield the variants to verify.

    These are the chosen variant, those without each group of its options, and one without all; then, of the first
    frames, the chosen one, those without each kernel, and one without all.

    chosen: the chosen variant's program. is_tiny: whether there is no TPU.
    """
    base = fallbacks.fallbacks_from_environment()
    yield StepVariant(name=CHOSEN, without=base)
    groups = [
        group
        for group, begins in fallbacks.OPTIONS.items()
        if any(option.startswith(begins) for option in chosen.compiler_options)
    ]
    for names in _each_and_all(groups):
        yield StepVariant(name=f"without {', '.join(names)}", without=base | _off(fallbacks.OPTIONS_VARIABLE, names))
    yield StepVariant(name=CHOSEN + PART, without=base, is_part=True)
    # Without a TPU the attention kernel alone can be interpreted.
    for names in _each_and_all(KERNELS[:1] if is_tiny else KERNELS):
        without = base | _off(fallbacks.KERNELS_VARIABLE, names)
        yield StepVariant(name=f"without the kernels {', '.join(names)}{PART}", without=without, is_part=True)


def _each_and_all(names: Sequence[str]) -> list[Sequence[str]]:
    return [*([name] for name in names), *([names] if len(names) > 1 else [])]


def _off(variable: str, names: Sequence[str]) -> fallbacks.Fallbacks:
    """Return the fallbacks of a machine whose owner switches these off."""
    return fallbacks.fallbacks_from_environment({variable: ",".join(f"-{name}" for name in names)})


class StepVariants:
    """Variants of one step on one set of devices."""

    def __init__(
        self,
        spec: ModelSpec,
        devices: "Sequence[Device]",
        precision: "Precision",
        runs: int,
        report: Callable[[str], None] = print,
    ) -> None:
        self.spec, self.devices, self.runs, self.report = spec, tuple(devices), runs, report
        self.precision: Precision = precision
        # Without a TPU kernels are interpreted, because otherwise none would be compared.
        self.kernel: Literal["auto", "pallas"] = "auto" if devices[0].platform == "tpu" else "pallas"

    def program(self, settings: Settings, variation: StepVariant) -> "Program":
        """Return a variant's program."""
        from ..tpu_runtime.programs import denoising_plan
        from ..tpu_runtime.programs.program import CompileTarget

        spec = with_blocks(self.spec, NUM_PART_BLOCKS if variation.is_part else NUM_BLOCKS)
        plan = denoising_plan.DenoisingPlan.published(spec, settings)
        target = CompileTarget(
            devices=self.devices, precision=self.precision, kernel=self.kernel, fallbacks=variation.without
        )
        return plan.program(plan.step_groups[0], target, plan.shape)

    def predict(
        self, wanted: "Iterator[StepVariant]", sizes: Mapping[bool, Settings], topology: "Topology"
    ) -> Iterator[FormResult]:
        """Yield each variant with its predicted time.

        wanted: the variants. sizes: settings by whether a variant is of a part. topology: the chips.
        All compile before the first is predicted: most have the same kernels.
        """
        from ..tpu_runtime.plan import compile as compiling
        from ..tpu_runtime.plan import plan

        rows: list[FormResult] = []
        compiled: list[CompiledProgram] = []
        for variation in wanted:
            started = time.monotonic()
            try:
                done = compiling.compile_program(self.program(sizes[variation.is_part], variation), topology)
            except Exception as error:  # any exception: the other variants are still useful
                rows.append(_fail(variation, error, started, "does not compile"))
            else:
                compiled.append(done)
                rows.append(
                    FormResult(
                        name=variation.name, compile_s=done.compile_s, median_s=None, predicted_s=None,
                        peak_bytes=done.memory.peak, difference=None, problem=done.refusal,
                    )
                )  # fmt: skip
            self.report(_format_row(rows[-1]))
        plans = iter(plan.predict_programs(compiled, topology, self.report))
        for row in rows:
            yield row if row.peak_bytes is None else replace(row, predicted_s=next(plans).predicted_s)

    def measure(self, wanted: "Iterator[StepVariant]", sizes: Mapping[bool, Settings]) -> Iterator[FormResult]:
        """Yield each variant with its time, and its difference from the chosen one of its size."""
        chosen: dict[bool, np.ndarray] = {}
        pulls: dict[str, np.ndarray] = {}
        for variation in wanted:
            program = self.program(sizes[variation.is_part], variation)
            started = time.monotonic()
            try:
                row, values, run = self._one(variation, program, started, chosen.get(variation.is_part), pulls)
                if variation.is_part and not pulls and not row.problem:
                    pulls |= _pulls(program, run, values)
                chosen.setdefault(variation.is_part, values)
            except Exception as error:  # any exception: the other variants are still useful
                row = _fail(variation, error, started, "does not run")
            self.report(_format_row(row))
            yield row

    def _one(
        self,
        variation: StepVariant,
        program: "Program",
        started: float,
        chosen: "np.ndarray | None",
        pulls: "Mapping[str, np.ndarray]",
    ) -> "tuple[FormResult, np.ndarray, Run]":
        """Return the variant's outcome, its values, and a function that runs it with any weights."""
        import numpy as np

        from ..tpu_runtime.plan import compile as compiling

        executable = program.compile()
        compile_s = time.monotonic() - started

        def run(weights: "Mapping[str, jax.Array]", runs: int) -> "tuple[np.ndarray, bool, list[float]]":
            (*_, denoised, is_finite), seconds = time_runs(
                executable, weights, functools.partial(step_arguments, program), runs
            )
            return np.asarray(denoised, np.float64), bool(is_finite), seconds

        values, is_finite, seconds = run(random_weights(program), self.runs)
        row = FormResult(
            name=variation.name, compile_s=compile_s, median_s=statistics.median(seconds), predicted_s=None,
            peak_bytes=compiling.measure_memory(program, executable).peak,
            difference=None if chosen is None else relative_rms(values, chosen),
            problem="", factors={} if chosen is None else attribute_error(values - chosen, pulls),
        )  # fmt: skip
        problem = _problem(row, self.precision) if is_finite else "values are not finite"
        return replace(row, problem=problem), values, run

    def loop(self, settings: Settings) -> dict[str, Json]:
        """Time consecutive steps as a sampler runs them: compiled through the caches, state donated, each awaited."""
        from ..tpu_runtime.programs import executables

        program = self.program(settings, StepVariant(name=CHOSEN, without=fallbacks.fallbacks_from_environment()))
        executable, is_new = executables.compile_or_load(program)
        weights, args, seconds = random_weights(program), step_arguments(program), []
        for index in range(LOOP_STEPS):
            begun = time.perf_counter()
            *state, _, is_finite = executable(weights, *args)
            args = args._replace(state=tuple(state))
            bool(is_finite)  # waits, as the sampler does
            if index:
                seconds.append(time.perf_counter() - begun)
        return {"steps": len(seconds), "median_s": statistics.median(seconds), "was_compiled": is_new}


def _fail(variation: StepVariant, error: Exception, started: float, verb: str) -> FormResult:
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return FormResult(
        name=variation.name, compile_s=time.monotonic() - started, median_s=None, predicted_s=None, peak_bytes=None,
        difference=None, problem=f"{verb}: {first[:200]}",
    )  # fmt: skip


def _format_row(row: FormResult) -> str:
    ran = "" if row.median_s is None else f", {_seconds(row.median_s)} s"
    return f"{row.name}: compiled in {row.compile_s:.0f} s{ran} {row.problem}".rstrip()


def relative_rms(values: "np.ndarray", others: "np.ndarray") -> float:
    """Return the RMS of the difference of two arrays `[...]`, relative to that of `others`."""
    import numpy as np

    return float(np.linalg.norm(values - others) / max(float(np.linalg.norm(others)), 1e-30))


def attribute_error(difference: "np.ndarray", pulls: "Mapping[str, np.ndarray]") -> dict[str, float]:
    """Return the coefficient of each of `pulls` in a difference `[...]`, by least squares."""
    import numpy as np

    if not pulls:
        return {}
    columns = np.stack([pull.ravel() for pull in pulls.values()], axis=1)
    solution, *_ = np.linalg.lstsq(columns.T @ columns, columns.T @ difference.ravel(), rcond=None)
    return dict(zip(pulls, map(float, solution), strict=True))


def _problem(row: FormResult, precision: str) -> str:
    """Describe the deviations of a variant that exceed rounding; "" without any."""
    bounds = FACTORS[precision]
    wrong = [
        f"{name} are {abs(factor):.1e} {'larger' if factor > 0 else 'smaller'}, where {bounds[name]:.1e} "
        "may be rounding"
        for name, factor in row.factors.items()
        if not abs(factor) <= bounds[name]
    ]
    if row.difference is not None and not row.difference <= BOUNDS[precision]:
        wrong.insert(0, f"differs by {row.difference:.1e}, where {BOUNDS[precision]:.1e} may be rounding")
    return "; ".join(wrong)


def _pulls(program: "Program", run: Run, values: "np.ndarray") -> "dict[str, np.ndarray]":
    """Return the change of a variant's results per doubling of the weights in each of `ERROR_DIRECTIONS`."""
    weights = random_weights(program)
    pulls = {}
    for name, pattern in ERROR_DIRECTIONS.items():
        grown = {
            key: _place(weight * (1 + GROWTH), weight) if pattern.search(key) else weight
            for key, weight in weights.items()
        }
        pulls[name] = (run(grown, 0)[0] - values) / GROWTH
    return pulls


def random_weights(program: "Program") -> dict[str, "jax.Array"]:
    """Return random weights with which every part of a block affects the result.

    Products keep the size of their inputs; norms, gates and biases have deviation 1. Norms of queries and keys are
    larger: otherwise attention is nearly the mean of all tokens, so small that no fault of it shows.
    """

    def deviation(name: str, want: "jax.ShapeDtypeStruct") -> float:
        matrix = len(want.shape) >= 2 and min(want.shape[-2:]) > 8
        return float(want.shape[-1]) ** -0.5 if matrix else HEAD_NORMS if _HEAD_NORM.search(name) else 1.0

    shapes = program.weights or {}
    # Separate seeds: with equal weights for queries and keys, each token would attend only to itself.
    return {
        name: random_array(shapes[name], deviation(name, shapes[name]), seed)
        for seed, name in enumerate(sorted(shapes))
    }


def step_arguments(program: "Program") -> "StepArgs":
    """Return random arguments, with a solver whose result is the network's output, both branches in equal parts."""
    import numpy as np

    from ..tpu_runtime.programs.denoise_step import StepArgs

    args = StepArgs(*random_arguments(program))
    row = np.zeros(args.row.shape, np.float32)
    row[:, 1] = 1
    return args._replace(row=_place(row, args.row), guidance=_place(np.float32(0.5), args.guidance))


def _place(values: "np.ndarray | np.float32 | jax.Array", like: "jax.Array") -> "jax.Array":
    import jax

    return jax.device_put(values, like.sharding)


def format_verification(spec: ModelSpec, record: Mapping[str, Json], rows: Sequence[FormResult]) -> str:
    """Return the readable report."""
    from ..tpu_runtime.plan import report

    label = record["label"]
    head = ("form of the step", "compile", "GiB", label, "of the chosen", "difference")
    times = {row.name: row.median_s if row.median_s is not None else row.predicted_s for row in rows}

    def share(row: FormResult) -> str:
        seconds, chosen = times[row.name], times.get(CHOSEN + PART * row.name.endswith(PART))
        return f"{100 * seconds / chosen:.0f} %" if seconds and chosen else "-"

    table = [
        (
            row.name, f"{row.compile_s:.0f} s", "-" if row.peak_bytes is None else report.format_gib(row.peak_bytes),
            _seconds(times[row.name]), share(row), "-" if row.difference is None else f"{row.difference:.1e}",
        )
        for row in rows
    ]  # fmt: skip
    lines = [
        f"{NUM_BLOCKS} blocks of {'the tiny model of ' * record['is_tiny']}{spec.title} on {record['num_devices']} x "
        f"{record['device_kind']}, {record['precision']}; seconds are {label}"
        + (", not on a TPU: they do not indicate speed." if record["is_tiny"] else "."),
        "",
        *report.format_table([head, *table]),
        "",
    ]
    if loop := record["loop"]:
        lines.append(
            f"{loop['steps']} steps in a row, as a sampler runs them: {loop['median_s']:.4f} s each, the program "
            + ("compiled." if loop["was_compiled"] else "from the cache.")
        )
    if label == "measured":
        lines.append(f"Fullest device: {DeviceMemory(**record['memory'])}.")
    wrong = [f"{row.name}: {row.problem}." for row in rows if row.problem]
    return "\n".join([*lines, *(wrong or ["All forms agree." if label == "measured" else "All forms compile."])])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
