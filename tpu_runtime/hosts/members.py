"""The followers of a leader: taken in where they fit, heard, told things, and lost."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import versions
from ..line import wire
from ..line.link import Door, Gone, MachineLink
from ..line.records import At, Begin, Bye, ChipRows, Ended, Log, Text
from ..progress import Preview, Progress, in_daemon
from . import distributed, terms
from .place import Place
from .together import Elsewhere, HostsError, Several

log = logging.getLogger(__name__)

# How long a prompt waits for followers that are not here yet.
LATE_S = 45.0
# How long a host may take to end an attempt that is over: then it is stuck in a program that others have left.
STUCK_S = 30.0
# How long a stage may take to end by itself once a host is gone.
GRACE_S = 5.0
_HEARD, _LOG_LINES, _MOST_TEXT = (At, Ended, Log, ChipRows, Text), 5, 200


class Member:
    """A follower, as the leader knows it. The loop of the line hears it, another thread asks what it said."""

    def __init__(self, process: int, address: str, link: MachineLink) -> None:
        self.process, self.link = process, link
        self.text = ""
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.rows: list[dict[str, Any]] = []
        self._name = f"{process} ({address})"
        self.forget_attempt()

    def __str__(self) -> str:
        return f"host {self._name}"

    @property
    def title(self) -> str:
        """At the start of a sentence."""
        return f"Host {self._name}"

    def hear(self, message: Any) -> None:
        if isinstance(message, Text):
            self.text = message.text
        elif isinstance(message, Log):
            self.log.append(message.text)
        elif isinstance(message, ChipRows):
            self.rows = message.rows
        elif isinstance(message, Ended):
            self.ended = message
            self._said.put(None)
        else:
            self._said.put(message)

    def next(self, timeout_s: float) -> At | None:
        """What it said next within this attempt; None after a while, or once the attempt ended there."""
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=timeout_s)

    def failure(self) -> Elsewhere | None:
        """Of an attempt that failed there."""
        ended = self.ended
        return Elsewhere(ended.ending, f"{self.title}: {ended.error}") if ended and ended.ending else None

    def forget_attempt(self) -> None:
        self.ended: Ended | None = None
        self._said: queue.SimpleQueue[At | None] = queue.SimpleQueue()


@dataclass(frozen=True, kw_only=True)
class _Guarded:
    """A host's progress that also ends when another host fails or is gone."""

    inner: Progress
    check: Callable[[], None]

    def text(self, message: str) -> None:
        self.inner.text(message)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        self.inner.step(done, total, unit, preview)

    def check_cancelled(self) -> None:
        self.check()
        self.inner.check_cancelled()


