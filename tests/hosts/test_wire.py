"""Messages between machines, to the byte: what is sent comes back, and what is no message is refused early."""

import json
from typing import Any

import pytest
import torch
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef
from comfyui_tpu.tpu_runtime.hosts import wire
from comfyui_tpu.tpu_runtime.model_spec import StepCache

MODEL = ModelRef(
    spec_name="wan2.1-t2v-14b", model_id="tiny/wan21", precision="float32", loras=(Lora(path="a", strength=0.5),)
)
MESSAGE = {
    "kind": "stage", "model": MODEL, "cache": StepCache(start=1, end=2, interval=3), "text": "é", "none": None,
    "pair": (1, [2, (3.5, True)]), "deep": {"list": [torch.arange(6, dtype=torch.int32).reshape(2, 3)]},
    "bfloat16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), "empty": torch.zeros(0, 4, dtype=torch.float16),
    "inside": (torch.tensor([True, False]), [ModelRef(spec_name="a", model_id="b")]), "last": torch.tensor(7.0),
}  # fmt: skip


class Line:
    """Bytes that are read in the pieces that are asked for."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked = content, []

    def __call__(self, count: int) -> bytes:
        self.asked.append(count)
        found, self.content = self.content[:count], self.content[count:]
        assert len(found) == count
        return found


def sent(message: dict[str, Any]) -> bytes:
    return b"".join(bytes(part) for part in wire.pack(message))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(other) is dict and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_what_is_sent_comes_back_with_its_types():
    line = Line(sent(MESSAGE))
    assert same(wire.unpack(line), MESSAGE) and not line.content


def test_the_line_has_both_lengths_then_json_then_tensors():
    content = sent({"a": torch.tensor([1, 2], dtype=torch.int16), "b": torch.tensor([3], dtype=torch.uint8)})
    head = int.from_bytes(content[:8], "big")
    assert int.from_bytes(content[8:16], "big") == 5
    assert json.loads(content[16 : 16 + head]) == {
        "a": {"__tensor__": ["int16", [2], 0]}, "b": {"__tensor__": ["uint8", [1], 4]},
    }  # fmt: skip
    assert content[16 + head :] == bytes([1, 0, 2, 0, 3])


def test_without_tensors_nothing_more_is_read():
    line = Line(sent({"kind": "text"}))
    assert wire.unpack(line) == {"kind": "text"} and line.asked == [16, len('{"kind": "text"}')]


def test_what_is_no_data_becomes_null():
    assert wire.unpack(Line(sent({"x": object(), "y": {1, 2}, "z": Line(b""), 3: "number"}))) == {
        "x": None, "y": None, "z": None, "3": "number",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("head", "body", "is_refused"),
    [
        (2**26, 0, False), (2**26 + 1, 0, True), (2, 2**34, False), (2, 2**34 + 1, True),
        (2**26 + 1, 2**34 + 1, True), (2**63, 0, True),
    ],
)  # fmt: skip
def test_lengths_beyond_any_message_are_refused_before_they_are_read(head: int, body: int, is_refused: bool):
    asked = []

    def read(count: int) -> bytes:
        asked.append(count)
        if len(asked) == 1:
            return head.to_bytes(8, "big") + body.to_bytes(8, "big")
        raise EOFError

    with pytest.raises(ValueError if is_refused else EOFError, match="what came is no message" if is_refused else None):
        wire.unpack(read)
    assert asked == ([16] if is_refused else [16, head])


def test_only_records_that_are_expected_are_made():
    content = sent({"model": MODEL})
    with pytest.raises(KeyError):
        wire.unpack(Line(content), records=[Lora])
    assert wire.unpack(Line(content), records=[Lora, ModelRef]) == {"model": MODEL}
    for nested in ([MODEL], (MODEL,), {"a": MODEL}):
        assert wire.unpack(Line(sent({"x": nested}))) == {"x": nested}


@pytest.mark.parametrize("name", ["nn", "float128", "Tensor", ""])
def test_a_tensor_of_no_known_type_is_refused(name: str):
    head = json.dumps({"x": {"__tensor__": [name, [1], 0]}}).encode()
    content = len(head).to_bytes(8, "big") + (4).to_bytes(8, "big") + head + bytes(4)
    with pytest.raises(ValueError, match=f"there is no type {name} of numbers"):
        wire.unpack(Line(content))


def test_a_tensor_that_the_body_does_not_hold_is_refused():
    head = json.dumps({"x": {"__tensor__": ["int32", [3], 0]}}).encode()
    content = len(head).to_bytes(8, "big") + (4).to_bytes(8, "big") + head + bytes(4)
    with pytest.raises((ValueError, RuntimeError)):
        wire.unpack(Line(content))
