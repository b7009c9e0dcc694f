"""Wan 2.1 and 2.2, text to video.

Wan-AI/Wan2.1-T2V-14B-Diffusers, Wan2.1-T2V-1.3B-Diffusers and Wan2.2-T2V-A14B-Diffusers, licensed under Apache-2.0. The
paper is https://arxiv.org/abs/2503.20314, the oracle `diffusers.WanPipeline`. The first half has the parts that the
other models of the family share.

Defaults of steps, guidance and shift are those of `generate.py` and the README in https://github.com/Wan-Video/Wan2.1,
and of `wan/configs/` in https://github.com/Wan-Video/Wan2.2.
"""

from dataclasses import replace

from ...model_spec import (
    MAG_CACHE_INPUTS,
    DenoiserSpec,
    FloatInput,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    SamplingConfig,
    TinyModel,
    VaeSpec,
)
from ..common import light
from ..common.wan_vae import VAE_DECODER, decode, denormalize_latents
from .core_inputs import CORE
from .text_encoder import NEGATIVE_PROMPT, PROMPT, TEXT, TEXT_ENCODER
from .transformer import TRANSFORMER, forward, make_experts

# The published checkpoint's config: UniPC (https://arxiv.org/abs/2302.04867) of order 2 on a flow. The sampler's widget
# overrides `flow_shift`.
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "solver_order": 2,
    "solver_type": "bh2",
    "timestep_spacing": "linspace",
    "use_flow_sigmas": True,
}

INPUTS = {
    "height": IntInput(default=720, low=64, high=1920, multiple_of=16),
    "width": IntInput(default=1280, low=64, high=1920, multiple_of=16),
    "num_frames": IntInput(default=81, low=1, high=241, multiple_of=4, plus=1),
    "num_inference_steps": IntInput(default=50, low=1, high=100),
    "guidance_scale": FloatInput(default=5.0, low=0.0, high=20.0),
    "seed": IntInput(default=2025, low=0, high=2**64 - 1),
    "fps": IntInput(default=16, low=1, high=120),
    # For the second of two experts, the one for low noise. 0: guidance as for the first.
    "guidance_scale_2": FloatInput(default=0.0, low=0.0, high=20.0),
    # Steps of the first expert. 0: it runs down to the checkpoint's `boundary_ratio`.
    "high_noise_steps": IntInput(default=0, low=0, high=100),
    **MAG_CACHE_INPUTS,
}

# Latents `[1, 16, 1 + (frames - 1) / 4, height / 8, width / 8]`; a token is 1 x 2 x 2 of them.
GEOMETRY = LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=(1, 2, 2))
RECIPE = SamplingConfig(scheduler=SCHEDULER, shift_key="flow_shift")
DENOISER = DenoiserSpec(forward=forward, tile=(7, 9, 16))
VAE = VaeSpec(latent_format="Wan21", denormalize=denormalize_latents, decode=decode, light=light.WAN)
MINIATURE = TinyModel(
    id="tiny/wan21",
    inputs={"height": 80, "width": 112, "num_frames": 17},
    texts={"prompt": "a red circle moves right on blue", "negative_prompt": ""},
)

SPEC = ModelSpec(
    name="wan2.1-t2v-14b",
    family="Wan21",
    title="Wan 2.1 T2V 14B",
    category="Wan2.1",
    published=HubCheckpoint(
        hub_id="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        # FastVideo's (FastWan, few steps) and diffusers' of SkyReels V2 (not diffusion forcing) run the same network.
        pipeline_classes=("WanPipeline", "WanDMDPipeline", "SkyReelsV2Pipeline"),
    ),
    miniature=MINIATURE,
    components=(TEXT_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=GEOMETRY,
    text_encoders=(TEXT,),
    inputs={**INPUTS, "flow_shift": FloatInput(default=5.0, low=0.1, high=20.0, step=0.5)},
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=RECIPE,
    denoiser=DENOISER,
    vae=VAE,
    core=CORE,
)

# Siblings: another size, and two experts.
_SMALL = TRANSFORMER.derive(
    config={"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30},
    tiny={"attention_head_dim": 12, "ffn_dim": 130, "num_attention_heads": 12, "num_layers": 2},
)

SMALL = replace(
    SPEC,
    name="wan2.1-t2v-1.3b",
    title="Wan 2.1 T2V 1.3B",
    published=replace(SPEC.published, hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    miniature=replace(MINIATURE, id="tiny/wan21_1.3b"),
    components=(TEXT_ENCODER, _SMALL, VAE_DECODER),
    inputs={
        **SPEC.inputs,
        # The README's `--size 832*480 --sample_shift 8 --sample_guide_scale 6`.
        "height": replace(SPEC.whole_numbers("height"), default=480),
        "width": replace(SPEC.whole_numbers("width"), default=832),
        "guidance_scale": FloatInput(default=6.0, low=0.0, high=20.0),
        "flow_shift": FloatInput(default=8.0, low=0.1, high=20.0, step=0.5),
    },
)

EXPERTS = make_experts(TRANSFORMER)

TWO_EXPERTS = replace(
    SPEC,
    name="wan2.2-t2v-a14b",
    title="Wan 2.2 T2V A14B",
    # The first expert, for high noise, runs while the timestep is at least this share of the training timesteps.
    published=replace(SPEC.published, hub_id="Wan-AI/Wan2.2-T2V-A14B-Diffusers", index={"boundary_ratio": 0.875}),
    miniature=replace(MINIATURE, id="tiny/wan22t2v"),
    components=(TEXT_ENCODER, *EXPERTS, VAE_DECODER),
    inputs={
        **SPEC.inputs,
        "num_inference_steps": IntInput(default=40, low=1, high=100),
        "guidance_scale": FloatInput(default=4.0, low=0.0, high=20.0),
        "guidance_scale_2": FloatInput(default=3.0, low=0.0, high=20.0),
        # `sample_shift` of `wan/configs/wan_t2v_A14B.py`; the checkpoint's scheduler config has 3.
        "flow_shift": FloatInput(default=12.0, low=0.1, high=20.0, step=0.5),
    },
    denoiser=replace(DENOISER, experts=tuple(expert.name for expert in EXPERTS)),
)

SIBLINGS = (SMALL, TWO_EXPERTS)
