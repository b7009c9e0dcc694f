"""One stage at work: a located checkpoint, what it is compiled for, the host that watches, and the caches it uses."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import torch

from ..checkpoints import checkpoint, load
from ..checkpoints.checkpoint import Checkpoint
from ..programs import finite, modules, network_call
from ..programs.executables import Executable
from ..programs.program import Target
from ..programs.step_reuse import Runnable
from ..programs.weights import Weights, bytes_per_chip
from ..spec import Call, ModelSpec
from . import telemetry
from .device_cache import DeviceCache
from .program_cache import ProgramCache, Wanted
from .prompt_cache import PromptCache


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the host code of a stage may ask for: networks to call, weights, progress."""

    found: Checkpoint
    target: Target
    progress: telemetry.Watched
    device_cache: DeviceCache
    program_cache: ProgramCache
    prompt_cache: PromptCache
    counts: Counter[str]

    @property
    def spec(self) -> ModelSpec:
        return self.found.spec

    @property
    def name(self) -> str:
        return self.progress.activity.stage

    @property
    def call(self) -> Call:
        """Runs a network; see `spec.Call`."""
        return network_call.caller(self.program, self._execute)

    def program(self, request: network_call.Request) -> Executable:
        return self.program_cache.get(self.wanted(request), self.progress)

    def wanted(self, request: network_call.Request) -> Wanted:
        """The program that a request needs."""
        config = self.found.config(self.spec.component(request.component), self.progress)
        return Wanted(
            title=f"the {request.component.replace('_', ' ')}",
            key=(self.spec.name, config, self.target, *request.key),
            build=lambda: request.program(self.spec, config, self.target),
        )

    def _execute(self, executable: Executable, request: network_call.Request) -> tuple[Any, Any]:
        weights = self.weights(request.component, executable)
        self.progress.check_cancelled()
        args = jax.tree.map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, request.args)
        result, carried, is_finite = executable(weights, *args)
        result, is_finite = jax.device_get((result, is_finite))
        if not is_finite:
            raise self.not_finite(f"values of the {request.component.replace('_', ' ')}")
        return result, carried

    def not_finite(self, what: str) -> finite.NotFinite:
        return finite.failure(self.spec.title, what, self.target.precision)

    def weights(self, name: str, executable: Runnable) -> Weights:
        """A component's weights as `executable` wants them, loaded if they are not resident."""
        component = self.spec.component(name)
        wanted = executable.program.weights
        assert wanted is not None

        def read() -> Weights:
            self.counts["load"] += 1
            folder = self.found.fetch_weights(component, self.progress)
            network = modules.build(component, self.found.config(component, self.progress))
            files = checkpoint.match(network, checkpoint.read_headers(folder, component), folder)
            return load.load(network, files, wanted, f"{name} of {self.found.model_id}", self.progress)

        resident = self.device_cache.get(
            (name, self.found.identity(component.folder, self.progress), executable.program.precision),
            component=name,
            model=self.found.model_id,
            size_bytes=bytes_per_chip(wanted),
            running=executable,
            load=read,
        )
        activity = self.progress.activity
        needed = self.device_cache.size_bytes + self.device_cache.code_bytes + executable.workspace_bytes
        activity.needed_bytes = max(activity.needed_bytes, needed)
        return resident.weights

    def report(self, unit: str) -> Callable[[int, int], None]:
        """Moves the host's bar and lets it cancel."""

        def report(done: int, total: int) -> None:
            self.progress.step(done, total, unit)
            self.progress.check_cancelled()

        return report
