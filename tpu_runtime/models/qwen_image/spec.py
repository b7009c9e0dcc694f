"""Qwen-Image, text to image: Qwen/Qwen-Image-2512, licensed under Apache-2.0.

The oracle is `diffusers.QwenImagePipeline`, the paper https://arxiv.org/abs/2508.02324. The VAE is diffusers'
`AutoencoderKLQwenImage`, the network of Wan 2.1's VAE with a fine-tuned decoder (`common/wan_vae.py`).
"""

from typing import TYPE_CHECKING, Any

from ....sharding.shape import MeshShape
from ...model_spec import (
    FLOW_SCHEDULERS,
    DenoiserSpec,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    Parallelism,
    SamplingConfig,
    TinyModel,
    VaeSpec,
    classifier_free_guidance,
)
from ...model_spec.upstream import UpstreamConfig
from ..common import layers, light
from ..common.wan_vae import VAE_DECODER, decode, denormalize_latents
from ..common.wan_vae_encoder import VAE_ENCODER, encode_video
from . import control
from .core_inputs import CORE
from .text_encoder import NEGATIVE_PROMPT, PROMPT, TEXT, TEXT_ENCODER
from .transformer import PATCH, TRANSFORMER, forward

if TYPE_CHECKING:
    import torch


def apply_guidance(prompt: "torch.Tensor", negative: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """Return classifier-free guidance with each token rescaled to the norm of `prompt`'s, as upstream does.

    prompt, negative: predicted flows `[1, 16, 1, height, width]`, float32. scale: guidance scale, a scalar.
    """
    guided = layers.cut_patches(classifier_free_guidance(prompt, negative, scale), PATCH)
    length = layers.cut_patches(prompt, PATCH).norm(dim=-1, keepdim=True)
    return layers.join_patches(guided * (length / guided.norm(dim=-1, keepdim=True)), prompt, PATCH)


def solver_arguments(
    config: UpstreamConfig, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    """Return upstream's arguments of `set_timesteps`, besides the number of steps.

    config: the scheduler's. latent_shape: `(..., height, width)`. num_steps: of the schedule.
    shift: the user's; None or 0: the shift grows with the image, as the config says.
    """
    import numpy as np
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

    height, width = latent_shape[-2:]
    defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    numbers = (config.get(name, default) for name, default in defaults.items())
    mu = np.log(shift) if shift else calculate_shift(height // 2 * (width // 2), *numbers)
    return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}


# The published checkpoint's config.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
# Other schedulers use the fixed shift `flow_shift` and no terminal shift, as the Lightning LoRAs were trained.
_FIXED = {"shift_terminal": None, "use_dynamic_shifting": False}


def shard_heads_in_pairs(num_devices: int, branches: int) -> MeshShape:
    """Return the mesh: heads split over `tp`, over all chips or, from 8 chips on, over each half of them.

    num_devices: chips. branches: 2 with guidance, else 1. The sequence is short and the weights are 38 GiB, so weights
    stay split. With two groups, each holds all weights and takes one guidance branch, or half of the sequence.
    """
    pair = 2 if num_devices >= 8 and num_devices % 2 == 0 else 1
    return MeshShape(dp=pair if branches == 2 else 1, sp=pair if branches == 1 else 1, tp=num_devices // pair)


SPEC = ModelSpec(
    name="qwen-image-2512",
    family="QwenImage",
    title="Qwen-Image 2512",
    category="Qwen-Image",
    published=HubCheckpoint(hub_id="Qwen/Qwen-Image-2512", pipeline_classes=("QwenImagePipeline",)),
    miniature=TinyModel(
        id="tiny/qwenimage",
        inputs={"height": 80, "width": 112},
        texts={"prompt": "a large red circle left on blue", "negative_prompt": ""},
    ),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_ENCODER, VAE_DECODER),
    # Latents `[1, 16, 1, height / 8, width / 8]`, a video of one frame; a token is 2 x 2 of them.
    geometry=LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=PATCH),
    text_encoders=(TEXT,),
    inputs={
        "height": IntInput(default=1328, low=64, high=2048, multiple_of=16),
        "width": IntInput(default=1328, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        "guidance_scale": FloatInput(default=4.0, low=1.0, high=20.0),
        "seed": IntInput(default=42, low=0, high=2**64 - 1),
        # 0: the checkpoint's shift for an image of that size.
        "flow_shift": FloatInput(default=0.0, low=0.0, high=20.0, step=0.5),
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=SamplingConfig(
        scheduler=SCHEDULER,
        schedulers={name: {**changes, **_FIXED} for name, changes in FLOW_SCHEDULERS.items()},
        shift_key="shift",
        guide=apply_guidance,
        solver_arguments=solver_arguments,
    ),
    denoiser=DenoiserSpec(
        forward=forward,
        head_norms=(
            HeadNorms(
                queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
                keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
            ),
        ),
        controls=control.CONTROLS,
        controlled=control.forward,
    ),
    parallelism=Parallelism(mesh=shard_heads_in_pairs),
    vae=VaeSpec(
        latent_format="Wan21", denormalize=denormalize_latents, decode=decode, encode=encode_video, light=light.WAN
    ),
    core=CORE,
)
