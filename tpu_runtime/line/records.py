"""The messages of the protocol. A receiver names those it expects; any other ends the connection.

See `MachineLink.get`.
"""

from typing import Any, NamedTuple


class Text(NamedTuple):
    """A line for the status."""

    text: str


class Ask(NamedTuple):
    """A call of a stage or of another method, with its arguments."""

    name: str
    arguments: dict


# --- from `serve` to a client


class Load(NamedTuple):
    """The server's first message."""

    requests: int  # running and queued
    model: str  # the last one that ran; "" before any


class NeedFile(NamedTuple):
    """A request for the file with this SHA-256. The client sends `File`, then its bytes."""

    digest: str


class File(NamedTuple):
    """The header of a file."""

    size: int  # bytes that follow


class Step(NamedTuple):
    """Progress of a stage, see `Progress.step`."""

    done: int
    total: int
    unit: str
    latent_format: str = ""  # of the preview
    latents: Any = None  # a tensor of the preview; None without one


class Result(NamedTuple):
    """The result of a call."""

    value: Any


class Failed(NamedTuple):
    """An error of a call."""

    kind: str  # class of the error that the client raises; "" for others
    text: str


# --- from the leader to its followers


class Begin(NamedTuple):
    """All hosts are connected."""

    environment: dict  # variables that all hosts use (see `terms`)


class Answer(NamedTuple):
    """The leader's answer to a waiting follower."""

    to: str  # "go" after a barrier, "decided" for a value, "verdict" for an attempt
    value: Any


class Stop(NamedTuple):
    """Abort this attempt."""


class AskRows(NamedTuple):
    """A request for `ChipRows`."""

    pass


class Bye(NamedTuple):
    """The leader ends."""

    why: str


# --- from a follower to the leader


class At(NamedTuple):
    """The follower has reached a barrier."""

    what: str  # it is about to do
    state: Any  # compared with that of the other hosts


class Ended(NamedTuple):
    """The follower's attempt has ended."""

    ending: Any  # an `Ending`, or None after success
    error: str


class Log(NamedTuple):
    """A line of the follower's log."""

    text: str


class ChipRows(NamedTuple):
    """Statistics of the follower's chips, as the monitor shows them."""

    rows: list
