"""Tokenizers that files of text encoders carry along, as `tokenizer.json`, the form in which theirs are published."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import CheckpointError, TensorFile, parse_json

# Tensors of bytes, and what they are: a SentencePiece model, and Mistral's tekken.json.
SENTENCEPIECE, TEKKEN = "spiece_model", "tekken_model"
# Mistral's longest has 128; each is cut in two at every byte.
_LONGEST_TOKEN = 1024
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4


def embedded(tensors: Mapping[str, TensorFile]) -> TensorFile | None:
    """The tensor of a file that is a tokenizer."""
    return tensors.get(SENTENCEPIECE) or tensors.get(TEKKEN)


def write(tensor: TensorFile, folder: Path, chat_template: str | None = None) -> None:
    """Writes the tokenizer that a tensor is into a folder; `CheckpointError` where it is none."""
    from safetensors import safe_open

    with safe_open(str(tensor.path), framework="np") as file:
        content = file.get_tensor(tensor.name).tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        kind = tensor.name.rpartition(".")[2]
        (_write_sentencepiece if kind == SENTENCEPIECE else _write_tekken)(content, folder, chat_template)
    except CheckpointError:
        raise
    except Exception as error:  # whatever the parsers make of bytes that may be anything
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is no tokenizer that can be read ({type(error).__name__}: "
            f"{str(error)[:200]}); the file is damaged. Download it again."
        ) from error


def _write_sentencepiece(content: bytes, folder: Path, chat_template: str | None) -> None:
    """UMT5's and T5's as transformers 4 converted them: a unigram model behind its own normalisation."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(content)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    unknown = next(index for index, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN)
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=proto.trainer_spec.byte_fallback))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    tokenizer.normalizer = normalizers.Sequence(
        [
            *([normalizers.Precompiled(charsmap)] if charsmap else []),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    end = pieces[proto.trainer_spec.eos_id][0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, proto.trainer_spec.eos_id)]
    )
    special = [piece.piece for piece in proto.pieces if piece.type not in (_NORMAL, _USER_DEFINED, 6)]
    tokenizer.add_special_tokens(special)
    own = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    pad = pieces[proto.trainer_spec.pad_id][0] if proto.trainer_spec.pad_id >= 0 else end
    names = {"eos_token": end, "pad_token": pad, "unk_token": pieces[unknown][0]}
    _save(tokenizer, folder, {**names, "tokenizer_class": "T5Tokenizer"})


def _write_tekken(content: bytes, folder: Path, chat_template: str | None) -> None:
    """Mistral's: byte pairs by rank, behind the special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    said = parse_json(content)
    config = said["config"]
    num_special = int(config["default_num_special_tokens"])
    size = int(config["default_vocab_size"]) - num_special
    special = _special(said, num_special)
    ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in said["vocab"][:size]}
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
    tokenizer = Tokenizer(models.BPE(vocabulary, [pair for *_, pair in sorted(merges)], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(list(special))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    template = {"chat_template": chat_template} if chat_template else {}
    _save(tokenizer, folder, {**names, **template, "tokenizer_class": "LlamaTokenizerFast"})


def _special(said: Mapping[str, Any], count: int) -> list[str]:
    """The special tokens in their order; those without a name are fillers."""
    found = {int(entry["rank"]): str(entry["token_str"]) for entry in said.get("special_tokens") or ()}
    return [found.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def _letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {**{byte: chr(byte) for byte in own}, **{byte: chr(256 + index) for index, byte in enumerate(others)}}


def _save(tokenizer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(config), indent=2), "utf-8")
