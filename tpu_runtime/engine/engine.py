"""The engine: devices, caches, and one stage at a time that uses them.

While a stage runs, background threads compile and read for the later stages of an announced generation.
"""

import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import torch

from ...attention.policy import Kernel
from ...sharding.mesh import Device
from .. import device_memory, host_memory, memory_errors, versions
from .. import precision as precisions
from ..cache import xla_cache
from ..checkpoints.model_ref import ModelRef, PlannedGeneration
from ..machine import record
from ..machine.device_access import open_devices
from ..machine.fallbacks import ChipHalted, Unsupported, classify_halt
from ..machine.policy import FallbackPolicy
from ..machine.record import MachineRecord
from ..messages import compose
from ..model_spec import STAGES, Quality, Settings
from ..multihost.coordinator import AttemptOutcome, HostGroup, RemoteAttemptFailed
from ..programs import executables, upstream_network
from ..programs.finite_check import NotFinite
from ..programs.program import CompileTarget, step_compiler_options
from ..progress import Progress, SilentProgress, run_in_daemon_thread
from . import memory_advice, profiling, stage_functions, telemetry
from .device_cache import DeviceCache
from .memory_advice import OutOfMemory
from .overlap_check import OverlapChecks
from .program_cache import COMPILE_THREAD, ProgramCache
from .prompt_cache import PromptCache
from .stage_context import StageContext

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class BackgroundCancelled(Exception):
    """Cancellation of background work."""


