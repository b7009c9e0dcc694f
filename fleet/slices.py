"""Which slices a Ray cluster has, and how the actor of one is started: on its machine, or on the first of its machines
while followers run on the others.
"""

import secrets
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..tpu_runtime.pipeline import ending_with_us, trust

# Labels that Ray gives the machines of a slice.
_NAME, _TOPOLOGY, _POD_TYPE, _WORKER = (
    f"ray.io/tpu-{name}" for name in ("slice-name", "topology", "pod-type", "worker-id")
)
# By it the engine knows that it has other hosts; which ones, the TPU's machines say.
_HOSTS = {"COMFYUI_TPU_HOSTS": "auto"}
_FOLLOW = "from comfyui_tpu.cli.main import command; raise SystemExit(command())"
_AGAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Slice:
    """`hosts` machines with `chips` each. One host is as good as another; several have the `name` of their slice."""

    chips: int
    hosts: int = 1
    name: str = ""
    topology: str = ""
    generation: str = ""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The actor of a slice; `stop` ends it and its followers, and frees the chips."""

    handle: Any
    stop: Callable[[], None]


def found(nodes: Iterable[Mapping[str, Any]]) -> list[Slice]:
    """The slices among the living machines of a cluster (`ray.nodes()`); one of several hosts once all are there."""
    alone: list[Slice] = []
    parts: dict[Slice, int] = defaultdict(int)
    for node in nodes:
        chips = int(node.get("Resources", {}).get("TPU", 0)) if node.get("Alive") else 0
        place = _slice(node.get("Labels") or {}, chips)
        if place.hosts > 1:
            parts[place] += 1
        elif chips:
            alone.append(place)
    return [*alone, *(place for place, machines in parts.items() if machines >= place.hosts)]


def _slice(labels: Mapping[str, str], chips: int) -> Slice:
    """The slice that a machine with these labels belongs to."""
    name, topology, pod = (labels.get(label, "") for label in (_NAME, _TOPOLOGY, _POD_TYPE))
    if chips and name and topology and pod:
        total = 1
        for side in topology.split("x"):
            total *= int(side)
        if total > chips:
            generation = pod.partition("-")[0]
            return Slice(chips=chips, hosts=total // chips, name=name, topology=topology, generation=generation)
    return Slice(chips=chips)


def start(place: Slice, actor: Any, name: str) -> Started:
    """An actor of class `actor` that has a slice's chips, and that Ray starts again when it is gone."""
    import ray

    options = _options(place, actor)
    if place.hosts > 1:
        return _start_over_hosts(place, actor, name)
    handle = ray.remote(**options)(actor).remote(name)
    return Started(handle=handle, stop=lambda: _kill([handle]))


def _options(place: Slice, actor: Any) -> dict[str, Any]:
    return {"num_cpus": 0, "resources": {"TPU": place.chips}, "max_restarts": -1, "max_concurrency": actor.CONCURRENCY}


def _start_over_hosts(place: Slice, actor: Any, name: str) -> Started:
    """The actor on the machine that the slice calls worker 0, and a `FollowerActor` on each other one."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import slice_placement_group

    reserved = slice_placement_group(
        topology=place.topology,
        accelerator_version=place.generation,
        chips_per_vm=place.chips,
        bundle_label_selector=[{_NAME: place.name, _WORKER: str(index)} for index in range(place.hosts)],
    )

    group: Any = reserved.placement_group

    def begin(kind: Any, index: int, *arguments: Any, **options: Any) -> Any:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return ray.remote(**_options(place, kind), scheduling_strategy=where, **options)(kind).remote(*arguments)

    secret = {trust.VARIABLE: secrets.token_urlsafe(24)}  # of this slice's own link
    handle = begin(actor, 0, name, runtime_env={"env_vars": {**_HOSTS, **secret}})
    followers = [begin(FollowerActor, index, runtime_env={"env_vars": secret}) for index in range(1, place.hosts)]
    for follower in followers:
        follower.follow.options(max_task_retries=-1).remote()

    def stop() -> None:
        _kill([handle, *followers])
        reserved.shutdown()

    return Started(handle=handle, stop=stop)


def _kill(handles: Sequence[Any]) -> None:
    import ray

    for handle in handles:
        ray.kill(handle, no_restart=True)


class FollowerActor:
    """A further host of a slice: `comfyui-tpu follow`, started again whenever it ends, as the leader is by Ray. It ends
    with this actor, which Ray kills when the slice is given up.
    """

    CONCURRENCY = 1

    def follow(self) -> None:
        while True:
            command = [sys.executable, "-c", _FOLLOW, "follow", "--once"]
            subprocess.run(command, check=False, preexec_fn=ending_with_us())
            time.sleep(_AGAIN_S)
