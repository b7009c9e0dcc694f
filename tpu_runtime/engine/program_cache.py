"""The compiled programs of this process, by all that they depend on. Each is compiled once, in a thread of its own.

A stage asks for a program (`get`) and waits, so that it can be cancelled. What later stages will ask for is noted
before (`note`) and compiled behind the running one, in that order. XLA cannot be stopped: what it is at work on is
finished and kept, whoever does not want it any more.
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

from ..cache.store import Store, signature
from ..cache.xla_cache import when_missed
from ..machine.fallbacks import Unsupported
from ..programs import executables
from ..programs.executables import Executable
from ..programs.program import TRACING, Program
from ..progress import in_daemon
from ..refusal import DoesNotFit
from . import telemetry
from .device_cache import DeviceCache

log = logging.getLogger(__name__)

# The name of threads that compile, for which a process waits before it ends (see `current`).
COMPILER = "comfyui-tpu-compile"
# How many compile behind a stage, unless the machine's record says otherwise; XLA has more threads of its own.
MAX_BEHIND = 2
# How often who waits looks whether the user cancelled.
LOOK_AGAIN_S = 0.2
# How long the programs of a model took to compile on such chips, whatever their size: what the next may take.
SECONDS = Store("compile_seconds")
# Of a shorter wait no bar is shown.
LEAST_BAR_S = 10
# No compilation takes a day; a cache's file may say anything.
LONGEST_S = 24 * 3600
# The unit of such a bar.
SECOND = "second"
# What compiling again would not change.
_FINAL = (DoesNotFit, Unsupported)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A program that somebody will run: what to call it, all that it depends on, how to make it."""

    title: str
    key: tuple[Any, ...]
    build: Callable[[], Program]

    @property
    def kind(self) -> str:
        """What programs have in common that differ in their sizes alone; they take about as long to compile."""
        words = [part for part in self.key if isinstance(part, str)]
        chips = jax.devices()
        return signature(*words, re.sub(r"\d+", "", self.title), chips[0].device_kind, len(chips))

    @property
    def digest(self) -> str:
        return signature(*(json.dumps(part, sort_keys=True) if isinstance(part, dict) else part for part in self.key))


@dataclass(eq=False, kw_only=True)
class Compilation:
    """A program on its way: it waits to be compiled, is compiled, or was refused."""

    wanted: Wanted
    digest: str
    started: float | None = None
    is_awaited: bool = False  # by a stage
    is_new: bool = False  # XLA's cache does not have it
    done: threading.Event = field(default_factory=threading.Event)
    found: Executable | None = None
    error: BaseException | None = None
    _program: Program | None = None

    def not_cached(self) -> None:
        self.is_new = True

    @property
    def program(self) -> Program:
        if self._program is None:  # else nobody need wait for what another thread traces
            with TRACING:
                self._program = self._program or self.wanted.build()
        return self._program


