"""The engine: devices, caches, and one stage at a time that uses them.

While a stage runs, background threads compile and read for the later stages of an announced generation.
"""

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import torch

from ...attention.policy import Kernel
from ...distributed.multihost.coordinator import HostGroup
from ...sharding.mesh import Device
from .. import device_memory, host_memory, versions
from .. import precision as precisions
from ..cache import xla_cache
from ..checkpoints import prefetch
from ..checkpoints.model_ref import ModelRef, PlannedGeneration
from ..checkpoints.prefetch import FilePrefetch
from ..machine import record
from ..machine.device_access import open_devices
from ..machine.fallbacks import ChipHalted
from ..machine.policy import FallbackPolicy
from ..machine.record import MachineRecord
from ..messages import compose
from ..model_spec import STAGES, Settings
from ..programs import upstream_network
from ..programs.program import CompileTarget, step_compiler_options
from ..progress import Progress, SilentProgress, run_in_daemon_thread
from . import profiling, stage_functions, telemetry
from .device_cache import DeviceCache
from .overlap_check import OverlapChecks
from .program_cache import COMPILE_THREAD, ProgramCache
from .prompt_cache import PromptCache
from .recovery import FAILURES, Recovery, classify_failure
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
    files: reads weights ahead; may have begun before the chips were open.
    """

    def __init__(
        self,
        chips: Sequence[Device] | None = None,
        kernel: Kernel = "auto",
        hosts: HostGroup | None = None,
        when_halted: Callable[[], None] = lambda: None,
        files: FilePrefetch | None = None,
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
        self._files = files or FilePrefetch()
        self.overlap_checks = OverlapChecks(
            programs=self.program_cache, chips=self.device_cache, verdicts=self.ladder, lock=self._lock
        )

    def expect(self, generations: Iterable[PlannedGeneration]) -> None:
        """Announce the generations about to run, replacing the earlier announcement.

        Nothing happens until a stage of one runs.
        """
        expected = {}
        for generation in reversed(list(generations)):
            base = generation.model.without_choices()
            expected[base] = replace(generation, model=base, settings=_without_seed(generation.settings))
        if expected != self._expected:
            self.hosts.tell("expect", {"generations": list(expected.values())[::-1]})
            self._expected = expected
            self._cancel_background(keep=expected)

    def prepare(self, calls: Iterable[tuple[ModelRef, dict[str, Any]]]) -> None:
        """Compile the programs of single calls in the background, in this order, and read their weights ahead.

        calls: each a model and arguments of `stage_functions.precompile_call`.
        """
        ahead = self._ahead

        def work() -> None:
            for model, arguments in calls:
                watched = telemetry.TrackedProgress(
                    host=ahead, activity=telemetry.Activity(stage="warmup", model=model.model_id)
                )
                watched.check_cancelled()
                stage = self._stage(model, watched)
                self._request_files(stage, prefetch.list_call_stages(arguments))
                stage_functions.precompile_call(stage, **arguments)

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
        self._forget_prefetched()

    def _forget_prefetched(self) -> None:
        self._ahead.noted.clear()
        self._files.cancel()

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
                    result = self._run_with_recovery(stage, model, progress, activity, arguments)
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

    def _run_with_recovery(
        self, stage: str, model: ModelRef, progress: Progress, activity: telemetry.Activity, arguments: dict[str, Any]
    ) -> Any:
        """Return the stage's result, after as many retries as `recovery` allows."""
        settings = arguments.get("settings")
        recovery: Recovery | None = None
        result: Any = None
        while True:
            if recovery is None:
                with self.hosts.attempt(classify_failure):
                    context = self._open_stage(model, settings, progress, activity)
                recovery = self._recovery(context, settings)
            named = f"{model.spec.title}, stage {stage},"
            try:
                with host_memory.translate_errors(named), self.hosts.attempt(classify_failure):
                    result = stage_functions.STAGE_FUNCTIONS[stage](recovery.stage, **arguments)
            except FAILURES as failure:
                act = recovery.choose(failure)
            else:
                self.ladder.commit()
                return result
            # Outside of the `except` block, because the failure's traceback holds arrays.
            if act():
                recovery = None

    def _recovery(self, stage: StageContext, settings: Settings | None) -> Recovery:
        def mark_lost(lost: ChipHalted) -> None:
            self.lost = lost
            self._when_halted()

        return Recovery(
            stage=stage, settings=settings, policy=self.ladder,
            options=functools.partial(self._step_options, stage),
            unloads=self._unload_in_stages(stage), clear=self._clear, mark_lost=mark_lost,
        )  # fmt: skip

    def _step_options(self, stage: StageContext) -> Mapping[str, str]:
        """Return the compiler options of a denoising step before any is left out; none for other stages."""
        if stage.name not in ("denoise", "predict"):
            return {}
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
        expected = self._expected.get(model.without_choices())
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
        self._request_files(stage, unread)
        if settings is not None and uncompiled:
            with stage.progress.activity.timed("importing_s"):
                upstream_network.import_upstream(model.spec.components)  # not safe in two threads at once
            _run_in_background(lambda: stage_functions.precompile_stages(quiet, settings, uncompiled), COMPILE_THREAD)

    def _request_files(self, stage: StageContext, stages: Collection[str]) -> None:
        """Start to read the weights of `stages` in the background, unless they are resident."""
        if len(self.local_devices) < len(self.devices):
            return  # with several hosts each needs only part of each file
        resident = {held.component for held in self.device_cache.list() if held.model == stage.found.model_id}
        self._files.request(stage.model.without_choices(), prefetch.list_files(stage.found, stages, resident))

    def _cancel_background(self, keep: Collection[ModelRef] = ()) -> None:
        """Cancel background work, except for compilations that XLA has begun and weights of the models in `keep`."""
        self._ahead.is_cancelled = True
        self._ahead = BackgroundProgress()
        self._files.cancel(keep)
        self.program_cache.drop()

    def _unload_in_stages(self, stage: StageContext) -> Iterator[str]:
        """Yield the title of each unloaded group.

        With several hosts unload everything at once: their contents may differ.
        """
        if type(self.hosts) is not HostGroup:
            self._clear()
            yield "everything else"
            return
        for unloaded in self.device_cache.unload_in_stages(stage.found.model_id):
            self._forget_prefetched()
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
