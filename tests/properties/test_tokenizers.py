"""Tokenizers and chat templates of a folder, and of files: a sentence, or tokens, and never the end of a thread."""

import base64
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from comfyui_tpu.tests.properties.hostile import ends_well
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import tokenization
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.formats import tokenizer_files
from comfyui_tpu.tpu_runtime.models import spec_for_family
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

FAMILIES = ("Wan21", "Flux2", "HunyuanVideo15", "ZImage")


@pytest.fixture(params=FAMILIES)
def tokenizer_copy(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A family's text encoder, and a copy of its tokenizer's folder."""
    spec = spec_for_family(request.param)
    text = spec.text_encoders[0]
    return text, Path(shutil.copytree(tiny.ensure_random(spec) / text.tokenizer_folder, tmp_path / "tokenizer"))


def change(path: Path, edit: Callable[[dict], object]) -> None:
    said = json.loads(path.read_text())
    edit(said)
    path.write_text(json.dumps(said))


# Each takes exponential time, or ends Rust's thread, on a text of letters.
HOSTILE = [r"(a+)+$", r"(?:a|a)*b", r"(a*)*\1b", r"((a{1,9}){1,9}){1,9}b", r"(?=(a+))*\1x", r"(.*)(.*)(.*)(.*)x", "("]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_tokenizer_unknown_regex_raises_checkpoint_error(tokenizer_copy: tuple[Any, Path], pattern: str):
    text, folder = tokenizer_copy
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for part, value in (
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [split]}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": pattern}, "content": "b"}),
        (
            "decoder",
            {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}]},
        ),
    ):
        path, saved = folder / "tokenizer.json", (folder / "tokenizer.json").read_bytes()
        change(path, lambda said, part=part, value=value: said.update({part: value}))
        with raises_message(CheckpointError, "tokenizer.pattern_unknown"):
            text.tokenize(tokenization.load_tokenizer(folder), ["a" * 60])
        path.write_bytes(saved)
    text.tokenize(tokenization.load_tokenizer(folder), ["a" * 60])


def panicking_tokenizer() -> Tokenizer:
    """One whose pattern ends Rust's thread on letters in a row."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:a|aa)+$(?<=b)"), behavior="isolated")
    return tokenizer


@pytest.mark.parametrize("call", ["call", "tokenize", "encode", "chat"])
def test_guarded_tokenizer_panic_raises_checkpoint_error(call: str):
    """ComfyUI's prompt thread, which catches `Exception` alone, ended with it."""
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast(tokenizer_object=panicking_tokenizer(), pad_token="p", chat_template="[INST]")
    with pytest.raises(BaseException) as raised:
        own("a" * 60)
    assert not isinstance(raised.value, Exception), "upstream mends this itself"
    tokenizer, text = tokenization.GuardedTokenizer(own, Path("folder")), "a" * 60
    calls = {
        "call": lambda: tokenizer([text]),
        "tokenize": lambda: tokenizer.tokenize(text),
        "encode": lambda: tokenizer.encode(text),
        "chat": lambda: tokenization.tokenize_chats(
            tokenizer,
            [[{"content": text}]],
            9,
            padding_side="left",
            template="[INST]" + text,
            add_generation_prompt=False,
        ),
    }
    with raises_message(CheckpointError, "tokenizer.failed", source="folder"):
        calls[call]()


def test_guard_panics_passes_other_exceptions():
    for error in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):
        with pytest.raises(error), tokenization.guard_panics("x"):
            raise error


TEMPLATES = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 12000000000 }}",
    "{{ range(10**10) | list }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ raise_exception('no') }}",
    "{% include '/etc/passwd' %}",
    "{{",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_chat_template_of_folder_is_never_executed(template: str, place: str, tmp_path: Path):
    """One with what its model's turns begin with is left alone, any other is refused."""
    text = spec_for_family("HunyuanVideo15").text_encoders[0]
    folder = Path(
        shutil.copytree(tiny.ensure_random(spec_for_family("HunyuanVideo15")) / "tokenizer", tmp_path / "tokenizer")
    )
    wanted = text.tokenize(tokenization.load_tokenizer(folder), ["a red circle"])
    (folder / "chat_template.jinja").unlink()
    for before, is_taken in (("<|im_start|>", True), ("", False)):
        if place.endswith(".jinja"):
            (folder / place).write_text(before + template)
        else:
            (folder / place).touch()
            held = json.loads((folder / place).read_text() or "{}")
            (folder / place).write_text(json.dumps({**held, "chat_template": before + template}))
        if is_taken:
            ends_well(lambda: text.tokenize(tokenization.load_tokenizer(folder), ["a red circle"]), 2**20)
            found = text.tokenize(tokenization.load_tokenizer(folder), ["a red circle"])
            assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))
        else:
            with raises_message(CheckpointError, "tokenizer.chat_template_differs"):
                text.tokenize(tokenization.load_tokenizer(folder), ["a red circle"])


