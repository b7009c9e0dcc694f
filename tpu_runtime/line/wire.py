"""A message as JSON, and the tensors in it as the bytes of a safetensors file. Nothing is unpickled, so that nothing is
run which another machine sent; what is not expected raises `WireError`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoints.model_ref import Expected, Lora, ModelRef
from ..files import parse_json
from ..model_spec import Curve, MagCache, Settings, StepCache

# Records that arguments may hold; those of `MODELS` name files of the machine that reads them.
SETTINGS = (Settings, StepCache, MagCache, Curve)
MODELS = (Expected, Lora, ModelRef, *SETTINGS)
# The JSON of a message.
MOST_HEAD = 2**20
_TENSOR, _TUPLE, _RECORD = "__tensor__", "__tuple__", "__record__"


class WireError(RuntimeError):
    """What came, or is to be sent, is no message."""


def pack(message: Any) -> tuple[str, bytes]:
    """The JSON `[bytes of the tensors, message]`, and these bytes. What is neither data nor a record becomes null."""
    tensors: dict[str, Any] = {}
    packed, body = _packed(message, tensors), b""
    if tensors:
        from safetensors.torch import save

        body = save(tensors)
    head = json.dumps([len(body), packed])
    if len(head) > MOST_HEAD:
        raise WireError(f"a message has {len(head)} letters; it may have {MOST_HEAD}")
    return head, body


def read_head(head: str, most_bytes: int) -> tuple[int, Any]:
    """How many bytes of tensors follow, and the packed message."""
    try:
        size, packed = parse_json(head)
    except (TypeError, ValueError) as error:
        raise WireError(f"a message cannot be read ({error})") from None
    if type(size) is not int or not 0 <= size <= most_bytes:
        raise WireError(f"a message claims {size!r:.40} bytes of tensors, where {most_bytes} are allowed")
    return size, packed


def unpack(packed: Any, body: bytes | bytearray, messages: Sequence[type], values: Sequence[type] = SETTINGS) -> Any:
    """The message, one of `messages`, in which may be records of `values`."""
    from safetensors import SafetensorError

    try:
        tensors: Mapping[str, Any] = {}
        if body:
            from safetensors.torch import load

            tensors = load(bytes(body))
        found = _unpacked(packed, tensors, {record.__name__: record for record in (*messages, *values)})
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise WireError(f"a message cannot be read ({type(error).__name__}: {error!s:.200})") from None
    if not isinstance(found, tuple(messages)):
        raise WireError("what came is not what is expected next")
    return found


def _packed(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _packed(one, tensors) for name, one in value.items()}
    if isinstance(value, MODELS) or hasattr(value, "_fields"):
        named = {name: _packed(getattr(value, name), tensors) for name in type(value).__annotations__}
        return {_RECORD: type(value).__name__, **named}
    if isinstance(value, tuple | list):
        items = [_packed(one, tensors) for one in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if not hasattr(value, "detach"):
        return None  # another node's thing in a CONDITIONING
    name = str(len(tensors))
    # A copy: safetensors refuses tensors that share memory, and one CONDITIONING may be on both inputs.
    tensors[name] = value.detach().cpu().contiguous().clone()
    return {_TENSOR: name}


def _unpacked(value: Any, tensors: Mapping[str, Any], records: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, tensors, records) for one in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_unpacked(one, tensors, records) for one in value[_TUPLE])
    named = {name: _unpacked(one, tensors, records) for name, one in value.items()}
    return _record(records[named.pop(_RECORD)], named) if _RECORD in named else named


def _record(kind: Any, named: Mapping[str, Any]) -> Any:
    """A record whose values are of the types that it states, as far as these are classes."""
    for name, stated in kind.__annotations__.items():
        wanted = (int, float) if stated is float else stated
        if wanted is Any or not isinstance(wanted, type | tuple) or name not in named:
            continue
        if not isinstance(named[name], wanted):
            raise TypeError(f"{kind.__name__}.{name} is a {type(named[name]).__name__}")
    return kind(**named)
