"""Any of diffusers' linear solvers as one table of coefficients.

A step of such a solver (Euler, UniPC, DPM-Solver, DDIM) is linear in the sample, the denoiser's output, the few tensors
that the scheduler remembers and the noise that it draws. The upstream scheduler is therefore run once on the host with
unit vectors instead of latents and noise. Its results are its coefficients, row by row. On the device a step is one
weighted sum in float32: the same program for every step, solver and number of steps. No solver is reimplemented here.
"""

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Float
from torch.overrides import TorchFunctionMode

from ..messages import compose
from ..model_spec import ModelSpec, Settings

Scheduler = Any  # diffusers' schedulers share no typed interface

# Unit vectors of one step: the sample, the denoiser's output, and up to this many remembered tensors and noise draws.
MAX_MEMORY, MAX_DRAWS = 4, 4
SAMPLE, OUTPUT = 0, 1
# Limit of integers in a scheduler's config: some are lengths of lists that it allocates, usually 1000 or less.
MAX_CONFIG_NUMBER = 100_000


@dataclass(frozen=True, kw_only=True)
class SolverTable:
    """Coefficients of a solver's steps.

    `table[i]` maps `(sample, output, memory...)` to the next `(sample, memory...)` and, in its last row, to the
    denoised estimate for a preview. The noise of a solver that adds some is the last of the memory: it is inserted
    before the step, and 0 after it.
    """

    timesteps: np.ndarray  # [num_steps], int32 or float32 as in the scheduler: the denoiser's input
    table: np.ndarray  # [num_steps, 2 + num_memory, 2 + num_memory], float32
    # [num_steps, 2], float32: shares of a clean sample and of noise in the sample before each step
    levels: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.float32))
    # For each step and each of its noise draws, whether the step uses it; at most one per step. Empty: no noise.
    draws: tuple[tuple[bool, ...], ...] = ()
    begin: int = 0  # first step of this generation; the solver remembers nothing there, and earlier steps are zeros

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def next_timesteps(self) -> np.ndarray:
        """Return the timestep after each of `timesteps`, 0 after the last."""
        return np.append(self.timesteps[1:], self.timesteps.dtype.type(0))

    @property
    def num_memory(self) -> int:
        return self.table.shape[2] - 2

    @property
    def digest(self) -> str:
        """Return a hash that is equal for solvers with equal steps."""
        parts = (self.timesteps, self.table, self.levels, np.array([self.begin]))
        return hashlib.sha256(b"".join(part.tobytes() for part in parts) + repr(self.draws).encode()).hexdigest()

    def draw_noises(self, draw: Callable[[], np.ndarray], steps: range | None = None) -> Iterator[np.ndarray | None]:
        """Yield the noise `[1, *latent]` that each of `steps` adds, or None. `steps` None: all.

        draw: returns new noise; it is called as often as upstream draws, and not before the step is requested.
        """
        for step in range(self.num_steps) if steps is None else steps:
            noise, used = None, self.draws[step] if self.draws else ()
            for is_used in used:
                drawn = draw()
                noise = drawn if is_used else noise
            yield noise


State = tuple[Float[Array | np.ndarray, "*latent"], ...]


def initial_state(sample: np.ndarray, num_memory: int) -> tuple[np.ndarray, ...]:
    """Return the state before the first step: `sample` `[1, *latent]`, and zeros as memory."""
    return (sample, *(np.zeros_like(sample) for _ in range(num_memory)))


def insert_noise(state: tuple[Any, ...], noise: np.ndarray | None) -> tuple[Any, ...]:
    """Return the state with the noise `[1, *latent]` of the next step (`SolverTable.draw_noises`); None: unchanged."""
    return state if noise is None else (*state[:-1], noise)


