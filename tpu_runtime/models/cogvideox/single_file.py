"""CogVideoX's single files: the denoiser with ComfyUI's keys, the VAE with diffusers'."""

from ...files import CheckpointError
from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...messages import compose
from ...model_spec.upstream import UpstreamConfig
from ..common.kl_single_file import causal_vae_config

# Networks with further input channels, by the number of input channels.
_OF_CHANNELS = {33: "CogVideoX Fun", 48: "a CogVideoX that inpaints, such as VOID"}


def denoiser_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of the transformer from its tensors' shapes. Raises CheckpointError for other networks.

    shapes: of the file's tensors. base: the published config.
    """
    if len(shapes["patch_embed.proj.weight"]) != 2:
        raise CheckpointError(compose("file.cogvideox_1_0_unsupported"))
    dim, patch = shapes.require("patch_embed.proj.weight", 2)
    (head_dim,) = shapes.require("transformer_blocks.0.attn1.norm_q.weight", 1)
    size = base["patch_size"] ** 2 * base["patch_size_t"]
    if (channels := patch // size) in _OF_CHANNELS:
        raise CheckpointError(compose(
            "file.cogvideox_variant_unsupported", path=shapes.path, of_channels=_OF_CHANNELS[channels],
            channels=channels,
        ))  # fmt: skip
    config: Config = {
        "attention_head_dim": head_dim,
        "in_channels": channels,
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("transformer_blocks"),
        "out_channels": shapes.require("proj_out.weight", 2)[0] // size,
        "text_embed_dim": shapes.require("patch_embed.text_proj.weight", 2)[1],
        "time_embed_dim": shapes.require("time_embedding.linear_1.weight", 2)[0],
    }
    time = "ofs_embedding.linear_1.weight"
    config["ofs_embed_dim"] = shapes.require(time, 2)[0] if time in shapes else None
    return config


LAYOUTS = (
    FileLayout(
        class_name="CogVideoXTransformer3DModel",
        marks=(
            ("blocks.0.norm1.linear.weight", "patch_embed.text_proj.weight"),
            ("transformer_blocks.0.norm1.linear.weight", "patch_embed.text_proj.weight"),
        ),
        refused={"patch_embed.pos_embedding": "CogVideoX with learnt positions"},
        config=denoiser_config,
    ),
    FileLayout(
        class_name="AutoencoderKLCogVideoX",
        marks=(("decoder.conv_in.conv.weight", "decoder.mid_block.resnets.0.norm1.norm_layer.weight"),),
        config=causal_vae_config,
    ),
)
