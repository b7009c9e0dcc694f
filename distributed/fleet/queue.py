"""The choice of a worker's next job: one with the model and size that it holds, as long as there is one.

A worker that must change goes to the group with the most waiting jobs per worker. Each choice considers a bounded
number of groups, so the time is linear in the number of jobs, whether they have one size or thousands.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

# How many models, sizes of a model, and jobs of a size are considered.
MAX_CANDIDATES = 64


class JobKey(NamedTuple):
    """Jobs with the same weights and, within a model, the same compiled programs."""

    model: str
    size: str


@dataclass(slots=True, kw_only=True)
class Job:
    """A job of a batch."""

    id: str
    line: int  # of the batch's file
    text: str  # of that line
    group: JobKey
    avoid: str = ""  # the worker that it last failed on
    failures: list[str] = field(default_factory=list)  # errors so far
    losses: int = 0  # how often its worker was lost


class Queue:
    """Waiting jobs by model and size, and the group that each worker holds."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._waiting: dict[str, dict[str, deque[Job]]] = {}
        self._counts: Counter[str] = Counter()  # waiting jobs by model
        self._held: dict[str, JobKey] = {}
        for job in jobs:
            self.add(job)

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, job: Job) -> None:
        self._waiting.setdefault(job.group.model, {}).setdefault(job.group.size, deque()).append(job)
        self._counts[job.group.model] += 1

    def take(self, worker: str) -> Job | None:
        """Return the next job for a worker, which then holds its group; None if no job waits."""
        first = None
        for waiting in self._candidates(worker):
            first = first or waiting[0]
            if job := next((job for job in islice(waiting, MAX_CANDIDATES) if job.avoid != worker), None):
                return self._assign(job, worker)
        # Only jobs that failed on this worker are left.
        return first and self._assign(first, worker)

    def forget(self, worker: str) -> None:
        """Note that a worker holds nothing any more."""
        self._held.pop(worker, None)

    def _candidates(self, worker: str) -> Iterator[deque[Job]]:
        """Yield groups in order of preference, at most `MAX_CANDIDATES` models and sizes.

        First the worker's own group, then those with the most waiting jobs per worker, counting this one.
        """
        current = self._held.get(worker, JobKey("", ""))
        others = [group for name, group in self._held.items() if name != worker]
        at_models, at_groups = Counter(group.model for group in others), Counter(others)
        models = sorted(
            islice(self._waiting, MAX_CANDIDATES), key=lambda model: -self._counts[model] / (1 + at_models[model])
        )
        for model in dict.fromkeys((current.model, *models)):
            sizes = self._waiting.get(model, {})
            if current.model == model and current.size in sizes:
                yield sizes[current.size]
            groups = [JobKey(model, size) for size in islice(sizes, MAX_CANDIDATES)]
            groups.sort(key=lambda group: -len(sizes[group.size]) / (1 + at_groups[group]))
            yield from (sizes[group.size] for group in groups)

    def _assign(self, job: Job, worker: str) -> Job:
        model, size = self._held[worker] = job.group
        sizes = self._waiting[model]
        sizes[size].remove(job)
        if not sizes[size]:
            del sizes[size]
        if not sizes:
            del self._waiting[model]
        self._counts[model] -= 1
        return job
