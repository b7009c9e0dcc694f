"""The followers of a leader: taken in where they fit, heard, told things, and lost."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .. import versions
from ..line import wire
from ..line.link import Door, Gone, MachineLink
from ..line.records import At, Begin, Bye, ChipRows, Ended, Log, Text
from ..progress import Progress
from . import distributed, terms
from .place import Place
from .together import HostsError

log = logging.getLogger(__name__)

# How long a prompt waits for followers that are not here yet.
LATE_S = 45.0
_HEARD, _LOG_LINES, _MOST_TEXT = (At, Ended, Log, ChipRows, Text), 5, 200


class Member:
    """A follower, as the leader knows it. The loop of the line hears it, another thread asks what it said."""

    def __init__(self, process: int, address: str, link: MachineLink) -> None:
        self.process, self.link = process, link
        self.text = ""
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.rows: list[dict[str, Any]] = []
        self.ended: Ended | None = None
        self._name = f"{process} ({address})"
        self._said: deque[At] = deque()
        self._changed = threading.Condition()

    def __str__(self) -> str:
        return f"host {self._name}"

    @property
    def title(self) -> str:
        """At the start of a sentence."""
        return f"Host {self._name}"

    def tell(self, message: Any) -> None:
        try:
            self.link.send(message)
        except Gone as error:
            log.debug("%s: %s", self, error)  # who hears it says so

    def hear(self, message: Any) -> None:
        if isinstance(message, Text):
            self.text = message.text
        elif isinstance(message, Log):
            self.log.append(message.text)
        elif isinstance(message, ChipRows):
            self.rows = message.rows
        else:
            with self._changed:
                if isinstance(message, Ended):
                    self.ended = message
                else:
                    self._said.append(message)
                self._changed.notify_all()

    def next(self, timeout_s: float) -> At | None:
        """What it said next within this attempt; None after a while, or once the attempt ended there."""
        with self._changed:
            self._changed.wait_for(lambda: self._said or self.ended, timeout_s)
            return self._said.popleft() if self._said else None

    def failure(self) -> Ended | None:
        """Its last word of an attempt that failed there."""
        ended = self.ended
        return ended if ended and ended.ending else None

    def forget_attempt(self) -> None:
        with self._changed:
            self.ended = None
            self._said.clear()


class Members:
    """All of them. `lost` is called with the reason when one is gone after all began, `failed` when an attempt of one
    failed.
    """

    def __init__(self, place: Place, lost: Callable[[str], None], failed: Callable[[Member, Ended], None]) -> None:
        self._place, self._on_lost, self._on_failed = place, lost, failed
        self._found: dict[int, Member] = {}
        self._refused: dict[str, str] = {}
        self._begun = False
        self._door: Door | None = None
        self._changed = threading.Condition()
        self.lost: str | None = None

    def all(self) -> list[Member]:
        return [self._found[process] for process in sorted(self._found)]

    def tell(self, message: Any) -> None:
        for member in self.all():
            member.tell(message)

    # -- taking in -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
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

    def gather(self, progress: Progress) -> None:
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
        self.tell(Begin(terms.environment()))
        try:
            distributed.start(self._place)
        except RuntimeError as error:
            self._on_lost(f"The hosts could not be joined ({str(error).partition(chr(10))[0]}).")
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

    # -- hearing, and losing -------------------------------------------------------------------------------------------

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
                    self._on_failed(member, message)
        except Gone as error:
            self._gone(member, str(error))

    def _gone(self, member: Member, why: str) -> None:
        with self._changed:
            if not self._begun:
                del self._found[member.process]
                log.warning("%s is gone: %s", member, why)
                return
        last = f" Its log ended: {' | '.join(member.log).rstrip('.')}." if member.log else ""
        self._on_lost(f"{member.title} is gone ({why}).{last}")

    def lose(self, why: str) -> bool:
        """From now on nothing can run here; False if that was so before."""
        with self._changed:
            if self.lost is not None:
                return False
            self.lost = f"{why} {distributed.what_now()}"
            self._changed.notify_all()
        self.tell(Bye(why))
        return True

    def wait_lost(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.lost, timeout_s)
