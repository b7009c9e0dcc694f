"""Compiled programs of this process, by everything that they depend on. Each is compiled once, in its own thread.

A stage requests a program (`get`) and waits, so that it can be cancelled. Programs of later stages are requested ahead
(`note`) and compiled in the background, in that order. XLA compilations cannot be interrupted; they run to completion
and are cached.
"""

import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from ..cache.store import signature
from ..cache.xla_cache import on_cache_miss
from ..machine.fallbacks import Unsupported
from ..memory_errors import CompileOutOfMemory
from ..messages import compose, compose_list
from ..programs import executables
from ..programs.executables import Executable
from ..programs.program import TRACE_LOCK, Program
from ..progress import run_in_daemon_thread
from . import compile_times, telemetry
from .device_cache import DeviceCache

log = logging.getLogger(__name__)

# Name of the threads that compile. A process waits for these before it ends (see `current`).
COMPILE_THREAD = "comfyui-tpu-compile"
# Background compilations at a time, unless the machine's record has another number. XLA has threads of its own.
MAX_BACKGROUND_COMPILES = 2
# Poll interval for cancellation, in seconds.
POLL_S = 0.2
# Shortest expected wait with a progress bar, in seconds.
MIN_BAR_S = 10
# Unit of the progress bar.
BAR_UNIT = "second"
# Errors that a second compilation would raise again.
_FINAL = (CompileOutOfMemory, Unsupported)


@dataclass(frozen=True, kw_only=True)
class ProgramRequest:
    """A request for a program."""

    title: str  # for messages
    key: tuple[Any, ...]  # everything that the program depends on
    build: Callable[[], Program]  # describes the program; traces nothing yet
    model: str = ""  # name of the spec

    @property
    def kind(self) -> str:
        """Digest that is equal for programs which differ in their sizes alone and so take about as long to compile."""
        words = [entry for entry in self.key if isinstance(entry, str)]
        chips = jax.devices()
        return signature(*words, re.sub(r"\d+", "", self.title), chips[0].device_kind, len(chips))

    @property
    def digest(self) -> str:
        """Digest of the key."""
        return signature(*(json.dumps(part, sort_keys=True) if isinstance(part, dict) else part for part in self.key))


@dataclass(eq=False, kw_only=True)
class PendingCompilation:
    """A program that is waiting to be compiled, being compiled, or was refused."""

    wanted: ProgramRequest
    digest: str
    started: float | None = None  # monotonic seconds; None while it waits
    is_awaited: bool = False  # by a stage
    is_new: bool = False  # not in XLA's persistent cache
    done: threading.Event = field(default_factory=threading.Event)  # set when compiled or refused
    found: Executable | None = None  # the loaded program
    error: BaseException | None = None  # the reason of a refusal
    _program: Program | None = None

    def mark_new(self) -> None:
        self.is_new = True

    @property
    def program(self) -> Program:
        if self._program is None:  # else no need to wait while another thread traces
            with TRACE_LOCK:
                self._program = self._program or self.wanted.build()
        return self._program


