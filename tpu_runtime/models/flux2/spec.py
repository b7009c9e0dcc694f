"""FLUX.2, text to image, optionally with reference images: black-forest-labs/FLUX.2-dev; parts of the whole family.

The oracle is `diffusers.Flux2Pipeline`, whose defaults of steps and guidance are used. There is no paper; upstream's
code is https://github.com/black-forest-labs/flux2. The repository is gated, under the FLUX non-commercial license.
"""

from typing import Any

from ....sharding.shape import MeshShape
from ...model_spec import (
    DenoiserSpec,
    EqualsConfig,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    ImageConditioning,
    IntInput,
    LatentGeometry,
    ModelSpec,
    Parallelism,
    SamplingConfig,
    TinyModel,
    VaeSpec,
)
from ...model_spec.upstream import UpstreamConfig
from . import text_encoder
from .core_inputs import CORE
from .transformer import GUIDANCE_KEYS, TRANSFORMER, forward
from .vae import VAE, decode, denormalize_latents, encode_image, encode_pixels

HEAD_NORMS = (
    HeadNorms(
        queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
        keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
    ),
    HeadNorms(queries=("single_transformer_blocks.*.attn.norm_q",), keys=("single_transformer_blocks.*.attn.norm_k",)),
)

# The published checkpoint's config: rectified flow (https://arxiv.org/abs/2209.03003) by Euler steps.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

INPUTS = {
    "height": IntInput(default=1024, low=64, high=2048, multiple_of=16),
    "width": IntInput(default=1024, low=64, high=2048, multiple_of=16),
    "num_inference_steps": IntInput(default=50, low=1, high=100),
    "guidance_scale": FloatInput(default=4.0, low=0.0, high=20.0),
    "seed": IntInput(default=42, low=0, high=2**64 - 1),
}


def shard_heads(num_devices: int, branches: int) -> MeshShape:
    """Return the mesh: heads split over all chips. The sequence is short and the weights are 60 GiB.

    num_devices: chips. branches: unused; there is one. Weights stay split; activations are summed instead.
    """
    return MeshShape(tp=num_devices)


def solver_arguments(
    config: UpstreamConfig, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    """Return upstream's arguments of `set_timesteps`, besides the number of steps.

    config: the scheduler's. latent_shape: `(..., height, width)`. num_steps: of the schedule. shift: unused; upstream
    computes `mu` from the image's size and the number of steps.
    """
    import numpy as np
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    sigmas = None if config.get("use_flow_sigmas") else np.linspace(1.0, 1 / num_steps, num_steps)
    return {"sigmas": sigmas, "mu": compute_empirical_mu(latent_shape[-2] * latent_shape[-1], num_steps)}


# Latents `[1, 128, height / 16, width / 16]`, 2 x 2 of the VAE's 32 channels; a token is one of them.
GEOMETRY = LatentGeometry(channels=128, stride_t=0, stride_hw=16, patch_thw=(1, 1, 1))
MINIATURE = TinyModel(
    id="tiny/flux2", inputs={"height": 80, "width": 112}, texts={"prompt": "a red circle and a green square on blue"}
)
RECIPE = SamplingConfig(scheduler=SCHEDULER, guidance="embedded", solver_arguments=solver_arguments)

_DEV = TRANSFORMER.derive(
    config={
        "guidance_embeds": True,
        "joint_attention_dim": 15360,
        "num_attention_heads": 48,
        "num_layers": 8,
        "num_single_layers": 48,
    },
    tiny={"num_attention_heads": 6},
    needs={
        "joint_attention_dim": EqualsConfig("text_encoder", "text_config.hidden_size", times=len(text_encoder.STATES))
    },
    original_keys=GUIDANCE_KEYS,
)

SPEC = ModelSpec(
    name="flux2-dev",
    family="Flux2",
    title="FLUX.2 dev",
    category="FLUX.2",
    published=HubCheckpoint(hub_id="black-forest-labs/FLUX.2-dev", pipeline_classes=("Flux2Pipeline",)),
    miniature=MINIATURE,
    components=(text_encoder.TEXT_ENCODER, _DEV, *VAE),
    geometry=GEOMETRY,
    text_encoders=(text_encoder.TEXT,),
    inputs=INPUTS,
    texts={"prompt": "A beautiful sunset over the ocean"},
    recipe=RECIPE,
    denoiser=DenoiserSpec(forward=forward, head_norms=HEAD_NORMS),
    parallelism=Parallelism(mesh=shard_heads),
    vae=VaeSpec(latent_format="Flux2", denormalize=denormalize_latents, decode=decode, encode=encode_pixels),
    pictures=ImageConditioning(encode=encode_image, are_references=True),
    core=CORE,
)
