"""What the driver of a batch and those who run its jobs say to each other."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from ..nodes.declare import Folders
from ..nodes.graph import Workflow

# How often a worker is asked what it does.
STATUS_S = 0.25


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
    """A worker went away, in words, or never `started`. It comes back, unless that is `for_good`."""

    def __init__(self, reason: str, *, started: bool = True, for_good: bool = False) -> None:
        super().__init__(reason)
        self.started, self.for_good = started, for_good


class Worker:
    """Runs one job at a time, for one thread of the driver, in an actor (`worker.Actor`), which is started again
    whenever it ended. `gone` are the errors of calls to one that is not there.
    """

    name: str
    gone: tuple[type[Exception], ...] = ()

    def _call(self, method: str, *arguments: Any) -> Future:
        """What a method of the actor gives."""
        raise NotImplementedError

    def _why(self, error: Exception) -> Exception:
        """`Lost` with the reason."""
        raise NotImplementedError

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until it answers, or nobody waits any more. Raises `Lost`."""
        raise NotImplementedError

    def restart(self) -> None:
        """Ends its process, where it only fails; `wait` has a new one."""
        raise NotImplementedError

    def run(
        self, request: Request, report: Callable[[Status], None], is_cancelled: Callable[[], bool]
    ) -> JobDone | JobFailed:
        """A job's end; cancelled within a step where it `is_cancelled`. Raises `Lost`."""
        said_so = False
        try:
            running, asked = self._call("run", request), self._call("status")
            while not running.done():
                wait([running], STATUS_S)
                if asked.done():
                    report(asked.result())
                    asked = self._call("status")
                if is_cancelled() and not said_so:
                    self._call("cancel")
                    said_so = True
            return running.result()
        except self.gone as error:
            raise self._why(error) from None


class Workers:
    """Those who run jobs."""

    def found(self) -> Sequence[Worker]:
        """Those that are new since the last call."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all workers at once."""
        raise NotImplementedError
