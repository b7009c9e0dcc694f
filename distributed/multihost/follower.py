"""A follower process of an engine: it executes the leader's requests, and ends when the leader disconnects."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ...tpu_runtime.progress import Progress, SilentProgress, run_in_daemon_thread
from ..rpc import codec
from ..rpc.connection import Connection, ConnectionLost, HandshakeRejected, connect
from ..rpc.messages import (
    AbortAttempt,
    AttemptEnded,
    BarrierReached,
    ChipStats,
    GetChipStats,
    Invoke,
    LogLine,
    Reply,
    Shutdown,
    Start,
    StatusText,
)
from . import distributed, handshake
from .coordinator import RESTART_EXIT_CODE, Arguments, AttemptAborted, AttemptOutcome, ChipRow, HostGroup, Result
from .rank import HostRank

log = logging.getLogger(__name__)

PAUSE_S = 1.0
# The engine's methods that the leader may call between stages. Any other request is a stage.
REQUESTS = ("expect", "free", "free_titled")
# The most tensor bytes in a message, and the messages of a leader.
_MAX_TENSOR_BYTES, _LEADER_MESSAGES = 2**34, (Reply, GetChipStats, Shutdown, Invoke, AbortAttempt)


class Follower(HostGroup):
    """The hosts of an engine, in a follower.

    When the leader disconnects, the process exits with `RESTART_EXIT_CODE`.
    """

    is_leader = False

    def __init__(self, place: HostRank) -> None:
        self._place = place
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._link: Any = None
        self._answering: Future | None = None
        self._rows: Callable[[], list[ChipRow]] = list

    def join(self) -> None:
        """Wait for the leader, then join this process's chips to all others. Raises Refused."""
        self._link = self._connect()
        try:
            first = self._link.receive((Start, Shutdown))
        except ConnectionLost as error:
            self._link.close()
            raise HandshakeRejected(
                f"The leader closed the connection ({error}); it may be starting or shutting down."
            ) from None
        if isinstance(first, Shutdown):
            raise HandshakeRejected(f"The leader does not begin: {first.why}.")
        handshake.apply_environment(first.environment)
        log.info("Joining %d hosts", self._place.count)
        self._hearing = run_in_daemon_thread(self._hear, "comfyui-tpu-follower")
        logging.getLogger(__name__.partition(".")[0]).addHandler(_ToLeader(self._link))
        distributed.initialize(self._place)

    def serve_leader(self, engine: Any, chips: Callable[[Any], list[ChipRow]]) -> None:
        """Execute the leader's requests on `engine` until the leader disconnects, then exit.

        chips: returns the monitor's rows of the engine's own chips.
        """
        self._rows = lambda: chips(engine)
        log.info("Following with %d of %d chips", len(engine.local_devices), len(engine.devices))
        while True:
            message = self._messages.get()
            if not isinstance(message, Invoke):
                continue
            if message.name in REQUESTS:
                getattr(engine, message.name)(**message.arguments)
                continue
            try:
                engine.run(message.name, **message.arguments, progress=SilentProgress())
                log.info("%s: done", message.name)
            except Exception as error:  # of any kind: the leader has received it, and reports it to the user
                log.info("%s: %s: %s", message.name, type(error).__name__, error)

    def _connect(self) -> Connection:
        is_logged = False
        hello = {"process": self._place.process, "count": self._place.count, "terms": handshake.host_versions()}
        while True:
            try:
                return connect(self._place.address, hello)
            except HandshakeRejected:
                raise
            except OSError as error:
                if not is_logged:
                    log.info("Waiting for the leader at %s (%s)", self._place.address, error)
                is_logged = True
                time.sleep(PAUSE_S)

    def _hear(self) -> None:
        """Receive the leader's messages until it disconnects."""
        try:
            while True:
                self._take(
                    self._link.receive(_LEADER_MESSAGES, values=codec.MODEL_RECORDS, most_bytes=_MAX_TENSOR_BYTES)
                )
        except ConnectionLost as error:
            self._end(f"the connection to the leader was lost ({error})")

    def _take(self, message: object) -> None:
        if isinstance(message, Shutdown):
            self._end(message.why)
        elif isinstance(message, GetChipStats):
            if self._answering is None or self._answering.done():  # a chip may hang
                self._answering = run_in_daemon_thread(
                    lambda: self._link.tell(ChipStats(self._rows())), "comfyui-tpu-rows"
                )
        else:
            if isinstance(message, AbortAttempt):
                self._is_stopped.set()
            self._messages.put(message)

    def _end(self, why: str) -> None:
        """Exit at once: the chips may wait for other hosts that have left, and JAX would wait for its coordinator."""
        log.warning("Restarting: %s", why)
        logging.shutdown()
        os._exit(RESTART_EXIT_CODE)

    # -- see `HostGroup`; only the leader announces -------------------------------------------------------------------

    def stage(self, name: str, arguments: Arguments, progress: Progress) -> contextlib.AbstractContextManager[Progress]:
        return contextlib.nullcontext(_Reporting(self._link, self._is_stopped))

    def _verdict(self, own: AttemptOutcome | None, error: BaseException | None) -> tuple[AttemptOutcome | None, str]:
        self._link.tell(AttemptEnded(own, str(error)))
        verdict = self._next("verdict")
        self._is_stopped.clear()
        return verdict, "another host's attempt did not succeed"

    def barrier(self, what: str, state: object = None) -> bool:
        if self._is_stopped.is_set():
            raise AttemptAborted
        self._link.tell(BarrierReached(what, state))
        return self._next("go")

    def broadcast(self, value: Result) -> Result:
        return self._next("decided")

    def _next(self, name: str) -> Any:
        """Return the value of the leader's next answer to `name`. Raises Stopped if the attempt is aborted."""
        while True:
            message = self._messages.get()
            if isinstance(message, Reply) and message.to == name:
                return message.value
            if isinstance(message, AbortAttempt) and name != "verdict":
                raise AttemptAborted


class _Reporting(SilentProgress):
    """Progress that is reported to the leader, and that ends when the leader aborts the attempt."""

    def __init__(self, link: Connection, is_stopped: threading.Event) -> None:
        self._link, self._is_stopped = link, is_stopped

    def text(self, message: str) -> None:
        log.info("%s", message)
        self._link.tell(StatusText(message))

    def check_cancelled(self) -> None:
        if self._is_stopped.is_set():
            raise AttemptAborted


class _ToLeader(logging.Handler):
    """A log handler that sends lines to the leader, which quotes the last ones if this process is lost.

    A logging thread holds a lock that the connections' thread may need, so it does not wait for that thread.
    """

    def __init__(self, link: Connection) -> None:
        super().__init__(logging.INFO)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(
            f"{__package__}".replace("multihost", "rpc")
        ):  # sending logs, which would recurse
            self._link.post(LogLine(record.getMessage()[:1000]))
