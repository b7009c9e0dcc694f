"""What the driver of a batch and those who run its jobs say to each other."""

from collections.abc import Mapping, Sequence
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
class Ready:
    """A worker is there and has nothing to do: a new one, or one that was started again and holds nothing."""

    worker: str


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A worker went away, with the job it had. Another `Ready` follows when it is back, unless it is `for_good`."""

    worker: str
    reason: str
    for_good: bool = False


@dataclass(frozen=True, kw_only=True)
class Done:
    """A job's results and record are in the store."""

    worker: str
    job: str
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A job ended with an error; `of_job`: it would end so anywhere. `cancelled`: because it was asked to."""

    worker: str
    job: str
    error: str
    of_job: bool = False
    cancelled: bool = False


Event = Ready | Lost | Done | Failed


class Workers(Protocol):
    """Those who run jobs, one each at a time. They start again by themselves, for ever."""

    def events(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits for something at most that long."""
        ...

    def submit(self, worker: str, request: Request) -> None:
        """Gives a worker that is ready a job; `Done`, `Failed` or `Lost` follows."""
        ...

    def statuses(self) -> Mapping[str, Status]:
        """What each worker last said that it does."""
        ...

    def restart(self, worker: str) -> None:
        """Ends a worker that only fails; `Lost` and `Ready` follow."""
        ...

    def cancel(self) -> None:
        """Asks what runs to stop within a step; `Failed` or `Lost` follows."""
        ...

    def close(self) -> None:
        """Ends all workers at once."""
        ...
