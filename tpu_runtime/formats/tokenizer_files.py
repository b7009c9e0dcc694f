"""Tokenizers embedded in files of text encoders, converted to `tokenizer.json`, the form in which theirs are published.

They are tensors of bytes in safetensors files, and fields in GGUF files.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import tokenization
from ..files import CheckpointError, TensorFile, parse_json, read_json
from ..messages import compose
from . import gguf_file

# Names of tensors of bytes: a SentencePiece model, and Mistral's tekken.json.
TENSORS = SENTENCEPIECE, TEKKEN = "spiece_model", "tekken_model"
# Prefix of GGUF's fields.
_GGUF = "tokenizer.ggml."
# Bytes; Mistral's longest has 128. Each token is split at every byte.
_LONGEST_TOKEN = 1024
# Placeholders are made for tokens without a name.
_MOST_SPECIAL = 4096
# Kinds of tokens, with the same numbers in SentencePiece's models and in GGUF's fields.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class _Words:
    """A rule that splits text into words, which byte pairs do not cross, by llama.cpp's name."""

    pattern: str
    pad: str  # token of the models' training; some GGUF files name another
    is_composed: bool = False  # whether text is normalised to NFC
    takes_words: bool = False  # whether words that are tokens are not split further


_WORDS = {
    "qwen2": _Words(tokenization.WORDS_QWEN2, pad="<|endoftext|>", is_composed=True),
    "tekken": _Words(tokenization.WORDS_TEKKEN, pad="<pad>", takes_words=True),
}


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer in a file of weights."""

    path: Path
    name: str  # of the tensor, or the prefix of GGUF's fields


def find_tokenizer(path: Path, tensors: Mapping[str, TensorFile], prefix: str = "") -> TokenizerFile | None:
    """Return the tokenizer in a file for the network with this `prefix`.

    None without a tokenizer, or for an unsupported kind of GGUF.

    path: of the file.
    tensors: of the file by name.
    In a checkpoint of several networks the tensor is inside the encoder, or next to it as ComfyUI saves it.
    """
    if path.suffix == gguf_file.SUFFIX:
        fields = gguf_file.read_gguf(path)[1]
        kind = gguf_file.get_text(fields, f"{_GGUF}model")
        is_known = kind == "t5" or (kind == "gpt2" and gguf_file.get_text(fields, f"{_GGUF}pre") in _WORDS)
        return TokenizerFile(path, _GGUF) if is_known else None
    candidates = (name for leaf in TENSORS for name in tensors if name.rpartition(".")[2] == leaf)
    nearest = max(candidates, key=lambda name: _nearness(name, prefix), default="")
    return TokenizerFile(path, tensors[nearest].name) if nearest and _nearness(nearest, prefix) >= 0 else None


def _nearness(name: str, prefix: str) -> int:
    """Return how many characters of a network's prefix a tensor shares; -1 for a tensor of another network."""
    place = name[: len(name) - len(name.rpartition(".")[2])]
    return len(place) if prefix.startswith(place) else len(prefix) if place.startswith(prefix) else -1


def read_tokenizers(path: Path, tensors: Mapping[str, TensorFile], prefix: str = "") -> dict[str, bytes]:
    """Return the contents of the tokenizers in a file, by their tensor names in safetensors files.

    path: of the file.
    tensors, prefix: as for `find_tokenizer`.
    """
    if (tokenizer_file := find_tokenizer(path, tensors, prefix)) is None:
        return {}
    if tokenizer_file.name == _GGUF:
        values = _fields(path)
        is_t5 = gguf_file.get_text(values, "model") == "t5"
        return {SENTENCEPIECE: _sentencepiece_of_gguf(values).SerializeToString()} if is_t5 else {}
    return {tokenizer_file.name.rpartition(".")[2]: _bytes(tokenizer_file)}


def read_folder_tokenizer(folder: Path) -> dict[str, bytes]:
    """Return `carried` for a tokenizer's folder: its own file, or the SentencePiece model of `tokenizer.json`."""
    for file, name in (("spiece.model", SENTENCEPIECE), ("tekken.json", TEKKEN)):
        if (folder / file).is_file():
            return {name: (folder / file).read_bytes()}
    document = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else {}
    model = document.get("model")
    if not isinstance(model, dict) or model.get("type") != "Unigram":
        return {}
    try:
        return {SENTENCEPIECE: _sentencepiece_of_json(document, model).SerializeToString()}
    except Exception as error:  # any error of parsing an untrusted file
        raise CheckpointError(compose(
            "file.tokenizer_unreadable", folder=folder / "tokenizer.json", error_type=type(error).__name__,
            error=str(error)[:200],
        )) from error  # fmt: skip


