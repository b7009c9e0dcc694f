"""What of a prompt does not reach the model as it may be meant: said once a prompt, in the node and the log."""

import bisect
import dataclasses
import functools
import logging
import re

import jax
import pytest
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.support.host import Host, Runner
from comfyui_tpu.tpu_runtime import tokenization
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import SPECS, spec_for_family

WAN = spec_for_family("Wan21")
END = "a green lamp at the very end"


@functools.cache
def runner() -> Runner:
    return Runner(jax.devices()[:1])


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("a (red circle:1.4) on blue", ["'(red circle:1.4)' (a weight)"]),
        ("(a, b:.5) (cat:2)", ["'(a, b:.5)' (a weight)"]),
        ("((cat:1.2))", ["'(cat:1.2)' (a weight)"]),
        ("a {red|blue} ball", ["'{red|blue}' (a choice)"]),
        ("embedding:foo, a cat", ["'embedding:foo' (an embedding)"]),
        ("(x:1.1) {a|b} embedding:y", ["'(x:1.1)' (a weight)", "'{a|b}' (a choice)", "'embedding:y' (an embedding)"]),
        ("a cat (a small one) at noon (10:30), in (16:9), 4:3 (John 3:16)", []),
        ("a sign that reads (scale: 1:50), (note: see page 12), \\(cat:1.2)", []),
        ('{"scene": "a cat | a dog", "style": {"name": "oil"}} f(x) {red}', []),
        ("the word embedding: what it means; a|b", []),
    ],
)  # fmt: skip
def test_find_literal_syntax_finds_weights_choices_and_embeddings(prompt: str, found: list[str]):
    assert list(tokenization.find_literal_syntax(prompt)) == found


@pytest.mark.parametrize("part", ["(", "{", "{|", "|", "(a:", "(a ", ": 1.", "\\(", "embedding:"])
def test_find_literal_syntax_long_prompt_takes_linear_time(part: str):
    """Seconds where it is linear, days where it is not."""
    list(tokenization.find_literal_syntax("{(" + part * 300_000))


def test_encode_literal_syntax_warns_once_per_prompt(caplog: pytest.LogCaptureFixture):
    sentence = (
        "Wan 2.1 T2V 14B: '(red circle:1.4)' (a weight) in the prompt is taken literally; it has no special meaning "
        "here. Describe it in words. Wan 2.1 T2V 14B: '{a|b}' (a choice) in the negative prompt is taken literally; it "
        "has no special meaning here. Describe it in words."
    )
    for _ in range(2):
        host = Host()
        with caplog.at_level(logging.WARNING):
            runner().encode(parity.tiny_model(WAN), "a (red circle:1.4)", "{a|b}", host)
        (last,) = [one for one in host.said if "literally" in one]
        assert last is host.said[-1] and last.startswith("Took ") and last.endswith(f". {sentence}")
        assert [record.message for record in caplog.records] == [sentence]
        caplog.clear()


def test_encode_plain_prompt_has_no_warning(caplog: pytest.LogCaptureFixture):
    host = Host()
    with caplog.at_level(logging.WARNING):
        runner().encode(parity.tiny_model(WAN), "a cat (a small one)", WAN.texts["negative_prompt"], host)
    assert not [one for one in host.said if WAN.title in one] and not caplog.records


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_count_truncated_matches_tokenizer_count(spec):
    """Against the tokenizer's own count of as many words as just fit, and of two more."""
    text = spec.text_encoders[0]
    tokenizer = tokenization.load_tokenizer(tiny.ensure_random(spec) / text.tokenizer_folder)
    whole = functools.partial(text.tokenize, tokenizer, length=3000)

    def size(prompt: str) -> int:
        return int(whole([prompt])[1].sum())

    number = bisect.bisect_right(range(2000), text.max_length, key=lambda number: size("a " * number + "a"))
    fits, long = "a " * (number - 1) + "a", "a " * number + END
    assert size(fits) <= text.max_length < size("a " * number + "a")
    assert tokenization.count_truncated(text, tokenizer, fits) == (0, "")
    left, words = tokenization.count_truncated(text, tokenizer, long)
    assert left == size(long) - text.max_length > 0
    assert words and END.endswith(words)


