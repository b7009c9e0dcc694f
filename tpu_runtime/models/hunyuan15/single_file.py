"""HunyuanVideo 1.5's single files: the denoiser and the VAE with Tencent's keys, which ComfyUI keeps."""

from collections.abc import Iterable
from typing import Any

from ...files import CheckpointError
from ...formats.file_signature import Config, FileLayout, TensorShapes, prefix_keys
from ...messages import compose
from ...model_spec import KeyTable
from ...model_spec.upstream import UpstreamConfig
from ..common.encoder_single_files import VISION_QUERY, vision_config, vision_table
from ..common.kl_single_file import causal_vae_config

# The upscaler's number of input channels.
_UPSCALER = 98


def denoiser_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of the transformer from its tensors' shapes. Raises CheckpointError for the upscaler.

    shapes: of the file's tensors. base: the published config.
    """
    dim, in_channels, *_ = shapes.require("x_embedder.proj.weight", 5)
    (head_dim,) = shapes.require("transformer_blocks.0.attn.norm_q.weight", 1)
    if in_channels == _UPSCALER:
        raise CheckpointError(compose("file.upscaler_unsupported", path=shapes.path, in_channels=in_channels))
    return {
        "attention_head_dim": head_dim,
        "image_embed_dim": shapes.require("image_embedder.norm_in.weight", 1)[0],
        "in_channels": in_channels,
        "mlp_ratio": shapes.require("transformer_blocks.0.ff.net.0.proj.weight", 2)[0] / dim,
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("transformer_blocks"),
        "num_refiner_layers": shapes.count("context_embedder.token_refiner.refiner_blocks"),
        "out_channels": shapes.require("proj_out.weight", 2)[0],
        "text_embed_2_dim": shapes.require("context_embedder_2.norm.weight", 1)[0],
        "text_embed_dim": shapes.require("context_embedder.proj_in.weight", 2)[1],
        "use_meanflow": "time_embed.timestep_embedder_r.linear_1.weight" in shapes,
    }


_RESNET = {name: name for name in ("norm1", "conv1.conv", "norm2", "conv2.conv")}
_RESNET |= {f"nin_shortcut{end}": f"conv_shortcut{end}" for end in ("", ".conv")}
_ATTENTION = {"norm": "norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "proj_out"}


def vae_table(names: Iterable[str]) -> KeyTable:
    """Return the key table from Tencent's names of the VAE to diffusers'. `names` are not needed."""
    table: dict[str, Any] = {}
    for network, side, blocks in (("encoder", "down", "down_blocks"), ("decoder", "up", "up_blocks")):
        table |= prefix_keys(f"{network}.mid.block_1", f"{network}.mid_block.resnets.0", _RESNET)
        table |= prefix_keys(f"{network}.mid.block_2", f"{network}.mid_block.resnets.1", _RESNET)
        table |= prefix_keys(f"{network}.mid.attn_1", f"{network}.mid_block.attentions.0", _ATTENTION)
        table |= prefix_keys(f"{network}.{side}.*.block.*", f"{network}.{blocks}.*.resnets.*", _RESNET)
        table[f"{network}.{side}.*.{side}sample.conv.conv"] = f"{network}.{blocks}.*.{side}samplers.0.conv.conv"
    return table


LAYOUTS = (
    FileLayout(
        class_name="HunyuanVideo15Transformer3DModel",
        marks=(
            ("txt_in.individual_token_refiner.blocks.0.norm1.weight", "vision_in.proj.0.weight"),
            ("context_embedder.token_refiner.refiner_blocks.0.norm1.weight", "image_embedder.norm_in.weight"),
        ),
        relatives={r"sparse": "HunyuanVideo 1.5 with sparse attention"},
        config=denoiser_config,
    ),
    FileLayout(
        class_name="AutoencoderKLHunyuanVideo15",
        marks=(("decoder.conv_in.conv.weight", "decoder.mid.attn_1.q.weight", "decoder.norm_out.gamma"),),
        table=vae_table,
        config=causal_vae_config,
    ),
    FileLayout(
        class_name="AutoencoderKLHunyuanVideo15",
        marks=(
            ("decoder.conv_in.conv.weight", "decoder.mid_block.attentions.0.to_q.weight", "decoder.norm_out.gamma"),
        ),
        config=causal_vae_config,
    ),
    FileLayout(
        class_name="SiglipVisionModel",
        marks=(
            (f"vision_model.{VISION_QUERY}", "!vision_model.embeddings.class_embedding"),
            ("embeddings.patch_embedding.bias", VISION_QUERY),
        ),
        table=vision_table,
        config=vision_config,
        ignored=("head.", "vision_model.head.", "text_model.", "logit_"),
    ),
)
