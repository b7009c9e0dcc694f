"""Workers of a Ray cluster: an actor per slice of TPU chips, on its machine or on the first of its machines.

The other machines of a slice run followers. Ray places the actors, detects lost ones, and restarts them without limit,
on the same machine or on its replacement. Ray does not hold the queue: its head may be lost with all its state. The
unfinished jobs are recorded in the batch's files.
"""

import logging
import math
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from ..multihost import supervisor
from ..rpc import auth
from .messages import Worker, WorkerLost, Workers
from .worker import WorkerActor

log = logging.getLogger(__name__)

# In seconds: between searches for new machines, before a follower is restarted, and to connect to the cluster.
_SEARCH_S, _RESTART_S, _CONNECT_S = 5.0, 5.0, 10.0
# Ray's labels of the machines of a slice.
_NAME, _TOPOLOGY, _POD_TYPE, _WORKER = (
    f"ray.io/tpu-{name}" for name in ("slice-name", "topology", "pod-type", "worker-id")
)
# Makes the engine detect its other hosts from the TPU's metadata.
_HOSTS = {"COMFYUI_TPU_HOSTS": "auto"}
_FOLLOW = "from comfyui_tpu.cli.main import command; raise SystemExit(command())"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The TPU chips of one or several machines. Machines with a slice of their own are interchangeable."""

    chips: int  # per host
    hosts: int = 1
    name: str = ""  # of a slice with several hosts
    topology: str = ""  # such as "4x4"
    generation: str = ""  # such as "v6e"


class RayWorker(Worker):
    """The actor of a slice, which Ray restarts; if Ray gives it up, another one is created."""

    def __init__(self, ray: "ModuleType", place: Slice, actor: type, name: str) -> None:
        self.name, self.place = name, place
        self._ray, self._actor = ray, actor
        self._handle, self.stop = start_actor(place, actor, name)

    def call(self, method: str, *arguments: object) -> Future:
        return getattr(self._handle, method).remote(*arguments).future()

    def lost(self, error: Exception, is_running: bool) -> WorkerLost | None:
        if not isinstance(error, self._ray.exceptions.RayError):
            raise error
        if is_running:
            return WorkerLost(_sentence(error))
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return None
        # Ray will not start this one again.
        self.stop()
        self._handle, self.stop = start_actor(self.place, self._actor, self.name)
        return WorkerLost(
            f"a worker of the cluster does not start: {_sentence(error)} Is the pack installed on every machine of it, "
            "in the same version?"
        )

    def restart(self) -> None:
        self._ray.kill(self._handle, no_restart=False)


class RayWorkers(Workers):
    """Actors on the cluster at `address`. Raises RuntimeError without Ray, a cluster, or a TPU in it.

    actor: their class, which measurements replace.
    """

    def __init__(self, address: str, actor: type = WorkerActor) -> None:
        try:
            import ray
        except ImportError:
            raise RuntimeError("--ray needs Ray: pip install 'comfyui-tpu[fleet]'.") from None
        self._ray: ModuleType = ray
        self._known: list[RayWorker] = []
        self._actor, self._count = actor, 0
        try:
            where = urlsplit(address if "://" in address else f"//{address}")
            if where.hostname and where.port:  # Ray itself tries for minutes
                socket.create_connection((where.hostname, where.port), _CONNECT_S).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
            self._look()
        except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
            raise RuntimeError(
                f"no Ray cluster answers at {address} ({_sentence(error)}). On a machine of the cluster the address is "
                "auto, elsewhere its head's, HOST:6379 or ray://HOST:10001; there `ray status` shows whether it runs."
            ) from error
        if not self._known:
            self.close()
            raise RuntimeError(
                f"the cluster at {address} has no TPU: no machine in it has the resource TPU. Add some, or leave --ray "
                "out to run on this machine."
            )

    def _look(self) -> None:
        """Create an actor for each slice without one. Actors of lost machines wait for a replacement."""
        self._looked = time.monotonic()
        missing = Counter(find_slices(self._ray.nodes()))
        for known in list(self._known):
            # A slice of several hosts does not return under its name.
            if known.place.hosts > 1 and known.place not in missing:
                known.stop()
                self._known.remove(known)
        missing.subtract(known.place for known in self._known)
        for place in missing.elements():
            self._known.append(RayWorker(self._ray, place, self._actor, f"slice-{self._count}"))
            self._count += 1

    def found(self) -> Sequence[RayWorker]:
        """Return the actors, after a search for new machines if the last one is old."""
        if time.monotonic() > self._looked + _SEARCH_S:
            try:
                self._look()
            except self._ray.exceptions.RayError as error:
                log.warning("the cluster's machines are not known (%s); trying again", _sentence(error))
        return self._known

    def close(self) -> None:
        for known in self._known:
            known.stop()
        self._ray.shutdown()


def _sentence(error: Exception) -> str:
    """Summarize Ray's error about an actor or a cluster in one line, its cause first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "cause" in line.lower() or "died" in line.lower() or "node" in line.lower()]
    return " ".join(dict.fromkeys((causes or lines)[:3]))[:400] or type(error).__name__


