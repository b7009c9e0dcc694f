"""Wan 2.2 and 2.1, image to video, and first-last-frame to video. The oracle is `diffusers.WanImageToVideoPipeline`.

Wan-AI/Wan2.2-I2V-A14B-Diffusers has two experts, each for its part of the timesteps. Wan2.1-I2V-14B-480P-Diffusers,
-720P-Diffusers and Wan2.1-FLF2V-14B-720P-diffusers have one denoiser, which also attends to CLIP's image tokens. All
take the encoded video as more channels (https://arxiv.org/abs/2503.20314). All are licensed under
Apache-2.0.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....sharding.rules import GATHERED, REPLICATED, Rule
from ...messages import compose
from ...model_spec import (
    Call,
    ConfigRequirement,
    EqualsConfig,
    FloatInput,
    HubCheckpoint,
    ImageConditioning,
    IntInput,
    ModelSpec,
    Settings,
)
from ...model_spec.upstream import UpstreamConfig
from ..common import IMAGE_PROMPT, wan_vae_encoder
from ..common.wan_vae import VAE_DECODER
from . import spec, text_encoder
from .core_inputs import CORE
from .image_encoder import CLIP_MEAN, CLIP_STD, IMAGE_ENCODER, VISION_SIZE, VISION_TOKENS, look, preprocess_images
from .text_encoder import TEXT, TEXT_ENCODER
from .transformer import IMAGE_TRANSFORMER, make_experts

if TYPE_CHECKING:
    import numpy as np
    import torch

# --- Wan 2.2 ----------------------------------------------------------------------------------------------------------

EXPERTS = make_experts(IMAGE_TRANSFORMER)

SPEC = ModelSpec(
    name="wan2.2-i2v-a14b",
    family="Wan22I2V",
    title="Wan 2.2 I2V A14B",
    category="Wan2.2-I2V",
    published=HubCheckpoint(
        hub_id="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        pipeline_classes=("WanImageToVideoPipeline",),
        # The first expert, for high noise, runs while the timestep is at least this share of the training timesteps.
        index={"boundary_ratio": 0.9},
    ),
    miniature=replace(spec.MINIATURE, id="tiny/wan22i2v", picture="wan_i2v_shapes.png"),
    components=(TEXT_ENCODER, *EXPERTS, wan_vae_encoder.VAE_ENCODER, VAE_DECODER),
    geometry=spec.GEOMETRY,
    text_encoders=(TEXT,),
    inputs={
        **spec.INPUTS,
        "num_inference_steps": IntInput(default=40, low=1, high=100),
        "guidance_scale": FloatInput(default=3.5, low=0.0, high=20.0),
        "guidance_scale_2": FloatInput(default=3.5, low=0.0, high=20.0),
        "seed": replace(spec.INPUTS["seed"], default=0),
        "shift": FloatInput(default=5.0, low=0.1, high=20.0, step=0.5),
    },
    texts={"prompt": IMAGE_PROMPT, "negative_prompt": text_encoder.NEGATIVE_PROMPT},
    recipe=spec.RECIPE,
    denoiser=replace(spec.DENOISER, experts=tuple(expert.name for expert in EXPERTS)),
    vae=replace(spec.VAE, encode=wan_vae_encoder.encode_video),
    pictures=ImageConditioning(
        encode=wan_vae_encoder.encode_image, numbers=(1, 2), condition_shapes=wan_vae_encoder.condition_shapes
    ),
    core=CORE,
)

# --- Wan 2.1 ----------------------------------------------------------------------------------------------------------


def condition_shapes(latent_shape: tuple[int, ...], pictures: int = 1) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of `condition` and of `image_embeds`, all images' tokens `[1, 257 * pictures, image_dim]`.

    `condition` `[1, 4 + 16, frames, height, width]` is the mask and the encoded video as channels.

    latent_shape: `(rows, channels, frames, height, width)`. pictures: number of images.
    """
    tokens = (1, pictures * VISION_TOKENS, "image_dim")
    return {**wan_vae_encoder.condition_shapes(latent_shape), "image_embeds": tokens}


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: UpstreamConfig
) -> "dict[str, np.ndarray]":
    """Return `condition` and `image_embeds` (see `condition_shapes`); images' tokens are concatenated in order.

    call: runs a component. image: one or two images `[number, height, width, 3]` in 0..1.
    settings: of the generation. vae_config: the VAE's config.
    """
    tokens = look(call, preprocess_images(image))
    condition = wan_vae_encoder.encode_image(call, image, settings, vae_config)
    return {**condition, "image_embeds": tokens.reshape(1, -1, tokens.shape[-1])}


