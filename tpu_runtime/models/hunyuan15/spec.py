"""HunyuanVideo 1.5, text to video: hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v.

The oracle is `diffusers.HunyuanVideo15Pipeline`, the paper https://arxiv.org/abs/2511.18870. The checkpoint is a
conversion of tencent/HunyuanVideo-1.5, under the Tencent Hunyuan Community License.
"""

from typing import Any

from ...model_spec import (
    BoolInput,
    DenoiserSpec,
    FeatureReuse,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    SamplingConfig,
    TinyModel,
    VaeSpec,
)
from ...model_spec.upstream import UpstreamConfig
from .core_inputs import CORE
from .text_encoder import GLYPH_ENCODER, NEGATIVE_PROMPT, PROMPT, TEXT_ENCODER, TEXT_ENCODERS
from .transformer import TRANSFORMER, forward, keep_features, reuse_features
from .vae import LIGHT_VAE, VAE_DECODER, decode, denormalize_latents


def solver_arguments(
    config: UpstreamConfig, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    """Return upstream's arguments of `set_timesteps`, besides the number of steps: evenly spaced sigmas.

    config, latent_shape, shift: unused here; the shift is a key of the scheduler's config. num_steps: of the schedule.
    """
    import numpy as np

    return {"sigmas": np.linspace(1.0, 0.0, num_steps + 1)[:-1]}


# The published 720p checkpoint's config; for 480p the shift is 5.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 9.0,
    "use_dynamic_shifting": False,
}

SPEC = ModelSpec(
    name="hunyuanvideo1.5-t2v-720p",
    family="HunyuanVideo15",
    title="HunyuanVideo 1.5 T2V",
    category="HunyuanVideo1.5",
    published=HubCheckpoint(
        hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        pipeline_classes=("HunyuanVideo15Pipeline",),
        index={"guider": ("diffusers", "ClassifierFreeGuidance")},
        files={"guider/guider_config.json": {"_class_name": "ClassifierFreeGuidance", "guidance_scale": 6.0}},
    ),
    miniature=TinyModel(
        id="tiny/hunyuan15",
        inputs={"height": 80, "width": 112, "num_frames": 9},
        texts={"prompt": "a red circle moves right on blue", "negative_prompt": ""},
    ),
    components=(TEXT_ENCODER, GLYPH_ENCODER, TRANSFORMER, VAE_DECODER),
    # Latents `[1, 32, 1 + (frames - 1) / 4, height / 16, width / 16]`; a token is one of them.
    geometry=LatentGeometry(channels=32, stride_t=4, stride_hw=16, patch_thw=(1, 1, 1)),
    text_encoders=TEXT_ENCODERS,
    inputs={
        "height": IntInput(default=720, low=64, high=1920, multiple_of=16),
        "width": IntInput(default=1280, low=64, high=1920, multiple_of=16),
        "num_frames": IntInput(default=121, low=1, high=241, multiple_of=4, plus=1),
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        "guidance_scale": FloatInput(default=6.0, low=1.0, high=20.0),  # below 1 upstream still guides
        "seed": IntInput(default=42, low=0, high=2**64 - 1),
        # 0: the checkpoint's own shift, which differs between 480p, 720p and image to video.
        "flow_shift": FloatInput(default=0.0, low=0.0, high=20.0, step=0.5),
        "fps": IntInput(default=24, low=1, high=120),
        "step_cache": BoolInput(default=False),
        # Reuse suits the middle of 50 steps: the first steps compose the video, the last add its details.
        "cache_start": IntInput(default=11, low=0, high=100),
        "cache_end": IntInput(default=45, low=0, high=100),
        "cache_interval": IntInput(default=4, low=1, high=100),
        "cache_threshold": FloatInput(default=0.0, low=0.0, high=1.0, step=0.01),  # 0: DeepCache
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=SamplingConfig(scheduler=SCHEDULER, shift_key="shift", solver_arguments=solver_arguments),
    denoiser=DenoiserSpec(
        forward=forward,
        tile=(8, 8, 16),
        step_reuse=FeatureReuse(
            keep=keep_features, reuse=reuse_features, tokens=("hidden",), whole=("text", "text_length")
        ),
        head_norms=(
            HeadNorms(
                queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
                keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
            ),
        ),
    ),
    vae=VaeSpec(latent_format="HunyuanVideo15", denormalize=denormalize_latents, decode=decode, light=LIGHT_VAE),
    core=CORE,
)
