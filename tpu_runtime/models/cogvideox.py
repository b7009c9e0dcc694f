"""CogVideoX 1.5 text to video: zai-org/CogVideoX1.5-5B. The oracle is `diffusers.CogVideoXPipeline`."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sharding.rules import REPLICATED, Rule
from ..model_spec import (
    Component,
    Denoiser,
    FloatLimit,
    HeadNorms,
    IntLimit,
    LatentGeometry,
    Miniature,
    ModelSpec,
    Need,
    Published,
    Recipe,
    Same,
    Settings,
    Switch,
    TextEncoding,
    Vae,
)
from . import layers
from .autoencoders.cogvideox import VAE_DECODER, decode
from .text_encoders import t5

if TYPE_CHECKING:
    import jax
    import torch

PROMPT = (
    "A panda, dressed in a small, red jacket and a tiny hat, sits on a wooden stool in a serene bamboo forest. The "
    "panda's fluffy paws strum a miniature acoustic guitar, producing soft, melodic tunes. Nearby, a few other pandas "
    "gather, watching curiously and some clapping in rhythm. Sunlight filters through the tall bamboo, casting a "
    "gentle glow on the scene. The panda's face is expressive, showing concentration and joy as it plays. The "
    "background includes a small, flowing stream and vibrant green foliage, enhancing the peaceful and magical "
    "atmosphere of this unique musical performance."
)
MAX_TOKENS = 226
# What the makers publish for text to video.
HEIGHT, WIDTH = 768, 1360
GEOMETRY = LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=(2, 2, 2))


def forward(
    transformer: Any, sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The velocity of `[rows, 16, latent_frames, latent_height, latent_width]` at one timestep."""
    rows, _, *size = sample.shape
    output = transformer(
        hidden_states=sample.transpose(1, 2),
        encoder_hidden_states=inputs["text"],
        timestep=timestep.expand(rows),
        image_rotary_emb=rotary_tables(transformer.config, size, sample.device),
        return_dict=False,
    )
    return output[0].transpose(1, 2)