def advance(state: State, output: Array | np.ndarray, row: Float[Array | np.ndarray, "rows columns"]) -> State:
    """Return the next state and, last, the denoised estimate, `[1, *latent]` float32 each: one step of the solver.

    state: sample and memory. output: of the denoiser, `[1, *latent]`. row: coefficients of the step.
    """
    terms = (state[0], output.astype(jnp.float32), *state[1:])
    return tuple(
        sum(row[i, j] * term for j, term in enumerate(terms))  # type: ignore[misc]
        for i in range(len(terms))
    )


def build_scheduler(config: Mapping[str, object]) -> Scheduler:
    """Return the upstream scheduler of a checkpoint's `scheduler_config.json`.

    Raises `ValueError` for an unknown class, for too large numbers and for a config that upstream rejects.
    """
    import diffusers
    from diffusers.schedulers.scheduling_utils import SchedulerMixin

    name = config.get("_class_name")
    upstream = getattr(diffusers, str(name), None)
    if not (inspect.isclass(upstream) and issubclass(upstream, SchedulerMixin)):
        raise ValueError(compose("program.scheduler_missing", name=name))
    for key, value in config.items():
        if isinstance(value, int) and abs(value) > MAX_CONFIG_NUMBER:
            raise ValueError(compose(
                "program.scheduler_number_too_large", name=name, key=key, value=value,
                max_config_number=MAX_CONFIG_NUMBER,
            ))  # fmt: skip
    with _upstream(name):
        return cast(Scheduler, upstream).from_config(dict(config))


@contextlib.contextmanager
def _upstream(name: object) -> Iterator[None]:
    """Raise upstream's errors about a config, which may hold anything, as `ValueError` with a clear message."""
    try:
        yield
    except TooManyDraws:
        raise
    except Exception as error:
        raise ValueError(
            compose("program.scheduler_fails", name=name, error_type=type(error).__name__, error=error)
        ) from error


def build_table(
    spec: ModelSpec, config: Mapping[str, object], settings: Settings, latent_shape: tuple[int, ...], begin: int = 0
) -> SolverTable:
    """Return the steps of a generation.

    Raises `ValueError` if sigmas are given and the scheduler does not support them.

    config: a checkpoint's `scheduler_config.json`; the settings may choose another scheduler.
    latent_shape: of one sample. begin: first step, see `tabulate`. spec, settings: of the generation.
    """
    shift = settings.shift or config.get(spec.recipe.shift_key or "")  # 0 is the checkpoint's own
    if settings.scheduler in spec.recipe.schedulers:
        config = _adapt_config(config, spec.recipe.schedulers[settings.scheduler])
    if shift and spec.recipe.shift_key:
        shift_keys = [name for name in SHIFT_KEYS if name in _arguments(config)]
        config = {**config, **dict.fromkeys(shift_keys, shift)}
    scheduler = build_scheduler(config)
    arguments = spec.recipe.solver_arguments(config, latent_shape, settings.num_inference_steps, settings.shift)
    if settings.sigmas:
        arguments["sigmas"] = np.array(settings.sigmas)
    if "sigmas" not in inspect.signature(scheduler.set_timesteps).parameters:
        arguments.pop("sigmas", None)
        if settings.sigmas:
            raise ValueError(
                compose("program.scheduler_without_sigmas", title=spec.title, type=type(scheduler).__name__)
            )
    return tabulate(scheduler, settings.num_inference_steps, begin, **arguments)


def guidance_scales(spec: ModelSpec, settings: Settings) -> dict[str, float]:
    """Return the guidance scale of each denoiser."""
    first, second = settings.guidance_scale, settings.guidance_scale_2
    return dict(zip(spec.denoiser.experts, (first, first if second is None else second), strict=False))


