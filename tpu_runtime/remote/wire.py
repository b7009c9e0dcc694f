"""Messages between a process that asks for stages and one that runs them: each is a safetensors file, with JSON in its
metadata. Nothing is unpickled, so that nothing is run which another machine sent.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..limits import Settings, StepCache

# Both ends must have the same: raise it when messages change.
PROTOCOL = 1
DEFAULT_PORT = 8190
VARIABLE = "COMFYUI_TPU_TOKEN"
RUN, LOAD, FILE = "/tpu/run", "/tpu/load", "/tpu/file/"
# More is refused before it is read: a minute of video at 720p is less.
MOST_BYTES = 16 * 2**30
_HEAD_BYTES = 8
_TENSOR, _TUPLE, _SETTINGS = "$tensor", "$tuple", "$settings"


class WireError(RuntimeError):
    """What came is no message."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message of plain values, lists, tuples, dicts, `Settings` and CPU tensors; anything else in it becomes null, as
    what other nodes put into a CONDITIONING.
    """
    from safetensors.torch import save

    tensors: dict[str, Any] = {}
    text = json.dumps(_packed(message, tensors))
    return save(tensors, metadata={"message": text})


def frame(content: bytes) -> bytes:
    """A message among others: its length, then itself."""
    return len(content).to_bytes(_HEAD_BYTES, "little") + content


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next framed message; None at the end. `read` gives as many bytes as asked for, or fewer at the end."""
    head = read(_HEAD_BYTES)
    if not head:
        return None
    size = int.from_bytes(head, "little")
    if len(head) < _HEAD_BYTES or size > MOST_BYTES or len(content := read(size)) < size:
        raise WireError("it ended within a message")
    return content


def unpack(content: bytes) -> dict[str, Any]:
    """The message in `pack`'s bytes; WireError for anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        size = int.from_bytes(content[:_HEAD_BYTES], "little")
        head = json.loads(content[_HEAD_BYTES : _HEAD_BYTES + size])
        message = _unpacked(json.loads(head["__metadata__"]["message"]), tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a message cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict):
        raise WireError("a message is no object")
    return message


def _packed(value: Any, tensors: dict[str, Any]) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _packed(one, tensors) for name, one in value.items()}
    if isinstance(value, list):
        return [_packed(one, tensors) for one in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_packed(one, tensors) for one in value]}
    if isinstance(value, Settings):
        cache = value.step_cache
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        own["step_cache"] = cache and (cache.start, cache.end, cache.interval)
        return {_SETTINGS: _packed(own, tensors)}
    if hasattr(value, "detach"):
        name = f"t{len(tensors)}"
        # Copies: safetensors refuses tensors that share memory, and one CONDITIONING may be on both inputs.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    return None


def _unpacked(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_unpacked(one, tensors) for one in value[_TUPLE])
    if _SETTINGS in value:
        given = _unpacked(value[_SETTINGS], tensors)
        if (cache := given.get("step_cache")) is not None:
            given["step_cache"] = StepCache(start=cache[0], end=cache[1], interval=cache[2])
        return Settings(**given)
    return {name: _unpacked(one, tensors) for name, one in value.items()}