class BackgroundProgress(SilentProgress):
    """Progress sink for background work. Not displayed; raises once `is_cancelled` is set.

    noted: prefetched stages by name, with the settings that their programs were requested for, None before that.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self.noted: dict[str, Settings | None] = {}

    def check_cancelled(self) -> None:
        if self.is_cancelled:
            raise BackgroundCancelled


class Engine:
    """Devices with their caches; runs one stage at a time.

    counts: how often weights were loaded, LoRAs merged, prompts encoded and programs compiled.
    kernel: of the denoisers (see `AttentionPolicy`).
    hosts: each has an engine over all `devices` and holds the arrays of its `own` devices.
    when_halted: called once a core has halted, after which this process cannot use the chips.
    """

    def __init__(
        self,
        chips: Sequence[Device] | None = None,
        kernel: Kernel = "auto",
        hosts: HostGroup | None = None,
        when_halted: Callable[[], None] = lambda: None,
    ) -> None:
        versions.warn_once()
        versions.check()
        self.devices = tuple(chips or open_devices())
        self.ladder = FallbackPolicy(self.devices)
        if self.ladder.record.keeps_programs:
            xla_cache.use_persistent_cache()
        self.compilations = xla_cache.count_compilations()
        self.local_devices = tuple(device for device in self.devices if device.process_index == jax.process_index())
        self.hosts = hosts or HostGroup()
        self.kernel: Kernel = kernel
        self.lost: ChipHalted | None = None
        self._when_halted = when_halted
        self.counts: Counter[str] = Counter(load=0, merge=0, encode=0, compile=0)
        machine = self.ladder.record
        self.device_cache = DeviceCache(self.local_devices[0], machine.reserve_share)
        self.program_cache = ProgramCache(self.device_cache, self.counts, machine.compilers_behind)
        self.prompt_cache = PromptCache()
        self.activity: telemetry.Activity | None = None
        self.last_run: telemetry.LastRun | None = None
        self.peak_bytes = [0] * len(self.local_devices)
        self._generation: telemetry.LastRun | None = None
        self._lock = threading.RLock()
        self._expected: dict[ModelRef, PlannedGeneration] = {}
        self._ahead = BackgroundProgress()
        self.overlap_checks = OverlapChecks(
            programs=self.program_cache, chips=self.device_cache, verdicts=self.ladder, lock=self._lock
        )

    def expect(self, generations: Iterable[PlannedGeneration]) -> None:
        """Announce the generations about to run, replacing the earlier announcement.

        Nothing happens until a stage of one runs.
        """
        expected = {}
        for generation in reversed(list(generations)):
            base = _without_loras(generation.model)
            expected[base] = replace(generation, model=base, settings=_without_seed(generation.settings))
        if expected != self._expected:
            self.hosts.tell("expect", {"generations": list(expected.values())[::-1]})
            self._expected = expected
            self._cancel_background()

    def prepare(self, calls: Iterable[tuple[ModelRef, dict[str, Any]]]) -> None:
        """Compile the programs of single calls in the background, in this order (see `stage_functions`)."""
        ahead = self._ahead

        def work() -> None:
            for model, arguments in calls:
                watched = telemetry.TrackedProgress(
                    host=ahead, activity=telemetry.Activity(stage="warmup", model=model.model_id)
                )
                watched.check_cancelled()
                stage_functions.precompile_call(self._stage(model, watched), **arguments)

        if type(self.hosts) is HostGroup:
            _run_in_background(work, COMPILE_THREAD)

    def free(self, ids: Iterable[str] | None = None) -> None:
        """Unload weights and compiled programs.

        ids: of residents, whose weights alone are unloaded; None for everything.
        """
        with self._lock:
            if ids is None:
                self.hosts.tell("free", {})
                self._clear()
            else:
                ids = set(ids)
                chosen = [resident.title for resident in self.device_cache.list() if resident.id in ids]
                self.hosts.tell("free_titled", {"titles": chosen})
                self.device_cache.drop(ids)

    def free_titled(self, titles: Iterable[str]) -> None:
        """Unload the weights of residents by title, because ids differ between hosts."""
        with self._lock:
            chosen = set(titles)
            self.device_cache.drop([resident.id for resident in self.device_cache.list() if resident.title in chosen])

    def _clear(self) -> None:
        self.device_cache.clear()
        self._ahead.noted.clear()

    # -- how a stage runs ----------------------------------------------------------------------------------------------

    def run(self, stage: str, model: ModelRef, progress: Progress, **arguments: Any) -> Any:
        """Run one stage on all hosts and return its result.

        model: its networks run.
        progress: of the stage; is also asked for Cancel.
        stage: a key of `stage_functions.STAGE_FUNCTIONS`.
        arguments: of that function (see `api`).
        Runs one stage at a time and without gradients. ComfyUI calls nodes in inference mode, which torchax cannot use.
        """
        if stage in stage_functions.CALL_FUNCTIONS and type(self.hosts) is not HostGroup:
            raise ValueError(compose("stage.several_hosts_unsupported"))
        with (
            self._lock,
            torch.inference_mode(False),
            torch.no_grad(),
            self.hosts.stage(stage, {"model": model, **arguments}, progress) as progress,
        ):
            activity = telemetry.Activity(stage=stage, model=model.model_id)
            self.activity = activity
            try:
                if self.lost is not None:
                    raise ChipHalted(str(self.lost))
                with profiling.trace_stage(stage):
                    result = self._run_with_fallbacks(stage, model, progress, activity, arguments)
                if stage in STAGES:
                    progress.text(activity.summary())
            except BaseException:
                self._cancel_background()
                self.ladder.rollback()
                raise
            finally:
                self.activity = None
                self.update_peak_bytes()
            self._record_stage(activity)
            return result

    def _run_with_fallbacks(
        self, stage: str, model: ModelRef, progress: Progress, activity: telemetry.Activity, arguments: dict[str, Any]
    ) -> Any:
        """Return the stage's result.

        It is retried with one kernel or option less after each failure that a fallback can avoid.
        """
        settings = arguments.get("settings")
        while True:
            context = self.hosts.attempt(
                lambda: self._open_stage(model, settings, progress, activity), _classify_failure
            )
            try:
                result = self._run_with_oom_retry(
                    context, functools.partial(stage_functions.STAGE_FUNCTIONS[stage], context, **arguments), settings
                )
            except Unsupported as error:
                if (sentence := self.ladder.down(error)) is None:
                    raise
            except NotFinite:
                options = self._step_options(context) if stage in ("denoise", "predict") else {}
                if (sentence := self.ladder.try_without_overlap(options)) is None:
                    raise
            except jax.errors.JaxRuntimeError as error:
                last = executables.last_executed()
                halt = classify_halt(error, last.program.name if last else stage, last.kernels if last else ())
                if halt is None:
                    raise memory_errors.parse_host_error(str(error)) or error from None
                self.lost = self.ladder.record_halt(halt)
                self._when_halted()
                raise self.lost from None
            else:
                self.ladder.commit()
                return result
            # Outside of the `except` blocks: the error's traceback holds arrays.
            log.warning("%s", sentence)
            progress.text(sentence)

    def _step_options(self, stage: StageContext) -> Mapping[str, str]:
        """Return the compiler options of a denoising step before any is left out."""
        config = stage.config(stage.spec.denoiser.experts[0])
        return step_compiler_options(stage.target.mesh(stage.spec.parallelism.mesh_shape(len(self.devices), 1, config)))

    def _open_stage(
        self, model: ModelRef, settings: Settings | None, progress: Progress, activity: telemetry.Activity
    ) -> StageContext:
        """Return the stage's context with its checkpoint located, after starting background work for later stages."""
        stage = self._stage(model, telemetry.TrackedProgress(host=progress, activity=activity))
        self._prefetch(stage, model, settings)
        return stage

    def _stage(self, model: ModelRef, watched: telemetry.TrackedProgress) -> StageContext:
        # All hosts must leave out the same: the leader's record counts.
        without = record.parse_record(
            self.hosts.broadcast(MachineRecord(fallbacks=self.ladder.fallbacks).to_json())
        ).fallbacks
        return StageContext(
            model=model,
            resolved=model.resolve(watched),
            target=CompileTarget(
                devices=self.devices,
                precision=precisions.resolve_precision(model.precision, self.devices[0].platform),
                pictures=precisions.resolve_image_precision(model.precision, self.devices[0].platform),
                kernel=self.kernel,
                fallbacks=without,
            ),
            progress=watched,
            device_cache=self.device_cache,
            program_cache=self.program_cache,
            prompt_cache=self.prompt_cache,
            counts=self.counts,
            hosts=self.hosts,
            overlap=self.overlap_checks,
        )

    def _prefetch(self, stage: StageContext, model: ModelRef, settings: Settings | None) -> None:
        """Start to compile and to read from disk, in the background, what the later stages need."""
        expected = self._expected.get(_without_loras(model))
        if expected is None or stage.name not in STAGES:
            return
        settings = _without_seed(settings) if stage.name == "denoise" else expected.settings
        later = STAGES[STAGES.index(stage.name) + 1 :]
        stages = [name for name in later if name in expected.stages]
        prefetched = self._ahead.noted
        unread = [name for name in (stage.name, *stages) if name not in prefetched]
        uncompiled = [name for name in stages if settings is not None and prefetched.get(name) != settings]
        prefetched.update(dict.fromkeys(unread))
        prefetched.update(dict.fromkeys(uncompiled, settings))
        quiet = replace(
            stage, progress=telemetry.TrackedProgress(host=self._ahead, activity=replace(stage.progress.activity))
        )
        if unread and len(self.local_devices) == len(
            self.devices
        ):  # with several hosts each needs only part of each file
            _run_in_background(lambda: stage_functions.prefetch_weights(quiet, unread), "comfyui-tpu-read")
        if settings is not None and uncompiled:
            with stage.progress.activity.timed("importing_s"):
                upstream_network.import_upstream(model.spec.components)  # not safe in two threads at once
            _run_in_background(lambda: stage_functions.precompile_stages(quiet, settings, uncompiled), COMPILE_THREAD)

    def _cancel_background(self) -> None:
        """Cancel background work, except for compilations that XLA has begun."""
        self._ahead.is_cancelled = True
        self._ahead = BackgroundProgress()
        self.program_cache.drop()

    def _run_with_oom_retry(self, stage: StageContext, work: Callable[[], Result], settings: Settings | None) -> Result:
        """Run `work`, and retry it after out-of-memory errors.

        Each retry follows a step of unloading; the last error becomes `OutOfMemory` with advice.

        A program that the compiler refuses is not tried again: the refusal does not depend on the memory in use.
        """
        reason = host_reason = ""
        for unloaded in itertools.chain(("",), self._unload_in_stages(stage)):
            if unloaded:
                log.warning("%s: out of memory (%s); unloaded %s, trying once more.", stage.name, reason, unloaded)
                stage.progress.text(compose("stage.retrying_after_unload", unloaded=unloaded))
            try:
                with host_memory.translate_errors(f"{stage.spec.title}, stage {stage.name},"):
                    return self.hosts.attempt(work, _classify_failure)
            except memory_errors.HostMemoryError as error:
                # Arrays on the chips need no host memory, unless the host is the device.
                host_reason, again = str(error), self.devices[0].platform == "cpu"
                reason = host_reason
            except memory_errors.CompileOutOfMemory as error:
                advice = memory_advice.compile_refusal_message(
                    stage.spec, stage.name, settings, error.refused, len(self.devices)
                )
                raise OutOfMemory(advice) from None
            except (OutOfMemory, RemoteAttemptFailed, jax.errors.JaxRuntimeError) as error:
                # Keep only its text: the error's traceback holds arrays.
                reason, again = _out_of_memory(error)
                host_reason = ""
            if not again:
                break
        self._clear()
        if host_reason:
            raise memory_errors.HostMemoryError(host_reason)
        raise OutOfMemory(
            memory_advice.out_of_memory_message(stage.spec, stage.name, settings, reason, len(self.devices))
        )

    def _unload_in_stages(self, stage: StageContext) -> Iterator[str]:
        """Yield the title of each unloaded group.

        With several hosts unload everything at once: their contents may differ.
        """
        if type(self.hosts) is not HostGroup:
            self._clear()
            yield "everything else"
            return
        for unloaded in self.device_cache.unload_in_stages(stage.found.model_id):
            self._ahead.noted.clear()
            yield unloaded

    def _record_stage(self, activity: telemetry.Activity) -> None:
        """Add a stage to its generation. Decoding completes a generation; a warm-up is not counted."""
        if activity.stage not in STAGES:
            return
        generation = self._generation
        if generation is None or generation.model != activity.model or activity.stage in dict(generation.stages):
            generation = telemetry.LastRun(model=activity.model)
        generation.add(activity, device_memory.max_memory_stats(self.local_devices))
        self.last_run = generation
        self._generation = None if activity.stage == "decode" else generation
        if activity.stage == "decode":
            log.info("%s", generation)

    def update_peak_bytes(self) -> list[int]:
        """Return the bytes held on each own device now, and update `peak_bytes`."""
        held_bytes = telemetry.bytes_in_use(self.local_devices)
        self.peak_bytes = [max(pair) for pair in zip(held_bytes, self.peak_bytes, strict=True)]
        return held_bytes


