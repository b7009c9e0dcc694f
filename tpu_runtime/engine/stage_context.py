"""The context of one running stage: a located checkpoint, the compile target, progress, and the caches."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import torch

from ...distributed.multihost.coordinator import HostGroup
from ..cache.store import signature
from ..checkpoints import checkpoint, weight_loader
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.controls import ControlFile, check_fits, read_control
from ..checkpoints.model_ref import Lora, ModelRef, ResolvedModel
from ..loras import apply
from ..machine.fallbacks import WITHOUT_OVERLAP
from ..messages import compose, compose_term
from ..model_spec import Call, Component, Json, ModelSpec
from ..programs import finite_check, network_call
from ..programs.controls import join_weights, split_weights
from ..programs.executables import Executable
from ..programs.program import CompileTarget, digest_weights
from ..programs.step_cache import Runnable
from ..programs.weights import SCALE_SUFFIX, Weights, bytes_per_chip, shared_network
from . import telemetry
from .device_cache import DeviceCache, ResidentWeights
from .frame_buffer import PendingFrames
from .overlap_check import FirstStep, OverlapChecks
from .program_cache import ProgramCache, ProgramRequest
from .prompt_cache import PromptCache


@dataclass(frozen=True, kw_only=True)
class _PlannedControl:
    """A control network, as a program takes it."""

    file: ControlFile
    abstract: Mapping[str, jax.ShapeDtypeStruct]  # its weights by name
    key: tuple[str, ...]  # of the device cache


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Networks, weights and progress for the host code of a stage."""

    model: ModelRef  # as requested
    resolved: ResolvedModel  # its spec, checkpoint and configs
    target: CompileTarget  # devices, precision and kernels to compile for
    progress: telemetry.TrackedProgress  # of the application, with the stage's activity
    device_cache: DeviceCache
    program_cache: ProgramCache
    prompt_cache: PromptCache
    counts: Counter[str]  # of the engine
    hosts: HostGroup  # all hosts of the engine
    overlap: OverlapChecks | None = None  # None: first steps are not compared

    @property
    def spec(self) -> ModelSpec:
        return self.resolved.spec

    @property
    def found(self) -> Checkpoint:
        return self.resolved.checkpoint

    def config(self, component: str) -> Json:
        """Return a component's own `config.json`."""
        return self.resolved.configs[component]

    @property
    def name(self) -> str:
        return self.progress.activity.stage

    @property
    def call(self) -> Call:
        """Function that runs a network (see `model_spec.Call`)."""
        return network_call.make_call(self.program, self._execute)

    def program(self, request: network_call.CallRequest) -> Executable:
        return self.executable(self.make_request(request))

    def executable(self, wanted: ProgramRequest) -> Executable:
        """Return a loaded program, the same on all hosts."""
        program = self.program_cache.get(wanted, self.progress)
        while not self.hosts.barrier(f"load {wanted.title}, {wanted.digest[:12]}", program.runs):
            self.program_cache.unload(wanted)
            program = self.program_cache.get(wanted, self.progress)
        return program

    def check(self, what: str) -> None:
        """Synchronise before a program runs.

        Raises if the user cancelled; waits until all hosts are about to run `what`.
        """
        self.progress.check_cancelled()
        self.hosts.barrier(f"run {what}")

    def make_request(self, request: network_call.CallRequest) -> ProgramRequest:
        """Return the program request for a call."""
        config = self.config(request.component)
        return ProgramRequest(
            title=compose("stage.the_component", component=compose_term("component", request.component)),
            key=(self.spec.name, config, self.target, *request.key),
            build=lambda: request.program(self.spec, config, self.target),
            model=self.spec.name,
        )

    def first_step(
        self, program: Runnable, args: tuple[Any, ...], request: Callable[["StageContext"], ProgramRequest]
    ) -> FirstStep | None:
        """Return the denoiser's step that `program` is about to run with `args`, if it is to be compared; else None.

        request: returns its program request as compiled in a given context.
        """
        if self.overlap is None or type(self.hosts) is not HostGroup:
            return None

        def make_request(overlaps: bool) -> ProgramRequest:
            without = replace(self.target, fallbacks=self.target.fallbacks | WITHOUT_OVERLAP)
            return request(self if overlaps else replace(self, target=without))

        return self.overlap.first_step(program, args, make_request)

    def _execute(self, executable: Executable, request: network_call.CallRequest) -> tuple[Any, Any]:
        """Run a program; return its result (or pending frames) and the value that stays on the devices."""
        weights = self.weights(request.component, executable)
        self.check(executable.program.name)
        args = jax.tree.map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, request.args)
        failure = functools.partial(self.not_finite_error, compose(
            "stage.values_of_component", component=compose_term("component", request.component),
        ))  # fmt: skip
        with self.progress.activity.timed("running_s"):
            result, carried, is_finite = executable(weights, *args)
            if request.defers:
                return PendingFrames(result, is_finite, failure), carried
            result, is_finite = jax.device_get((result, is_finite))
        if not is_finite:
            raise failure()
        return result, carried

    def not_finite_error(self, what: str, loras: Sequence[Lora] = ()) -> finite_check.NotFinite:
        """Return the error for `what`, values that are not finite, computed by weights with these LoRAs."""
        names = [Path(lora.path).name for lora in loras if lora.strength]
        return finite_check.not_finite_error(self.spec.title, what, self.target.precision, names)

    def weights(self, name: str, executable: Runnable) -> Weights:
        """Return the weights that `executable` takes, loaded if they are not resident.

        They are those of the component `name`, and of the control networks if it is a denoiser with `controls`.
        """
        component = self.spec.component(name)
        assert executable.program.weights is not None
        abstract = executable.program.own_weights
        named = self._plan_controls(executable) if name in self.spec.denoiser.experts else []
        companions = {part.key: bytes_per_chip(part.abstract) for part in named}

        loras = self.model.select_loras(name)
        # Models that share a file need not need the same layers of it.
        program, identity = executable.program, self.found.identity(component.folder, self.progress)
        key = (name, identity, program.precision, program.weights_digest)
        variant = apply.hash_variant(loras)
        if not self.hosts.barrier(f"use {name} of {self.found.model_id}", self.device_cache.state(key, variant)):
            self.device_cache.drop([signature(key)])
        resident = self.device_cache.get(
            key,
            component=name,
            model=self.found.model_id,
            size_bytes=bytes_per_chip(abstract),
            running=executable,
            variant=variant,
            load=lambda held: self._load(component, loras, abstract, held),
            companions=companions,
        )
        all_keys = {**companions, key: bytes_per_chip(abstract)}
        parts = [
            self.device_cache.get(
                part.key, component=f"{part.file.spec.title} {part.file.path.name}", model=self.found.model_id,
                size_bytes=companions[part.key], running=executable,
                load=lambda held, part=part: (self._load_control(part), frozenset()),
                companions=all_keys,
            ).weights
            for part in named
        ]  # fmt: skip
        activity = self.progress.activity
        needed = self.device_cache.size_bytes + self.device_cache.code_bytes + executable.workspace_bytes
        activity.needed_bytes = max(activity.needed_bytes, needed)
        return join_weights(resident.weights, parts) if parts else resident.weights

    @functools.cached_property
    def controls(self) -> tuple[ControlFile, ...]:
        """Control networks. Raises `CheckpointError` if one does not fit it."""
        files = tuple(map(read_control, self.model.controls))
        for file in files:
            check_fits(file, self.spec, self.config(self.spec.denoiser.experts[0]))
        return files

    def _plan_controls(self, executable: Runnable) -> "list[_PlannedControl]":
        """Return the control networks, as `executable` takes them."""
        program = executable.program
        if program.weights is None or len(program.own_weights) == len(program.weights):
            return []  # no file is read for a program that takes none
        _, parts = split_weights(program.weights, len(self.controls))
        return [
            _PlannedControl(
                file=file,
                abstract=abstract,
                key=("control", file.identity, program.precision, digest_weights(abstract)),
            )
            for file, abstract in zip(self.controls, parts, strict=True)
        ]

    def _load_control(self, part: "_PlannedControl") -> Weights:
        """Return the weights of a control network."""
        network = shared_network(part.file.spec.component, part.file.config)
        files = part.file.match_weights(network)
        self.counts["load"] += 1
        with self.progress.activity.timed("loading_s"):
            weights = weight_loader.load_weights(
                network, files, part.abstract, f"{part.file.spec.title} {part.file.path.name}", self.progress,
                check=self.check,
            )  # fmt: skip
        self.progress.activity.loaded_bytes += sum(
            math.prod(want.shape) * want.dtype.itemsize for want in part.abstract.values()
        )
        return weights

    def fetch_weights(self, component: Component) -> Path:
        """Return a component's folder after downloading its weights if need be."""
        with self.progress.activity.timed("downloading_s"):
            return self.found.fetch_weights(component, self.progress)

    def norm_deltas(self, component: Component) -> dict[str, torch.Tensor]:
        """Return the sums of all LoRA differences of a denoiser's norms and biases, by name."""
        loras = self.model.select_loras(component.name)
        if not loras or not self.spec.denoiser.head_norms:
            return {}
        network = shared_network(component, self.config(component.name))
        return apply.sum_vector_deltas(loras, network, self.progress)

    def _load(
        self,
        component: Component,
        loras: tuple[Lora, ...],
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        resident: ResidentWeights | None,
    ) -> tuple[Weights, frozenset[str]]:
        """Return a component's weights with `loras` merged, and the names of the changed ones.

        abstract: shape, dtype and sharding of every weight by name.
        resident: a resident variant, of which only the differing weights are read again; else None.
        """
        folder = self.fetch_weights(component)
        network = shared_network(component, self.config(component.name))
        files = checkpoint.match_weights(network, checkpoint.read_headers(folder, component), folder)
        changed = apply.make_merge(loras, network, self.check)
        self.hosts.barrier(f"read {component.name}, {checkpoint.content_signature(files)}, {apply.hash_loras(loras)}")
        self.counts["merge"] += bool(changed.names)
        title = f"{component.name} of {self.found.model_id}"
        if loras:
            title += f" with {', '.join(Path(lora.path).name for lora in loras)}"
        if resident is None:
            self.counts["load"] += 1
        else:
            stale = resident.changed | changed.names
            abstract = {name: want for name, want in abstract.items() if name.removesuffix(SCALE_SUFFIX) in stale}
        activity, kept = self.progress.activity, resident.weights if resident else None
        with activity.timed("loading_s"):
            weights = weight_loader.load_weights(
                network, files, abstract, title, self.progress, changed, kept, self.check
            )
        activity.loaded_bytes += sum(math.prod(want.shape) * want.dtype.itemsize for want in abstract.values())
        return weights, changed.names

    def report(self, unit: str) -> Callable[[int, int], None]:
        """Return a function of done and total that moves the progress bar and raises if the user cancelled."""

        def report(done: int, total: int) -> None:
            self.progress.step(done, total, unit)
            self.progress.check_cancelled()

        return report