def _sentencepiece_of_json(said: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """Return the SentencePiece model of a `tokenizer.json`: the inverse of `_sentencepiece`."""
    model, unknown = _new_sentencepiece(), own["unk_id"]
    special = {token["content"] for token in said.get("added_tokens") or () if token.get("special")}
    for index, (piece, score) in enumerate(own["vocab"]):
        kind = _UNKNOWN if index == unknown else _CONTROL if piece in special else _NORMAL
        model.pieces.add(piece=piece, score=score, type=kind)
    numbers = {piece: index for index, (piece, _) in enumerate(own["vocab"])}
    model.trainer_spec.byte_fallback = bool(own.get("byte_fallback"))
    model.trainer_spec.unk_id = unknown
    model.trainer_spec.bos_id = -1
    model.trainer_spec.eos_id = numbers["</s>"]
    model.trainer_spec.pad_id = numbers.get("<pad>", -1)
    steps = (said.get("normalizer") or {}).get("normalizers") or ()
    charsmap = (step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled")
    model.normalizer_spec.precompiled_charsmap = base64.b64decode(next(charsmap, ""))
    return model


def write_tokenizer(carried: TokenizerFile, folder: Path, chat_template: str | None = None) -> int:
    """Write the tokenizer of a file into a folder, and return its number of tokens.

    Raises `CheckpointError` if invalid.

    chat_template: added to the config; None for no template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tokenization.guard_panics(carried.path):
            tokenizer, names = _read(carried)
            tokenizer.save(str(folder / "tokenizer.json"))
            size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    except CheckpointError:
        raise
    except Exception as error:  # any error of parsing untrusted bytes
        raise CheckpointError(compose(
            "file.carried_tokenizer_unreadable", path=carried.path, member=carried.name.rstrip("."),
            error_type=type(error).__name__, error=str(error)[:200],
        )) from error  # fmt: skip
    template = {"chat_template": chat_template} if chat_template else {}
    config = {**names, **template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    return size


def _read(carried: TokenizerFile) -> tuple[Any, dict[str, str]]:
    """Return a tokenizer, and its begin, end, padding and unknown tokens by their config keys."""
    if carried.name == _GGUF:
        values = _fields(carried.path)
        is_t5 = gguf_file.get_text(values, "model") == "t5"
        return _sentencepiece(_sentencepiece_of_gguf(values)) if is_t5 else _byte_pairs_of_gguf(values)
    content = _bytes(carried)
    if carried.name.rpartition(".")[2] == TEKKEN:
        return _tekken(content)
    model = _new_sentencepiece()
    model.ParseFromString(content)
    return _sentencepiece(model)


def _fields(path: Path) -> Mapping[str, Any]:
    """Return a GGUF file's fields of its tokenizer."""
    return gguf_file.read_gguf(path)[1].below(_GGUF)


def _bytes(carried: TokenizerFile) -> bytes:
    from safetensors import safe_open

    with safe_open(str(carried.path), framework="np") as file:
        return file.get_tensor(carried.name).tobytes()


def _new_sentencepiece() -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]


def _sentencepiece_of_gguf(fields: Mapping[str, Any]) -> Any:
    """Return the SentencePiece model that GGUF's fields were written from."""
    model = _new_sentencepiece()
    kinds = fields["token_type"]
    for piece, score, kind in zip(fields["tokens"], fields["scores"], kinds, strict=True):
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.byte_fallback = _BYTE in kinds
    model.trainer_spec.eos_id = fields["eos_token_id"]
    model.trainer_spec.pad_id = fields.get("padding_token_id", -1)
    charsmap = fields.get("precompiled_charsmap", ())
    model.normalizer_spec.precompiled_charsmap = bytes(value & 255 for value in charsmap)
    return model


def _sentencepiece(model: Any) -> tuple[Any, dict[str, str]]:
    """Return UMT5's or T5's tokenizer as transformers 4 converted it: its normalisation, then a unigram model."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    unknown = next((index for index, piece in enumerate(model.pieces) if piece.type == _UNKNOWN), None)
    if unknown is None:
        raise ValueError("it has no token for unknown text")
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=model.trainer_spec.byte_fallback))
    charsmap = model.normalizer_spec.precompiled_charsmap
    tokenizer.normalizer = normalizers.Sequence(
        [
            *([normalizers.Precompiled(charsmap)] if charsmap else []),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    end = pieces[model.trainer_spec.eos_id][0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, model.trainer_spec.eos_id)]
    )
    special = [piece.piece for piece in model.pieces if piece.type in (_UNKNOWN, _CONTROL, _UNUSED)]
    tokenizer.add_special_tokens(special)
    user_tokens = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in user_tokens])
    pad = pieces[model.trainer_spec.pad_id][0] if model.trainer_spec.pad_id >= 0 else end
    return tokenizer, {"eos_token": end, "pad_token": pad, "unk_token": pieces[unknown][0]}


def _tekken(content: bytes) -> tuple[Any, dict[str, str]]:
    """Return Mistral's tokenizer: special tokens, then byte pairs by rank."""
    document = parse_json(content)
    config = document["config"]
    tokenization.check_pattern(config["pattern"], "A tekken_model")
    num_special = int(config["default_num_special_tokens"])
    if not 0 <= num_special <= _MOST_SPECIAL:
        raise ValueError(
            f"default_num_special_tokens is {num_special}; published is 1000, and it may be {_MOST_SPECIAL} at most"
        )
    size = int(config["default_vocab_size"]) - num_special
    special = _special(document, num_special)
    ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in document["vocab"][:size]}
    if max(map(len, ranks)) > _LONGEST_TOKEN:
        raise ValueError(f"it has a token of more than {_LONGEST_TOKEN} bytes")
    letters = _letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {token: index for index, token in enumerate(special)}
    vocabulary |= {text(token): rank + num_special for token, rank in ranks.items()}
    merges: list[tuple[int, int, int, tuple[str, str]]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], (text(left), text(right))))
    words = _Words(config["pattern"], pad="<pad>", takes_words=True)
    tokenizer = _byte_pairs(vocabulary, [pair for *_, pair in sorted(merges)], words, special)
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": words.pad}


