"""Which job a worker gets next: one of the model and size that it holds, as long as there is one.

A worker that must change goes to where most jobs wait for each worker that is there already. Choosing looks at a
bounded number of groups, so that ten thousand jobs, of one size or of as many sizes, take time in proportion.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

# How many models, sizes of a model, and jobs of a size are looked at.
MOST = 64


class Group(NamedTuple):
    """Jobs that run the same weights, and of these the same compiled programs."""

    model: str
    size: str


@dataclass(slots=True, kw_only=True)
class Job:
    """`text` is its line of the file, number `line`. `avoid` is the worker that it last failed on. What went wrong with
    it so far: its own `failures`, and how often its worker went away.
    """

    id: str
    line: int
    text: str
    group: Group
    avoid: str = ""
    failures: list[str] = field(default_factory=list)
    losses: int = 0


class Queue:
    """Waiting jobs by model and size, and what each worker holds."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._waiting: dict[str, dict[str, deque[Job]]] = {}
        self._counts: Counter[str] = Counter()  # waiting jobs by model
        self._held: dict[str, Group] = {}
        for job in jobs:
            self.add(job)

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, job: Job) -> None:
        self._waiting.setdefault(job.group.model, {}).setdefault(job.group.size, deque()).append(job)
        self._counts[job.group.model] += 1

    def take(self, worker: str) -> Job | None:
        """The next job for a worker, which then holds its model; None where none waits."""
        first = None
        for waiting in self._candidates(worker):
            first = first or waiting[0]
            if job := next((job for job in islice(waiting, MOST) if job.avoid != worker), None):
                return self._given(job, worker)
        # What is left only failed here before: better here than nowhere.
        return first and self._given(first, worker)

    def forget(self, worker: str) -> None:
        """A worker holds nothing any more."""
        self._held.pop(worker, None)

    def _candidates(self, worker: str) -> Iterator[deque[Job]]:
        """Groups to look at, best first: at most `MOST` models and sizes. Of what nobody holds the most jobs wait for
        each worker that would then be there.
        """
        held = self._held.get(worker, Group("", ""))
        others = [group for one, group in self._held.items() if one != worker]
        at_models, at_groups = Counter(group.model for group in others), Counter(others)
        models = sorted(islice(self._waiting, MOST), key=lambda model: -self._counts[model] / (1 + at_models[model]))
        for model in dict.fromkeys((held.model, *models)):
            sizes = self._waiting.get(model, {})
            if held.model == model and held.size in sizes:
                yield sizes[held.size]
            groups = [Group(model, size) for size in islice(sizes, MOST)]
            groups.sort(key=lambda group: -len(sizes[group.size]) / (1 + at_groups[group]))
            yield from (sizes[group.size] for group in groups)

    def _given(self, job: Job, worker: str) -> Job:
        model, size = self._held[worker] = job.group
        sizes = self._waiting[model]
        sizes[size].remove(job)
        if not sizes[size]:
            del sizes[size]
        if not sizes:
            del self._waiting[model]
        self._counts[model] -= 1
        return job
