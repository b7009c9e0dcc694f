"""FLUX.2's single files: the denoiser with Black Forest Labs' keys, the VAE with those of `AutoencoderKL`, Mistral."""

from functools import partial

from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...model_spec.upstream import UpstreamConfig
from ..common import kl_single_file
from ..common.encoder_single_files import BIAS, QK_NORM, QUERY, causal_config, language_model_table, list_signatures
from . import text_encoder


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


def mistral_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of a Mistral 3 from its tensors' shapes; `base` is the published config."""
    text = base["text_config"]
    return {"text_config": {**text, **causal_config(shapes, text, "model.language_model.")}}


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
    FileLayout(
        class_name="Mistral3ForConditionalGeneration",
        marks=(
            *list_signatures(QUERY, f"!{QK_NORM}", f"!{BIAS}"),
            ("blk.0.attn_q.weight", "!blk.0.attn_q_norm.weight", "!blk.0.attn_k.bias"),
        ),
        table=partial(language_model_table, "model.language_model."),
        config=mistral_config,
        chat_template=text_encoder.CHAT_TEMPLATE,
        ignored=("tekken_model", "model.vision_tower.", "vision_tower.", "lm_head.", "output."),
    ),
    *kl_single_file.list_layouts("AutoencoderKLFlux2", "bn.running_mean"),
)
