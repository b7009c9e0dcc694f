"""Qwen-Image's single files: the denoiser, whose original keys are those of diffusers. Its VAE is Wan's."""

from ...formats.file_signature import Config, FileLayout, Flag, TensorShapes
from ...model_spec.upstream import UpstreamConfig

# Edit models from 2511 on embed reference latents at timestep 0. Some of ComfyUI's files mark that with an empty
# tensor, others only with their name. FireRed's Edit is like 2509.
_ZERO_TIME = Flag(
    mark="__index_timestep_zero__",
    true=r"(?<!\d)2511(?!\d)",
    false=r"(?<!\d)2509(?!\d)|firered",
    meaning="2511 of Qwen-Image Edit, whose images have a time of their own, or 2509",
    answers="+ qwen-image-edit-2511 or + Qwen/Qwen-Image-Edit-2509",
)


def denoiser_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of the transformer from its tensors' shapes; `base` is the published config."""
    dim, in_channels = shapes.require("img_in.weight", 2)
    (head_dim,) = shapes.require("transformer_blocks.0.attn.norm_q.weight", 1)
    return {
        "attention_head_dim": head_dim,
        "in_channels": in_channels,
        "joint_attention_dim": shapes.require("txt_in.weight", 2)[1],
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("transformer_blocks"),
        "out_channels": shapes.require("proj_out.weight", 2)[0] // base["patch_size"] ** 2,
    }


LAYOUTS = (
    FileLayout(
        class_name="QwenImageTransformer2DModel",
        marks=(("txt_norm.weight", "img_in.weight", "transformer_blocks.0.img_mod.1.weight"),),
        refused={
            "time_text_embed.addition_t_embedding": "Qwen-Image Layered",
            "controlnet_": "a ControlNet of Qwen-Image",
        },
        config=denoiser_config,
        ignored=(_ZERO_TIME.mark,),
        flags={"zero_cond_t": _ZERO_TIME},
    ),
)
