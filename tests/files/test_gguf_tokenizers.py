"""Tokenizers in GGUF's fields give the tokens of those that llama.cpp's converter wrote the fields from."""

import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import transformers
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.test_gguf_and_tokenizers import PROMPTS, by_rank, carried_by, sentencepiece_model, tekken
from comfyui_tpu.tests.files.test_single_files import WAN, rest
from comfyui_tpu.tests.support.comfyui_server import COMFYUI, needs_comfyui
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import tokenization
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.formats import tokenizer_files
from comfyui_tpu.tpu_runtime.models import LAYOUTS, lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from sentencepiece import sentencepiece_model_pb2

pytestmark = pytest.mark.slow

# Kinds of tokens as llama.cpp numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


@contextlib.contextmanager
def gguf_file(path: Path, architecture: str) -> Any:
    writer = gguf.GGUFWriter(str(path), architecture)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sentencepiece(writer: gguf.GGUFWriter, content: bytes, size: int) -> None:
    """As `T5Model.set_vocab` of llama.cpp's `convert_hf_to_gguf.py`: filled up to the model's vocabulary."""
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(content)
    rows = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    rows += [(f"[PAD{number}]", -1000.0, UNUSED) for number in range(len(rows), size)]
    pieces, scores, kinds = zip(*rows, strict=True)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.encode() for piece in pieces])
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(model.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(model.normalizer_spec.remove_extra_whitespaces)
    writer.add_precompiled_charsmap(model.normalizer_spec.precompiled_charsmap)
    writer.add_eos_token_id(model.trainer_spec.eos_id)
    writer.add_pad_token_id(model.trainer_spec.pad_id)


def add_byte_pairs(
    writer: gguf.GGUFWriter,
    pre: str,
    vocabulary: Mapping[str, int],
    merges: Sequence[str],
    kinds: Mapping[str, int],
    end: str,
) -> None:
    """As `_set_vocab_gpt2` of the same. The padding's token is another than the model's, as some files have it."""
    by_id = {index: token for token, index in vocabulary.items()}
    names = [by_id.get(index, f"[PAD{index}]") for index in range(max(by_id) + 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([kinds.get(name, NORMAL) if name in vocabulary else UNUSED for name in names])
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(vocabulary[end])
    writer.add_pad_token_id(vocabulary[end])


def load_written_tokenizer(path: Path, chat_template: str | None = None) -> Any:
    """The tokenizer of a file."""
    carried = carried_by(path)
    assert carried is not None
    tokenizer_files.write_tokenizer(carried, path.with_suffix(""), chat_template)
    return tokenization.load_tokenizer(path.with_suffix(""))


def test_gguf_umt5_tokenizer_matches_sentencepiece(tmp_path: Path):
    model, source = sentencepiece_model(), tiny.ensure_random(WAN)
    path = tmp_path / "umt5.gguf"
    with gguf_file(path, "t5encoder") as writer:
        for name, tensor in single_files.t5_llama(single_files.load_folder(source / "text_encoder")).items():
            writer.add_tensor(name, tensor.numpy())
        add_sentencepiece(writer, model, 200)
    found = checkpoint.locate(WAN, rest(WAN, str(path)))
    assert found.folder("tokenizer", SilentProgress()) != source / "tokenizer"
    tokenizer = tokenization.load_tokenizer(found.folder("tokenizer", SilentProgress()))
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model, add_eos=True)
    for prompt in PROMPTS:
        assert tokenizer(prompt)["input_ids"] == oracle.encode(prompt), prompt
    assert tokenizer("", padding="max_length", max_length=4)["input_ids"] == [1, 0, 0, 0]


CHATS = [*PROMPTS, "It's 12345 o'clock, I'LL\n\n  go…", "é e\u0301 ﬁ", "<|im_end|> <think>x</think>", "日本語 🙂\t."]


def qwen_of(folder: Path, path: Path) -> transformers.Qwen2Tokenizer:
    """A folder's tokenizer, also as GGUF."""
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(folder)
    said = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]]
    kinds = {each["content"]: CONTROL if each["special"] else USER_DEFINED for each in said["added_tokens"]}
    with gguf_file(path, "qwen3") as writer:
        add_byte_pairs(writer, "qwen2", tokenizer.get_vocab(), merges, kinds, "<|im_end|>")
    return tokenizer


@pytest.mark.parametrize("name", ["flux2-klein-4b", "hunyuanvideo1.5-t2v-720p"])
def test_gguf_qwen_tokenizer_matches_folder_tokenizer(name: str, tmp_path: Path):
    spec = lookup_spec(name)
    text, kind = spec.text_encoders[0], spec.component("text_encoder").class_name
    folder = tiny.ensure_random(spec) / "tokenizer"
    oracle = qwen_of(folder, tmp_path / "qwen.gguf")
    template = next(layout.chat_template for layout in LAYOUTS if layout.class_name == kind)
    tokenizer = load_written_tokenizer(tmp_path / "qwen.gguf", template)
    for prompt in CHATS:
        assert tokenizer(prompt)["input_ids"] == oracle(prompt)["input_ids"], prompt
    ours, theirs = (text.tokenize(each, CHATS) for each in (tokenizer, tokenization.load_tokenizer(folder)))
    assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


