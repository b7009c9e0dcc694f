"""Single files of `AutoencoderKL` and of VAEs that share its networks, with latent diffusion's keys or diffusers'."""

from collections.abc import Iterable
from typing import Any

from ...formats.file_signature import Config, FileLayout, TensorShapes, count_layers, prefix_keys
from ...model_spec import KeyTable
from ...model_spec.upstream import UpstreamConfig

_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"nin_shortcut": "conv_shortcut"}
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def vae_table(names: Iterable[str]) -> KeyTable:
    """Return the key table from the original names to diffusers'. The original decoder counts levels from the last.

    names: keys of the file, original or diffusers'.
    """
    names = list(names)
    table: dict[str, Any] = {"encoder.quant_conv": "quant_conv", "decoder.post_quant_conv": "post_quant_conv"}
    for network in ("encoder", "decoder"):
        table[f"{network}.norm_out"] = f"{network}.conv_norm_out"
        table |= prefix_keys(f"{network}.mid.block_1", f"{network}.mid_block.resnets.0", _RESNET)
        table |= prefix_keys(f"{network}.mid.block_2", f"{network}.mid_block.resnets.1", _RESNET)
        table |= prefix_keys(f"{network}.mid.attn_1", f"{network}.mid_block.attentions.0", _ATTENTION)
    table |= prefix_keys("encoder.down.*.block.*", "encoder.down_blocks.*.resnets.*", _RESNET)
    table["encoder.down.*.downsample.conv"] = "encoder.down_blocks.*.downsamplers.0.conv"
    levels = min(count_layers(names, "decoder.up") or count_layers(names, "decoder.up_blocks"), 16)
    for level in range(levels):
        block = f"decoder.up_blocks.{levels - 1 - level}"
        table |= prefix_keys(f"decoder.up.{level}.block.*", f"{block}.resnets.*", _RESNET)
        table[f"decoder.up.{level}.upsample.conv"] = f"{block}.upsamplers.0.conv"
    return table


def vae_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the VAE's config from its tensors' shapes, with the decoder's widths if they differ from the encoder's."""
    levels = shapes.count("encoder.down_blocks")
    widths = [shapes.require(f"encoder.down_blocks.{n}.resnets.0.conv1.weight", 4)[0] for n in range(levels)]
    decoder = [shapes.require(f"decoder.up_blocks.{n}.resnets.0.conv1.weight", 4)[0] for n in range(levels)][::-1]
    config: Config = {
        "block_out_channels": tuple(widths),
        "latent_channels": shapes.require("decoder.conv_in.weight", 4)[1],
        "layers_per_block": shapes.count("encoder.down_blocks.0.resnets"),
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }
    return config | ({} if decoder == widths else {"decoder_block_out_channels": tuple(decoder)})


def causal_vae_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of a VAE with causal convolutions from its shapes, for CogVideoX and HunyuanVideo 1.5."""
    levels = shapes.count("encoder.down_blocks")
    widths = (shapes.require(f"encoder.down_blocks.{n}.resnets.0.conv1.conv.weight", 5)[0] for n in range(levels))
    return {
        "block_out_channels": tuple(widths),
        "latent_channels": shapes.require("decoder.conv_in.conv.weight", 5)[1],
        "layers_per_block": shapes.count("encoder.down_blocks.0.resnets"),
    }


def list_layouts(class_name: str, *more: str) -> tuple[FileLayout, ...]:
    """Return the layouts of a class, whose files also have (or, with `!`, do not have) the tensors `more`."""
    return (
        FileLayout(
            class_name=class_name,
            marks=(("encoder.mid.block_1.conv1.weight", "decoder.mid.block_1.conv1.weight", *more),),
            table=vae_table,
            config=vae_config,
        ),
        FileLayout(
            class_name=class_name,
            marks=(("encoder.mid_block.resnets.0.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight", *more),),
            config=vae_config,
        ),
    )


LAYOUTS = list_layouts("AutoencoderKL", "!bn.running_mean")
