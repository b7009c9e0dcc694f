"""Workers of a Ray cluster: an actor for each slice of TPU chips. Ray places them, sees when one is gone, and starts it
again, here or on a machine that takes the lost one's place, for ever.

The queue is not Ray's: its head may be lost with all it knows, and the batch's files say what is left to do.
"""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from . import slices
from .messages import Done, Event, Failed, Lost, Ready, Request, Status
from .slices import Slice
from .worker import Worker

log = logging.getLogger(__name__)

# How often is looked for new machines, and asked what workers do.
_LOOK_S, _STATUS_S, _AGAIN_S = 5.0, 1.0, 1.0
# So many in a row that never were there: it is not the machine that goes away.
_VAIN_STARTS = 4
# Ray itself tries for minutes.
_CONNECT_S = 10.0


class Actor:
    """A worker in a process of the cluster. Runs one job at a time, and answers meanwhile."""

    # `stay`, `run`, `status` and `cancel` at once.
    CONCURRENCY = 5

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)
        self._status = Status()
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()

    def ready(self) -> None:
        """Answers once it is there."""

    def stay(self) -> None:
        """Answers never: who waits for it hears of this actor's end."""
        threading.Event().wait()

    def run(self, request: Request) -> Done | Failed:
        def report(status: Status) -> None:
            self._status = status

        with self._lock:
            return self._worker.run(request, report, self._is_cancelled.is_set)

    def status(self) -> Status:
        return self._status

    def cancel(self) -> None:
        self._is_cancelled.set()


@dataclass(kw_only=True)
class _Known:
    """An actor as the driver knows it. `waiting` is what it was asked: to run a job, to say that it is there, or, where
    it is and has nothing to do, to stay.
    """

    name: str
    place: Slice
    started: slices.Started
    waiting: Any = None
    staying: Any = None
    is_here: bool = False
    is_running: bool = False
    ask_at: float = 0.0
    vain_starts: int = 0
    asked: Any = None
    asked_at: float = 0.0
    status: Status = field(default_factory=Status)


