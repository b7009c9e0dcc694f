"""A prompt of ComfyUI's own nodes, and an image that it names, are anyone's: each node is looked at once, soon."""

import io
import json
import math
from typing import Any

import pytest
from comfyui_tpu.nodes.graphs import core_calls, image_headers
from comfyui_tpu.nodes.graphs.expressions import MAX_LENGTH, evaluate
from comfyui_tpu.nodes.graphs.known import MAX_SIDE, ImageSize, NotKnown
from comfyui_tpu.tests.comfyui.test_core_expected import Facts, edit, node, sampler, workflow
from comfyui_tpu.tests.properties.hostile import changed, ends_well
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

COUNT = 5000
Nodes = dict[str, dict[str, Any]]


def chain(kind: str, socket: str, first: Any, **inputs: Any) -> Nodes:
    """Thousands of nodes, each of which hangs on the one before."""
    links = [first, *([str(number), 0] for number in range(COUNT))]
    return {str(number): node(kind, **{socket: links[number]}, **inputs) for number in range(COUNT)}


END = [str(COUNT - 1), 0]
TEXT = node("CLIPTextEncode", clip=["clip", 0], text="")
GRAPHS: dict[str, Nodes] = {
    "models": chain("LoraLoaderModelOnly", "model", ["unet", 0]) | {"sampler": sampler(model=END)},
    "models without an end": chain("LoraLoaderModelOnly", "model", END) | {"sampler": sampler(model=END)},
    "unknown nodes": chain("SomePatch", "model", ["unet", 0]) | {"sampler": sampler(model=END)},
    "references": chain("ReferenceLatent", "conditioning", ["text", 0], latent=["latent", 0])
    | {"text": TEXT, "sampler": sampler(positive=END)},
    "samplers": {
        str(n): sampler(latent_image=[str(n - 1), 0] if n else ["latent", 0]) for n in range(COUNT)
    },
    "switches": chain("ComfySwitchNode", "on_true", 64, on_false=END, switch=True)
    | {"latent": node("EmptySD3LatentImage", width=END, height=64)},
    "switches that choose switches": chain("ComfySwitchNode", "switch", True, on_true=END, on_false=["0", 0])
    | {"latent": node("EmptySD3LatentImage", width=END, height=64)},
    "expressions": {
        str(n): node("ComfyMathExpression", expression="a * b", **{
            f"values.{letter}": [str(n - 1), 1] if n else 9**9 for letter in "ab"
        })
        for n in range(COUNT)
    },
    "all of all": {
        str(n): node("ComfyMathExpression", expression="1", **{f"values.{m}": [str(m), 0] for m in range(200)})
        for n in range(200)
    },
    "images": chain("ImageScaleBy", "image", ["image", 0], scale_by=1e300) | {
        "image": node("LoadImage", image="a landscape"),
        "latent": node("VAEEncode", pixels=END, vae=["vae", 0]),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_predict_graph_of_thousands_of_nodes_stays_within_limits(name: str):
    nodes = workflow(**GRAPHS[name])
    ends_well(lambda: core_calls.predict(nodes, Facts()), len(json.dumps(nodes)))


def test_predict_long_chain_has_samplings_and_cycle_has_none():
    assert core_calls.predict(workflow(**GRAPHS["models"])).samplings
    assert not core_calls.predict(workflow(**GRAPHS["models without an end"])).samplings
    assert len(core_calls.predict(workflow(**GRAPHS["samplers"])).samplings) > COUNT


@pytest.mark.parametrize("document", [workflow(), edit()], ids=["video", "edit"])
def test_predict_arbitrary_prompt_fails_cleanly(document: Nodes):
    @settings(max_examples=200)
    @given(text=changed(document))
    def predict(text: str) -> None:
        try:
            prompt = json.loads(text.encode("utf-8", "replace"))
        except RecursionError:
            return  # the server's parser refuses it as well
        if isinstance(prompt, dict):
            core_calls.predict(prompt, Facts())

    predict()


BOMBS = (
    "9**9**9**9", "9" * 500 + "**" + "9" * 400, "pow(9, 999999)", "a" + "*a" * 400, "(" * 400 + "1" + ")" * 400,
    "-" * 900 + "1", "sum(values, values)", "a if a else " * 80 + "a", "'a' * 10**9", "[a] * 10**9", "values[0]",
    "(lambda: a)()", "a.__class__", "__import__('os')", "open('x')", "round(a, 10**9)", "min()", "1 << 10**9", "a; a",
    "float('inf')", "int('9' * 900)", "1e308 * 10", "(-1) ** 0.5", "f'{a}'", "a := 1", "", " ", "\x00", "a" * 10**6,
)  # fmt: skip


@pytest.mark.parametrize("expression", BOMBS)
def test_evaluate_malicious_expression_stays_within_limits(expression: str):
    def attempt() -> None:
        try:
            results = evaluate(expression, {"a": 2**62, "b": 3})
        except (NotKnown, ArithmeticError, TypeError, ValueError):
            return
        assert all(math.isfinite(result) for result in results)

    ends_well(attempt, len(expression))


@settings(max_examples=200)
@given(text=st.text("ab0123456789.*/+-%()<>=!, eE_[]'\"\n", max_size=60) | st.text(max_size=MAX_LENGTH))
def test_evaluate_arbitrary_text_fails_cleanly(text: str):
    try:
        evaluate(text, {"a": 2**62, "b": 0.5})
    except (NotKnown, ArithmeticError, TypeError, ValueError):
        pass


def encode_image(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (37, 29)).save(file, kind, **options)
    return file.getvalue()


FILES = [
    encode_image("PNG"),
    encode_image("JPEG", exif=Pillow.Exif()),
    encode_image("WEBP"),
    encode_image("WEBP", lossless=True),
]


@settings(max_examples=300)
@given(file=st.sampled_from(FILES), at=st.integers(0, 200), put=st.binary(max_size=8), kept=st.integers(0, 400))
def test_read_size_arbitrary_image_header_is_none_or_valid(file: bytes, at: int, put: bytes, kept: int):
    size = image_headers.read_size((file[:at] + put + file[at + len(put) :])[:kept])
    assert size is None or (1 <= size.width <= MAX_SIDE and 1 <= size.height <= MAX_SIDE)


@pytest.mark.parametrize(
    "start",
    [
        b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\x00tEXt\x00\x00\x00\x00" * 80_000,  # chunks without content
        b"\xff\xd8" + b"\xff" * 2**20,  # bytes that fill
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 2**18,  # segments without content
        b"\xff\xd8" + b"\xff\xe1\x20\x00Exif\0\0MM\0*\0\0\0\x08\xff\xff".ljust(0x2004, b"\0") * 100,
        b"\x89PNG\r\n\x1a\n" + b"\xff\xff\xff\xffIHDR",
        b"\xff\xd8\xff\xc0\x00\x02",
    ],
)  # fmt: skip
def test_read_size_endless_header_is_none(start: bytes):
    ends_well(lambda: image_headers.read_size(start), len(start))
    assert image_headers.read_size(start) is None


def test_read_size_matches_pillow_files():
    assert {image_headers.read_size(file) for file in FILES} == {ImageSize(width=37, height=29)}
