"""What several models share of T5."""

import json
import string
from collections.abc import Iterable
from pathlib import Path


def write_t5_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """A real T5 tokenizer whose vocabulary is the words of `texts` and single characters."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    T5Tokenizer(vocab=[*special, *_pieces(texts)], extra_ids=0).save_pretrained(folder)


def write_umt5_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """The same in the form in which UMT5's is published: by transformers 4, its unknown token at 3."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["<pad>", "</s>", "<s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram([*((token, 0.0) for token in special), *_pieces(texts)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {**names, "extra_ids": 0, "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2), "utf-8")


def _pieces(texts: Iterable[str]) -> list[tuple[str, float]]:
    """The words of `texts` and single characters, with their weights for a T5 tokenizer."""
    words = sorted({word.strip(string.punctuation) for text in texts for word in text.split()} - {""})
    characters = string.ascii_letters + string.digits + string.punctuation
    return [("▁", -6.0), *((f"▁{word}", -4.0) for word in words), *((character, -8.0) for character in characters)]
