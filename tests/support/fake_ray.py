"""What `distributed.fleet.cluster` uses of Ray, without a cluster: machines are there and gone as a test's script says.

Each look at the machines is one turn of the script.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...distributed.fleet.cluster import Slice
from ...distributed.fleet.messages import JobRequest, WorkerStatus
from .fleet import keep

_MOST_TURNS = 100_000


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class ActorUnavailableError(RayError):
    pass


class Reference(Future):
    """What a call will have given."""

    def future(self) -> Future:
        return self

    def fails(self, error: Exception) -> None:
        if not self.done():
            self.set_exception(error)


class Handle:
    """An actor, gone while its machine is. It runs a job when the script says so, by `finish`."""

    def __init__(self, name: str) -> None:
        self.name, self.is_alive = name, True
        self.calls: list[tuple[str, Reference]] = []
        self.requests: list[JobRequest] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *arguments: Any) -> Reference:
        reference = Reference()
        self.calls.append((method, reference))
        self.requests += arguments
        if not self.is_alive:
            reference.fails(ActorUnavailableError("The actor is restarting"))
        elif method == "status":
            reference.set_result(WorkerStatus())
        return reference

    def open(self, method: str) -> list[Reference]:
        """Calls that have no answer yet."""
        return [reference for name, reference in self.calls if name == method and not reference.done()]

    def finish(self) -> None:
        """Does the job that it has."""
        (reference,), request = self.open("run"), self.requests[-1]
        reference.set_result(keep(self.name, request))

    def lose(self) -> None:
        self.is_alive = False
        for _, reference in self.calls:
            reference.fails(ActorUnavailableError("The node died"))


class FakeRay:
    """In place of the module; `machines` is what `ray.nodes()` gives."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, ActorUnavailableError=ActorUnavailableError
    )

    def __init__(self, machines: list[dict[str, Any]]) -> None:
        self.machines = machines
        self.handles: dict[str, Handle] = {}
        self._script: Iterator[None] = iter(())
        self._turns = 0

    def play(self, script: Iterator[None]) -> None:
        self._script = script

    def start(self, place: Slice, actor: type, name: str) -> tuple[Handle, Callable[[], None]]:
        """As `distributed.fleet.cluster.start`."""
        handle = self.handles[name] = Handle(name)
        return handle, handle.lose

    def init(self, **_: Any) -> None: ...
    def shutdown(self) -> None: ...

    def nodes(self) -> list[dict[str, Any]]:
        self._turns += 1
        assert self._turns < _MOST_TURNS, "the script waits for what does not happen"
        next(self._script, None)
        return self.machines

    def kill(self, handle: Handle, no_restart: bool) -> None: ...


def machine(chips: int, name: str = "", topology: str = "", pod: str = "", alive: bool = True) -> dict[str, Any]:
    """One of `ray.nodes()`."""
    labels = {"slice-name": name, "topology": topology, "pod-type": pod}
    labels = {f"ray.io/tpu-{key}": value for key, value in labels.items() if value}
    return {"Alive": alive, "Resources": {"TPU": float(chips)} if chips else {}, "Labels": labels}
