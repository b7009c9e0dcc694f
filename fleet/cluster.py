"""Workers of a Ray cluster: an actor for each slice of TPU chips. Ray places them, sees when one is gone, and starts it
again, here or on a machine that takes the lost one's place, for ever.

The queue is not Ray's: its head may be lost with all it knows, and the batch's files say what is left to do.
"""

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any
from urllib.parse import urlsplit

from . import slices
from .messages import Lost, Worker, Workers
from .slices import Slice
from .worker import Actor

log = logging.getLogger(__name__)

# How often is looked for new machines, and asked what workers do.
_LOOK_S, _STATUS_S = 5.0, 1.0
# Ray itself tries for minutes.
_CONNECT_S = 10.0


class RayWorker(Worker):
    """The actor of a slice, which Ray starts again; another in its place where Ray does not."""

    def __init__(self, ray: Any, place: Slice, actor: type, name: str) -> None:
        self.name, self.place, self.is_there = name, place, True
        self._ray, self._actor = ray, actor
        self.gone = (ray.exceptions.RayError,)
        self.started = slices.start(place, actor, name)

    def wait(self, is_over: Callable[[], bool]) -> None:
        asked = self._call("ready")
        while not is_over():
            if not self.is_there:
                self.started.stop()
                raise Lost("its slice is not complete any more", for_good=True)
            if not wait_for([asked], _STATUS_S).done:
                continue
            try:
                return asked.result()
            except self._ray.exceptions.ActorUnavailableError:
                time.sleep(_STATUS_S)
                asked = self._call("ready")
            except self.gone as error:  # Ray will not start this one again
                self.started.stop()
                self.started = slices.start(self.place, self._actor, self.name)
                raise Lost(
                    f"a worker of the cluster does not start: {_sentence(error)} Is the pack installed on every "
                    "machine of it, in the same version?",
                    started=False,
                ) from None

    def _call(self, method: str, *arguments: Any) -> Future:
        return getattr(self.started.handle, method).remote(*arguments).future()

    def _why(self, error: Exception) -> Exception:
        return Lost(_sentence(error))

    def restart(self) -> None:
        self._ray.kill(self.started.handle, no_restart=False)


class RayWorkers(Workers):
    """Actors on the cluster at `address`; RuntimeError where there is no Ray, no cluster, or no TPU in it.
    `actor` is what they are, for measurements.
    """

    def __init__(self, address: str, actor: type = Actor) -> None:
        try:
            import ray
        except ImportError:
            raise RuntimeError("--ray needs Ray: pip install 'comfyui-tpu[fleet]'.") from None
        self._ray: Any = ray
        self._known: list[RayWorker] = []
        self._new: list[RayWorker] = []
        self._actor, self._count = actor, 0
        try:
            _connect(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
            self._look()
        except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
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
        for known in self._known:
            # A slice of several hosts does not come back by its name.
            known.is_there = known.place.hosts == 1 or known.place in there
        self._known = [known for known in self._known if known.is_there]
        missing = Counter(there)
        missing.subtract(known.place for known in self._known)
        for place in missing.elements():
            self._new.append(RayWorker(self._ray, place, self._actor, f"slice-{self._count}"))
            self._known.append(self._new[-1])
            self._count += 1

    def found(self) -> Sequence[RayWorker]:
        if time.monotonic() > self._looked + _LOOK_S:
            try:
                self._look()
            except self._ray.exceptions.RayError as error:
                log.warning("the cluster does not say which machines it has (%s); it is asked again", _sentence(error))
        new, self._new = self._new, []
        return new

    def close(self) -> None:
        for known in self._known:
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