def _without_loras(model: ModelRef) -> ModelRef:
    """Return the model without LoRAs and with the default quality.

    Later nodes may add LoRAs, and samplers override the quality.
    """
    return replace(model, loras=(), quality=Quality.EXACT)


def _without_seed(settings: Settings | None) -> Settings | None:
    """Return settings that are equal if the programs are."""
    return settings and replace(settings, seed=0)


def _run_in_background(work: Callable[[], None], name: str) -> None:
    """Run `work` in a daemon thread called `name`; its errors are only logged."""

    def quietly() -> None:
        try:
            with torch.no_grad():
                work()
        except BackgroundCancelled:
            pass
        except Exception as error:  # the stage that needs the result meets the same error and reports it
            log.warning("Background preparation stopped: %s: %s", type(error).__name__, error)

    run_in_daemon_thread(quietly, name)


def _classify_failure(error: BaseException) -> AttemptOutcome:
    """Return `"no room"` if memory cannot suffice, "again" if unloading may help, "failed" for other errors."""
    if isinstance(error, OutOfMemory | memory_errors.HostMemoryError):
        return "no room"
    if not isinstance(error, jax.errors.JaxRuntimeError) or memory_errors.parse_host_error(str(error)):
        return "failed"
    return "again" if "RESOURCE_EXHAUSTED" in str(error) else "failed"


def _out_of_memory(error: Exception) -> tuple[str, bool]:
    """Return the first line of an out-of-memory error, of this or another host, and whether to retry.

    Raise any other error.
    """
    ending = error.ending if isinstance(error, RemoteAttemptFailed) else _classify_failure(error)
    if ending == "failed":
        raise error
    return str(error).partition("\n")[0], ending == "again"
