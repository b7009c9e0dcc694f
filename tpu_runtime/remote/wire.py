"""Messages between a process that asks for stages and one that runs them: those of `hosts.wire`, of which only data are
taken. Nothing is unpickled, so that nothing is run which another machine sent.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any

from ..hosts import wire
from ..model_spec import Settings, StepCache

# Both ends must have the same: raise it when messages change.
PROTOCOL = 3
DEFAULT_PORT = 8190
VARIABLE = "COMFYUI_TPU_TOKEN"
RUN, LOAD, FILE = "/tpu/run", "/tpu/load", "/tpu/file/"
# More is refused before it is read.
MOST_BYTES = wire.MOST_BYTES
# Not those that name files of the machine that reads them.
_RECORDS = (Settings, StepCache)


class WireError(RuntimeError):
    """What came is no message."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message, see `hosts.wire.pack`."""
    return b"".join(wire.pack(message))


def unpack(content: bytes) -> dict[str, Any]:
    """The message in `pack`'s bytes; WireError for anything else."""
    message = read(io.BytesIO(content).read)
    if message is None:
        raise WireError("there is no message")
    return message


def read(read: Callable[[int], bytes]) -> dict[str, Any] | None:
    """The next message; None at the end. `read` gives as many bytes as asked for, or fewer at the end."""
    has_begun = False

    def exactly(size: int) -> bytes:
        nonlocal has_begun
        content = read(size)
        if len(content) < size:
            raise WireError("it ended within a message") if content or has_begun else EOFError
        has_begun = True
        return content

    try:
        message = wire.unpack(exactly, _RECORDS)
    except EOFError:
        return None
    except WireError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise WireError(f"a message cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict):
        raise WireError("a message is no object")
    return message
