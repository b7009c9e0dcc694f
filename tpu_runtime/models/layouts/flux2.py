"""Flux.2's files: the denoiser by Black Forest Labs' names, and the VAE by those of latent diffusion."""

from collections.abc import Iterable, Mapping
from typing import Any

from ...formats.layout import Config, FileLayout, Shapes, count, under
from ...model_spec import Table


def denoiser_config(shapes: Shapes, base: Mapping[str, Any]) -> Config:
    dim, in_channels = shapes.of("x_embedder.weight", 2)
    (head_dim,) = shapes.of("transformer_blocks.0.attn.norm_q.weight", 1)
    time = "time_guidance_embed"
    return {
        "attention_head_dim": head_dim,
        "guidance_embeds": f"{time}.guidance_embedder.linear_1.weight" in shapes,
        "in_channels": in_channels,
        "joint_attention_dim": shapes.of("context_embedder.weight", 2)[1],
        "mlp_ratio": shapes.of("transformer_blocks.0.ff.linear_out.weight", 2)[1] / dim,
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("transformer_blocks"),
        "num_single_layers": shapes.count("single_transformer_blocks"),
        "timestep_guidance_channels": shapes.of(f"{time}.timestep_embedder.linear_1.weight", 2)[1],
    }


_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"nin_shortcut": "conv_shortcut"}
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def vae_table(names: Iterable[str]) -> Table:
    """The makers' names; their decoder's levels count from the last."""
    names = list(names)
    table: dict[str, Any] = {"encoder.quant_conv": "quant_conv", "decoder.post_quant_conv": "post_quant_conv"}
    for part in ("encoder", "decoder"):
        table[f"{part}.norm_out"] = f"{part}.conv_norm_out"
        table |= under(f"{part}.mid.block_1", f"{part}.mid_block.resnets.0", _RESNET)
        table |= under(f"{part}.mid.block_2", f"{part}.mid_block.resnets.1", _RESNET)
        table |= under(f"{part}.mid.attn_1", f"{part}.mid_block.attentions.0", _ATTENTION)
    table |= under("encoder.down.*.block.*", "encoder.down_blocks.*.resnets.*", _RESNET)
    table["encoder.down.*.downsample.conv"] = "encoder.down_blocks.*.downsamplers.0.conv"
    levels = min(count(names, "decoder.up"), 16)
    for level in range(levels):
        own = f"decoder.up_blocks.{levels - 1 - level}"
        table |= under(f"decoder.up.{level}.block.*", f"{own}.resnets.*", _RESNET)
        table[f"decoder.up.{level}.upsample.conv"] = f"{own}.upsamplers.0.conv"
    return table


def vae_config(shapes: Shapes, base: Mapping[str, Any]) -> Config:
    """A decoder of other widths than the encoder's says so."""
    levels = shapes.count("encoder.down_blocks")
    widths = [shapes.of(f"encoder.down_blocks.{n}.resnets.0.conv1.weight", 4)[0] for n in range(levels)]
    decoder = [shapes.of(f"decoder.up_blocks.{n}.resnets.0.conv1.weight", 4)[0] for n in range(levels)][::-1]
    config: Config = {
        "block_out_channels": tuple(widths),
        "latent_channels": shapes.of("decoder.conv_in.weight", 4)[1],
        "layers_per_block": shapes.count("encoder.down_blocks.0.resnets"),
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }
    return config | ({} if decoder == widths else {"decoder_block_out_channels": tuple(decoder)})


LAYOUTS = (
    FileLayout(
        class_name="Flux2Transformer2DModel",
        marks=(
            ("double_stream_modulation_img.lin.weight", "img_in.weight"),
            ("double_stream_modulation_img.linear.weight", "x_embedder.weight"),
        ),
        config=denoiser_config,
    ),
    FileLayout(
        class_name="AutoencoderKLFlux2",
        marks=(("decoder.mid.block_1.conv1.weight", "bn.running_mean"),),
        table=vae_table,
        config=vae_config,
    ),
    FileLayout(
        class_name="AutoencoderKLFlux2",
        marks=(("decoder.mid_block.resnets.0.conv1.weight", "bn.running_mean"),),
        config=vae_config,
    ),
)
