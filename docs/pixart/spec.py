"""PixArt-Sigma text to image: PixArt-alpha/PixArt-Sigma-XL-2-1024-MS. The oracle is `diffusers.PixArtSigmaPipeline`."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...model_spec import (
    ConfigRequirement,
    DenoiserSpec,
    FloatInput,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    SamplingConfig,
    TextEncoding,
    TinyModel,
    VaeSpec,
)
from ..common import kl, t5
from .transformer import TRANSFORMER, forward

if TYPE_CHECKING:
    import numpy as np
    import torch

PROMPT = "A small cactus with a happy face in the Sahara desert."
MAX_TOKENS = 300


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int = MAX_TOKENS) -> "tuple[np.ndarray, np.ndarray]":
    """Ids and mask, `[rows, length]` int32; prompts in lower case, as upstream has them."""
    return t5.tokenize(tokenizer, [prompt.lower().strip() for prompt in prompts], length)


def encode_text(encoder: "torch.nn.Module", ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """`[rows, length]` tokens to `[rows, length, dim]` states."""
    return encoder(ids, mask).last_hidden_state, None


TEXT_ENCODER = t5.make_encoder(
    config={"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24, "vocab_size": 32128},
    tiny={"d_ff": 72, "d_kv": 8, "d_model": 40, "num_heads": 5, "num_layers": 2, "vocab_size": 210},
)

VAE_DECODER, _ = kl.make_vae(
    {"latent_channels": 4, "scaling_factor": 0.13025}, needs={"shift_factor": ConfigRequirement((None,))}
)

SPEC = ModelSpec(
    name="pixart-sigma-xl",
    family="PixArt",
    title="PixArt-Sigma XL",
    category="PixArt",
    published=HubCheckpoint(hub_id="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", pipeline_classes=("PixArtSigmaPipeline",)),
    miniature=TinyModel(id="tiny/pixart", inputs={"height": 80, "width": 112}),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=LatentGeometry(channels=4, stride_t=0, stride_hw=8, patch_thw=(1, 2, 2)),
    text_encoders=(
        TextEncoding(
            tokenizer_class="T5Tokenizer",
            max_length=MAX_TOKENS,
            width_key="caption_channels",
            tokenize=tokenize,
            encode=encode_text,
            write_tokenizer=partial(t5.write_t5_tokenizer, texts=(PROMPT.lower(),)),
        ),
    ),
    inputs={
        "height": IntInput(default=1024, low=64, high=2048, multiple_of=16),
        "width": IntInput(default=1024, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntInput(default=20, low=1, high=100),
        "guidance_scale": FloatInput(default=4.5, low=1.0, high=20.0),
        "seed": IntInput(default=0, low=0, high=2**64 - 1),
    },
    texts={"prompt": PROMPT, "negative_prompt": ""},
    recipe=SamplingConfig(
        scheduler={
            "_class_name": "DPMSolverMultistepScheduler",
            "algorithm_type": "dpmsolver++",
            "beta_end": 0.02,
            "beta_schedule": "linear",
            "beta_start": 0.0001,
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon",
            "solver_order": 2,
        }
    ),
    denoiser=DenoiserSpec(forward=forward),
    vae=VaeSpec(latent_format="SDXL", denormalize=kl.denormalize_latents, decode=kl.decode),
)
