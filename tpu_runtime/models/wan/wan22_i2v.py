"""Wan 2.2 image to video: Wan-AI/Wan2.2-I2V-A14B-Diffusers. The oracle is `diffusers.WanImageToVideoPipeline`.

Two experts of the network in `wan`, each for its part of the timesteps, and a VAE encoder.
"""

from dataclasses import replace

from ...model_spec import FloatInput, HubCheckpoint, ImageConditioning, IntInput, ModelSpec
from ..common import IMAGE_PROMPT
from ..common.wan_vae import VAE_DECODER
from ..common.wan_vae_encoder import VAE_ENCODER, condition_shapes, encode_image, encode_video
from ..text_encoders.wan import NEGATIVE_PROMPT, TEXT, TEXT_ENCODER
from . import wan

EXPERTS = wan.make_experts(wan.IMAGE_TRANSFORMER)

SPEC = ModelSpec(
    name="wan2.2-i2v-a14b",
    family="Wan22I2V",
    title="Wan 2.2 I2V A14B",
    category="Wan2.2-I2V",
    published=HubCheckpoint(
        hub_id="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        pipeline_classes=("WanImageToVideoPipeline",),
        # The first expert composes: it runs while the timestep is at least this share of the training timesteps.
        index={"boundary_ratio": 0.9},
    ),
    miniature=replace(wan.MINIATURE, id="tiny/wan22i2v", picture="wan_i2v_shapes.png"),
    components=(TEXT_ENCODER, *EXPERTS, VAE_ENCODER, VAE_DECODER),
    geometry=wan.GEOMETRY,
    text_encoders=(TEXT,),
    inputs={
        **wan.INPUTS,
        "num_inference_steps": IntInput(default=40, low=1, high=100),
        "guidance_scale": FloatInput(default=3.5, low=0.0, high=20.0),
        "guidance_scale_2": FloatInput(default=3.5, low=0.0, high=20.0),
        "seed": replace(wan.INPUTS["seed"], default=0),
        "shift": FloatInput(default=5.0, low=0.1, high=20.0, step=0.5),
    },
    texts={"prompt": IMAGE_PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=wan.RECIPE,
    denoiser=replace(wan.DENOISER, experts=tuple(expert.name for expert in EXPERTS)),
    vae=replace(wan.VAE, encode=encode_video),
    pictures=ImageConditioning(encode=encode_image, numbers=(1, 2), condition_shapes=condition_shapes),
)
