"""Which job a worker gets next: one of the model and size that it holds, as long as there is one.

A worker that must change goes to where most jobs wait for each worker that is there already. Choosing looks at a
bounded number of groups, so that ten thousand jobs, of one size or of as many sizes, take time in proportion.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from .ledger import Tries

# How many models, sizes of a model, and jobs of a size are looked at.
MOST = 64


class Group(NamedTuple):
    """Jobs that run the same weights, and of these the same compiled programs."""

    model: str
    size: str


@dataclass(slots=True, kw_only=True)
class Job:
    """`text` is its line of the file, number `line`. `avoid` is the worker that it last failed on."""

    id: str
    line: int
    text: str
    group: Group
    tries: Tries = field(default_factory=Tries)
    avoid: str = ""


class Queue:
    """Waiting jobs by model and size, and what each worker holds."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._waiting: dict[str, dict[str, deque[Job]]] = {}
        self._length = 0
        self._counts: Counter[str] = Counter()  # waiting jobs by model
        self._held: dict[str, Group] = {}
        self._holders: Counter[Group | str] = Counter()  # workers by group and by model
        for job in jobs:
            self.add(job)

    def __len__(self) -> int:
        return self._length

    def add(self, job: Job) -> None:
        sizes = self._waiting.setdefault(job.group.model, {})
        sizes.setdefault(job.group.size, deque()).append(job)
        self._counts[job.group.model] += 1
        self._length += 1

    def take(self, worker: str) -> Job | None:
        """The next job for a worker, which then holds its model; None where none waits."""
        held = self._held.get(worker)
        for group in self._candidates(held):
            jobs = self._waiting[group.model][group.size]
            if (job := _not_avoiding(jobs, worker)) is not None:
                return self._given(job, worker)
        # What is left only failed here before: better here than nowhere.
        for group in self._candidates(held):
            return self._given(self._waiting[group.model][group.size].popleft(), worker)
        return None

    def forget(self, worker: str) -> None:
        """A worker holds nothing any more."""
        held = self._held.pop(worker, None)
        if held is not None:
            self._holders[held] -= 1
            self._holders[held.model] -= 1

    def _candidates(self, held: Group | None) -> Iterable[Group]:
        """Groups to look at, best first: at most `MOST` of each kind."""
        if held is not None and held.model in self._waiting:
            sizes = self._waiting[held.model]
            if held.size in sizes:
                yield held
            yield from (group for group in self._sizes(held.model, held) if group != held)
        models = islice(self._waiting, MOST)
        for model in sorted(models, key=lambda model: self._worth(model, self._counts[model], held)):
            if held is None or model != held.model:
                yield from self._sizes(model, held)

    def _sizes(self, model: str, held: Group | None) -> list[Group]:
        sizes = self._waiting[model]
        groups = [Group(model, size) for size in islice(sizes, MOST)]
        return sorted(groups, key=lambda group: self._worth(group, len(sizes[group.size]), held))

    def _worth(self, key: Group | str, waiting: int, held: Group | None) -> float:
        """Smallest first: the jobs that wait for each worker that would then be there."""
        is_own = held is not None and key in (held, held.model)
        return -waiting / (1 + self._holders[key] - is_own)

    def _given(self, job: Job, worker: str) -> Job:
        model, size = job.group
        sizes = self._waiting[model]
        if not sizes[size]:
            del sizes[size]
        if not sizes:
            del self._waiting[model]
        self._length -= 1
        self._counts[model] -= 1
        if not self._counts[model]:
            del self._counts[model]
        if self._held.get(worker) != job.group:
            self.forget(worker)
            self._held[worker] = job.group
            self._holders[job.group] += 1
            self._holders[model] += 1
        return job


def _not_avoiding(jobs: deque[Job], worker: str) -> Job | None:
    """Takes the first of a group's next jobs that did not last fail on this worker."""
    for index, job in enumerate(islice(jobs, MOST)):
        if job.avoid != worker:
            del jobs[index]
            return job
    return None
