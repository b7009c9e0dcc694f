"""The messages of the protocol. A receiver names those it expects; any other ends the connection.

See `Connection.get`.
"""

from typing import Any, NamedTuple


class StatusText(NamedTuple):
    """A line for the status."""

    text: str


class Invoke(NamedTuple):
    """A call of a stage or of another method, with its arguments."""

    name: str
    arguments: dict


# --- from `serve` to a client


class ServerLoad(NamedTuple):
    """The server's first message."""

    requests: int  # running and queued
    model: str  # the last one that ran; "" before any


class FileRequest(NamedTuple):
    """A request for the file with this SHA-256. The client sends `File`, then its bytes."""

    digest: str


class FileHeader(NamedTuple):
    """The header of a file."""

    size: int  # bytes that follow


class StepDone(NamedTuple):
    """Progress of a stage, see `Progress.step`."""

    done: int
    total: int
    unit: str
    latent_format: str = ""  # of the preview
    latents: Any = None  # a tensor of the preview; None without one


class StageResult(NamedTuple):
    """The result of a call."""

    value: Any


class StageFailed(NamedTuple):
    """An error of a call."""

    kind: str  # class of the error that the client raises; "" for others
    text: str


# --- from the leader to its followers


class Start(NamedTuple):
    """All hosts are connected."""

    environment: dict  # variables that all hosts use (see `multihost.handshake`)


class Reply(NamedTuple):
    """The leader's answer to a waiting follower."""

    to: str  # "go" after a barrier, "decided" for a value, "verdict" for an attempt
    value: Any


class AbortAttempt(NamedTuple):
    """Abort this attempt."""


class GetChipStats(NamedTuple):
    """A request for `ChipStats`."""

    pass


class Shutdown(NamedTuple):
    """The leader ends."""

    why: str


# --- from a follower to the leader


class BarrierReached(NamedTuple):
    """The follower has reached a barrier."""

    what: str  # it is about to do
    state: Any  # compared with that of the other hosts


class AttemptEnded(NamedTuple):
    """The follower's attempt has ended."""

    ending: Any  # an `AttemptOutcome`, or None after success
    error: str


class LogLine(NamedTuple):
    """A line of the follower's log."""

    text: str


class ChipStats(NamedTuple):
    """Statistics of the follower's chips, as the monitor shows them."""

    rows: list