class ProgramCache:
    """Compiled programs by key, loaded on the devices. `counts["compile"]` tells how many were in no cache."""

    def __init__(self, device_cache: DeviceCache, counts: Counter[str], max_behind: int | None = None) -> None:
        self._max_behind = MAX_BEHIND if max_behind is None else max_behind
        self._device_cache = device_cache
        self._counts = counts
        self._lock = threading.Lock()
        # What is not loaded yet, by digest: waiting (in `_queue`), compiling, or refused.
        self._coming: dict[str, Compilation] = {}
        self._queue: list[Compilation] = []
        self._threads_behind = 0

    def get(self, wanted: Wanted, progress: telemetry.Watched) -> Executable:
        """The program: loaded, or compiled now. If it is being compiled, this waits for it."""
        digest = wanted.digest
        progress.check_cancelled()
        with self._lock:
            if (loaded := self._device_cache.program(digest)) is not None:
                return loaded
            one = self._coming.setdefault(digest, Compilation(wanted=wanted, digest=digest))
            if one in self._queue:
                self._queue.remove(one)
            is_ours, begun = one.started is None, one.started or time.monotonic()
            one.started, one.is_awaited = begun, True
        if is_ours:
            in_daemon(lambda: self._compile(one), COMPILER)
        self._wait(one, time.monotonic() - begun, progress)
        if one.found is not None:
            return one.found
        assert one.error is not None
        with self._lock:
            self._coming.pop(digest, None)
        if is_ours or isinstance(one.error, _FINAL):
            raise one.error
        return self.get(wanted, progress)  # it failed behind another stage: now by ourselves

    def _wait(self, one: Compilation, age_s: float, progress: telemetry.Watched) -> None:
        expected_s = _expected_s(one.wanted)
        facts = ["once for this size"]
        facts += [f"about {expected_s:.0f} s as the last time"] if expected_s >= 1 else []
        facts += [f"begun {age_s:.0f} s ago"] if age_s >= 1 else []
        progress.text(f"Preparing the program of {one.wanted.title}")
        activity, waiting = progress.activity, time.monotonic()
        began, said = waiting - age_s, None
        try:
            while not one.done.wait(LOOK_AGAIN_S):
                progress.check_cancelled()
                if not one.is_new:
                    continue
                if not activity.compiling:
                    activity.compiling = True
                    progress.text(f"Compiling {one.wanted.title} ({', '.join(facts)})")
                # The bar stays short of its end until that is reached.
                now = int(min(time.monotonic() - began, expected_s - 1))
                if expected_s >= LEAST_BAR_S and now != said:
                    progress.step(now, int(expected_s), SECOND)
                    said = now
        finally:
            one.is_awaited = activity.compiling = False
            activity.spent("compiling_s" if one.is_new else "preparing_s", time.monotonic() - waiting)
        progress.check_cancelled()

    def note(self, wanted: Wanted) -> Compilation | Executable:
        """The program as it is or will be: it is compiled behind what runs."""
        digest = wanted.digest
        with self._lock:
            if (loaded := self._device_cache.program(digest)) is not None:
                return loaded
            one = self._coming.get(digest)
            if one is None:
                one = self._coming[digest] = Compilation(wanted=wanted, digest=digest)
                self._queue.append(one)
            if self._queue and self._threads_behind < self._max_behind:
                self._threads_behind += 1
                in_daemon(self._compile_behind, COMPILER)
        return one

    def unload(self, wanted: Wanted) -> None:
        """Lets `get` load the program again."""
        self._device_cache.drop_program(wanted.digest)

    def drop(self) -> None:
        """Forgets what was noted and is not begun."""
        with self._lock:
            for one in self._queue:
                del self._coming[one.digest]
            self._queue.clear()

    def behind(self) -> list[dict[str, object]]:
        """What is compiled behind the running stage, or waits for that, in order; seconds since each was begun."""
        now = time.monotonic()
        with self._lock:
            coming = [one for one in self._coming.values() if not (one.is_awaited or one.done.is_set())]
        return [
            {"title": one.wanted.title, "elapsed_s": None if one.started is None else now - one.started}
            for one in coming
        ]

    def _compile_behind(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads_behind -= 1
                    return
                one = self._queue.pop(0)
                one.started = time.monotonic()
            self._compile(one)
            if isinstance(one.error, _FINAL):
                with self._lock:
                    self._coming[one.digest] = one  # said to the stage that asks for it, if one does
            elif one.error is not None:
                log.warning(
                    "%s failed to compile ahead (%s); the stage that needs it tries again.", one.wanted.title, one.error
                )

    def _compile(self, one: Compilation) -> None:
        try:
            began = time.monotonic()
            with torch.no_grad(), when_missed(one.not_cached):  # a thread begins with gradients
                found, one.is_new = executables.obtain(one.program)
            if one.is_new:
                SECONDS.put(one.wanted.kind, f"{time.monotonic() - began:.1f}".encode())
            with self._lock:
                # Where it does not fit next to what runs, its stage takes it from XLA's cache.
                if one.is_awaited or self._device_cache.has_room(found):
                    self._device_cache.add_program(one.digest, found)
                self._counts["compile"] += one.is_new
            one.found = found
        except BaseException as error:  # handed on to the stage that waits
            one.error = error
        with self._lock:
            self._coming.pop(one.digest, None)
        one.done.set()


def _expected_s(wanted: Wanted) -> float:
    """How long such a program took to compile the last time; 0 where that is not known."""
    try:
        seconds = float(SECONDS.get(wanted.kind) or 0)
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < LONGEST_S else 0.0
