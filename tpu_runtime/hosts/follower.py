"""A further process of an engine: it does what the leader says, when the leader says it, and ends with it."""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..progress import Preview, Progress
from . import distributed, terms
from .channel import Channel, Gone
from .place import Place
from .together import RESTART, Elsewhere, Ending, HostsError, Result, Stopped

log = logging.getLogger(__name__)

CONNECT_S, PAUSE_S = 5.0, 1.0


class Refused(HostsError):
    """The leader does not take this process in."""


class Follower:
    """See `Together`. As soon as the leader is gone the process ends, with `RESTART`."""

    is_leader = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._channel: Channel | None = None
        self._answering: threading.Thread | None = None
        self.own_rows: Callable[[], list[dict[str, Any]]] = list

    def join(self) -> None:
        """Waits for the leader, then joins this process's chips to all others; raises `Refused`."""
        self._channel = channel = self._connect()
        channel.send({"hello": {"process": self._place.process, "count": self._place.count, "terms": terms.terms()}})
        try:
            answer = channel.receive()
        except Gone as error:
            raise Refused(f"The leader hung up ({error}); perhaps it only just ends, or begins.") from None
        if "begin" not in answer:
            raise Refused(answer.get("refused") or f"The leader does not begin: {answer.get('bye')}.")
        terms.take_over(answer["begin"])
        log.info("Joining %d hosts", self._place.count)
        threading.Thread(target=self._hear, args=(channel,), name="comfyui-tpu-hosts-hear", daemon=True).start()
        logging.getLogger(__name__.partition(".")[0]).addHandler(_ToLeader(channel))
        distributed.start(self._place)

    def requests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the leader asks for, a method of the engine and its arguments, for ever."""
        while True:
            message = self._said.get()
            if "request" in message:
                yield message["request"], message["arguments"]

    def _connect(self) -> Channel:
        said = False
        while True:
            try:
                connection = socket.create_connection((self._place.host, self._place.port), CONNECT_S)
                return Channel(connection)
            except OSError as error:
                if not said:
                    log.info("Waiting for the leader at %s, port %d (%s)", self._place.host, self._place.port, error)
                said = True
                time.sleep(PAUSE_S)

    def _hear(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                if "bye" in message:
                    self._end(message["bye"])
                elif "rows" in message:
                    if self._answering is None or not self._answering.is_alive():  # a chip may hang
                        self._answering = threading.Thread(target=self._send_rows, daemon=True)
                        self._answering.start()
                else:
                    if "stop" in message:
                        self._is_stopped.set()
                    self._said.put(message)
        except (Gone, ValueError, KeyError) as error:
            self._end(f"the leader is gone ({error})")

    def _end(self, why: str) -> None:
        """At once: the chips may wait for others that do not come back, and JAX would wait for its coordinator."""
        log.warning("Starting again: %s", why)
        logging.shutdown()
        os._exit(RESTART)

    def _send_rows(self) -> None:
        self._send({"rows": self.own_rows()})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._channel is not None
        with contextlib.suppress(Gone):  # `_hear` ends the process
            self._channel.send(message)

    # -- see `Together` ------------------------------------------------------------------------------------------------

    def stage(
        self, name: str, arguments: Mapping[str, Any], progress: Progress
    ) -> contextlib.AbstractContextManager[Progress]:
        return contextlib.nullcontext(_Reporting(self._send, self._is_stopped))

    def tell(self, request: str, arguments: Mapping[str, Any]) -> None:
        pass

    def attempt(self, work: Callable[[], Result], ending: Callable[[BaseException], Ending]) -> Result:
        error: BaseException | None = None
        result, own = None, None
        try:
            try:
                result = work()
            except Stopped as stopped:
                error = stopped
            except BaseException as raised:
                error, own = raised, ending(raised)
            self._send({"ended": own, "error": str(error)})
            verdict: Ending | None = self._next("verdict")
            self._is_stopped.clear()
            if error is not None and own is not None and own == verdict:
                raise error
            if verdict is not None:
                raise Elsewhere(verdict, "another host's attempt did not succeed")
            return result  # pyright: ignore[reportReturnType] - `work` gave it, or nobody needs it
        finally:
            error = None  # its traceback holds this frame, and arrays: the circle would keep these on the chips

    def agree(self, what: str, state: Any = None) -> bool:
        if self._is_stopped.is_set():
            raise Stopped
        self._send({"at": what, "state": state})
        return self._next("go")

    def decide(self, value: Result) -> Result:
        return self._next("decided")

    def rows(self) -> list[dict[str, Any]]:
        return []

    def _next(self, name: str) -> Any:
        """The leader's answer `name`. While it is awaited in an attempt, that may be stopped."""
        while True:
            message = self._said.get()
            if name in message:
                return message[name]
            if "stop" in message and name != "verdict":
                raise Stopped


class _Reporting:
    """Tells the leader what a stage does here, and ends it when the leader says so."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None], is_stopped: threading.Event) -> None:
        self._send, self._is_stopped = send, is_stopped

    def text(self, message: str) -> None:
        log.info("%s", message)
        self._send({"text": message})

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        pass

    def check_cancelled(self) -> None:
        if self._is_stopped.is_set():
            raise Stopped


class _ToLeader(logging.Handler):
    """The leader keeps the last lines, to say them when this process is gone."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Gone):
            self._channel.send({"log": record.getMessage()})