def _byte_pairs_of_gguf(fields: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return Qwen's or Mistral's tokenizer from GGUF's fields: tokens in order, and byte pairs in merging order."""
    words = _WORDS[str(gguf_file.get_text(fields, "pre"))]
    texts, kinds = fields["tokens"], fields["token_type"]
    by_kind = {kind: [token for token, k in zip(texts, kinds, strict=True) if k == kind] for kind in set(kinds)}
    unused = set(by_kind.get(_UNUSED, ()))
    vocabulary = {token: index for index, token in enumerate(texts) if token not in unused}
    if words.pad not in vocabulary:
        raise ValueError(f"it has no token {words.pad}")
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = _byte_pairs(vocabulary, merges, words, by_kind.get(_CONTROL, ()), by_kind.get(_USER_DEFINED, ()))
    ids = {name: fields.get(f"{key}_token_id") for name, key in (("bos_token", "bos"), ("eos_token", "eos"))}
    names = {name: texts[token_id] for name, token_id in ids.items() if token_id is not None}
    return tokenizer, {**names, "pad_token": words.pad}


def _byte_pairs(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, ...]],
    words: _Words,
    special: Iterable[str],
    own: Iterable[str] = (),
) -> Any:
    """Return a tokenizer that merges bytes of words. Tokens in `special` and `own` are matched in text as they are."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    model = models.BPE(dict(vocabulary), list(merges), ignore_merges=words.takes_words)  # pyright: ignore[reportArgumentType]
    tokenizer = Tokenizer(model)
    if words.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])
    return tokenizer


def _special(said: Mapping[str, Any], count: int) -> list[str]:
    """Return the special tokens in order, with placeholders for those without a name."""
    named = {int(entry["rank"]): str(entry["token_str"]) for entry in said.get("special_tokens") or ()}
    return [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def _letters() -> dict[int, str]:
    """Return GPT-2's letter of each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + index) for index, byte in enumerate(others)}}
