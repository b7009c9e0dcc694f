"""A further process of an engine: it does what the leader says, when the leader says it, and ends with it."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ..line import wire
from ..line.link import Gone, MachineLink, Refused, connect
from ..line.records import Answer, Ask, AskRows, At, Begin, Bye, ChipRows, Ended, Log, Stop, Text
from ..progress import Progress, Silent, in_daemon
from . import distributed, terms
from .place import Place
from .together import RESTART, Ending, Result, Stopped, Together

log = logging.getLogger(__name__)

PAUSE_S = 1.0
# What the leader asks for between stages, methods of the engine. Whatever else it asks for is a stage.
REQUESTS = ("expect", "free", "free_titled")
# More than any argument of a stage has, or what a leader decides.
_MOST_BYTES, _SAID = 2**34, (Answer, AskRows, Bye, Ask, Stop)


class Follower(Together):
    """As soon as the leader is gone the process ends, with `RESTART`."""

    is_leader = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._link: Any = None
        self._answering: Future | None = None
        self._rows: Callable[[], list[dict[str, Any]]] = list

    def join(self) -> None:
        """Waits for the leader, then joins this process's chips to all others; raises `Refused`."""
        self._link = self._connect()
        try:
            first = self._link.receive((Begin, Bye))
        except Gone as error:
            self._link.close()
            raise Refused(f"The leader closed the connection ({error}); it may be starting or shutting down.") from None
        if isinstance(first, Bye):
            raise Refused(f"The leader does not begin: {first.why}.")
        terms.take_over(first.environment)
        log.info("Joining %d hosts", self._place.count)
        self._hearing = in_daemon(self._hear, "comfyui-tpu-follower")
        logging.getLogger(__name__.partition(".")[0]).addHandler(_ToLeader(self._link))
        distributed.start(self._place)

    def obey(self, engine: Any, chips: Callable[[Any], list[dict[str, Any]]]) -> None:
        """Does with the engine what the leader says, until the process ends with that one; `chips` says what the
        monitor shows of an engine's own.
        """
        self._rows = lambda: chips(engine)
        log.info("Following with %d of %d chips", len(engine.own), len(engine.devices))
        while True:
            message = self._said.get()
            if not isinstance(message, Ask):
                continue
            if message.name in REQUESTS:
                getattr(engine, message.name)(**message.arguments)
                continue
            try:
                engine.run(message.name, **message.arguments, progress=Silent())
                log.info("%s: done", message.name)
            except Exception as error:  # whatever it is, the leader has it by now, and says it to the user
                log.info("%s: %s: %s", message.name, type(error).__name__, error)

    def _connect(self) -> MachineLink:
        said = False
        hello = {"process": self._place.process, "count": self._place.count, "terms": terms.terms()}
        while True:
            try:
                return connect(self._place.address, hello)
            except Refused:
                raise
            except OSError as error:
                if not said:
                    log.info("Waiting for the leader at %s (%s)", self._place.address, error)
                said = True
                time.sleep(PAUSE_S)

    def _hear(self) -> None:
        """Takes what the leader says, until it is gone."""
        try:
            while True:
                self._take(self._link.receive(_SAID, values=wire.MODELS, most_bytes=_MOST_BYTES))
        except Gone as error:
            self._end(f"the leader is gone ({error})")

    def _take(self, message: Any) -> None:
        if isinstance(message, Bye):
            self._end(message.why)
        elif isinstance(message, AskRows):
            if self._answering is None or self._answering.done():  # a chip may hang
                self._answering = in_daemon(lambda: self._link.tell(ChipRows(self._rows())), "comfyui-tpu-rows")
        else:
            if isinstance(message, Stop):
                self._is_stopped.set()
            self._said.put(message)

    def _end(self, why: str) -> None:
        """At once: the chips may wait for others that do not come back, and JAX would wait for its coordinator."""
        log.warning("Starting again: %s", why)
        logging.shutdown()
        os._exit(RESTART)

    # -- see `Together`; announcing is the leader's ------------------------------------------------------------------

    def stage(
        self, name: str, arguments: Mapping[str, Any], progress: Progress
    ) -> contextlib.AbstractContextManager[Progress]:
        return contextlib.nullcontext(_Reporting(self._link, self._is_stopped))

    def _verdict(self, own: Ending | None, error: BaseException | None) -> tuple[Ending | None, str]:
        self._link.tell(Ended(own, str(error)))
        verdict = self._next("verdict")
        self._is_stopped.clear()
        return verdict, "another host's attempt did not succeed"

    def agree(self, what: str, state: Any = None) -> bool:
        if self._is_stopped.is_set():
            raise Stopped
        self._link.tell(At(what, state))
        return self._next("go")

    def decide(self, value: Result) -> Result:
        return self._next("decided")

    def _next(self, name: str) -> Any:
        """The leader's answer `name`. While it is awaited in an attempt, that may be stopped."""
        while True:
            message = self._said.get()
            if isinstance(message, Answer) and message.to == name:
                return message.value
            if isinstance(message, Stop) and name != "verdict":
                raise Stopped


class _Reporting(Silent):
    """Tells the leader what a stage does here, and ends it when the leader says so."""

    def __init__(self, link: MachineLink, is_stopped: threading.Event) -> None:
        self._link, self._is_stopped = link, is_stopped

    def text(self, message: str) -> None:
        log.info("%s", message)
        self._link.tell(Text(message))

    def check_cancelled(self) -> None:
        if self._is_stopped.is_set():
            raise Stopped


class _ToLeader(logging.Handler):
    """The leader keeps the last lines, to say them when this process is gone. Who logs holds a lock that the line's own
    thread may want, so it does not wait for that thread.
    """

    def __init__(self, link: MachineLink) -> None:
        super().__init__(logging.INFO)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(f"{__package__}".replace("hosts", "line")):  # the line would speak of itself
            self._link.post(Log(record.getMessage()[:1000]))
