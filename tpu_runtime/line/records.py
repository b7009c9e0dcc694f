"""What is said on the line. An end names those that it expects (see `MachineLink.get`); any other ends the link."""

from typing import Any, NamedTuple


class Text(NamedTuple):
    """A line of status."""

    text: str


class Ask(NamedTuple):
    """A stage, or what else is to be run there, with its arguments."""

    name: str
    arguments: dict


# --- by `serve`, to who asks


class Load(NamedTuple):
    """Its first word: how many requests run and wait, and the model that ran last."""

    requests: int
    model: str


class NeedFile(NamedTuple):
    """It lacks the file with this SHA-256, which is to be sent: `File`, and then its bytes."""

    digest: str


class File(NamedTuple):
    size: int


class Step(NamedTuple):
    """See `Progress.step`; `latents` are those of a preview, or None."""

    done: int
    total: int
    unit: str
    latent_format: str = ""
    latents: Any = None


class Result(NamedTuple):
    value: Any


class Failed(NamedTuple):
    """`kind` is that of the error where the asker is to raise the same."""

    kind: str
    text: str


# --- by the leader of several hosts


class Begin(NamedTuple):
    """All are here; `environment` holds for all (see `terms`)."""

    environment: dict


class Answer(NamedTuple):
    """To what a follower waits for: whether to `go`, what was `decided`, the `verdict` on an attempt."""

    to: str
    value: Any


class Stop(NamedTuple):
    """This attempt ends."""


class AskRows(NamedTuple):
    pass


class Bye(NamedTuple):
    why: str


# --- by a follower


class At(NamedTuple):
    """It is about to do `what`."""

    what: str
    state: Any


class Ended(NamedTuple):
    """Its attempt is over; `ending` is None where nothing failed there."""

    ending: Any
    error: str


class Log(NamedTuple):
    text: str


class ChipRows(NamedTuple):
    """Its chips, as the monitor shows them."""

    rows: list
