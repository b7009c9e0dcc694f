"""Wan 2.2's 5B model, text or image to video: Wan-AI/Wan2.2-TI2V-5B-Diffusers, licensed under Apache-2.0.

The oracles are `diffusers.WanPipeline` and, with an image, `diffusers.WanImageToVideoPipeline`, both with
`expand_timesteps`. The encoded image is the first latent frame, without noise: the timestep of its tokens is 0.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ...model_spec import (
    MAG_CACHE_INPUTS,
    ConfigRequirement,
    FloatInput,
    HubCheckpoint,
    ImageConditioning,
    IntInput,
    LatentGeometry,
    ModelSpec,
)
from ...model_spec.upstream import Net
from . import spec, vae
from .core_inputs import CORE
from .text_encoder import NEGATIVE_PROMPT, TEXT, TEXT_ENCODER
from .transformer import TRANSFORMER, predict_flow

if TYPE_CHECKING:
    import torch

    from ...programs.sharded_ops import ShardedOps

# The model authors' example, in the README of https://github.com/Wan-Video/Wan2.2.
PROMPT = "Two anthropomorphic cats in comfy boxing gear and bright gloves fight intensely on a spotlighted stage."


def condition_shapes(latent_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `first_frame` `[1, 48, 1, height, width]`, the encoded image, and of `is_given` `[1]`.

    `is_given` is 1 with an image and 0 without.

    latent_shape: `(rows, channels, frames, height, width)`.
    """
    return {"first_frame": (1, latent_shape[1], 1, *latent_shape[3:]), "is_given": (1,)}


def apply_known_latents(sample: "torch.Tensor", inputs: "dict[str, torch.Tensor]") -> "torch.Tensor":
    """Replace the first latent frame of `sample` by the encoded image, if there is one.

    sample: `[rows, 48, frames, height, width]`. inputs: see `condition_shapes`.
    """
    import torch

    frame = torch.arange(sample.shape[2], device=sample.device)[:, None, None]
    return torch.where((frame == 0) & (inputs["is_given"] > 0), inputs["first_frame"], sample)


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 48, frames, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `WanTransformer3DModel`. run: operations on the mesh. inputs: `text`, and those of
    `condition_shapes`.

    Upstream has a timestep per token; here there are two, one for the first frame's tokens and one for all others. The
    prediction for a given first frame differs from upstream's and is never used.
    """
    import torch

    others = timestep.float().expand(len(sample))
    firsts = others * (1.0 - inputs["is_given"].float())
    return predict_flow(dit, run, sample, torch.stack([firsts, others], dim=1), inputs["text"])


_TRANSFORMER = TRANSFORMER.derive(
    config={"ffn_dim": 14336, "in_channels": 48, "num_attention_heads": 24, "num_layers": 30, "out_channels": 48},
    tiny={"in_channels": 48, "num_layers": 2, "out_channels": 48},
    needs={
        "in_channels": ConfigRequirement((48,), required=True),
        "out_channels": ConfigRequirement((48,), required=True),
    },
)

SPEC = ModelSpec(
    name="wan2.2-ti2v-5b",
    family="Wan22I2V",
    title="Wan 2.2 TI2V 5B",
    category="Wan2.2-I2V",
    published=HubCheckpoint(
        hub_id="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        pipeline_classes=("WanPipeline", "WanImageToVideoPipeline", "WanDMDPipeline"),
        index={"expand_timesteps": True},
    ),
    miniature=replace(spec.MINIATURE, id="tiny/wan22ti2v", inputs={"height": 160, "width": 224}),
    components=(TEXT_ENCODER, _TRANSFORMER, vae.VAE_ENCODER, vae.VAE_DECODER),
    geometry=LatentGeometry(channels=48, stride_t=4, stride_hw=vae.STRIDE_HW, patch_thw=(1, 2, 2)),
    text_encoders=(TEXT,),
    inputs={
        "height": IntInput(default=704, low=64, high=1920, multiple_of=32),
        "width": IntInput(default=1280, low=64, high=1920, multiple_of=32),
        "num_frames": IntInput(default=121, low=1, high=241, multiple_of=4, plus=1),
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        "guidance_scale": FloatInput(default=5.0, low=0.0, high=20.0),
        "seed": replace(spec.INPUTS["seed"], default=0),
        "shift": FloatInput(default=5.0, low=0.1, high=20.0, step=0.5),
        "fps": IntInput(default=24, low=1, high=120),
        **MAG_CACHE_INPUTS,
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=replace(spec.RECIPE, scheduler={**spec.SCHEDULER, "flow_shift": 5.0}),
    # The first frame's tokens have a timestep of their own and must come first, so tokens are not tiled.
    denoiser=replace(spec.DENOISER, forward=forward, tile=None),
    vae=replace(spec.VAE, latent_format="Wan22", encode=vae.encode_video, light=vae.LIGHT_VAE),
    pictures=ImageConditioning(
        encode=vae.encode_image, condition_shapes=condition_shapes, put_given=apply_known_latents
    ),
    core=CORE,
)
