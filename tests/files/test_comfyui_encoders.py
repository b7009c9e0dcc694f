"""ComfyUI's `load_clip` as oracle: it reads the same files of text encoders on the CPU, and holds the numbers that we
read.

It takes an encoder's sizes from its own configs and not from the file, but for what `model_options` say: there the
tests name the miniatures' sizes. What it recognises a file by they keep as published: 24 layers and 10 240 rows (T5),
384 rows (ByT5), a bias of 512 (Qwen2.5-VL), a width of 2560, 4096 or 5120 and heads of 128 (Qwen3, Mistral).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.comfyui_oracle import (
    FP8,
    by_kitchen,
    fp8_new,
    fp8_old,
    holds,
    quantised,
    read_by_us,
    run_comfyui,
)
from comfyui_tpu.tests.files.single_files import Tensors
from comfyui_tpu.tests.files.test_gguf_and_tokenizers import PROMPTS, carried_by, sentencepiece_model, tekken
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tpu_runtime import tokenization
from comfyui_tpu.tpu_runtime.formats import tokenizer_files
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network

pytestmark = [needs_comfyui, pytest.mark.slow]


@dataclass(frozen=True, eq=False)
class Encoder:
    """A text encoder of a model: its sizes here, and ComfyUI's type and module of it."""

    model: str
    sizes: Mapping[str, Any]
    type: str
    module: str
    component: str = "text_encoder"
    # The module's name in ComfyUI's options.
    option: str | None = None

    def write(self, home: Path, name: str, change: Callable[[Tensors], Tensors] = single_files.same) -> Path:
        """The file of an encoder with random weights."""
        component = lookup_spec(self.model).component(self.component)
        text = component.tiny.get("text_config", component.tiny)
        sizes = {**text, **self.sizes, **({"head_dim": 128} if "head_dim" in text else {})}
        config = {**component.tiny, "text_config": sizes} if "text_config" in component.tiny else sizes
        folder = home / self.module
        if not folder.is_dir():
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
                torch.manual_seed(0)
                upstream_network.construct_upstream(component, config).save_pretrained(folder)
        return single_files.write(home / f"{name}.safetensors", folder, component.class_name, change=change)

    def job(self, *paths: Path, texts: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "kind": "clip", "type": self.type, "module": self.module, "paths": list(map(str, paths)), "texts": texts,
            "options": {f"{self.module if self.option is None else self.option}_model_config": dict(self.sizes)},
        }  # fmt: skip


