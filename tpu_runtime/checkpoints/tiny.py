"""The built-in tiny checkpoints: made on first use from the real classes, with fixed random weights.

They have the real layout, the real tokenizer class and every part of the real model, at a size that a CPU runs in
seconds. What they generate means nothing; that it equals what diffusers generates does.
"""

import hashlib
import json
import os
import shutil
import string
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ..cache.store import cache_folder
from ..spec import Component, ModelSpec

# Part of the folder's name: raise it when the way of making a checkpoint changes.
VERSION = 3


def ensure(spec: ModelSpec) -> Path:
    """The folder of a spec's tiny checkpoint; makes it if it is not there."""
    description = {
        "version": VERSION,
        "scheduler": dict(spec.scheduler),
        "files": {path: dict(content) for path, content in spec.files.items()},
        "components": {component.name: dict(component.tiny) for component in spec.components},
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / "tiny" / f"{spec.tiny_id.removeprefix('tiny/')}-{digest}"
    if not folder.is_dir():
        write(spec, folder)
    return folder


def write(spec: ModelSpec, folder: Path, seed: int = 0) -> None:
    """Writes a checkpoint with the `tiny` configs of `spec`'s components to `folder`, all or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_parts(spec, scratch, seed)
        os.replace(scratch, folder)
    except OSError:
        # Another process may have made the same folder meanwhile; anything else is an error.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_parts(spec: ModelSpec, folder: Path, seed: int) -> None:
    index: dict[str, object] = {"_class_name": spec.pipeline_classes[0], **spec.index}
    written: dict[str, str] = {}
    for component in spec.components:
        if component.folder not in written:
            # Experts of one class must not be equal: nobody would see them mixed up.
            same = list(written.values()).count(component.class_name)
            written[component.folder] = component.class_name
            _write_weights(component, folder / component.folder, seed + same)
            index[component.folder] = [component.library, component.class_name]
    for text in spec.texts_encoded:
        text.write_tokenizer(folder / text.tokenizer_folder)
        index[text.tokenizer_folder] = ["transformers", text.tokenizer_class]
    for path, content in spec.files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(dict(content), indent=2), "utf-8")
    scheduler = folder / "scheduler"
    scheduler.mkdir()
    (scheduler / "scheduler_config.json").write_text(json.dumps(dict(spec.scheduler), indent=2), "utf-8")
    index["scheduler"] = ["diffusers", spec.scheduler["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), "utf-8")


def _write_weights(component: Component, folder: Path, seed: int) -> None:
    import torch

    from ..programs import modules

    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        module = modules.construct(component, component.tiny)
        for norm in module.modules():
            # Fresh running statistics are the identity: nobody would see them missing.
            if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm) and norm.track_running_stats:
                norm.running_mean.uniform_(-0.5, 0.5)
                norm.running_var.uniform_(0.5, 1.5)
    # Small files, so that larger components have an index and several shards as real ones do.
    module.save_pretrained(folder, max_shard_size="1MB")


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
