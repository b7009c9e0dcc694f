"""The engine: its devices, what is kept on them and in host memory, and one stage at a time that uses it. Behind that
stage it compiles and reads what the later ones of an expected generation need.
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
from .. import device_memory, host_memory, refusal, versions
from .. import precision as precisions
from ..cache import xla_cache
from ..checkpoints.model_ref import Expected, ModelRef
from ..hosts.together import Elsewhere, Ending, Together
from ..machine import record
from ..machine.device_access import open_devices
from ..machine.fallbacks import Halted, Unsupported, halted
from ..machine.ladder import Ladder
from ..machine.record import MachineRecord
from ..model_spec import QUALITIES, STAGES, Settings
from ..programs import executables, modules
from ..programs.finite import NotFinite
from ..programs.program import Target, step_options
from ..progress import Progress, Silent, in_daemon
from . import memory_advice, profiling, run, telemetry
from .device_cache import DeviceCache
from .memory_advice import OutOfMemory
from .program_cache import COMPILER, ProgramCache
from .prompt_cache import PromptCache
from .stage import Stage

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Dropped(Exception):
    """Background work was cancelled."""


class Ahead(Silent):
    """The progress of what is done behind a stage: nobody sees it, and it ends once it `is_dropped`. `noted` are the
    stages whose programs and weights it is about, and their settings.
    """

    def __init__(self) -> None:
        self.is_dropped = False
        self.noted: dict[str, Settings | None] = {}

    def check_cancelled(self) -> None:
        if self.is_dropped:
            raise Dropped


class Engine:
    """Runs one stage at a time. `counts` tells how often weights were loaded, LoRAs merged, prompts encoded, programs
    compiled. `kernel` is that of the denoisers (see `AttentionPolicy`). With several `hosts` each has an engine over
    all `devices`, and holds what is on its `own`. `when_halted` is called once a core has halted:
    this process cannot use the chips any more.
    """

    def __init__(
        self,
        chips: Sequence[Device] | None = None,
        kernel: Kernel = "auto",
        hosts: Together | None = None,
        when_halted: Callable[[], None] = lambda: None,
    ) -> None:
        versions.warn_once()
        versions.check()
        self.devices = tuple(chips or open_devices())
        self.ladder = Ladder(self.devices)
        if self.ladder.record.keeps_programs:
            xla_cache.use_persistent_cache()
        self.compilations = xla_cache.compilations()
        self.own = tuple(device for device in self.devices if device.process_index == jax.process_index())
        self.hosts = hosts or Together()
        self.kernel: Kernel = kernel
        self.lost: Halted | None = None
        self._when_halted = when_halted
        self.counts: Counter[str] = Counter(load=0, merge=0, encode=0, compile=0)
        found = self.ladder.record
        self.device_cache = DeviceCache(self.own[0], found.reserve_share)
        self.program_cache = ProgramCache(self.device_cache, self.counts, found.compilers_behind)
        self.prompt_cache = PromptCache()
        self.activity: telemetry.Activity | None = None
        self.last_run: telemetry.LastRun | None = None
        self.peak_bytes = [0] * len(self.own)
        self._generation: telemetry.LastRun | None = None
        self._lock = threading.RLock()
        self._expected: dict[ModelRef, Expected] = {}
        self._ahead = Ahead()

    def expect(self, generations: Iterable[Expected]) -> None:
        """Says what is about to run, in place of what was said before; nothing happens until its first stage runs."""
        expected = {}
        for one in reversed(list(generations)):
            base = _base(one.model)
            expected[base] = replace(one, model=base, settings=_seedless(one.settings))
        if expected != self._expected:
            self.hosts.tell("expect", {"generations": list(expected.values())[::-1]})
            self._expected = expected
            self._drop_ahead()

    def prepare(self, calls: Iterable[tuple[ModelRef, dict[str, Any]]]) -> None:
        """Lets the programs of single calls, see `run.note_call`, be compiled behind what runs, in this order."""
        ahead = self._ahead

        def work() -> None:
            for model, arguments in calls:
                watched = telemetry.Watched(
                    host=ahead, activity=telemetry.Activity(stage="warmup", model=model.model_id)
                )
                watched.check_cancelled()
                run.note_call(self._stage(model, watched), **arguments)

        if type(self.hosts) is Together:
            _ahead_of_time(work, COMPILER)

    def free(self, ids: Iterable[str] | None = None) -> None:
        """Drops weights and compiled programs; with `ids`, the weights of those residents alone."""
        with self._lock:
            if ids is None:
                self.hosts.tell("free", {})
                self._clear()
            else:
                ids = set(ids)
                chosen = [one.title for one in self.device_cache.list() if one.id in ids]
                self.hosts.tell("free_titled", {"titles": chosen})
                self.device_cache.drop(ids)

    def free_titled(self, titles: Iterable[str]) -> None:
        """Drops the weights of residents by title; ids are of one host's files."""
        with self._lock:
            wanted = set(titles)
            self.device_cache.drop([one.id for one in self.device_cache.list() if one.title in wanted])

    def _clear(self) -> None:
        self.device_cache.clear()
        self._ahead.noted.clear()

    # -- how a stage runs ----------------------------------------------------------------------------------------------

    def run(self, stage: str, model: ModelRef, progress: Progress, **arguments: Any) -> Any:
        """What `run.WORK[stage]` returns for these arguments, on all hosts; see `pipeline` for those of each stage.

        One at a time, without gradients; ComfyUI calls nodes in inference mode, which torchax cannot use.
        """
        if stage in run.CALLS and type(self.hosts) is not Together:
            raise ValueError(
                "This TPU has several hosts, and ComfyUI's own samplers and loaders would send each step's numbers to "
                "all of them. Use this pack's own nodes, or the TPU of one host."
            )
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
                    raise Halted(str(self.lost))
                with profiling.trace_stage(stage):
                    result = self._attempted(stage, model, progress, activity, arguments)
                if stage in STAGES:
                    progress.text(activity.summary())
            except BaseException:
                self._drop_ahead()
                self.ladder.gave_up()
                raise
            finally:
                self.activity = None
                self.note_peak()
            self._finished(activity)
            return result

    def _attempted(
        self, stage: str, model: ModelRef, progress: Progress, activity: telemetry.Activity, arguments: dict[str, Any]
    ) -> Any:
        """What the stage returns, from the first rung of the ladder on that the machine takes."""
        settings = arguments.get("settings")
        while True:
            begun = self.hosts.attempt(lambda: self._begun(model, settings, progress, activity), _ending)
            try:
                result = self._within_memory(begun, functools.partial(run.WORK[stage], begun, **arguments), settings)
            except Unsupported as error:
                if (sentence := self.ladder.down(error)) is None:
                    raise
            except NotFinite:
                options = self._step_options(begun) if stage in ("denoise", "predict") else {}
                if (sentence := self.ladder.try_without_overlap(options)) is None:
                    raise
            except jax.errors.JaxRuntimeError as error:
                last = executables.last_started()
                halt = halted(error, last.program.name if last else stage, last.kernels if last else ())
                if halt is None:
                    raise refusal.of_host(str(error)) or error from None
                self.lost = self.ladder.halted(halt)
                self._when_halted()
                raise self.lost from None
            else:
                self.ladder.held()
                return result
            # Here, not above: the error's traceback holds arrays.
            log.warning("%s", sentence)
            progress.text(sentence)

    def _step_options(self, stage: Stage) -> Mapping[str, str]:
        """The compiler options of a denoiser's step, before any is left out."""
        config = stage.config(stage.spec.denoiser.experts[0])
        return step_options(stage.target.mesh(stage.spec.parallelism.arranged(len(self.devices), 1, config)))

    def _begun(
        self, model: ModelRef, settings: Settings | None, progress: Progress, activity: telemetry.Activity
    ) -> Stage:
        """A stage whose checkpoint is found, with what may be done ahead under way."""
        stage = self._stage(model, telemetry.Watched(host=progress, activity=activity))
        self._look_ahead(stage, model, settings)
        return stage

    def _stage(self, model: ModelRef, watched: telemetry.Watched) -> Stage:
        # What one host's record leaves out, all must: the leader's holds.
        without = record.parsed(self.hosts.decide(MachineRecord(fallbacks=self.ladder.fallbacks).to_json())).fallbacks
        return Stage(
            model=model,
            resolved=model.resolve(watched),
            target=Target(
                devices=self.devices,
                precision=precisions.resolve(model.precision, self.devices[0].platform),
                pictures=precisions.of_pictures(model.precision, self.devices[0].platform),
                kernel=self.kernel,
                fallbacks=without,
            ),
            progress=watched,
            device_cache=self.device_cache,
            program_cache=self.program_cache,
            prompt_cache=self.prompt_cache,
            counts=self.counts,
            hosts=self.hosts,
        )

    def _look_ahead(self, stage: Stage, model: ModelRef, settings: Settings | None) -> None:
        """Lets what the later stages need be compiled, and read from the disk, behind this one."""
        expected = self._expected.get(_base(model))
        if expected is None or stage.name not in STAGES:
            return
        settings = _seedless(settings) if stage.name == "denoise" else expected.settings
        later = STAGES[STAGES.index(stage.name) + 1 :]
        stages = [name for name in later if name in expected.stages]
        noted = self._ahead.noted
        unread = [name for name in (stage.name, *stages) if name not in noted]
        unnoted = [name for name in stages if settings is not None and noted.get(name) != settings]
        noted.update(dict.fromkeys(unread))
        noted.update(dict.fromkeys(unnoted, settings))
        quiet = replace(stage, progress=telemetry.Watched(host=self._ahead, activity=replace(stage.progress.activity)))
        if unread and len(self.own) == len(self.devices):  # each of several hosts needs only part of each file
            _ahead_of_time(lambda: run.read_ahead(quiet, unread), "comfyui-tpu-read")
        if settings is not None and unnoted:
            with stage.progress.activity.spends("importing_s"):
                modules.import_upstream(model.spec.components)  # not by two threads at once
            _ahead_of_time(lambda: run.note(quiet, settings, unnoted), COMPILER)

    def _drop_ahead(self) -> None:
        """Ends what was begun for later stages, but for what XLA is at work on."""
        self._ahead.is_dropped = True
        self._ahead = Ahead()
        self.program_cache.drop()

    def _within_memory(self, stage: Stage, work: Callable[[], Result], settings: Settings | None) -> Result:
        """Run `work`; out of memory, again after each stage of unloading. Then `OutOfMemory` says what would fit.

        A program that the compiler refuses is not tried again: its answer does not depend on what is loaded.
        """
        reason = host_reason = ""
        for unloaded in itertools.chain(("",), self._unload_in_stages(stage)):
            if unloaded:
                log.warning("%s: out of memory (%s); unloaded %s, trying once more.", stage.name, reason, unloaded)
                stage.progress.text(f"Out of memory: unloaded {unloaded}, trying once more")
            try:
                with host_memory.explained(f"{stage.spec.title}, stage {stage.name},"):
                    return self.hosts.attempt(work, _ending)
            except refusal.HostFull as error:
                # What is on the chips takes none of it, but for what computes on the host.
                host_reason, again = str(error), self.devices[0].platform == "cpu"
                reason = host_reason
            except refusal.DoesNotFit as error:
                advice = memory_advice.compiler_sentence(
                    stage.spec, stage.name, settings, error.refused, len(self.devices)
                )
                raise OutOfMemory(advice) from None
            except (OutOfMemory, Elsewhere, jax.errors.JaxRuntimeError) as error:
                # Only its text leaves this block: the error's traceback holds arrays.
                reason, again = _out_of_memory(error)
                host_reason = ""
            if not again:
                break
        self._clear()
        if host_reason:
            raise refusal.HostFull(host_reason)
        raise OutOfMemory(memory_advice.sentence(stage.spec, stage.name, settings, reason, len(self.devices)))

    def _unload_in_stages(self, stage: Stage) -> Iterator[str]:
        """Yield what was unloaded. Several hosts unload everything at once: theirs may hold different things."""
        if type(self.hosts) is not Together:
            self._clear()
            yield "everything else"
            return
        for unloaded in self.device_cache.release_in_stages(stage.found.model_id):
            self._ahead.noted.clear()
            yield unloaded

    def _finished(self, activity: telemetry.Activity) -> None:
        """Adds a stage to the generation it belongs to; decoding ends one, and warming up is none."""
        if activity.stage not in STAGES:
            return
        found = self._generation
        if found is None or found.model != activity.model or activity.stage in dict(found.stages):
            found = telemetry.LastRun(model=activity.model)
        found.add(activity, device_memory.fullest(self.own))
        self.last_run = found
        self._generation = None if activity.stage == "decode" else found
        if activity.stage == "decode":
            log.info("%s", found)

    def note_peak(self) -> list[int]:
        """Bytes held on each own device now; remembers the most."""
        held = telemetry.held_bytes(self.own)
        self.peak_bytes = [max(pair) for pair in zip(held, self.peak_bytes, strict=True)]
        return held


