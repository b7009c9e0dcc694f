"""Any of diffusers' deterministic solvers as one table of numbers.

A step of such a solver (Euler, UniPC, DPM-Solver, DDIM) is linear in the sample, the denoiser's output and the few
tensors that the scheduler remembers. So the upstream scheduler itself is run once on the host with unit vectors in
place of latents: what comes out are its coefficients, row by row. On the device a step is then one weighted sum in
float32, the same program for every step, solver and number of steps, and nothing of a solver is written again here.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Float

# The vector space of one step: the sample, the denoiser's output, and up to this many remembered tensors.
MAX_MEMORY = 4
SAMPLE, OUTPUT = 0, 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the denoiser is told at step `i` (`timesteps[i]`), and the step itself: `table[i]` maps
    `(sample, output, memory...)` to the next `(sample, memory...)` and, in its last row, to the denoised estimate that
    a preview shows.
    """

    timesteps: np.ndarray  # [num_steps], int32 or float32 as the scheduler gives them
    table: np.ndarray  # [num_steps, 2 + num_memory, 2 + num_memory], float32

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def num_memory(self) -> int:
        return self.table.shape[2] - 2


State = tuple[Float[Array, "*latent"], ...]


def initial_state(latents: np.ndarray, num_memory: int) -> tuple[np.ndarray, ...]:
    """The state before the first step: the noise, and nothing remembered."""
    return (latents, *(np.zeros_like(latents) for _ in range(num_memory)))


def advance(state: State, output: jax.Array, row: Float[Array, "rows columns"]) -> State:
    """One step: the next sample and memory from this one and the denoiser's output, and last the denoised estimate;
    float32.
    """
    terms = (state[0], output.astype(jnp.float32), *state[1:])
    return tuple(
        sum(row[i, j] * term for j, term in enumerate(terms))  # type: ignore[misc]
        for i in range(len(terms))
    )


def scheduler_from(config: Mapping[str, Any], **overrides: Any) -> Any:
    """The upstream scheduler of a checkpoint's `scheduler_config.json`."""
    import diffusers

    name = config.get("_class_name")
    upstream = getattr(diffusers, str(name), None)
    if upstream is None:
        raise ValueError(f"the checkpoint's scheduler is {name}, which this version of diffusers does not have.")
    return upstream.from_config({**config, **overrides})


def probe(scheduler: Any, num_steps: int, **timestep_arguments: Any) -> Schedule:
    """Reads the coefficients off an upstream scheduler.

    Raises `NotImplementedError` where the scheduler is not linear (thresholding), takes more than a step of these has,
    or keeps more than `MAX_MEMORY` tensors, and `ValueError` where its step is not finite.
    """
    if getattr(scheduler.config, "thresholding", False):
        raise NotImplementedError("dynamic thresholding is not a linear solver step.")
    if others := _other_arguments(scheduler):
        raise NotImplementedError(
            f"{type(scheduler).__name__} is not supported: its step also needs {' and '.join(others)}. Use a "
            "checkpoint with a deterministic scheduler, such as a DDIM, DPM-Solver, UniPC or Euler one."
        )
    scheduler.set_timesteps(num_steps, **timestep_arguments)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    rows, memory_size = [], 0
    for timestep in scheduler.timesteps:
        slots = list(_memory(scheduler))
        for index, slot in enumerate(slots):
            slot.write(_unit(2 + index))
        result = scheduler.step(_unit(OUTPUT), timestep, _unit(SAMPLE), return_dict=False)[0]
        after = {slot.key: slot.read() for slot in _memory(scheduler)}
        rows.append((result, [slot.key for slot in slots], after, _denoised(scheduler, len(rows), timestep)))
        memory_size = max(memory_size, len(after))
    return _tabulate(scheduler, rows)


def _other_arguments(scheduler: Any) -> list[str]:
    """What a scheduler's step needs besides the denoiser's output, the timestep and the sample."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return [name for name in needed if name not in ("model_output", "timestep", "sample")]


def _denoised(scheduler: Any, index: int, timestep: torch.Tensor) -> tuple[float, float]:
    """Of the sample and of the denoiser's output in the estimate of the end result, by what the output stands for."""
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


def _tabulate(scheduler: Any, rows: list) -> Schedule:
    """Gives every remembered tensor a fixed column."""
    keys = sorted({key for _, before, after, _ in rows for key in (*before, *after)})
    if len(keys) > MAX_MEMORY:
        raise NotImplementedError(f"{type(scheduler).__name__} keeps {len(keys)} tensors; {MAX_MEMORY} are allowed.")
    column = {key: 2 + index for index, key in enumerate(keys)}
    table = np.zeros((len(rows), 2 + len(keys), 2 + len(keys)), np.float32)
    for step, (result, before, after, denoised) in enumerate(rows):
        columns = [SAMPLE, OUTPUT, *(column[key] for key in before)]
        table[step, 0, columns] = _coefficients(result)[: len(columns)]
        for key, vector in after.items():
            table[step, column[key] - 1, columns] = _coefficients(vector)[: len(columns)]
        table[step, -1, [SAMPLE, OUTPUT]] = denoised
    if not np.isfinite(table).all():
        raise ValueError(f"{type(scheduler).__name__} gives no finite step with this config and number of steps.")
    timesteps = scheduler.timesteps.cpu().numpy()
    wanted = np.int32 if np.issubdtype(timesteps.dtype, np.integer) else np.float32
    return Schedule(timesteps=timesteps.astype(wanted), table=table)


def _unit(index: int) -> torch.Tensor:
    """A unit vector, shaped like a batch of one latent: `[1, 2 + MAX_MEMORY, 1, 1, 1]`."""
    vector = torch.zeros(1, 2 + MAX_MEMORY, 1, 1, 1)
    vector[0, index] = 1.0
    return vector


def _coefficients(vector: torch.Tensor) -> np.ndarray:
    return vector.reshape(-1).to(torch.float32).numpy()


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """A place where a scheduler remembers a tensor: an attribute, or an entry of a list attribute."""

    owner: Any
    name: str
    index: int | None

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


def _memory(scheduler: Any) -> Iterator[_Slot]:
    shape = _unit(0).shape
    for name, value in sorted(vars(scheduler).items()):
        if isinstance(value, torch.Tensor) and value.shape == shape:
            yield _Slot(owner=scheduler, name=name, index=None)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, torch.Tensor) and entry.shape == shape:
                    yield _Slot(owner=scheduler, name=name, index=index)
