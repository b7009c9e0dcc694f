"""The followers of a leader: taken in where they fit, heard each by a thread, told things, and lost."""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..progress import Progress
from . import distributed, terms
from .channel import Channel, Gone, listen
from .place import Place
from .together import HostsError

log = logging.getLogger(__name__)

# How long a prompt waits for followers that are not here yet.
LATE_S = 45.0
LOOK_S = 0.2
LOG_LINES = 5


class Member:
    """A follower, as the leader knows it. One thread hears it, another asks what it said."""

    def __init__(self, process: int, address: str, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.text = ""
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.rows: list[dict[str, Any]] = []
        self.ended: dict[str, Any] | None = None
        self._name = f"{process} ({address})"
        self._said: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()

    def __str__(self) -> str:
        return f"host {self._name}"

    @property
    def title(self) -> str:
        """At the start of a sentence."""
        return f"Host {self._name}"

    def tell(self, message: Mapping[str, Any]) -> None:
        try:
            self.channel.send(message)
        except Gone as error:
            log.debug("%s: %s", self, error)  # the thread that hears it says so

    def hear(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "ended" in message:
                self.ended = message
            else:
                self._said.append(message)
            self._changed.notify_all()

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """What it said next within this attempt; None after a while, or once the attempt ended there."""
        with self._changed:
            self._changed.wait_for(lambda: self._said or self.ended, timeout_s)
            return self._said.popleft() if self._said else None

    def failure(self) -> dict[str, Any] | None:
        """Its last word of an attempt that failed there."""
        ended = self.ended
        return ended if ended and ended["ended"] else None

    def begin_anew(self) -> None:
        """Forgets an attempt."""
        with self._changed:
            self.ended = None
            self._said.clear()


class Members:
    """All of them. `lost` is called with the reason when one is gone after all began, `failed` when an attempt of one
    failed.
    """

    def __init__(
        self, place: Place, lost: Callable[[str], None], failed: Callable[[Member, Mapping[str, Any]], None]
    ) -> None:
        self._place = place
        self._on_lost, self._on_failed = lost, failed
        self._found: dict[int, Member] = {}
        self._refused: dict[str, str] = {}
        self._begun = False
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self.lost: str | None = None

    def all(self) -> list[Member]:
        return [self._found[process] for process in sorted(self._found)]

    def tell(self, message: Mapping[str, Any]) -> None:
        for member in self.all():
            member.tell(message)

    # -- taking in -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        with self._changed:
            if self._socket is not None:
                return
            try:
                self._socket = listen(self._place.port)
            except OSError as error:
                raise HostsError(
                    f"Port {self._place.port}, where followers would come in, cannot be listened at: {error.strerror}. "
                    "End what uses it, or choose another port."
                ) from None
        threading.Thread(target=self._accept, args=(self._socket,), name="comfyui-tpu-hosts", daemon=True).start()

    def gather(self, progress: Progress) -> None:
        """Waits for all, then begins; raises `HostsError` for those that are missing or do not fit."""
        self.listen()
        began = time.monotonic()
        with self._changed:
            self._refused.clear()  # one that was mended since comes again
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
        self.tell({"begin": terms.environment()})
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

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, address = listening.accept()
            except OSError:
                return
            name = str(address[0]).removeprefix("::ffff:")
            threading.Thread(
                target=self._welcome, args=(Channel(connection), name), name="comfyui-tpu-hosts-hear", daemon=True
            ).start()

    def _welcome(self, channel: Channel, address: str) -> None:
        try:
            hello = channel.receive()["hello"]
            member = Member(int(hello["process"]), address, channel)
            problem = self._problem(member, hello)
        except (Gone, KeyError, TypeError, ValueError) as error:
            log.info("%s is no follower: %s", address, error)
            channel.close()
            return
        with self._changed:
            if self._begun:
                # Its place is taken by an earlier self that is about to be missed: it comes again when all have ended.
                channel.close()
                return
            self._refused.pop(address + str(member.process), None)
            if problem is None:
                if earlier := self._found.get(member.process):
                    earlier.channel.close()
                self._found[member.process] = member
            else:
                log.error("%s", problem)
                self._refused[address + str(member.process)] = problem
            self._changed.notify_all()
        if problem is None:
            log.info("%s is here", member)
            self._hear(member)
        else:
            member.tell({"refused": problem})

    def _problem(self, member: Member, hello: Mapping[str, Any]) -> str | None:
        """Why a follower cannot be taken in."""
        mine, place = terms.terms(), self._place
        if hello["count"] != place.count or not 0 < member.process < place.count:
            return (
                f"{member.title} says that it is process {member.process} of {hello['count']}, but the leader was "
                f"started for {place.count} hosts. Start it with --process 1 to {place.count - 1} --of {place.count}."
            )
        if other := terms.difference(mine, hello["terms"]):
            return (
                f"{member.title} cannot take part, its versions are others ({other}). Update this pack and its "
                "packages to the same versions on all hosts: python3 setup.py update."
            )
        return None

    # -- hearing, and losing -------------------------------------------------------------------------------------------

    def _hear(self, member: Member) -> None:
        try:
            while True:
                message = member.channel.receive()
                if "text" in message:
                    member.text = message["text"]
                elif "log" in message:
                    member.log.append(message["log"])
                elif "rows" in message:
                    member.rows = message["rows"]
                else:
                    member.hear(message)
                    if message.get("ended"):
                        self._on_failed(member, message)
        except (Gone, KeyError, ValueError) as error:
            self._gone(member, str(error))

    def _gone(self, member: Member, why: str) -> None:
        member.channel.close()
        with self._changed:
            if self._found.get(member.process) is not member:
                return
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
        self.close(why)
        return True

    def wait_lost(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.lost, timeout_s)

    def close(self, why: str) -> None:
        self.tell({"bye": why})