def _base(model: ModelRef) -> ModelRef:
    """The model without LoRAs, which a workflow's later nodes may add and which change no settings, and without its
    quality, which samplers have in theirs.
    """
    return replace(model, loras=(), quality=QUALITIES[0])


def _seedless(settings: Settings | None) -> Settings | None:
    """Settings that are equal where the programs are."""
    return settings and replace(settings, seed=0)


def _ahead_of_time(work: Callable[[], None], name: str) -> None:
    """Does what may be done ahead, in a thread called `name`; its errors do not matter."""

    def quietly() -> None:
        try:
            with torch.no_grad():
                work()
        except Dropped:
            pass
        except Exception as error:  # whatever it is, the stage that it was for will meet it, and say it to the user
            log.warning("Nothing more is prepared ahead: %s: %s", type(error).__name__, error)

    in_daemon(quietly, name)


def _ending(error: BaseException) -> Ending:
    """Whether memory ran out, and whether less beside it might help: what was known before loading, would not."""
    if isinstance(error, OutOfMemory | refusal.HostFull):
        return "no room"
    if not isinstance(error, jax.errors.JaxRuntimeError) or refusal.of_host(str(error)):
        return "failed"
    return "again" if "RESOURCE_EXHAUSTED" in str(error) else "failed"


def _out_of_memory(error: Exception) -> tuple[str, bool]:
    """Of an error that says memory ran out, here or elsewhere: its first line, and whether to try again. Any other is
    raised again.
    """
    ending = error.ending if isinstance(error, Elsewhere) else _ending(error)
    if ending == "failed":
        raise error
    return str(error).partition("\n")[0], ending == "again"
