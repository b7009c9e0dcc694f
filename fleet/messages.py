"""What the driver of a batch and those who run its jobs say to each other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..nodes.declare import Folders
from ..nodes.graph import Workflow


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What a model, or a LoRA (`kind`), holds (see `checkpoints.content`): workers compare theirs."""

    kind: str
    name: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One job for a worker. `files` are the pictures of its LoadImage nodes, by the names that the workflow has."""

    job: str
    line: int
    workflow: Workflow
    folders: Folders
    files: Mapping[str, bytes] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    out: str
    token: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a worker does now: `node` is a title, `done` of `total` counts `unit`."""

    node: str = ""
    text: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""

    def __str__(self) -> str:
        counted = f"{self.unit} {self.done}/{self.total}" if self.total else self.text
        return ", ".join(part for part in (self.node, counted) if part)


@dataclass(frozen=True, kw_only=True)
class JobDone:
    """A job's results and record are in the store."""

    job: str
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class JobFailed:
    """A job ended with an error. `fault`: of the job where the files that it names are as they were and its workflow is
    still wrong, of the place where files, mounts or memory of the machine are; else whoever fails with others too.
    """

    job: str
    error: str
    fault: str = ""
    cancelled: bool = False


JOBS_FAULT, PLACES_FAULT = "job", "place"


class Lost(RuntimeError):
    """A worker went away, in words. It comes back, unless that is `for_good`."""

    def __init__(self, reason: str, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


class Worker(Protocol):
    """Runs one job at a time, for one thread of the driver. It is started again whenever it ended."""

    name: str

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until it answers, or nobody waits any more. Raises `Lost`, or RuntimeError where it never starts."""
        ...

    def run(
        self, request: Request, report: Callable[[Status], None], is_cancelled: Callable[[], bool]
    ) -> JobDone | JobFailed:
        """A job's end; cancelled within a step where it `is_cancelled`. Raises `Lost`."""
        ...

    def restart(self) -> None:
        """Ends its process, where it only fails; `wait` has a new one."""
        ...


class Workers(Protocol):
    """Those who run jobs."""

    def found(self) -> Sequence[Worker]:
        """Those that are new since the last call."""
        ...

    def close(self) -> None:
        """Ends all workers at once."""
        ...
