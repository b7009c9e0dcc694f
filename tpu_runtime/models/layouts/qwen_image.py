"""Qwen-Image's files: the denoiser, whose names are the makers' and diffusers' alike. Its VAE is Wan's."""

from collections.abc import Mapping
from typing import Any

from ...formats.layout import Config, FileLayout, Shapes

# An empty tensor by which ComfyUI's files of Edit from 2511 on say that pictures have a time of their own.
_ZERO_TIME = "__index_timestep_zero__"


def denoiser_config(shapes: Shapes, base: Mapping[str, Any]) -> Config:
    dim, in_channels = shapes.of("img_in.weight", 2)
    (head_dim,) = shapes.of("transformer_blocks.0.attn.norm_q.weight", 1)
    return {
        "attention_head_dim": head_dim,
        "in_channels": in_channels,
        "joint_attention_dim": shapes.of("txt_in.weight", 2)[1],
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("transformer_blocks"),
        "out_channels": shapes.of("proj_out.weight", 2)[0] // base["patch_size"] ** 2,
        "use_additional_t_cond": "time_text_embed.addition_t_embedding.weight" in shapes,
        "zero_cond_t": _ZERO_TIME in shapes,
    }


LAYOUTS = (
    FileLayout(
        class_name="QwenImageTransformer2DModel",
        marks=(("txt_norm.weight", "img_in.weight", "transformer_blocks.0.img_mod.1.weight"),),
        config=denoiser_config,
        ignored=(_ZERO_TIME,),
        flags={"zero_cond_t": _ZERO_TIME},
    ),
)
