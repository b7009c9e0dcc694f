"""The messages between the driver of a batch and its workers, and the workers' interface."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ...nodes.declare import Folders
from ...nodes.graphs.graph import Workflow


@dataclass(frozen=True, kw_only=True)
class ContentHash:
    """The content of a model or LoRA, so that workers can compare their files (see `checkpoints.content`)."""

    kind: str  # "model" or "LoRA"
    name: str
    content: str  # a digest


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job for a worker."""

    job: str  # its id
    line: int  # of the batch's file
    workflow: Workflow
    folders: Folders
    files: Mapping[str, bytes] = field(default_factory=dict)  # images, by their names in the workflow
    marks: Sequence[ContentHash] = ()  # of its models and LoRAs
    out: str  # location of the batch
    token: str  # of the batch's store


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """The current work of a worker."""

    node: str = ""  # title
    text: str = ""
    done: int = 0  # of `total`, counted in `unit`
    total: int = 0
    unit: str = ""

    def __str__(self) -> str:
        counted = f"{self.unit} {self.done}/{self.total}" if self.total else self.text
        return ", ".join(text for text in (self.node, counted) if text)


@dataclass(frozen=True, kw_only=True)
class JobFailed:
    """The outcome of a job that ended with an error."""

    error: str
    fault: str = ""  # `JOB_FAULT`, `MACHINE_FAULT`, or "": that of the one that fails with others too
    cancelled: bool = False


# The job is at fault if its files are unchanged and its workflow is still invalid; the machine is for its files, mounts
# and memory.
JOB_FAULT, MACHINE_FAULT = "job", "place"


class WorkerLost(RuntimeError):
    """A worker was lost or did not start; the message says how. It is started again."""


class Worker:
    """A process with an actor (`worker.WorkerActor`) that runs one job at a time and is started again when it ends.

    No method waits: results and errors of an actor arrive through futures.
    """

    name: str

    def call(self, method: str, *arguments: object) -> Future:
        """Call a method of the actor, which is started if necessary. The future has its result."""
        raise NotImplementedError

    def lost(self, error: Exception, is_running: bool) -> WorkerLost | None:
        """Return how the actor was lost, by an error of a call; None if it only does not answer yet.

        is_running: whether it had a job. Raises `error` if it has another cause.
        """
        raise NotImplementedError

    def restart(self) -> None:
        """End the process after repeated failures; the next call starts a new one."""
        raise NotImplementedError


class Workers:
    """The workers of a batch."""

    def found(self) -> Sequence[Worker]:
        """Return all workers except those whose machines are lost for good."""
        raise NotImplementedError

    def close(self) -> None:
        """End all workers at once."""
        raise NotImplementedError