# --- slices -----------------------------------------------------------------------------------------------------------


def find_slices(nodes: Iterable[Mapping[str, Any]]) -> list[Slice]:
    """Return the slices among the living machines of a cluster; one of several hosts only if all are alive.

    nodes: of `ray.nodes()`.
    """
    hosts: Counter[Slice] = Counter()
    for node in nodes:
        chips = int(node.get("Resources", {}).get("TPU", 0)) if node.get("Alive") else 0
        labels = node.get("Labels") or {}
        name, topology, pod = (labels.get(label, "") for label in (_NAME, _TOPOLOGY, _POD_TYPE))
        total = math.prod(map(int, topology.split("x"))) if name and topology and pod else 0
        if chips and total > chips:
            generation = pod.partition("-")[0]
            hosts[Slice(chips=chips, hosts=total // chips, name=name, topology=topology, generation=generation)] += 1
        elif chips:
            hosts[Slice(chips=chips)] += 1
    return [place for place in sorted(hosts, key=lambda place: place.hosts) for _ in range(hosts[place] // place.hosts)]


def start_actor(place: Slice, actor: Any, name: str) -> tuple[Any, Callable[[], None]]:
    """Start an actor of class `actor` on a slice's chips, which Ray restarts when it is lost.

    place: the slice. name: argument of the actor. Also returns a function that ends it and its followers, and frees the
    chips.
    """
    import ray

    def begin(kind: Any, *arguments: Any, **options: Any) -> Any:
        options |= {"num_cpus": 0, "resources": {"TPU": place.chips}, "max_concurrency": kind.CONCURRENCY}
        return ray.remote(max_restarts=-1, **options)(kind).remote(*arguments)

    if place.hosts == 1:
        handles, free = [begin(actor, name)], lambda: None
    else:
        handles, free = _over_hosts(place, begin, actor, name)

    def stop() -> None:
        for handle in handles:
            ray.kill(handle, no_restart=True)
        free()

    return handles[0], stop


def _over_hosts(place: Slice, begin: Callable[..., Any], actor: Any, name: str) -> tuple[list[Any], Callable[[], None]]:
    """Start the actor on the slice's worker 0, and a `FollowerActor` on each other machine."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import slice_placement_group

    reserved = slice_placement_group(
        topology=place.topology,
        accelerator_version=place.generation,
        chips_per_vm=place.chips,
        bundle_label_selector=[{_NAME: place.name, _WORKER: str(index)} for index in range(place.hosts)],
    )
    group: Any = reserved.placement_group
    secret = {auth.TOKEN_VARIABLE: secrets.token_urlsafe(24)}  # of this slice's connections only

    def on_host(index: int, environment: Mapping[str, str], *actor: Any) -> Any:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return begin(*actor, scheduling_strategy=where, runtime_env={"env_vars": {**environment, **secret}})

    handles = [on_host(0, _HOSTS, actor, name), *(on_host(index, {}, FollowerActor) for index in range(1, place.hosts))]
    for follower in handles[1:]:
        follower.follow.options(max_task_retries=-1).remote()
    return handles, reserved.shutdown


class FollowerActor:
    """A further host of a slice: runs `comfyui-tpu follow`, and restarts it when it ends, as Ray does with the leader.

    It ends with this actor, which Ray kills when the slice is given up.
    """

    CONCURRENCY = 1

    def follow(self) -> None:
        while True:
            command = [sys.executable, "-c", _FOLLOW, "follow", "--once"]
            subprocess.run(command, check=False, preexec_fn=supervisor.die_with_parent())
            time.sleep(_RESTART_S)