@needs_comfyui
def test_gguf_published_qwen_tokenizer_round_trips(tmp_path: Path):
    """151 643 byte pairs, which ComfyUI has next to its code."""
    oracle = qwen_of(COMFYUI / "comfy" / "text_encoders" / "qwen25_tokenizer", tmp_path / "qwen.gguf")
    tokenizer = load_written_tokenizer(tmp_path / "qwen.gguf")
    assert len(oracle) > 150_000
    for prompt in CHATS:
        assert tokenizer(prompt)["input_ids"] == oracle(prompt)["input_ids"], prompt


# Mistral's own words, as its tekken.json has them: another case of letters begins another.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def test_gguf_mistral_tokenizer_matches_tekken(tmp_path: Path):
    """As transformers holds it and llama.cpp writes it: every pair of tokens that is one is a merge, by rank."""
    # As an attribute of `transformers` it is a module or a function, by what was imported before.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    said = json.loads(tekken())
    letters = bytes_to_unicode()
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in said["vocab"]}
    own = {token: "".join(letters[byte] for byte in token) for token in ranks}
    special = {entry["token_str"]: entry["rank"] for entry in said["special_tokens"]}
    pairs = [
        (rank, f"{own[token[:cut]]} {own[token[cut:]]}")
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {**special, **{own[token]: rank + 20 for token, rank in ranks.items()}}
    with gguf_file(tmp_path / "mistral.gguf", "llama") as writer:
        merges = [pair for _, pair in sorted(pairs)]
        add_byte_pairs(writer, "tekken", vocabulary, merges, dict.fromkeys(special, CONTROL), "</s>")
    tokenizer = load_written_tokenizer(tmp_path / "mistral.gguf", "{{ bos_token }}")
    for prompt in ("a cat and a dog", "hello  world", " Zebra über 过曝 12", "cats\n\nx!", "baking catDog"):
        assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == by_rank(prompt, TEKKEN), prompt
    assert tokenizer("[INST]cat[/INST]", add_special_tokens=False)["input_ids"] == [3, *by_rank("cat", TEKKEN), 4]
    assert tokenizer.pad_token_id == 11


def spoil(writer: gguf.GGUFWriter, case: str) -> None:
    writer.add_tokenizer_model("gpt2" if "pairs" in case else "t5")
    writer.add_tokenizer_pre("qwen2")
    if case != "no tokens":
        writer.add_token_list(["<unk>", "</s>", "a"])
    writer.add_token_scores([0.0, 0.0, -1.0])
    first = NORMAL if case == "no unknown" else UNKNOWN
    writer.add_token_types([first, CONTROL, NORMAL][: 2 if case == "fewer kinds" else 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(10**6)


@pytest.mark.parametrize("case", ["no tokens", "fewer kinds", "no unknown", "an end beyond all", "pairs of no token"])
def test_gguf_invalid_tokenizer_fields_raise_checkpoint_error(case: str, tmp_path: Path):
    with gguf_file(tmp_path / "file.gguf", "t5encoder") as writer:
        spoil(writer, case)
    with raises_message(CheckpointError, "file.carried_tokenizer_unreadable", member="tokenizer.ggml"):
        load_written_tokenizer(tmp_path / "file.gguf")


def test_gguf_unknown_pre_tokenizer_carries_no_tokenizer(tmp_path: Path):
    with gguf_file(tmp_path / "file.gguf", "llama") as writer:
        add_byte_pairs(writer, "starcoder", {"a": 0}, ["a a"], {}, "a")
    assert carried_by(tmp_path / "file.gguf") is None


def test_gguf_tokenizer_larger_than_embeddings_raises_checkpoint_error(tmp_path: Path):
    path = tmp_path / "umt5.gguf"
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(sentencepiece_model())
    model.normalizer_spec.precompiled_charsmap = b""  # what its text becomes is not asked, and it is long to read
    with gguf_file(path, "t5encoder") as writer:
        for name, tensor in single_files.t5_llama(
            single_files.load_folder(tiny.ensure_random(WAN) / "text_encoder")
        ).items():
            writer.add_tensor(name, tensor.numpy())
        add_sentencepiece(writer, model.SerializeToString(), 201)
    with raises_message(CheckpointError, "checkpoint.tokenizer_of_another_model", size=201, rows=200):
        checkpoint.locate(WAN, rest(WAN, str(path)))