class RayWorkers:
    """Actors on the cluster at `address`; RuntimeError where there is no Ray, no cluster, or no TPU in it.
    `actor` is what they are, for measurements.
    """

    def __init__(self, address: str, actor: type = Actor) -> None:
        try:
            import ray
        except ImportError:
            raise RuntimeError("--ray needs Ray: pip install 'comfyui-tpu[fleet]'.") from None
        self._ray: Any = ray
        self._known: dict[str, _Known] = {}
        self._actor = actor
        self._count = 0
        self._unsaid: list[Event] = []
        try:
            _connect(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
        except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
            raise _no_answer(address, error) from error
        try:
            self._look()
        except self._ray.exceptions.RayError as error:
            raise _no_answer(address, error) from error
        if not self._known:
            self.close()
            raise RuntimeError(
                f"the cluster at {address} has no TPU: no machine in it has the resource TPU. Add some, or leave --ray "
                "out to run on this machine."
            )

    def _look(self) -> None:
        """An actor for each slice that has none yet. Those of machines that are gone wait for others in their place."""
        self._looked = time.monotonic()
        there = slices.found(self._ray.nodes())
        for known in list(self._known.values()):
            if known.place.hosts > 1 and known.place not in there and not known.is_running:
                known.started.stop()  # a slice of several hosts does not come back by its name
                del self._known[known.name]
                self._unsaid.append(Lost(worker=known.name, reason="its slice is not whole any more", for_good=True))
        missing = Counter(there)
        missing.subtract(known.place for known in self._known.values())
        for place, count in missing.items():
            for _ in range(count):
                name = f"slice-{self._count}"
                self._count += 1
                self._known[name] = _Known(name=name, place=place, started=slices.start(place, self._actor, name))
                self._await(self._known[name])

    def _await(self, known: _Known, after_s: float = 0.0) -> None:
        """Lets an actor be asked for a sign of life, again and again until it is there."""
        known.waiting, known.staying, known.is_here, known.is_running = None, None, False, False
        known.status = Status()
        known.ask_at = time.monotonic() + after_s

    def events(self, timeout_s: float) -> list[Event]:
        now = time.monotonic()
        if now > self._looked + _LOOK_S:
            try:
                self._look()
            except self._ray.exceptions.RayError as error:
                log.warning("the cluster does not say which machines it has (%s); it is asked again", _sentence(error))
        for known in self._known.values():
            if known.ask_at and now >= known.ask_at:
                known.ask_at, known.waiting = 0.0, known.started.handle.ready.remote()
        found, self._unsaid = self._unsaid, []
        waiting = {known.waiting: known for known in self._known.values() if known.waiting is not None}
        timeout_s = 0 if found else timeout_s
        if not waiting:
            time.sleep(timeout_s)
            return found
        ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if ready and len(waiting) > 1:
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        answers = [self._answer(waiting[reference]) for reference in ready]
        return [*found, *(event for event in answers if event is not None)]

    def _answer(self, known: _Known) -> Event | None:
        was_here, was_running, staying = known.is_here, known.is_running, known.staying
        try:
            said = self._ray.get(known.waiting)
        except self._ray.exceptions.RayError as error:
            self._await(known, _AGAIN_S)
            if isinstance(error, self._ray.exceptions.RayTaskError):
                known.staying = staying  # it is there, and was asked: another call would take another of its threads
            if was_here:
                return Lost(worker=known.name, reason=_sentence(error))
            if not isinstance(error, self._ray.exceptions.ActorUnavailableError):
                # Ray will not start this one again.
                known.vain_starts += 1
                if known.vain_starts == _VAIN_STARTS:
                    raise RuntimeError(
                        f"a worker of the cluster does not start: {_sentence(error)} Is the pack installed on every "
                        "machine of it, in the same version?"
                    ) from None
                log.warning("%s: another takes its place: %s", known.name, _sentence(error))
                known.started.stop()
                known.started = slices.start(known.place, self._actor, known.name)
            return None
        if known.staying is None:
            known.staying = known.started.handle.stay.remote()
        known.waiting, known.is_here, known.is_running, known.vain_starts = known.staying, True, False, 0
        return said if was_running else Ready(worker=known.name)

    def submit(self, worker: str, request: Request) -> None:
        known = self._known[worker]
        known.waiting, known.is_running = known.started.handle.run.remote(request), True

    def statuses(self) -> Mapping[str, Status]:
        asked = {known.asked: known for known in self._known.values() if known.asked is not None}
        ready = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for reference in ready:
            known = asked[reference]
            known.asked = None
            try:
                known.status = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                log.debug("%s does not say what it does (%s).", known.name, error)
        now = time.monotonic()
        for known in self._known.values():
            if known.is_running and known.asked is None and now > known.asked_at + _STATUS_S:
                known.asked, known.asked_at = known.started.handle.status.remote(), now
        return {known.name: known.status for known in self._known.values()}

    def restart(self, worker: str) -> None:
        self._ray.kill(self._known[worker].started.handle, no_restart=False)

    def cancel(self) -> None:
        for known in self._known.values():
            if known.is_running:
                known.started.handle.cancel.remote()

    def close(self) -> None:
        for known in self._known.values():
            known.started.stop()
        self._ray.shutdown()


def _connect(address: str) -> None:
    """OSError or ValueError where `address` has a host and a port, and nobody is there."""
    where = urlsplit(address if "://" in address else f"//{address}")
    if where.hostname and where.port:
        socket.create_connection((where.hostname, where.port), _CONNECT_S).close()


def _no_answer(address: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"no Ray cluster answers at {address} ({_sentence(error)}). On a machine of the cluster the address is auto, "
        "elsewhere its head's, HOST:6379 or ray://HOST:10001; there `ray status` says whether it runs."
    )


def _sentence(error: Exception) -> str:
    """What Ray says of an actor's end or of a cluster, in one line: the cause stands behind the address."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "cause" in line.lower() or "died" in line.lower() or "node" in line.lower()]
    return " ".join(dict.fromkeys((causes or lines)[:3]))[:400] or type(error).__name__