@pytest.mark.parametrize("spec", SPECS[:4], ids=lambda spec: spec.name)
def test_count_truncated_huge_prompt_reads_a_bounded_part(spec, monkeypatch: pytest.MonkeyPatch):
    """Lists of its tokens are as long as that part's; what is counted is the tokenizer's own count of it."""
    text = spec.text_encoders[0]
    tokenizer = tokenization.load_tokenizer(tiny.ensure_random(spec) / text.tokenizer_folder)
    monkeypatch.setattr(tokenization, "MAX_COUNTED", 2000)
    lengths = []

    def tokenize(tokenizer, prompts, length=text.max_length):
        lengths.append(length)
        return text.tokenize(tokenizer, prompts, length=length)

    prompt = "(red:1.4) " * 200 + "{a|b} embedding:x " * 100_000
    number, words = tokenization.count_truncated(dataclasses.replace(text, tokenize=tokenize), tokenizer, prompt)
    assert number == int(text.tokenize(tokenizer, [prompt[:2000]], length=9000)[1].sum()) - text.max_length
    assert words and max(lengths) <= text.max_length + 4 * 2000
    assert list(tokenization.find_literal_syntax(prompt)) == ["'(red:1.4)' (a weight)"]


def test_encode_truncated_prompt_warns_for_new_and_cached_prompts(caplog: pytest.LogCaptureFixture):
    prompt = "cat " * 520 + END
    tokenizer = tokenization.load_tokenizer(tiny.ensure_random(WAN) / "tokenizer")
    size = int(WAN.text_encoders[0].tokenize(tokenizer, [prompt], length=5000)[1].sum())
    for _ in range(2):
        host = Host()
        with caplog.at_level(logging.WARNING):
            runner().encode(parity.tiny_model(WAN), prompt, "", host)
        (record,) = caplog.records
        assert host.said[-1].endswith(record.message)
        assert record.message.startswith(
            f"Wan 2.1 T2V 14B: the prompt has {size} tokens, but the text encoder takes at most 512: the last "
            f"{size - 512} are cut off, from '"
        )
        assert record.message.endswith("...' on. Shorten it.")
        caplog.clear()


@pytest.mark.parametrize(
    "miniature",
    [
        "tiny/wan21", "tiny/wan22i2v", "tiny/cogvideox", "tiny/flux2klein", "tiny/flux2", "tiny/qwenimage",
        "tiny/zimage", "tiny/hunyuan15",
    ],
)  # fmt: skip
def test_encode_tiny_model_reports_unknown_words(miniature: str):
    spec = next(one for one in SPECS if one.miniature.id == miniature)
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, precision="float32")
    example = spec.miniature.texts["prompt"]

    def said(prompt: str) -> list[str]:
        host = Host()
        runner().encode(model, prompt, "", host)
        return [re.sub(r"^Took .*?\. (?=The)", "", line) for line in host.said if "tiny model" in line]

    assert not said(example) and not said(example.title())
    assert said("a purple dragon, a purple sea") == [
        f'The tiny model does not know: purple, dragon, sea. It knows "{example}".'
    ]
    assert said(" ") == [f'The prompt is empty. The tiny model knows "{example}".']
    (long,) = said(" ".join(f"{letter * 70}" for letter in "bcdfghijkl"))
    assert "bbb" in long and "kkk" not in long.partition(" and others")[0] and " and others. It knows" in long


def test_count_truncated_long_quoted_text_is_counted_by_glyph_encoder():
    spec = spec_for_family("HunyuanVideo15")
    glyphs = spec.text_encoders[1]
    tokenizer = tokenization.load_tokenizer(tiny.ensure_random(spec) / glyphs.tokenizer_folder)
    left, words = tokenization.count_truncated(glyphs, tokenizer, f'a sign "{"x" * 300}{END}" in the sun')
    assert left > 44 and words.startswith("x" * 20) and END in words
    assert tokenization.count_truncated(glyphs, tokenizer, "no quotes " * 100) == (0, "")