def test_named_chat_template_of_folder_is_never_executed(tmp_path: Path):
    """transformers looks a template up by name first, in a folder that has several."""
    spec = spec_for_family("HunyuanVideo15")
    folder = Path(shutil.copytree(tiny.ensure_random(spec) / "tokenizer", tmp_path / "tokenizer"))
    from comfyui_tpu.tpu_runtime.models.common import qwen25

    (folder / "chat_template.jinja").unlink()
    named = [{"name": qwen25.CHAT_TEMPLATE, "template": TEMPLATES[0]}, {"name": "default", "template": "<|im_start|>"}]
    change(folder / "tokenizer_config.json", lambda said: said.update(chat_template=named))
    ends_well(lambda: spec.text_encoders[0].tokenize(tokenization.load_tokenizer(folder), ["a"]), 2**20)


def tekken_file(path: Path, **config: Any) -> Path:
    said = {
        "config": {
            "pattern": tokenization.WORDS_TEKKEN, "default_vocab_size": 276, "default_num_special_tokens": 20, **config,
        },
        "vocab": [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)],
        "special_tokens": [{"rank": n, "token_str": one} for n, one in enumerate(("<unk>", "<s>", "</s>", "<pad>"))],
    }  # fmt: skip
    content = np.frombuffer(json.dumps(said).encode(), np.uint8)
    safetensors.numpy.save_file({"tekken_model": content}, path)
    return path


COUNTS = st.sampled_from([-1, -(10**9), 4097, 10**6, 10**9, 2**63, 1e300, None, "x", [1], {}])


@settings(max_examples=40)
@given(name=st.sampled_from(["default_num_special_tokens", "default_vocab_size"]), count=COUNTS)
def test_write_tokenizer_arbitrary_tekken_count_fails_cleanly(
    tmp_path_factory: pytest.TempPathFactory, name: str, count: Any
):
    """`default_num_special_tokens` took 9.5 GiB of 10 kB."""
    folder = tmp_path_factory.getbasetemp() / "tekken"
    folder.mkdir(exist_ok=True)
    path = tekken_file(folder / "x.safetensors", **{name: count})
    carried = tokenizer_files.TokenizerFile(path, "tekken_model")
    ends_well(lambda: tokenizer_files.write_tokenizer(carried, folder / "out"), path.stat().st_size)
    if name == "default_num_special_tokens" and isinstance(count, int):
        with raises_message(
            CheckpointError,
            "file.carried_tokenizer_unreadable",
            error=re.compile(f"^default_num_special_tokens is {count}; "),
        ):
            tokenizer_files.write_tokenizer(carried, folder / "out")


@pytest.mark.parametrize("pattern", [*HOSTILE, None, 7])
def test_write_tokenizer_unknown_tekken_regex_raises_checkpoint_error(tmp_path: Path, pattern: Any):
    carried = tokenizer_files.TokenizerFile(tekken_file(tmp_path / "x.safetensors", pattern=pattern), "tekken_model")
    with raises_message(CheckpointError, "tokenizer.pattern_unknown"):
        tokenizer_files.write_tokenizer(carried, tmp_path / "out")
    tekken_file(carried.path)
    assert tokenizer_files.write_tokenizer(carried, tmp_path / "out") == 276


@pytest.mark.parametrize("kind", ["T5Tokenizer", "ByT5Tokenizer", "PegasusTokenizer", "XGLMTokenizer"])
@pytest.mark.parametrize("name", tokenization._COUNTS)
def test_load_tokenizer_huge_token_count_raises_checkpoint_error(tmp_path: Path, kind: str, name: str):
    for count in (10**9, 1e12, -5):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, name: count}))
        ends_well(lambda: tokenization.load_tokenizer(tmp_path), 2**20)
        with raises_message(
            CheckpointError, "tokenizer.too_many_extra_tokens", name=name, count=re.compile(f"^{str(count)[:5]}")
        ):
            tokenization.load_tokenizer(tmp_path)


def test_thread_survives_tokenizer_panic():
    """As ComfyUI's prompt thread does, which looks for `Exception`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenization.GuardedTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=panicking_tokenizer()), Path("folder")
    )
    said: list[str] = []

    def work() -> None:
        try:
            tokenizer("a" * 60)
        except Exception as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(said) == 1
