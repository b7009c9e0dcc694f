"""The tiny model of HunyuanVideo 1.5 image to video: that of text to video, trained with and without a first frame.

The transformer uses the latents of the first frame; the vision model has no effect.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tpu_runtime.models.hunyuan15.i2v import SPEC
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from ..training import shipped, upstream

TAG, SOURCE = "image-to-video", "moving"
CARD = """\
A small model with the classes of HunyuanVideo 1.5's image-to-video model. It is the [tiny model for text to
video](../hunyuan15/README.md), which was trained with and without a first frame (`tools/train_miniature.py`). The
vision model returns the same for every image, because the tiny model does not need it.

It understands first frames with one or two shapes ({shapes}) in {colours}. The sentence says what they do, such as "a
red circle moves right on blue": {motions}. Videos are {width}x{height} with 9 frames."""

PARTS = ("guider", "scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")
SHARED = {name: f"hunyuan15/{name}" for name in PARTS}


def train(out: Path, seed: int) -> Any:
    """Return the pipeline; it needs no further training."""
    start = shipped("hunyuan15")
    load = partial(upstream.HunyuanVideo15Pipeline.from_pretrained, trust_remote_code=False)
    base = load(start, torch_dtype=torch.float32)
    shutil.copytree(start / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    transformer = type(base.transformer).from_config({**base.transformer.config, "task_type": "i2v"})
    transformer.load_state_dict(base.transformer.state_dict())
    vision = SiglipVisionModel(SiglipVisionConfig(**SPEC.component("image_encoder").tiny))
    for name, parameter in vision.named_parameters():
        # Zeros would tell upstream's transformer that there is no picture; what it makes of ones is nothing, too.
        parameter.data.fill_(1.0 if name.endswith("post_layernorm.bias") else 0.0)
    processor = SiglipImageProcessorPil(**SPEC.published.files["feature_extractor/preprocessor_config.json"])
    parts = {name: base.components[name] for name in PARTS}
    pipeline = upstream.HunyuanVideo15ImageToVideoPipeline(
        **{**parts, "transformer": transformer}, image_encoder=vision, feature_extractor=processor
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
