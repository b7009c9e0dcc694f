"""Rewrites a part of a checkpoint as older versions of the libraries wrote it, as the real ones are published."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from comfyui_tpu.tpu_runtime.files import read_json
from safetensors.torch import load_file, save_file

Rename = Callable[[str], str]


def moved(*pairs: tuple[str, str]) -> Rename:
    """Names that start with the first of a pair start with its second; the first pair that fits counts."""

    def rename(name: str) -> str:
        found = next((pair for pair in pairs if name.startswith(pair[0])), ("", ""))
        return found[1] + name.removeprefix(found[0])

    return rename


def rewrite(source: Path, target: Path, rename: Rename, shards: int = 2) -> None:
    """A copy of a component's folder with other names and an older config; more than one file have an index."""
    target.mkdir(parents=True)
    tensors = {rename(name): x for path in source.glob("*.safetensors") for name, x in load_file(path).items()}
    config = read_json(source / "config.json")
    diffusers = "_class_name" in config
    stem = "diffusion_pytorch_model" if diffusers else "model"
    weight_map = {}
    for shard in range(shards):
        number = f"-{shard + 1:05}-of-{shards:05}" if shards > 1 else ""
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, target / f"{stem}{number}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(names, f"{stem}{number}.safetensors")
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (target / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    older = {**config, "_diffusers_version": "0.33.0"} if diffusers else as_transformers_4(config)
    (target / "config.json").write_text(json.dumps(older))


def as_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the words of transformers 4: of formats, of rotary embeddings, and with what it wrote beside them."""
    older = {name: as_transformers_4(part) if name.endswith("_config") else part for name, part in config.items()}
    rope = older.pop("rope_parameters", None)
    if rope is not None:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        older |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if len(scaling) > 1 else None}
    if older.pop("dtype", None):
        older |= {"torch_dtype": "bfloat16", "_name_or_path": "somewhere", "_attn_implementation_autoset": True}
        older |= {"transformers_version": "4.49.0", "tie_word_embeddings": False}
    if "t5" in config["model_type"]:
        older |= {"output_past": True, "scalable_attention": True, "tokenizer_class": "T5Tokenizer"}
    return older


def umt5_tokenizer(folder: Path) -> Any:
    """Wan's tokenizer as its file has it; upstream's pipelines would make a T5Tokenizer with another unknown token."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer" / "tokenizer.json"), pad_token="<pad>", eos_token="</s>"
    )
