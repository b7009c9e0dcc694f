"""Wan 2.1 and 2.2, text to video.

Wan-AI/Wan2.1-T2V-14B-Diffusers, Wan2.1-T2V-1.3B-Diffusers and Wan2.2-T2V-A14B-Diffusers. The oracle is
`diffusers.WanPipeline`. The network is `wan`.
"""

from dataclasses import replace

from ...model_spec import FloatInput, HubCheckpoint, IntInput, ModelSpec
from ..common.wan_vae import VAE_DECODER
from ..text_encoders.wan import NEGATIVE_PROMPT, PROMPT, TEXT, TEXT_ENCODER
from . import wan

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
    miniature=wan.MINIATURE,
    components=(TEXT_ENCODER, wan.TRANSFORMER, VAE_DECODER),
    geometry=wan.GEOMETRY,
    text_encoders=(TEXT,),
    inputs={**wan.INPUTS, "flow_shift": FloatInput(default=5.0, low=0.1, high=20.0, step=0.5)},
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=wan.RECIPE,
    denoiser=wan.DENOISER,
    vae=wan.VAE,
)

# Siblings: another size, and two experts.
_SMALL = wan.TRANSFORMER.derive(
    config={"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30},
    tiny={"attention_head_dim": 12, "ffn_dim": 130, "num_attention_heads": 12, "num_layers": 2},
)

SMALL = replace(
    SPEC,
    name="wan2.1-t2v-1.3b",
    title="Wan 2.1 T2V 1.3B",
    published=replace(SPEC.published, hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    miniature=replace(wan.MINIATURE, id="tiny/wan21_1.3b"),
    components=(TEXT_ENCODER, _SMALL, VAE_DECODER),
    inputs={
        **SPEC.inputs,
        # The model authors' defaults.
        "height": replace(SPEC.whole_numbers("height"), default=480),
        "width": replace(SPEC.whole_numbers("width"), default=832),
        "guidance_scale": FloatInput(default=6.0, low=0.0, high=20.0),
        "flow_shift": FloatInput(default=8.0, low=0.1, high=20.0, step=0.5),
    },
)

EXPERTS = wan.make_experts(wan.TRANSFORMER)

TWO_EXPERTS = replace(
    SPEC,
    name="wan2.2-t2v-a14b",
    title="Wan 2.2 T2V A14B",
    # The first expert composes: it runs while the timestep is at least this share of the training timesteps.
    published=replace(SPEC.published, hub_id="Wan-AI/Wan2.2-T2V-A14B-Diffusers", index={"boundary_ratio": 0.875}),
    miniature=replace(wan.MINIATURE, id="tiny/wan22t2v"),
    components=(TEXT_ENCODER, *EXPERTS, VAE_DECODER),
    inputs={
        **SPEC.inputs,
        "num_inference_steps": IntInput(default=40, low=1, high=100),
        "guidance_scale": FloatInput(default=4.0, low=0.0, high=20.0),
        "guidance_scale_2": FloatInput(default=3.0, low=0.0, high=20.0),
        # The model authors' value; the checkpoint's scheduler config has 3.
        "flow_shift": FloatInput(default=12.0, low=0.1, high=20.0, step=0.5),
    },
    denoiser=replace(wan.DENOISER, experts=tuple(expert.name for expert in EXPERTS)),
)

SIBLINGS = (SMALL, TWO_EXPERTS)
