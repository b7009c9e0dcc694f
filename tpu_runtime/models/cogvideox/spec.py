"""CogVideoX 1.5, text to video: zai-org/CogVideoX1.5-5B, under the CogVideoX license.

The oracle is `diffusers.CogVideoXPipeline`, the paper https://arxiv.org/abs/2408.06072. Defaults are those of
`inference/cli_demo.py` in https://github.com/zai-org/CogVideo.
"""

import math
from typing import TYPE_CHECKING

from ...messages import compose
from ...model_spec import (
    MAG_CACHE_INPUTS,
    BoolInput,
    DenoiserSpec,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    IntInput,
    ModelSpec,
    SamplingConfig,
    Settings,
    TinyModel,
    VaeSpec,
)
from ...model_spec.upstream import UpstreamConfig
from .core_inputs import CORE
from .text_encoder import PROMPT, TEXT, TEXT_ENCODER
from .transformer import GEOMETRY, TRANSFORMER, forward
from .vae import VAE_DECODER, decode

if TYPE_CHECKING:
    import torch


# The published size for text to video.
HEIGHT, WIDTH = 768, 1360


def draw_noise(latent_shape: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
    """Draw the initial noise `[1, 16, frames, height, width]` in upstream's order: frame by frame.

    latent_shape: of the result. generator: advanced by the draw.
    """
    import torch

    rows, channels, frames, *size = latent_shape
    drawn = torch.randn((rows, frames, channels, *size), generator=generator, dtype=torch.float32)
    return drawn.transpose(1, 2).contiguous()


def dynamic_guidance(scale: float, timestep: float, num_steps: int) -> float:
    """Return the guidance scale of a step, between 1 and `scale` + 1, with upstream's `use_dynamic_cfg` formula.

    timestep: 999 to 0, which upstream's formula uses like a step index. So the schedule is not smooth. num_steps: of
    the schedule.
    """
    return 1 + scale * ((1 - math.cos(math.pi * ((num_steps - timestep) / num_steps) ** 5.0)) / 2)


def advise(settings: Settings) -> str | None:
    """Return a sentence if the size or the number of frames is not one of the published ones, else None."""
    if (settings.height, settings.width) == (HEIGHT, WIDTH) and settings.num_frames % 16 == 1:
        return None
    return compose(
        "model.size_unpublished", width=settings.width, height=settings.height,
        num_frames=settings.num_frames, published_width=WIDTH, published_height=HEIGHT,
    )  # fmt: skip


def denormalize_latents(sample: "torch.Tensor", vae_config: UpstreamConfig) -> "torch.Tensor":
    """Scale the solver's `sample` `[1, 16, frames, height, width]` to the VAE's own scale, as upstream's pipeline."""
    return 1 / vae_config["scaling_factor"] * sample


# The published checkpoint's config: DDIM (https://arxiv.org/abs/2010.02502) with v-prediction and a terminal
# signal-to-noise ratio of zero (https://arxiv.org/abs/2305.08891).
SCHEDULER = {
    "_class_name": "CogVideoXDDIMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "set_alpha_to_one": True,
    "snr_shift_scale": 1.0,
    "steps_offset": 0,
    "timestep_spacing": "trailing",
}

# The alternatives of the model authors' `inference/cli_demo.py`. For this model they recommend the second, with
# `use_dynamic_cfg`.
SCHEDULERS = {
    name: {"_class_name": name, "timestep_spacing": "trailing"}
    for name in ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler")
}

SPEC = ModelSpec(
    name="cogvideox1.5-5b",
    family="CogVideoX",
    title="CogVideoX 1.5 5B",
    category="CogVideoX",
    published=HubCheckpoint(hub_id="zai-org/CogVideoX1.5-5B", pipeline_classes=("CogVideoXPipeline",)),
    miniature=TinyModel(
        id="tiny/cogvideox",
        inputs={"height": 80, "width": 112, "num_frames": 9},
        texts={"prompt": "a red circle moves up on white", "negative_prompt": ""},
    ),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=GEOMETRY,
    text_encoders=(TEXT,),
    inputs={
        "height": IntInput(default=HEIGHT, low=64, high=1920, multiple_of=16),
        "width": IntInput(default=WIDTH, low=64, high=1920, multiple_of=16),
        "num_frames": IntInput(default=81, low=1, high=161, multiple_of=8, plus=1),
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        "guidance_scale": FloatInput(default=6.0, low=1.0, high=20.0),
        "seed": IntInput(default=42, low=0, high=2**64 - 1),
        "fps": IntInput(default=16, low=1, high=120),
        "use_dynamic_cfg": BoolInput(default=False),
        **MAG_CACHE_INPUTS,
    },
    texts={"prompt": PROMPT, "negative_prompt": ""},
    recipe=SamplingConfig(
        scheduler=SCHEDULER, schedulers=SCHEDULERS, guidance_at=dynamic_guidance, noise=draw_noise, advice=advise
    ),
    denoiser=DenoiserSpec(
        forward=forward,
        head_norms=(
            HeadNorms(queries=("transformer_blocks.*.attn1.norm_q",), keys=("transformer_blocks.*.attn1.norm_k",)),
        ),
    ),
    vae=VaeSpec(latent_format="CogVideoX1_5", denormalize=denormalize_latents, decode=decode),
    core=CORE,
)
