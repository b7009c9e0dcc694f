"""The time of a collective on the links of a slice.

It is a start time, and bytes on the busiest link over its one-way bandwidth.

The bytes are a lower bound for what shortest paths can do: no waiting, both directions of every link used. All groups
of a collective run at once and share links. Between the two devices of one chip (TPU7x) a collective costs its start.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...sharding.mesh import Device
from ..messages import compose

Coords = tuple[int, ...]
Cable = tuple[Coords, Coords]
Groups = tuple[tuple[int, ...], ...]

# Seconds from the start of a collective to its first byte, with the participants' agreement to start. Not published for
# these chips: a hop is about 1 us (the "How to Scale Your Model" book), two or three hops and the agreement make 3 to
# 10 us. Of Z-Image's 600 transfers a step on eight v6e they make 2 to 6 ms; others measured eight chips on one image
# 1.85 times as slow as an image on each chip (MaxDiffusion #446). The self-test measures it.
START_S = 5e-6

RING = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "collective-broadcast": 1}
KINDS = (*RING, "all-to-all", "ragged-all-to-all", "collective-permute")


def link_bytes(kind: str, size_bytes: float, groups: Groups, devices: Sequence[Device]) -> Mapping[Cable, float]:
    """Return the bytes that each link carries in one direction.

    kind: of the collective. size_bytes: of the gathered array of an all-gather, of the array before a reduce-scatter or
        all-reduce, and of each device's array for an all-to-all or permute.
    groups: positions in `devices`; the pairs of a permute.
    Raises `NotImplementedError` for another kind.
    """
    places = tuple(tuple(tuple(devices[member].coords) for member in group) for group in groups)
    if kind == "collective-permute":
        traffic = [(source, target, 1.0) for source, target in places]
    elif kind in RING:
        traffic = [flow for group in places for flow in _ring_flows(group, RING[kind])]
    elif kind in KINDS:
        traffic = [
            (source, target, 1 / len(group)) for group in places for source, target in itertools.permutations(group, 2)
        ]
    else:
        raise NotImplementedError(compose("plan.collective_unknown", kind=repr(kind), kinds=", ".join(KINDS)))
    return {link: size_bytes * load for link, load in _loads(traffic).items()}


def is_exchange(groups: Groups) -> bool:
    """Return whether any of the `groups` (as in `link_bytes`) has two devices, so that there is something to start."""
    return any(len(set(group)) > 1 for group in groups)


def _ring_flows(group: Sequence[Coords], phases: int) -> list[tuple[Coords, Coords, float]]:
    """Return the flows of a ring.

    It passes `(n - 1) / n` of the array over each of its edges, half of it in each direction.
    """
    members = len(group)
    if members < 2:
        return []
    order = _ring_order(tuple(group))
    share = phases * (members - 1) / members / 2
    edges = list(zip(order, (*order[1:], order[0]), strict=True))
    return [(*edge, share) for edge in edges] + [(target, source, share) for source, target in edges]


@functools.cache
def _ring_order(group: tuple[Coords, ...]) -> tuple[Coords, ...]:
    """The ring whose busiest link is least busy, among a few plausible ones."""
    in_place = sorted(group)
    candidates = [group, tuple(in_place), (*in_place[::2], *in_place[1::2][::-1])]
    for axis in range(len(group[0])):
        rows = itertools.groupby(sorted(group, key=lambda place, a=axis: (place[a], place)), key=lambda p, a=axis: p[a])
        snake = [sorted(row, reverse=bool(number % 2)) for number, (_, row) in enumerate(rows)]
        candidates.append(tuple(itertools.chain.from_iterable(snake)))
    return min(candidates, key=_ring_load)


def _ring_load(order: Sequence[Coords]) -> tuple[float, float]:
    edges = list(zip(order, (*order[1:], order[0]), strict=True))
    loads = _loads([(*edge, 1.0) for edge in edges] + [(target, source, 1.0) for source, target in edges])
    return max(loads.values(), default=0.0), sum(loads.values())


def _loads(traffic: Iterable[tuple[Coords, Coords, float]]) -> Mapping[Cable, float]:
    """Load of every directed link; a flow is split evenly over the orders in which it can cross the dimensions."""
    loads: defaultdict[Cable, float] = defaultdict(float)
    for source, target, amount in traffic:
        paths = _paths(source, target)
        for path in paths:
            for link in path:
                loads[link] += amount / len(paths)
    return loads


@functools.cache
def _paths(source: Coords, target: Coords) -> tuple[tuple[Cable, ...], ...]:
    """One shortest path for every order of the dimensions in which the two places differ; none within one chip."""
    differing = [axis for axis in range(len(source)) if source[axis] != target[axis]]
    paths = []
    for order in itertools.permutations(differing):
        place, path = list(source), []
        for axis in order:
            step = int(math.copysign(1, target[axis] - place[axis]))
            while place[axis] != target[axis]:
                before = tuple(place)
                place[axis] += step
                path.append((before, tuple(place)))
        paths.append(tuple(path))
    return tuple(path for path in paths if path)