def assign_experts(
    spec: ModelSpec, table: SolverTable, settings: Settings, guidance: Mapping[str, float], boundary: float
) -> list[tuple[str, float]]:
    """Return the denoiser and the guidance scale of each step.

    The first denoiser runs from timestep `boundary` on, or for the first `high_noise_steps`, and the second after that.
    spec, settings: of the generation. table: its steps. guidance: scale of each denoiser.
    """
    timesteps = table.timesteps.tolist()
    first, *others = guidance.items()
    if not others:
        name, scale = first
        guidance_at = spec.recipe.guidance_at if settings.use_dynamic_cfg else None
        number = settings.num_inference_steps
        return [(name, guidance_at(scale, t, number) if guidance_at else scale) for t in timesteps]
    (second,) = others
    if settings.high_noise_steps:
        return [first if index < settings.high_noise_steps else second for index in range(table.num_steps)]
    return [first if timestep >= boundary else second for timestep in timesteps]


# Names of the shift in configs of flow-matching schedulers.
SHIFT_KEYS = ("flow_shift", "shift")


def _arguments(config: Mapping[str, object]) -> Mapping[str, inspect.Parameter]:
    """Return the constructor parameters of the class that `config` names; empty if diffusers lacks it."""
    import diffusers

    upstream = getattr(diffusers, str(config.get("_class_name")), None)
    return inspect.signature(upstream.__init__).parameters if upstream else {}


