"""Wan 2.1, image to video and first-last-frame to video.

Wan-AI/Wan2.1-I2V-14B-480P-Diffusers, -720P-Diffusers and Wan2.1-FLF2V-14B-720P-diffusers. The oracle is
`diffusers.WanImageToVideoPipeline`. The one denoiser takes the encoded video as more channels, and attends to CLIP's
image tokens as well as to the text.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....sharding.rules import GATHERED, REPLICATED, Rule
from ... import media
from ...messages import compose
from ...model_spec import (
    Call,
    Component,
    ConfigRequirement,
    EqualsConfig,
    FloatInput,
    HubCheckpoint,
    ImageConditioning,
    IntInput,
    ModelSpec,
    Settings,
)
from ...model_spec.upstream import Net, UpstreamConfig
from ..common import IMAGE_PROMPT, layers, wan_vae_encoder
from ..common.wan_vae import VAE_DECODER
from ..text_encoders import wan as wan_text
from ..text_encoders.wan import TEXT, TEXT_ENCODER
from . import wan

if TYPE_CHECKING:
    import numpy as np
    import torch

# CLIP's input: pixels on a side; and its output: a token per patch of 14 x 14 pixels, and the class token.
VISION_SIZE, VISION_TOKENS = 224, 16 * 16 + 1
# CLIP's normalization: mean and standard deviation of each colour channel, for pixels in 0..1.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def condition_shapes(latent_shape: tuple[int, ...], pictures: int = 1) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of `condition`, mask and encoded video as channels, and of `image_embeds`, all images' tokens.

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


def look(call: Call, pixels: "torch.Tensor") -> "np.ndarray":
    """Return CLIP's tokens `[images, 257, dim]` of `pixels` `[images, 3, 224, 224]`."""
    return call("image_encoder", tokens_of, pixels)[0]


def tokens_of(encoder: Net, pixels: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Return upstream's `hidden_states[-2]` `[images, 257, dim]` of `pixels` `[images, 3, 224, 224]`.

    `encoder` is built without its last layer.
    """
    from ...programs.upstream_network import scan_states

    x = encoder.pre_layrnorm(encoder.embeddings(pixels))
    return scan_states(encoder.encoder.layers, x, attention_mask=None), None


def trim_vision(encoder: Net) -> None:
    """Remove the norm of the pooled token, which is not used."""
    import torch

    encoder.post_layernorm = torch.nn.Identity()


def preprocess_images(images: "torch.Tensor") -> "torch.Tensor":
    """Preprocess `images` `[number, height, width, 3]` in 0..1 as CLIP's image processor: `[number, 3, 224, 224]`.

    The shorter side is scaled to 224 pixels, and the longer side is center-cropped.
    """
    import numpy as np
    import torch
    from PIL import Image

    height, width = images.shape[1:3]
    size = VISION_SIZE * width // min(height, width), VISION_SIZE * height // min(height, width)
    left, top = (size[0] - VISION_SIZE) // 2, (size[1] - VISION_SIZE) // 2
    box = left, top, left + VISION_SIZE, top + VISION_SIZE
    squares = []
    for image in images:
        picture = media.to_pillow(image)
        squares.append(np.asarray(picture.resize(size, Image.Resampling.BICUBIC).crop(box), np.float32))
    pixels = torch.from_numpy(np.stack(squares)) / 255.0
    return ((pixels - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)).movedim(-1, 1)


IMAGE_ENCODER = Component(
    name="image_encoder",
    library="transformers",
    class_name="CLIPVisionModel",
    # The published class; its projection is not used.
    class_aliases=("CLIPVisionModelWithProjection",),
    config={
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "image_size": VISION_SIZE,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "patch_size": 14,
    },
    tiny={
        "architectures": ["CLIPVisionModel"],
        "hidden_size": 28,
        "intermediate_size": 50,
        "num_attention_heads": 7,
        "num_hidden_layers": 3,
    },
    needs={"image_size": ConfigRequirement((VISION_SIZE,)), "patch_size": ConfigRequirement((14,), required=True)},
    blocks=("encoder.layers",),
    layers=slice(None, -1),
    only=("embeddings.", "pre_layrnorm.", "encoder."),
    # The prefix that transformers 4 wrote, as published.
    aliases={"vision_model.": ""},
    trim=trim_vision,
    rules=layers.VISION_RULES,
)

TRANSFORMER = wan.IMAGE_TRANSFORMER.derive(
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
    **wan.INPUTS,
    "num_inference_steps": IntInput(default=40, low=1, high=100),
    "seed": replace(wan.INPUTS["seed"], default=0),
    "shift": FloatInput(default=5.0, low=0.1, high=20.0, step=0.5),
}

# The model authors' `sample_neg_prompt`, against the faults of each task: shaking with one image, a cut between two.
NEGATIVE_PROMPT = "镜头晃动，" + wan_text.NEGATIVE_PROMPT
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
    miniature=replace(wan.MINIATURE, id="tiny/wan21i2v_720p"),
    components=_COMPONENTS,
    geometry=wan.GEOMETRY,
    text_encoders=(TEXT,),
    inputs=_INPUTS,
    texts={"prompt": IMAGE_PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=wan.RECIPE,
    denoiser=wan.DENOISER,
    vae=replace(wan.VAE, encode=wan_vae_encoder.encode_video),
    pictures=ImageConditioning(encode=encode_image, look=look, condition_shapes=condition_shapes),
)

I2V_480P = replace(
    I2V_720P,
    name="wan2.1-i2v-14b-480p",
    title="Wan 2.1 I2V 14B 480P",
    published=replace(I2V_720P.published, hub_id="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"),
    miniature=replace(wan.MINIATURE, id="tiny/wan21i2v"),
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
    miniature=replace(wan.MINIATURE, id="tiny/wan21flf2v"),
    components=tuple(_BETWEEN if component is TRANSFORMER else component for component in _COMPONENTS),
    inputs={
        **_INPUTS,
        # First and last frame must be in different latent frames.
        "num_frames": replace(I2V_720P.whole_numbers("num_frames"), low=5),
        "num_inference_steps": wan.INPUTS["num_inference_steps"],
        "shift": FloatInput(default=16.0, low=0.1, high=20.0, step=0.5),
    },
    texts={**I2V_720P.texts, "negative_prompt": NEGATIVE_PROMPT_BETWEEN},
    recipe=replace(wan.RECIPE, scheduler={**wan.SCHEDULER, "flow_shift": 16.0}),
    pictures=ImageConditioning(
        encode=encode_image, look=look, numbers=(2,), condition_shapes=partial(condition_shapes, pictures=2)
    ),
)

SIBLINGS = (I2V_480P, I2V_720P, FLF2V)