T5_SIZES = {"num_layers": 24, "d_ff": 10240, "d_model": 32, "d_kv": 8, "num_heads": 2, "vocab_size": 100}
BYT5_SIZES = {**T5_SIZES, "num_layers": 2, "d_ff": 64, "d_kv": 64, "num_heads": 6}
LANGUAGE = {
    "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 64,
}  # fmt: skip
QWEN25_SIZES = {
    **LANGUAGE, "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
UMT5 = Encoder("wan2.1-t2v-14b", T5_SIZES, "WAN", "umt5xxl")
T5 = Encoder("cogvideox1.5-5b", T5_SIZES, "COGVIDEOX", "t5xxl")
MISTRAL = Encoder("flux2-dev", {**LANGUAGE, "hidden_size": 5120}, "FLUX2", "mistral3_24b")
QWEN3 = Encoder("flux2-klein-4b", {**LANGUAGE, "hidden_size": 2560}, "FLUX2", "qwen3_4b")
QWEN3_8B = Encoder("flux2-klein-9b", {**LANGUAGE, "hidden_size": 4096}, "FLUX2", "qwen3_8b")
QWEN25 = Encoder("hunyuanvideo1.5-t2v-720p", QWEN25_SIZES, "HUNYUAN_VIDEO_15", "qwen25_7b")
# Their sizes are all that two encoders of one model are told, and the second has no name there.
BYT5 = Encoder("hunyuanvideo1.5-t2v-720p", BYT5_SIZES, "HUNYUAN_VIDEO_15", "byt5_small", "text_encoder_2", option="")
CARRIED = {"spiece_model": sentencepiece_model, "tekken_model": tekken}


def carrying(name: str) -> Callable[[Tensors], Tensors]:
    """A file with its tokenizer."""
    content = torch.frombuffer(bytearray(CARRIED[name]()), dtype=torch.uint8)
    return lambda tensors: {**tensors, name: content}


def weights(found: Tensors) -> Tensors:
    return {name: tensor for name, tensor in found.items() if not name.startswith("tokens.")}


def test_text_encoders_and_tokenizers_match_comfyui(tmp_path: Path):
    carried = {UMT5: "spiece_model", MISTRAL: "tekken_model"}
    jobs, files = [], []
    for encoder in (UMT5, T5, MISTRAL, QWEN3, QWEN3_8B):
        change = carrying(carried[encoder]) if encoder in carried else single_files.same
        files.append(encoder.write(tmp_path, f"{encoder.module}_file", change))
        jobs.append(encoder.job(files[-1], texts=PROMPTS if encoder in carried else ()))
    both = [encoder.write(tmp_path, f"{encoder.module}_file") for encoder in (QWEN25, BYT5)]
    for encoder in (QWEN25, BYT5):
        jobs.append({**encoder.job(*both), "options": {**QWEN25.job()["options"], **BYT5.job()["options"]}})
    theirs = run_comfyui(tmp_path, *jobs)
    for path, found in zip([*files, *both], theirs, strict=True):
        holds(read_by_us(path), weights(found), 0.0)
    for encoder, name in carried.items():
        found = theirs[(UMT5, T5, MISTRAL).index(encoder)]
        tensor = carried_by(tmp_path / f"{encoder.module}_file.safetensors")
        assert tensor is not None
        tokenizer_files.write_tokenizer(tensor, tmp_path / name)
        tokenizer = tokenization.load_tokenizer(tmp_path / name)
        for number, text in enumerate(PROMPTS):
            assert tokenizer(text)["input_ids"] == found[f"tokens.{number}"].tolist(), text


def fp8_of_umt5(tensors: Tensors) -> Tensors:
    """ComfyUI's first marks."""
    return {**quantised(fp8_old, ".DenseReluDense.")(tensors), "scaled_fp8": torch.zeros(2, dtype=FP8)}


# The formats in which ComfyUI's templates name these encoders.
QUANTISED = {
    "UMT5 in fp8": (UMT5, fp8_of_umt5),
    "Mistral in fp8": (MISTRAL, quantised(fp8_new, ".self_attn.")),
    "Mistral in nvfp4": (MISTRAL, quantised(by_kitchen("TensorCoreNVFP4Layout", "nvfp4"), ".mlp.")),
    "Qwen3 8B in fp8": (QWEN3_8B, quantised(fp8_new, ".mlp.")),
    "T5 in mxfp8": (T5, quantised(by_kitchen("TensorCoreMXFP8Layout", "mxfp8"), ".DenseReluDense.")),
}  # fmt: skip


def test_quantized_text_encoders_match_comfyui(tmp_path: Path):
    """But for one rounding: ComfyUI's are bfloat16."""
    carried = {UMT5: carrying("spiece_model"), MISTRAL: carrying("tekken_model")}
    files = []
    for number, (encoder, change) in enumerate(QUANTISED.values()):
        own = carried.get(encoder, single_files.same)
        files.append(encoder.write(tmp_path, f"file{number}", lambda tensors: own(change(tensors))))  # noqa: B023
    jobs = [encoder.job(path) for (encoder, _), path in zip(QUANTISED.values(), files, strict=True)]
    for path, found in zip(files, run_comfyui(tmp_path, *jobs), strict=True):
        holds(read_by_us(path), weights(found), 2**-7)
