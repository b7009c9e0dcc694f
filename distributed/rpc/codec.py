"""Encoding of messages: JSON, with their tensors as the bytes of a safetensors file.

Nothing is unpickled, so that no code from another machine runs. Anything unexpected raises `CodecError`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...tpu_runtime.checkpoints.model_ref import Lora, ModelRef, PlannedGeneration
from ...tpu_runtime.files import parse_json
from ...tpu_runtime.messages import Message, read_message
from ...tpu_runtime.model_spec import MagCache, MagCacheCurve, Settings, StepCache

# Records that arguments may contain; those of `MODELS` name files of the machine that reads them.
SETTINGS_RECORDS = (Settings, StepCache, MagCache, MagCacheCurve)
MODEL_RECORDS = (PlannedGeneration, Lora, ModelRef, *SETTINGS_RECORDS)
# Most characters of a message's JSON.
MAX_HEADER_LENGTH = 2**20
_TENSOR, _TUPLE, _RECORD, _MESSAGE = "__tensor__", "__tuple__", "__record__", "__message__"


class CodecError(RuntimeError):
    """Data that was received, or is to be sent, is not a valid message."""


def pack(message: object) -> tuple[str, bytes]:
    """Encode a message: the JSON `[bytes of the tensors, message]`, and these bytes.

    Values that are neither data nor a record become null. Raises WireError if the JSON is too long.
    """
    tensors: dict[str, Any] = {}
    packed, body = _pack(message, tensors), b""
    if tensors:
        from safetensors.torch import save

        body = save(tensors)
    head = json.dumps([len(body), packed])
    if len(head) > MAX_HEADER_LENGTH:
        raise CodecError(f"a message has {len(head)} characters; it may have {MAX_HEADER_LENGTH}")
    return head, body


def read_header(head: str, most_bytes: int) -> tuple[int, Any]:
    """Parse a message's JSON: how many bytes of tensors follow, and the packed message.

    most_bytes: limit of the tensors. Raises WireError.
    """
    try:
        size, packed = parse_json(head)
    except (TypeError, ValueError) as error:
        raise CodecError(f"a message cannot be read ({error})") from None
    if type(size) is not int or not 0 <= size <= most_bytes:
        raise CodecError(f"a message claims {size!r:.40} bytes of tensors, where {most_bytes} are allowed")
    return size, packed


def unpack(
    packed: Any, body: bytes | bytearray, messages: Sequence[type], values: Sequence[type] = SETTINGS_RECORDS
) -> Any:
    """Decode a message, which must be one of `messages`. Raises WireError.

    packed, body: its JSON value and tensors. values: records that it may contain.
    """
    from safetensors import SafetensorError

    try:
        tensors: Mapping[str, Any] = {}
        if body:
            from safetensors.torch import load

            tensors = load(bytes(body))
        message = _unpack(packed, tensors, {record.__name__: record for record in (*messages, *values)})
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CodecError(f"a message cannot be read ({type(error).__name__}: {error!s:.200})") from None
    if not isinstance(message, tuple(messages)):
        raise CodecError("a message of another type was expected")
    return message


def _pack(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, Message):
        return {_MESSAGE: value.describe()}
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _pack(item, tensors) for name, item in value.items()}
    if isinstance(value, MODEL_RECORDS) or hasattr(value, "_fields"):
        named = {name: _pack(getattr(value, name), tensors) for name in type(value).__annotations__}
        return {_RECORD: type(value).__name__, **named}
    if isinstance(value, tuple | list):
        items = [_pack(item, tensors) for item in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if not hasattr(value, "detach"):
        return None  # an object of another node in a CONDITIONING
    name = str(len(tensors))
    # A copy: safetensors refuses tensors that share memory, and one CONDITIONING may be on both inputs.
    tensors[name] = value.detach().cpu().contiguous().clone()
    return {_TENSOR: name}


def _unpack(value: Any, tensors: Mapping[str, Any], records: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors, records) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _MESSAGE in value:
        return read_message(value[_MESSAGE])
    if _TUPLE in value:
        return tuple(_unpack(item, tensors, records) for item in value[_TUPLE])
    named = {name: _unpack(item, tensors, records) for name, item in value.items()}
    return _record(records[named.pop(_RECORD)], named) if _RECORD in named else named


def _record(kind: Any, named: Mapping[str, Any]) -> Any:
    """Create a record. Raises TypeError for a value that is not of its field's type, as far as that is a class."""
    for name, stated in kind.__annotations__.items():
        allowed = (int, float) if stated is float else stated
        if allowed is Any or not isinstance(allowed, type | tuple) or name not in named:
            continue
        if not isinstance(named[name], allowed):
            raise TypeError(f"{kind.__name__}.{name} is a {type(named[name]).__name__}")
    return kind(**named)