class Members(Several):
    """All of them. `end` is called with a sentence, in a thread of its own, when one is gone and the process must be
    started again; with the progress of the stage if that is stuck on the chips, which nothing can interrupt.
    """

    def __init__(self, place: Place, end: Callable[[str, Progress | None], None]) -> None:
        self._place, self._end = place, end
        self._found: dict[int, Member] = {}
        self._refused: dict[str, str] = {}
        self._begun = False
        self._door: Door | None = None
        self._running: _Guarded | None = None
        self._changed = threading.Condition()
        self.lost: str | None = None

    def members(self) -> list[Member]:
        return [self._found[process] for process in sorted(self._found)]

    def _tell(self, message: Any) -> None:
        for member in self.members():
            member.link.tell(message)  # who hears it says that it is gone

    # -- taking in -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Takes followers in from now on."""
        if self._door is not None:
            return
        versions.source_digest()  # reads the pack's source, before anybody waits for it
        self._door = Door(self._problem, self._hear)
        try:
            self._door.listen("", self._place.port)
        except OSError as error:
            self._door = None
            raise HostsError(
                f"Port {self._place.port}, where followers would come in, cannot be listened at: {error.strerror}. "
                "End what uses it, or choose another port."
            ) from None

    def _gather(self, progress: Progress) -> None:
        """Waits for all, then begins; raises `HostsError` for those that are missing or do not fit."""
        with self._changed:
            self._refused.clear()  # one that was fixed since comes again
        self.listen()
        began = time.monotonic()
        while missing := self._missing():
            names = ", ".join(map(str, missing))
            hosts = f"host{'s' if len(missing) > 1 else ''} {names} of {self._place.count}"
            if self._refused:
                raise HostsError(" ".join(self._refused.values()))
            if time.monotonic() - began > LATE_S:
                raise HostsError(
                    f"This TPU has {self._place.count} hosts, and {hosts} did not come within {LATE_S:.0f} s. Start "
                    f"there: comfyui-tpu follow --coordinator {self._place.host}:{self._place.port} --process "
                    f"{missing[0]} --of {self._place.count}. Then queue the prompt again."
                )
            progress.text(f"Waiting for {hosts}, {began + LATE_S - time.monotonic():.0f} s more")
            progress.check_cancelled()
            with self._changed:
                self._changed.wait(1.0)
        progress.text(f"Joining {self._place.count} hosts")
        self._tell(Begin(terms.environment()))
        try:
            distributed.start(self._place)
        except RuntimeError as error:
            self._lost(f"The hosts could not be joined ({str(error).partition(chr(10))[0]}).")
            raise HostsError(str(self.lost)) from error

    def _missing(self) -> list[int]:
        """The followers that are not here. When all are, none may be exchanged for another any more."""
        with self._changed:
            missing = [process for process in range(1, self._place.count) if process not in self._found]
            self._begun = not missing
            return missing

    def _problem(self, hello: Mapping[str, Any], address: str) -> str | None:
        """Why a follower, which knows the token, cannot be taken in."""
        process, count, place = int(hello["process"]), int(hello["count"]), self._place
        title, problem = f"Host {process} ({address})", None
        if count != place.count or not 0 < process < place.count:
            problem = (
                f"{title} says that it is process {process} of {count}, but the leader was started for {place.count} "
                f"hosts. Start it with --process 1 to {place.count - 1} --of {place.count}."
            )
        elif other := terms.difference(terms.terms(), dict(hello["terms"])):
            problem = (
                f"{title} cannot take part, its versions are others ({other:.1000}). Update this pack and its "
                "packages to the same versions on all hosts: python3 setup.py update."
            )
        with self._changed:
            if problem is None:
                self._refused.pop(address + str(process), None)
                # An earlier self may be about to be missed: then it comes again when that is gone.
                return f"{title} is here already, or only just ends." if process in self._found else None
            log.error("%s", problem)
            if len(self._refused) < place.count:
                self._refused[address + str(process)] = problem
            self._changed.notify_all()
        return problem

    async def _hear(self, link: MachineLink, hello: Mapping[str, Any], address: str) -> None:
        member = Member(int(hello["process"]), address, link)
        with self._changed:
            if self._found.setdefault(member.process, member) is not member:
                return
            self._changed.notify_all()
        log.info("%s is here", member)
        try:
            while True:
                message = await link.get(_HEARD, wire.SETTINGS)
                member.hear(message)
                if isinstance(message, Ended) and message.ending:
                    asyncio.get_running_loop().call_later(STUCK_S, self._look_after, member, message)
        except Gone as error:
            self._gone(member, str(error))

    # -- hosts that are gone -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _at_work(self, progress: Progress) -> Iterator[_Guarded]:
        """While the stage's thread is told of hosts that are gone; if it is stuck, its progress is."""
        self._raise_if_lost()
        self._running = _Guarded(inner=progress, check=self._check)
        try:
            yield self._running
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _check(self) -> None:
        """For the stage's thread: raises where it need not go on."""
        self._raise_if_lost()
        for member in self.members():
            if (failure := member.failure()) is not None:
                raise failure

    def _raise_if_lost(self, cause: BaseException | None = None, within_s: float = 0.0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.lost, within_s)
        if self.lost is not None:
            raise HostsError(self.lost) from cause

    def _look_after(self, member: Member, message: Ended) -> None:
        """An attempt failed there. If this process waits for it on the chips, nothing else ends that."""
        if member.ended is message:
            self._lost(f"{member.title} failed: {message.error}")

    def _gone(self, member: Member, why: str) -> None:
        with self._changed:
            if not self._begun:
                del self._found[member.process]
                log.warning("%s is gone: %s", member, why)
                return
        last = f" Its log ended: {' | '.join(member.log).rstrip('.')}." if member.log else ""
        self._lost(f"{member.title} is gone ({why}).{last}")

    def _lost(self, why: str) -> None:
        """From now on nothing can run here, and the process ends."""
        with self._changed:
            if self.lost is not None:
                return
            self.lost = f"{why} {distributed.what_now()}"
            self._changed.notify_all()
        for member in self.members():
            member.link.post(Bye(why))  # one may be stuck
        in_daemon(lambda: self._end_all(f"{self.lost}"), "comfyui-tpu-hosts-end")

    def _end_all(self, sentence: str) -> None:
        log.error("%s", sentence)
        with self._changed:
            self._changed.wait_for(lambda: self._running is None, GRACE_S)
            running = self._running
        self._end(sentence, running.inner if running else None)
