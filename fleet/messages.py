"""What the driver of a batch and those who run its jobs say to each other."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..nodes.declare import Folders
from ..nodes.graphs.graph import Workflow


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
class JobFailed:
    """In place of a job's record: it ended with an error. `fault`: of the job where the files that it names are as they
    were and its workflow is still wrong, of the place where files, mounts or memory of the machine are; else whoever
    fails with others too.
    """

    error: str
    fault: str = ""
    cancelled: bool = False


JOBS_FAULT, PLACES_FAULT = "job", "place"


class Lost(RuntimeError):
    """A worker went away, in words, or did not start. It comes back."""


class Worker:
    """Has an actor (`worker.Actor`), which runs one job at a time and is started again whenever it ended. No method
    waits: what an actor returns, or why it does not, comes later.
    """

    name: str

    def call(self, method: str, *arguments: Any) -> Future:
        """What a method of the actor returns, which is started where there is none."""
        raise NotImplementedError

    def lost(self, error: Exception, is_running: bool) -> Lost | None:
        """What an error of a call says of the actor, which had a job if it `is_running`; None where it only does not
        answer yet. Raises what says nothing of it.
        """
        raise NotImplementedError

    def restart(self) -> None:
        """Ends its process, where it only fails; the next call starts a new one."""
        raise NotImplementedError


class Workers:
    """Those who run jobs."""

    def found(self) -> Sequence[Worker]:
        """All but those whose machines are gone for good."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all workers at once."""
        raise NotImplementedError
