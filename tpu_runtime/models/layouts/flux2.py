"""FLUX.2's single files: the denoiser with Black Forest Labs' keys. Its VAE is in `kl`."""

from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...model_spec.upstream import UpstreamConfig


def denoiser_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of the transformer from its tensors' shapes; `base` is the published config."""
    dim, in_channels = shapes.require("x_embedder.weight", 2)
    (head_dim,) = shapes.require("transformer_blocks.0.attn.norm_q.weight", 1)
    time = "time_guidance_embed"
    return {
        "attention_head_dim": head_dim,
        "guidance_embeds": f"{time}.guidance_embedder.linear_1.weight" in shapes,
        "in_channels": in_channels,
        "joint_attention_dim": shapes.require("context_embedder.weight", 2)[1],
        "mlp_ratio": shapes.require("transformer_blocks.0.ff.linear_out.weight", 2)[1] / dim,
        "num_attention_heads": dim // head_dim,
        "num_layers": shapes.count("transformer_blocks"),
        "num_single_layers": shapes.count("single_transformer_blocks"),
        "timestep_guidance_channels": shapes.require(f"{time}.timestep_embedder.linear_1.weight", 2)[1],
    }


LAYOUTS = (
    FileLayout(
        class_name="Flux2Transformer2DModel",
        marks=(
            ("double_stream_modulation_img.lin.weight", "img_in.weight"),
            ("double_stream_modulation_img.linear.weight", "x_embedder.weight"),
        ),
        relatives={r"\bkv\b": "FLUX.2 klein KV, whose reference images look at themselves alone"},
        config=denoiser_config,
    ),
)