def _adapt_config(config: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return `config` with `changes` for another class, without entries that upstream would warn about."""
    known = {"_class_name", *_arguments(changes)}
    return {name: value for name, value in {**config, **changes}.items() if name in known}


def tabulate(scheduler: Scheduler, num_steps: int, begin: int = 0, **timestep_arguments: Any) -> SolverTable:
    """Return the coefficients of an upstream scheduler that begins at step `begin`, as its pipelines from latents do.

    Raises `NotImplementedError` if the scheduler is not linear (thresholding), needs other arguments, keeps more than
    `MAX_MEMORY` tensors or adds several noises in a step. Raises `ValueError` if its step is not finite.

    num_steps: number of steps. timestep_arguments: of the scheduler's `set_timesteps`.
    """
    if getattr(scheduler.config, "thresholding", False):
        raise NotImplementedError(compose("program.dynamic_thresholding_unsupported"))
    if others := _other_arguments(scheduler):
        raise NotImplementedError(
            compose("program.scheduler_unsupported", type=type(scheduler).__name__, others=" and ".join(others))
        )
    # The memory of many steps has columns in a table of few steps, too: one program for any number of steps.
    usual = copy.deepcopy(scheduler)
    with _upstream(type(scheduler).__name__):
        usual.set_timesteps(USUAL_STEPS, **{name: x for name, x in timestep_arguments.items() if name != "sigmas"})
        scheduler.set_timesteps(num_steps, **timestep_arguments)
        rows, usual_rows = _rows(scheduler, begin), _rows(usual, 0)
    return _build_table(scheduler, rows, usual_rows, begin)


# Steps after which every supported solver has filled its memory.
USUAL_STEPS = 6


def _rows(scheduler: Scheduler, begin: int) -> "list[_Coefficients]":
    """Return the coefficients of the steps from `begin` on."""
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    stepper = _Stepper(scheduler)
    rows = []
    for index, timestep in enumerate(scheduler.timesteps[begin:], begin):
        level = _level(scheduler, timestep)
        slots = [*_memory(scheduler), *_memory(stepper)]
        for number, slot in enumerate(slots):
            slot.write(_unit(2 + number))
        with _CountedDraws() as draws:
            result = stepper.step(_unit(OUTPUT), timestep, _unit(SAMPLE))
        rows.append(
            _Coefficients(
                result=_coefficients(result),
                before=[slot.key for slot in slots],
                after={slot.key: _coefficients(slot.read()) for slot in (*_memory(scheduler), *_memory(stepper))},
                denoised=_estimate_shares(scheduler, index, timestep),
                level=level,
                num_draws=draws.count,
            )
        )
    return rows


def _level(scheduler: Scheduler, timestep: torch.Tensor) -> tuple[float, float]:
    """Return the shares of a clean sample and of noise in the sample before this step, as upstream mixes them."""
    clean, noise, times = _unit(SAMPLE), _unit(OUTPUT), timestep.reshape(1)
    is_flow = hasattr(scheduler, "scale_noise")
    mixed = scheduler.scale_noise(clean, times, noise) if is_flow else scheduler.add_noise(clean, noise, times)
    shares = _coefficients(mixed)
    return float(shares[SAMPLE]), float(shares[OUTPUT])


def _parameters(scheduler: Scheduler) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(scheduler.step).parameters


def _other_arguments(scheduler: Scheduler) -> list[str]:
    """Return the arguments of a scheduler's step that `_Stepper` does not supply."""
    needed = [name for name, parameter in _parameters(scheduler).items() if parameter.default is parameter.empty]
    known = ("model_output", "timestep", "sample", "old_pred_original_sample", "timestep_back")
    return [name for name in needed if name not in known]


class _Stepper:
    """Driver of a scheduler, one step after the other, as diffusers' pipelines call them.

    `CogVideoXDPMScheduler` keeps nothing: its step takes the previous estimate of the end result and the previous
    timestep, and returns its own estimate as a second output, which is remembered here.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.returns_estimate = "old_pred_original_sample" in _parameters(scheduler)
        self.old_pred_original_sample: torch.Tensor | None = None
        self.timestep_back: torch.Tensor | None = None

    def step(self, output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        if not self.returns_estimate:
            return self.scheduler.step(output, timestep, sample, return_dict=False)[0]
        result, self.old_pred_original_sample = self.scheduler.step(
            output, self.old_pred_original_sample, timestep, self.timestep_back, sample, return_dict=False
        )
        self.timestep_back = timestep
        return result


class TooManyDraws(NotImplementedError):
    """Failure of a step that draws noise more than `MAX_DRAWS` times."""


class _CountedDraws(TorchFunctionMode):
    """Mode in which each draw of normal noise returns another unit vector."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if function not in (torch.randn, torch.randn_like):
            return function(*args, **(kwargs or {}))
        if self.count == MAX_DRAWS:
            raise TooManyDraws(compose("program.scheduler_draws_too_often", max_draws=MAX_DRAWS))
        self.count += 1
        return _unit(2 + MAX_MEMORY + self.count - 1)


@dataclass(frozen=True, kw_only=True)
class _Coefficients:
    """Coefficients of a step: its results on unit vectors."""

    result: np.ndarray  # of the sample, `[2 + MAX_MEMORY + MAX_DRAWS]`
    before: list[tuple[str, int]]  # slots of the memory before the step
    after: dict[tuple[str, int], np.ndarray]  # of the memory after it, by slot
    denoised: tuple[float, float]  # of the sample and the output in the denoised estimate
    level: tuple[float, float]  # shares of a clean sample and of noise
    num_draws: int

    @property
    def draws(self) -> tuple[bool, ...]:
        """Return for each draw whether the step used it."""
        made = np.stack([self.result, *self.after.values()])
        return tuple(bool(made[:, 2 + MAX_MEMORY + index].any()) for index in range(self.num_draws))

    def in_columns(self, coefficients: np.ndarray, column: Mapping[tuple[str, int], int], width: int) -> np.ndarray:
        """Return coefficients in the table's columns, `[width]` float32; the noise has the last.

        column: of each slot.
        """
        row = np.zeros(width, np.float32)
        columns = [SAMPLE, OUTPUT, *(column[key] for key in self.before)]
        row[columns] = coefficients[: len(columns)]
        if True in self.draws:
            row[-1] = coefficients[2 + MAX_MEMORY + self.draws.index(True)]
        return row


def _estimate_shares(scheduler: Scheduler, index: int, timestep: torch.Tensor) -> tuple[float, float]:
    """Return the shares of sample and output in the denoised estimate, by the scheduler's prediction type."""
    kind = scheduler.config.get("prediction_type", "flow_prediction")
    if kind == "flow_prediction":
        return 1.0, -float(scheduler.sigmas[index])
    signal = float(scheduler.alphas_cumprod[int(timestep)]) ** 0.5
    noise = (1 - signal**2) ** 0.5
    if kind == "v_prediction":
        return signal, -noise
    if kind == "epsilon" and signal > 0:
        return 1 / signal, -noise / signal
    return 0.0, 1.0


def _build_table(
    scheduler: Scheduler, rows: list[_Coefficients], usual: list[_Coefficients], begin: int
) -> SolverTable:
    """Return the table in which every remembered tensor, and the noise, has a fixed column.

    `usual` rows count for columns.
    """
    name, all_rows = type(scheduler).__name__, [*rows, *usual]
    keys = sorted({key for row in all_rows for key in (*row.before, *row.after)})
    if len(keys) > MAX_MEMORY:
        raise NotImplementedError(
            compose("program.scheduler_memory_too_large", name=name, count=len(keys), max_memory=MAX_MEMORY)
        )
    if any(sum(row.draws) > 1 for row in all_rows):
        raise NotImplementedError(compose("program.scheduler_several_noises", name=name))
    adds_noise = any(True in row.draws for row in all_rows)
    column = {key: 2 + index for index, key in enumerate(keys)}
    width = 2 + len(keys) + adds_noise
    table = np.zeros((begin + len(rows), width, width), np.float32)
    levels = np.zeros((begin + len(rows), 2), np.float32)
    for step, row in enumerate(rows, begin):
        levels[step] = row.level
        table[step, 0] = row.in_columns(row.result, column, width)
        for key, coefficients in row.after.items():
            table[step, column[key] - 1] = row.in_columns(coefficients, column, width)
        table[step, -1, [SAMPLE, OUTPUT]] = row.denoised
    if not np.isfinite(table).all():
        raise ValueError(compose("program.scheduler_not_finite", type=type(scheduler).__name__))
    timesteps = scheduler.timesteps.cpu().numpy()
    dtype = np.int32 if np.issubdtype(timesteps.dtype, np.integer) else np.float32
    draws = ((),) * begin + tuple(row.draws for row in rows) if adds_noise else ()
    return SolverTable(timesteps=timesteps.astype(dtype), table=table, levels=levels, draws=draws, begin=begin)


def _unit(index: int) -> torch.Tensor:
    """Return a unit vector, shaped like a batch of one latent: `[1, 2 + MAX_MEMORY + MAX_DRAWS, 1, 1, 1]`."""
    vector = torch.zeros(1, 2 + MAX_MEMORY + MAX_DRAWS, 1, 1, 1)
    vector[0, index] = 1.0
    return vector


def _coefficients(vector: torch.Tensor) -> np.ndarray:
    return vector.reshape(-1).to(torch.float32).numpy().copy()


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """Place where a scheduler remembers a tensor: an attribute, or an entry of a list attribute."""

    owner: object  # the scheduler, or the driver of its steps
    name: str  # of the attribute
    index: int | None  # in the list; None: the attribute itself

    @property
    def key(self) -> tuple[str, int]:
        return self.name, -1 if self.index is None else self.index

    def read(self) -> torch.Tensor:
        value = getattr(self.owner, self.name)
        return value if self.index is None else value[self.index]

    def write(self, tensor: torch.Tensor) -> None:
        if self.index is None:
            setattr(self.owner, self.name, tensor)
        else:
            getattr(self.owner, self.name)[self.index] = tensor


def _memory(owner: object) -> Iterator[_Slot]:
    shape = _unit(0).shape
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, torch.Tensor) and value.shape == shape:
            yield _Slot(owner=owner, name=name, index=None)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, torch.Tensor) and entry.shape == shape:
                    yield _Slot(owner=owner, name=name, index=index)