def rotary_tables(config: Any, size: Sequence[int], device: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    """Cosines and sines of every latent token, `[tokens, head_dim]`, for a latent's frames, height and width.

    Positions count from 0, so a latent larger than `sample_height` and `sample_width`, where upstream's tables end,
    only continues them.
    """
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    frames, height, width = (side // patch for side, patch in zip(size, GEOMETRY.patch_thw, strict=True))
    grid = height, width
    cosines, sines = get_3d_rotary_pos_embed(
        config.attention_head_dim, None, grid, frames, grid_type="slice", max_size=grid, device=device
    )
    return cosines, sines


class SharedProcessor(layers.JointProcessor):
    """`CogVideoXAttnProcessor2_0` with latents and text apart: they share projections and norms."""

    def of_text(self, attn: Any) -> tuple[tuple, tuple, Any]:
        return (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), attn.to_out[0]


def run_block(
    fuses: Any,
    block: Any,
    hidden_states: "torch.Tensor",
    encoder_hidden_states: "torch.Tensor",
    temb: "torch.Tensor",
    image_rotary_emb: "tuple[torch.Tensor, torch.Tensor]",
    attention_kwargs: None = None,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """`CogVideoXBlock` with latents and text apart in the feed-forward too: joined, tokens would leave their chips."""

    def attend(latent: "torch.Tensor", text: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        return block.attn1(latent, text, image_rotary_emb=image_rotary_emb)

    def of_streams(norm: Any) -> "tuple[layers.Modulation, layers.Modulation]":
        shift, scale, gate, *of_text = norm.linear(norm.silu(temb)).chunk(6, dim=1)
        return layers.modulated(shift, scale, gate, norm.norm), layers.modulated(*of_text, norm=norm.norm)

    # Of latents and of text, each before attention and before the feed-forward.
    modulations = list(zip(of_streams(block.norm1), of_streams(block.norm2), strict=True))
    hidden = hidden_states, encoder_hidden_states
    return layers.run_joint_block(fuses, attend, hidden, modulations, (block.ff, block.ff))


def modulate(linear: Any, gather: "Callable[[jax.Array], jax.Array]", embedding: "torch.Tensor") -> "torch.Tensor":
    """The vector of all shifts, scales and gates: whole on every chip before it is cut into these."""
    import torch

    from ..programs import torch_bridge

    return torch_bridge.call_jax(gather, torch.nn.functional.linear(embedding, linear.weight, linear.bias))


def gather_vector(sequence: Any, axes: "tuple[str, ...] | None", vector: "jax.Array") -> "jax.Array":
    """`[rows, dim]`, computed where the weights of `dim` lie, on `axes`; whole afterwards."""
    return sequence.constrain(sequence.constrain(vector, None, axes), None, None)


def prepare_denoiser(network: Any, sequence: Any) -> None:
    """Puts our attention and token placement where upstream lets us."""

    blocks = network.blocks("transformer_blocks")
    blocks.block.attn1.set_processor(SharedProcessor(sequence.joint_attention))
    fuses = layers.fused_norms(sequence, blocks.block.norm1.norm.eps)
    blocks.block.forward = partial(run_block, fuses, blocks.block)
    for name in ("norm1", "norm2"):
        linear = blocks.block.get_submodule(name).linear
        weight = sequence.layouts[f"transformer_blocks.*.{name}.linear.weight"].in_use
        linear.forward = partial(modulate, linear, partial(gather_vector, sequence, weight[1] if weight else None))

    enter = partial(layers.enter_joint, sequence, "image_rotary_emb")
    blocks.scan = sequence.scan("transformer_blocks", enter, ("hidden_states", "encoder_hidden_states"))


def noise(latent_shape: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
    """Upstream draws frame by frame: its latents are `[1, latent_frames, 16, h, w]`."""
    import torch

    rows, channels, frames, *size = latent_shape
    drawn = torch.randn((rows, frames, channels, *size), generator=generator, dtype=torch.float32)
    return drawn.transpose(1, 2).contiguous()


def guidance_at(settings: Settings, timestep: float) -> float:
    """With `use_dynamic_cfg` upstream's scale, between 1 and `guidance_scale` + 1: it takes a timestep (999 to 0) as if
    it counted steps, so the scale is no smooth curve.
    """
    if not settings.use_dynamic_cfg:
        return settings.guidance_scale
    num_steps = settings.num_inference_steps
    return 1 + settings.guidance_scale * ((1 - math.cos(math.pi * ((num_steps - timestep) / num_steps) ** 5.0)) / 2)


def advice(settings: Settings) -> str | None:
    """A sentence for a size that the makers do not publish; None for those they do."""
    if (settings.height, settings.width) == (HEIGHT, WIDTH) and settings.num_frames % 16 == 1:
        return None
    return (
        f"{settings.width}x{settings.height} with {settings.num_frames} frames runs, but may look worse than what its "
        f"makers publish: {WIDTH}x{HEIGHT}, and 16k + 1 frames up to 161."
    )


def denormalize_latents(sample: "torch.Tensor", settings: Settings, vae_config: Mapping[str, Any]) -> "torch.Tensor":
    """Latents in the VAE's own scale, without the frames at the start that fill up whole patches."""
    padding = sample.shape[2] - ((settings.num_frames - 1) // GEOMETRY.stride_t + 1)
    return 1 / vae_config["scaling_factor"] * sample[:, :, padding:]


TEXT_ENCODER = t5.encoder(
    config={"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24, "vocab_size": 32128},
    tiny={"d_ff": 72, "d_kv": 8, "d_model": 40, "num_heads": 5, "num_layers": 3, "vocab_size": 210},
    blocks=("encoder.block",),
    aliases={
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (
            "encoder.relative_attention_bias.weight"
        )
    },
    trim=t5.move_position_bias,
)

# ComfyUI's; adapters for this model have those or diffusers'.
MAKERS_NAMES = {
    "time_embedding_linear_1": "time_embedding.linear_1",
    "time_embedding_linear_2": "time_embedding.linear_2",
    "blocks.*.norm1.linear": "transformer_blocks.*.norm1.linear",
    "blocks.*.norm1.norm": "transformer_blocks.*.norm1.norm",
    "blocks.*.norm2.linear": "transformer_blocks.*.norm2.linear",
    "blocks.*.norm2.norm": "transformer_blocks.*.norm2.norm",
    "blocks.*.q": "transformer_blocks.*.attn1.to_q",
    "blocks.*.k": "transformer_blocks.*.attn1.to_k",
    "blocks.*.v": "transformer_blocks.*.attn1.to_v",
    "blocks.*.norm_q": "transformer_blocks.*.attn1.norm_q",
    "blocks.*.norm_k": "transformer_blocks.*.attn1.norm_k",
    "blocks.*.attn_out": "transformer_blocks.*.attn1.to_out.0",
    "blocks.*.ff_proj": "transformer_blocks.*.ff.net.0.proj",
    "blocks.*.ff_out": "transformer_blocks.*.ff.net.2",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="CogVideoXTransformer3DModel",
    config={
        "attention_bias": True,
        "attention_head_dim": 64,
        "in_channels": 16,
        "max_text_seq_length": MAX_TOKENS,
        "num_attention_heads": 48,
        "num_layers": 42,
        "out_channels": 16,
        "patch_bias": False,
        "patch_size": 2,
        "patch_size_t": 2,
        "sample_frames": 81,
        "sample_height": 96,
        "sample_width": 170,
        "text_embed_dim": 4096,
        "time_embed_dim": 512,
        "use_rotary_positional_embeddings": True,
    },
    tiny={
        "attention_head_dim": 16,
        "num_attention_heads": 6,
        "num_layers": 3,
        "text_embed_dim": 40,
        "time_embed_dim": 36,
    },
    needs={
        "in_channels": Need((16,)),
        "max_text_seq_length": Need((MAX_TOKENS,)),
        "ofs_embed_dim": Need((None,)),
        "out_channels": Need((16,)),
        "patch_size": Need((2,)),
        # CogVideoX 1.0 has none.
        "patch_size_t": Need((2,), required=True),
        "text_embed_dim": Same("text_encoder", "d_model"),
        "use_learned_positional_embeddings": Need((False,)),
        "use_rotary_positional_embeddings": Need((True,), required=True),
    },
    blocks=("transformer_blocks",),
    makers_names=MAKERS_NAMES,
    rules=(
        Rule("transformer_blocks.**.bias", REPLICATED),
        Rule("transformer_blocks.*.attn1.norm_*.weight", REPLICATED),
        Rule("transformer_blocks.*.*.norm.weight", REPLICATED),
        # Modulation is of one vector: where its weights lie, it is computed, and the vector is gathered.
        Rule("transformer_blocks.*.*.linear.weight", (None, "all_embed", None)),
        Rule("transformer_blocks.*.attn1.**.weight", *layers.BLOCK_GATHERED),
        Rule("transformer_blocks.*.ff.net.**.weight", *layers.BLOCK_GATHERED),
        Rule("patch_embed.*.weight", *layers.GATHERED),
        Rule("time_embedding.linear_*.weight", *layers.GATHERED),
        Rule("norm_out.linear.weight", *layers.GATHERED),
        Rule("proj_out.weight", *layers.GATHERED),
    ),
)

# As the published checkpoint configures it.
SCHEDULER = {
    "_class_name": "CogVideoXDDIMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "set_alpha_to_one": True,
    "snr_shift_scale": 1.0,
    "steps_offset": 0,
    "timestep_spacing": "trailing",
}

# What the makers' own script sets in its place: for this model they recommend the second, with `use_dynamic_cfg`.
SCHEDULERS = {
    name: {"_class_name": name, "timestep_spacing": "trailing"}
    for name in ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler")
}

SPEC = ModelSpec(
    name="cogvideox1.5-5b",
    family="CogVideoX",
    title="CogVideoX 1.5 5B",
    category="CogVideoX",
    published=Published(hub_id="zai-org/CogVideoX1.5-5B", pipeline_classes=("CogVideoXPipeline",)),
    miniature=Miniature(id="tiny/cogvideox", inputs={"height": 80, "width": 112, "num_frames": 9}),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=GEOMETRY,
    text_encoders=(
        TextEncoding(
            tokenizer_class="T5Tokenizer",
            max_length=MAX_TOKENS,
            width_key="text_embed_dim",
            tokenize=partial(t5.tokens, length=MAX_TOKENS),
            encode=t5.encode_unmasked,
            write_tokenizer=partial(t5.write_t5_tokenizer, texts=(PROMPT,)),
        ),
    ),
    inputs={
        "height": IntLimit(default=HEIGHT, low=64, high=1920, multiple_of=16),
        "width": IntLimit(default=WIDTH, low=64, high=1920, multiple_of=16),
        "num_frames": IntLimit(default=81, low=1, high=161, multiple_of=8, plus=1),
        "num_inference_steps": IntLimit(default=50, low=1, high=100),
        "guidance_scale": FloatLimit(default=6.0, low=1.0, high=20.0),
        "seed": IntLimit(default=42, low=0, high=2**64 - 1),
        "fps": IntLimit(default=16, low=1, high=120),
        "use_dynamic_cfg": Switch(default=False),
    },
    texts={"prompt": PROMPT, "negative_prompt": ""},
    recipe=Recipe(scheduler=SCHEDULER, schedulers=SCHEDULERS, guidance_at=guidance_at, noise=noise, advice=advice),
    denoiser=Denoiser(
        forward=forward,
        prepare=prepare_denoiser,
        head_norms=(
            HeadNorms(queries=("transformer_blocks.*.attn1.norm_q",), keys=("transformer_blocks.*.attn1.norm_k",)),
        ),
    ),
    vae=Vae(latent_format="CogVideoX1_5", denormalize=denormalize_latents, decode=decode),
)