class ProgramCache:
    """Compiled programs by key, loaded on the devices. `counts["compile"]` counts those that were in no cache."""

    def __init__(self, device_cache: DeviceCache, counts: Counter[str], max_behind: int | None = None) -> None:
        self._max_behind = MAX_BACKGROUND_COMPILES if max_behind is None else max_behind
        self._device_cache = device_cache
        self._counts = counts
        self._lock = threading.Lock()
        # Programs that are not loaded yet, by digest: waiting (in `_queue`), compiling, or refused.
        self._pending: dict[str, PendingCompilation] = {}
        self._queue: list[PendingCompilation] = []
        self._num_threads = 0

    def get(self, wanted: ProgramRequest, progress: telemetry.TrackedProgress) -> Executable:
        """Return the program: loaded, or compiled now.

        Waits if another thread compiles it. Raises its compile error.
        """
        digest = wanted.digest
        progress.check_cancelled()
        with self._lock:
            if (loaded := self._device_cache.program(digest)) is not None:
                return loaded
            pending = self._pending.setdefault(digest, PendingCompilation(wanted=wanted, digest=digest))
            if pending in self._queue:
                self._queue.remove(pending)
            is_ours, started = pending.started is None, pending.started or time.monotonic()
            pending.started, pending.is_awaited = started, True
        if is_ours:
            run_in_daemon_thread(lambda: self._compile(pending), COMPILE_THREAD)
        self._wait(pending, time.monotonic() - started, progress)
        if pending.found is not None:
            return pending.found
        assert pending.error is not None
        with self._lock:
            self._pending.pop(digest, None)
        if is_ours or isinstance(pending.error, _FINAL):
            raise pending.error
        return self.get(wanted, progress)  # it failed in the background: compile it here

    def _wait(self, pending: PendingCompilation, age_s: float, progress: telemetry.TrackedProgress) -> None:
        """Wait for a compilation, reporting progress. Raises if the user cancels.

        age_s: seconds since it began.
        """
        expected_s = compile_times.get_last_s(pending.wanted.kind)
        facts = [compose("stage.once_for_this_size")]
        facts += [compose("stage.expected_time", expected_s=f"{expected_s:.0f}")] if expected_s >= 1 else []
        facts += [compose("stage.compiling_since", age_s=f"{age_s:.0f}")] if age_s >= 1 else []
        progress.text(compose("stage.preparing_program", title=pending.wanted.title))
        activity, waiting = progress.activity, time.monotonic()
        began, shown_s = waiting - age_s, None
        try:
            while not pending.done.wait(POLL_S):
                progress.check_cancelled()
                if not pending.is_new:
                    continue
                if not activity.compiling:
                    activity.compiling = True
                    progress.text(compose("stage.compiling", title=pending.wanted.title, facts=compose_list(facts)))
                # The bar stays below its end until the program is ready.
                now = int(min(time.monotonic() - began, expected_s - 1))
                if expected_s >= MIN_BAR_S and now != shown_s:
                    progress.step(now, int(expected_s), BAR_UNIT)
                    shown_s = now
        finally:
            pending.is_awaited = activity.compiling = False
            activity.add_time("compiling_s" if pending.is_new else "preparing_s", time.monotonic() - waiting)
        progress.check_cancelled()

    def note(self, wanted: ProgramRequest) -> PendingCompilation | Executable:
        """Return the program, or its pending compilation, which is queued to run in the background."""
        digest = wanted.digest
        with self._lock:
            if (loaded := self._device_cache.program(digest)) is not None:
                return loaded
            pending = self._pending.get(digest)
            if pending is None:
                pending = self._pending[digest] = PendingCompilation(wanted=wanted, digest=digest)
                self._queue.append(pending)
            if self._queue and self._num_threads < self._max_behind:
                self._num_threads += 1
                run_in_daemon_thread(self._compile_in_background, COMPILE_THREAD)
        return pending

    def unload(self, wanted: ProgramRequest) -> None:
        """Unload the program, so that `get` loads it again."""
        self._device_cache.drop_program(wanted.digest)

    def drop(self) -> None:
        """Cancel the queued compilations that have not begun."""
        with self._lock:
            for compilation in self._queue:
                del self._pending[compilation.digest]
            self._queue.clear()

    def list_background(self) -> list[dict[str, object]]:
        """Return title and elapsed seconds of the compilations that no stage waits for, in order.

        The seconds are None if a compilation has not begun.
        """
        now = time.monotonic()
        with self._lock:
            unawaited = [
                compilation
                for compilation in self._pending.values()
                if not (compilation.is_awaited or compilation.done.is_set())
            ]
        return [
            {
                "title": compilation.wanted.title,
                "elapsed_s": None if compilation.started is None else now - compilation.started,
            }
            for compilation in unawaited
        ]

    def _compile_in_background(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._num_threads -= 1
                    return
                pending = self._queue.pop(0)
                pending.started = time.monotonic()
            self._compile(pending)
            if isinstance(pending.error, _FINAL):
                with self._lock:
                    self._pending[pending.digest] = pending  # raised in the stage that asks for it, if any
            elif pending.error is not None:
                log.warning(
                    "%s failed to compile in the background (%s); the stage that needs it tries again.",
                    pending.wanted.title,
                    pending.error,
                )

    def _compile(self, pending: PendingCompilation) -> None:
        try:
            began = time.monotonic()
            with torch.no_grad(), on_cache_miss(pending.mark_new):  # gradients are enabled in a new thread
                executable, pending.is_new = executables.compile_or_load(pending.program)
            if pending.is_new:
                wanted, seconds = pending.wanted, time.monotonic() - began
                name = pending.program.name if wanted.model else ""
                compile_times.record(wanted.kind, wanted.model, name, seconds)
            with self._lock:
                # If it does not fit next to the running program, its stage loads it from XLA's cache later.
                if pending.is_awaited or self._device_cache.has_room(executable):
                    self._device_cache.add_program(pending.digest, executable)
                self._counts["compile"] += pending.is_new
            pending.found = executable
        except BaseException as error:  # raised again in the waiting stage
            pending.error = error
        with self._lock:
            self._pending.pop(pending.digest, None)
        pending.done.set()
