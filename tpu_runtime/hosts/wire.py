"""Messages between hosts, and between the machines of `remote`: a JSON object, and the bytes of the tensors in it.

Nothing is unpickled, so that nothing is run which another machine sent.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ..checkpoints.model_ref import Expected, Lora, ModelRef
from ..model_spec import Settings, StepCache

RECORDS = (Expected, Lora, ModelRef, Settings, StepCache)
_TENSOR, _TUPLE, _RECORD = "__tensor__", "__tuple__", "__record__"
# More than any message has: a minute of video at 720p is less.
MOST_BYTES, _MOST_JSON = 2**34, 2**26
_PLAIN = (str, int, float, bool, type(None))


def pack(message: Mapping[str, Any]) -> list[Any]:
    """What goes onto the line: the lengths of both parts, 8 bytes each, the JSON, the tensors.

    What is neither data nor one of the records here becomes null: other nodes' things in a CONDITIONING.
    """
    tensors: list[Any] = []
    head = json.dumps(_packed(message, tensors)).encode()
    body = [memoryview(tensor).cast("B") for tensor in tensors if tensor.size]
    sizes = len(head).to_bytes(8, "big") + sum(len(part) for part in body).to_bytes(8, "big")
    return [sizes + head, *body]


def unpack(read: Callable[[int], bytes | bytearray], records: Sequence[type] = RECORDS) -> dict[str, Any]:
    """The next message, in which may be `records`; `read` gives exactly so many bytes.

    What is no message raises ValueError, KeyError, TypeError or RuntimeError.
    """
    sizes = read(16)
    head, body = int.from_bytes(sizes[:8], "big"), int.from_bytes(sizes[8:], "big")
    if head > _MOST_JSON or body > MOST_BYTES:
        raise ValueError("what came is no message")
    message = json.loads(read(head))
    allowed = {record.__name__: record for record in records}
    return _unpacked(message, memoryview(read(body)) if body else memoryview(b""), allowed)


def _packed(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(name): _packed(one, tensors) for name, one in value.items()}
    if isinstance(value, tuple | list):
        items = [_packed(one, tensors) for one in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if is_dataclass(value) and isinstance(value, RECORDS):
        return {_RECORD: type(value).__name__} | {
            field.name: _packed(getattr(value, field.name), tensors) for field in fields(value)
        }
    return _packed_tensor(value, tensors) if hasattr(value, "detach") else None


def _packed_tensor(tensor: Any, tensors: list[Any]) -> dict[str, Any]:
    """A torch tensor's place in the body; its bytes go to the end of `tensors`."""
    import torch

    start = sum(one.size for one in tensors)
    tensors.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return {_TENSOR: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]}


def _unpacked(value: Any, body: memoryview, records: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, body, records) for one in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_unpacked(one, body, records) for one in value[_TUPLE])
    if _TENSOR in value:
        name, shape, start = value[_TENSOR]
        return _unpacked_tensor(name, shape, body[start:])
    named = {name: _unpacked(one, body, records) for name, one in value.items()}
    return records[named.pop(_RECORD)](**named) if _RECORD in named else named


def _unpacked_tensor(name: str, shape: Sequence[int], body: memoryview) -> Any:
    """The tensor that a body begins with."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no type {name} of numbers")
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(body[: count * dtype.itemsize]), dtype=dtype).reshape(shape)
