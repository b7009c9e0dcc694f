"""Tokenizers and chat templates as published folders hold them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime import tokenization
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.files import CheckpointError, read_json
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.models.common import t5
from comfyui_tpu.tpu_runtime.models.wan import text_encoder
from tokenizers import Tokenizer

PROMPTS = ("a cat, a dog", "猫 and a dög 🐈", "", "a\n\ncat  in </s> the <unk> kitchen", "a cat and a dog " * 200)
PAD, END, UNKNOWN = 0, 1, 3


@pytest.fixture
def umt5(tmp_path: Path) -> Path:
    t5.write_umt5_tokenizer(tmp_path / "tokenizer", (text_encoder.PROMPT,))
    return tmp_path / "tokenizer"


def test_load_tokenizer_umt5_matches_tokenizer_json(umt5: Path):
    """A T5Tokenizer, which its config names, is made anew by transformers 5, with the unknown token at 2."""
    ids, mask = text_encoder.tokenize(tokenization.load_tokenizer(umt5), PROMPTS)
    file = Tokenizer.from_file(str(umt5 / "tokenizer.json"))
    file.enable_truncation(text_encoder.MAX_TOKENS)
    file.enable_padding(length=text_encoder.MAX_TOKENS, pad_id=PAD, pad_token="<pad>")
    expected = file.encode_batch([text_encoder.clean_prompt(prompt) for prompt in PROMPTS])
    np.testing.assert_array_equal(ids, [encoding.ids for encoding in expected])
    np.testing.assert_array_equal(mask, [encoding.attention_mask for encoding in expected])
    assert [UNKNOWN in row for row in ids] == [False, True, False, True, False]
    assert ids[2].tolist() == [END] + [PAD] * 511 and ids[4, -1] == END


def test_published_umt5_tokenizer_matches_load_tokenizer(umt5: Path):
    ours, theirs = (
        text_encoder.tokenize(each, PROMPTS)
        for each in (tokenization.load_tokenizer(umt5), umt5_tokenizer(umt5.parent))
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("family", ["Flux2", "HunyuanVideo15"])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_load_tokenizer_finds_chat_template_in_each_location(family: str, place: str, tmp_path: Path):
    text = spec_for_family(family).text_encoders[0]
    folder = Path(
        shutil.copytree(tiny.ensure_random(spec_for_family(family)) / text.tokenizer_folder, tmp_path / "tokenizer")
    )
    before = text.tokenize(tokenization.load_tokenizer(folder), ["a cat"])
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    file = folder / place
    if file.suffix == ".jinja":
        file.write_text(template)
    else:
        held = read_json(file) if file.is_file() else {}
        file.write_text(json.dumps({**held, "chat_template": template}))
    after = text.tokenize(tokenization.load_tokenizer(folder), ["a cat"])
    assert [x.tolist() for x in after] == [x.tolist() for x in before]


def test_load_tokenizer_prefers_own_chat_template(tmp_path: Path):
    spec = spec_for_family("Flux2")
    folder = Path(shutil.copytree(tiny.ensure_random(spec) / "tokenizer", tmp_path / "tokenizer"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "another"}))
    assert tokenization.load_tokenizer(folder).chat_template == (folder / "chat_template.jinja").read_text()


@pytest.mark.parametrize("family", ["Flux2", "HunyuanVideo15"])
def test_tokenize_without_chat_template_raises_checkpoint_error(family: str, tmp_path: Path):
    spec = spec_for_family(family)
    folder = Path(shutil.copytree(tiny.ensure_random(spec) / "tokenizer", tmp_path / "tokenizer"))
    (folder / "chat_template.jinja").unlink()
    with raises_message(
        CheckpointError, "tokenizer.no_chat_template", name_or_path=folder, template="chat_template.json"
    ):
        spec.text_encoders[0].tokenize(tokenization.load_tokenizer(folder), ["a cat"])
