"""Messages between machines: what is sent comes back, and what is no message is refused before it costs memory."""

import json
from typing import Any

import pytest
import torch
from comfyui_tpu.distributed.rpc import codec
from comfyui_tpu.distributed.rpc.messages import AttemptEnded, BarrierReached, Invoke, StatusText
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef
from comfyui_tpu.tpu_runtime.model_spec import MagCache, MagCacheCurve, StepCache

MODEL = ModelRef(
    spec_name="wan2.1-t2v-14b", model_id="tiny/wan21", precision="float32", loras=(Lora(path="a", strength=0.5),)
)
ARGUMENTS = {
    "model": MODEL, "cache": StepCache(start=1, end=2, interval=3),
    "curve": MagCache(threshold=0.1, curve=MagCacheCurve(ratios=((1.0, 2.0),))), "text": "é", "none": None, "twice": [],
    "pair": (1, [2, (3.5, True)]), "deep": {"list": [torch.arange(6, dtype=torch.int32).reshape(2, 3)]},
    "bfloat16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), "empty": torch.zeros(0, 4, dtype=torch.float16),
    "inside": (torch.tensor([True, False]), [ModelRef(spec_name="a", model_id="b")]), "last": torch.tensor(7.0),
}  # fmt: skip
ARGUMENTS["twice"] = [ARGUMENTS["bfloat16"], ARGUMENTS["bfloat16"].T]  # safetensors refuses shared memory


def round_trip(
    message: Any, messages: tuple = (Invoke,), values: tuple = codec.MODEL_RECORDS, most: int = 10**6
) -> Any:
    head, body = codec.pack(message)
    size, packed = codec.read_header(head, most)
    assert size == len(body)
    return codec.unpack(packed, body, messages, values)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(other) is dict and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_codec_round_trip_keeps_values_and_types():
    assert same(round_trip(Invoke("denoise", ARGUMENTS)), Invoke("denoise", ARGUMENTS))
    assert round_trip(StatusText("x"), (StatusText, BarrierReached)) == StatusText("x")


def test_codec_replaces_unsupported_values_with_null():
    assert round_trip(Invoke("x", {"a": object(), "b": {1, 2}, 3: "number"})) == Invoke(
        "x", {"a": None, "b": None, "3": "number"}
    )


def test_read_header_oversized_claim_raises_codec_error():
    for claim in (101, 2**34, 2**63, -1, 1.5, True, None, "9"):
        with pytest.raises(codec.CodecError, match="claims"):
            codec.read_header(json.dumps([claim, {}]), 100)
    assert codec.read_header("[100, {}]", 100) == (100, {})


@pytest.mark.parametrize("head", ["", "{", "[]", "7", "[0]", "[0, 1, 2]", "[" * 10**5, "[0, " + "[" * 200 + "]" * 201])
def test_read_header_invalid_text_raises_codec_error(head: str):
    with pytest.raises(codec.CodecError):
        codec.read_header(head, 100)


def test_unpack_creates_only_expected_records():
    for message in (StatusText("x"), BarrierReached("x", None), AttemptEnded(None, "")):
        with pytest.raises(codec.CodecError):
            round_trip(message)
    for nested in (MODEL, [MODEL], (MODEL,), {"a": Lora(path="/etc/passwd", strength=1.0)}):
        with pytest.raises(codec.CodecError):
            round_trip(Invoke("x", {"x": nested}), values=codec.SETTINGS_RECORDS)
        assert round_trip(Invoke("x", {"x": nested})) == Invoke("x", {"x": nested})


def test_unpack_record_with_wrong_types_raises_codec_error():
    """An At whose `what` is a list was hung on to by the thread that heard it, which ended."""
    for named in (
        {"what": [], "state": 1},
        {"what": None, "state": 1},
        {"state": 1},
        {"what": "x", "state": 1, "y": 2},
    ):
        with pytest.raises(codec.CodecError):
            codec.unpack({"__record__": "At", **named}, b"", (BarrierReached,))


@pytest.mark.parametrize("body", [b"", b"\0" * 7, (2**60).to_bytes(8, "little") + b"{}", b"\2" + b"\0" * 7 + b"{}"])
def test_unpack_tensor_missing_from_body_raises_codec_error(body: bytes):
    with pytest.raises(codec.CodecError):
        codec.unpack({"__record__": "Ask", "name": "x", "arguments": {"a": {"__tensor__": "0"}}}, body, (Invoke,))


@pytest.mark.parametrize("curve", ["x", {"ratios": {"__tuple__": []}}, {"ratios": [[1.0]]}, {"other": 1}, {}])
def test_unpack_invalid_curve_raises_codec_error(curve: Any):
    named = {"__record__": "Curve", **curve} if isinstance(curve, dict) else curve
    settings = {"__record__": "MagCache", "threshold": 0.1, "curve": named}
    with pytest.raises(codec.CodecError):
        codec.unpack({"__record__": "Ask", "name": "x", "arguments": {"a": settings}}, b"", (Invoke,))


@pytest.mark.parametrize("threshold", [None, "x", [1]])
def test_unpack_invalid_threshold_raises_codec_error(threshold: Any):
    settings = {"__record__": "MagCache", "threshold": threshold, "curve": None}
    with pytest.raises(codec.CodecError):
        codec.unpack({"__record__": "Ask", "name": "x", "arguments": {"a": settings}}, b"", (Invoke,))


def test_pack_oversized_message_raises_codec_error():
    with pytest.raises(codec.CodecError, match="characters"):
        codec.pack(StatusText("x" * codec.MAX_HEADER_LENGTH))