TRANSFORMER = IMAGE_TRANSFORMER.derive(
    config={"added_kv_proj_dim": 5120, "image_dim": 1280},
    tiny={"added_kv_proj_dim": 6 * 24, "image_dim": 28},
    needs={
        "added_kv_proj_dim": ConfigRequirement(
            fits=lambda dim: dim is not None, wording=compose("settings.a_number"), required=True
        ),
        "image_dim": EqualsConfig("image_encoder", "hidden_size"),
    },
    rules=(
        Rule("blocks.*.attn2.norm_added_k.weight", REPLICATED),
        Rule("condition_embedder.image_embedder.norm*.weight", REPLICATED),
        Rule("condition_embedder.image_embedder.ff.**.weight", *GATHERED),
    ),
    original_keys={
        "blocks.*.cross_attn.k_img": "blocks.*.attn2.add_k_proj",
        "blocks.*.cross_attn.v_img": "blocks.*.attn2.add_v_proj",
        "blocks.*.cross_attn.norm_k_img": "blocks.*.attn2.norm_added_k",
        "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    },
)

_COMPONENTS = (TEXT_ENCODER, IMAGE_ENCODER, TRANSFORMER, wan_vae_encoder.VAE_ENCODER, VAE_DECODER)
_INPUTS = {
    **spec.INPUTS,
    "num_inference_steps": IntInput(default=40, low=1, high=100),
    "seed": replace(spec.INPUTS["seed"], default=0),
    "shift": FloatInput(default=5.0, low=0.1, high=20.0, step=0.5),
}

# The model authors' `sample_neg_prompt`, against the faults of each task: shaking with one image, a cut between two.
NEGATIVE_PROMPT = "镜头晃动，" + text_encoder.NEGATIVE_PROMPT
NEGATIVE_PROMPT_BETWEEN = "镜头切换，" + NEGATIVE_PROMPT

I2V_720P = ModelSpec(
    name="wan2.1-i2v-14b-720p",
    family="Wan22I2V",
    category="Wan2.2-I2V",
    title="Wan 2.1 I2V 14B 720P",
    published=HubCheckpoint(
        hub_id="Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        pipeline_classes=("WanImageToVideoPipeline",),
        index={"image_processor": ("transformers", "CLIPImageProcessor")},
        files={
            "image_processor/preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor",
                "crop_size": {"height": VISION_SIZE, "width": VISION_SIZE},
                "image_mean": CLIP_MEAN,
                "image_std": CLIP_STD,
                "resample": 3,
                "size": {"shortest_edge": VISION_SIZE},
            }
        },
    ),
    miniature=replace(spec.MINIATURE, id="tiny/wan21i2v_720p"),
    components=_COMPONENTS,
    geometry=spec.GEOMETRY,
    text_encoders=(TEXT,),
    inputs=_INPUTS,
    texts={"prompt": IMAGE_PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=spec.RECIPE,
    denoiser=spec.DENOISER,
    vae=replace(spec.VAE, encode=wan_vae_encoder.encode_video),
    pictures=ImageConditioning(encode=encode_image, look=look, condition_shapes=condition_shapes),
    core=CORE,
)

I2V_480P = replace(
    I2V_720P,
    name="wan2.1-i2v-14b-480p",
    title="Wan 2.1 I2V 14B 480P",
    published=replace(I2V_720P.published, hub_id="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"),
    miniature=replace(spec.MINIATURE, id="tiny/wan21i2v"),
    inputs={
        **_INPUTS,
        "height": replace(I2V_720P.whole_numbers("height"), default=480),
        "width": replace(I2V_720P.whole_numbers("width"), default=832),
        "shift": FloatInput(default=3.0, low=0.1, high=20.0, step=0.5),
    },
)

_POSITIONS = 2 * VISION_TOKENS
_BETWEEN = TRANSFORMER.derive(
    config={"pos_embed_seq_len": _POSITIONS},
    tiny={"pos_embed_seq_len": _POSITIONS},
    needs={"pos_embed_seq_len": ConfigRequirement((_POSITIONS,), required=True)},
    rules=(Rule("condition_embedder.image_embedder.pos_embed", REPLICATED),),
    original_keys={"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"},
)

FLF2V = replace(
    I2V_720P,
    name="wan2.1-flf2v-14b-720p",
    title="Wan 2.1 FLF2V 14B 720P",
    published=replace(I2V_720P.published, hub_id="Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers"),
    miniature=replace(spec.MINIATURE, id="tiny/wan21flf2v"),
    components=tuple(_BETWEEN if component is TRANSFORMER else component for component in _COMPONENTS),
    inputs={
        **_INPUTS,
        # First and last frame must be in different latent frames.
        "num_frames": replace(I2V_720P.whole_numbers("num_frames"), low=5),
        "num_inference_steps": spec.INPUTS["num_inference_steps"],
        "shift": FloatInput(default=16.0, low=0.1, high=20.0, step=0.5),
    },
    texts={**I2V_720P.texts, "negative_prompt": NEGATIVE_PROMPT_BETWEEN},
    recipe=replace(spec.RECIPE, scheduler={**spec.SCHEDULER, "flow_shift": 16.0}),
    pictures=ImageConditioning(
        encode=encode_image, look=look, numbers=(2,), condition_shapes=partial(condition_shapes, pictures=2)
    ),
)

SIBLINGS = (I2V_480P, I2V_720P, FLF2V)
