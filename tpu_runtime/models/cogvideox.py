"""CogVideoX 1.5 text to video: zai-org/CogVideoX1.5-5B. The oracle is `diffusers.CogVideoXPipeline`.

The denoiser is that of CogVideoX (https://arxiv.org/abs/2408.06072, section 2.2); its modules have the names of
diffusers' `CogVideoXTransformer3DModel`.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ..messages import compose
from ..model_spec import (
    MAG_CACHE_INPUTS,
    BoolInput,
    DenoiserSpec,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    SamplingConfig,
    Settings,
    TextEncoding,
    TinyModel,
    VaeSpec,
)
from ..model_spec.upstream import Net, UpstreamConfig
from .autoencoders.cogvideox import VAE_DECODER, decode
from .common import layers, t5
from .common.layers import Modulation
from .denoisers.cogvideox import MAX_TOKENS, TRANSFORMER

if TYPE_CHECKING:
    import torch

    from ..programs.sharded_ops import ShardedOps
    from .common.layers import Pair

GEOMETRY = LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=(2, 2, 2))

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    cogvideox: Net,
    run: "ShardedOps",
    sample: "torch.Tensor",
    timestep: "torch.Tensor",
    inputs: "dict[str, torch.Tensor]",
) -> "torch.Tensor":
    """Return the velocity of `sample` `[rows, 16, frames, height, width]` at one `timestep` `[1]`.

    cogvideox: diffusers' `CogVideoXTransformer3DModel`. run: operations on the mesh.
    inputs: `text` `[rows, 226, text_embed_dim]`.
    """
    return predict_velocity(cogvideox, run, sample, embed_time(cogvideox, sample, timestep), inputs["text"])


def embed_time(cogvideox: Net, sample: "torch.Tensor", timestep: "torch.Tensor") -> "torch.Tensor":
    """Return the time embedding `[rows, dim]` of `timestep` `[1]` for every row of `sample` `[rows, ...]`.

    cogvideox: diffusers' module.
    """
    return cogvideox.time_embedding(cogvideox.time_proj(timestep.expand(len(sample))).to(sample.dtype))


def predict_velocity(
    cogvideox: Net, run: "ShardedOps", latents: "torch.Tensor", temb: "torch.Tensor", text: "torch.Tensor"
) -> "torch.Tensor":
    """Return the velocity of `latents` `[rows, channels, frames, height, width]`.

    cogvideox: diffusers' module. run: operations on the mesh. temb: time embedding `[rows, dim]`.
    text: `[rows, 226, text_embed_dim]`; its padding is attended to, as upstream.
    """
    cosines, sines = (run.tokens(table[None]) for table in rotary_tables(cogvideox.config, latents))
    x = run.tokens(cogvideox.patch_embed.proj(layers.cut_patches(latents, GEOMETRY.patch_thw)))  # [rows, tokens, dim]
    text = run.replicate(cogvideox.patch_embed.text_proj(text))

    def body(block: Net, streams: "Pair") -> "Pair":
        return run_block(block, run, *streams, temb, (cosines, sines))

    x, _ = run.scan(cogvideox.transformer_blocks, (x, text), body)
    x = cogvideox.norm_out(cogvideox.norm_final(run.remove_padding(x)), temb=temb)
    return layers.join_patches(cogvideox.proj_out(x), latents, GEOMETRY.patch_thw)


def run_block(
    block: Net, run: "ShardedOps", x: "torch.Tensor", text: "torch.Tensor", temb: "torch.Tensor", rotary: "Pair"
) -> "Pair":
    """Run one `CogVideoXBlock`: joint attention, then a shared feed-forward. Returns both streams.

    block: diffusers' module. run: operations on the mesh. x, text: `[rows, tokens, dim]`. temb: `[rows, dim]`.
    rotary: cosines and sines `[1, tokens, head_dim]` of the video.

    Upstream concatenates video and text for both updates. Here they stay apart, so that tokens stay on their chips.
    """
    norm = partial(run.residual_norm, eps=block.norm1.norm.eps)
    text_norm = partial(norm, placement="replicated")
    (msa, text_msa), (mlp, text_mlp) = modulate(run, block.norm1, temb), modulate(run, block.norm2, temb)

    _, y = norm(x, None, None, msa.scale, msa.shift)
    _, text_y = text_norm(text, None, None, text_msa.scale, text_msa.shift)
    update, text_update = joint_attention(block.attn1, run, y, text_y, rotary)
    x, y = norm(x, update, msa.gate, mlp.scale, mlp.shift)
    x = run.add_feed_forward(x, block.ff, y, mlp.gate)
    text, text_y = text_norm(text, text_update, text_msa.gate, text_mlp.scale, text_mlp.shift)
    return x, run.add_feed_forward(text, block.ff, text_y, text_mlp.gate, "replicated")


def modulate(run: "ShardedOps", norm: Net, temb: "torch.Tensor") -> "tuple[Modulation, Modulation]":
    """Return the modulation of the video and of the text, as `CogVideoXLayerNormZero` `norm` does.

    run: operations on the mesh. temb: time embedding `[rows, dim]`.
    """
    chunks = run.gather_vector(norm.linear(norm.silu(temb))).chunk(6, dim=1)
    return layers.make_modulation(*chunks[:3], norm=norm.norm), layers.make_modulation(*chunks[3:], norm=norm.norm)


def joint_attention(attn: Net, run: "ShardedOps", x: "torch.Tensor", text: "torch.Tensor", rotary: "Pair") -> "Pair":
    """Return the joint-attention updates of `x` and `text`, `[rows, tokens, dim]` each.

    attn: diffusers' module. run: operations on the mesh. rotary: cosines and sines `[1, tokens, head_dim]` of the
    video. Both streams share projections and norms; the text has no positions.
    """
    prologues = layers.make_prologue(attn.norm_q, attn.norm_k, rotary), layers.make_prologue(attn.norm_q, attn.norm_k)
    qkv = attn.to_q, attn.to_k, attn.to_v
    latent_heads = layers.project_heads(run, attn, x, *qkv)
    text_heads = layers.project_heads(run, attn, text, *qkv, placement="replicated")
    attended, text_attended = run.joint_attention(latent_heads, text_heads, prologues=prologues)
    (update,) = run.products(attended.flatten(2), attn.to_out[0])
    (text_update,) = run.products(text_attended.flatten(2), attn.to_out[0], placement="replicated")
    return update, text_update


def rotary_tables(config: Any, latents: "torch.Tensor") -> "Pair":
    """Return cosines and sines `[tokens, head_dim]` of the tokens of `latents`.

    config: the transformer's. latents: `[rows, channels, frames, height, width]`. Positions count from 0. Upstream's
    tables end at `sample_height` and `sample_width`; larger latents continue them.
    """
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    frames, height, width = (side // patch for side, patch in zip(latents.shape[2:], GEOMETRY.patch_thw, strict=True))
    grid = height, width
    cosines, sines = get_3d_rotary_pos_embed(
        config.attention_head_dim, None, grid, frames, grid_type="slice", max_size=grid, device=latents.device
    )
    return cosines, sines


# --- the recipe -------------------------------------------------------------------------------------------------------

PROMPT = (
    "A panda, dressed in a small, red jacket and a tiny hat, sits on a wooden stool in a serene bamboo forest. The "
    "panda's fluffy paws strum a miniature acoustic guitar, producing soft, melodic tunes. Nearby, a few other pandas "
    "gather, watching curiously and some clapping in rhythm. Sunlight filters through the tall bamboo, casting a "
    "gentle glow on the scene. The panda's face is expressive, showing concentration and joy as it plays. The "
    "background includes a small, flowing stream and vibrant green foliage, enhancing the peaceful and magical "
    "atmosphere of this unique musical performance."
)
# The published size for text to video.
HEIGHT, WIDTH = 768, 1360


def draw_noise(latent_shape: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
    """Draw the initial noise `[1, 16, frames, height, width]` in upstream's order: frame by frame.

    latent_shape: of the result. generator: advanced by the draw.
    """
    import torch

    rows, channels, frames, *size = latent_shape
    drawn = torch.randn((rows, frames, channels, *size), generator=generator, dtype=torch.float32)
    return drawn.transpose(1, 2).contiguous()


def dynamic_guidance(scale: float, timestep: float, num_steps: int) -> float:
    """Return the guidance scale of a step, between 1 and `scale` + 1, with upstream's `use_dynamic_cfg` formula.

    timestep: 999 to 0, which upstream's formula uses like a step index. So the schedule is not smooth. num_steps: of
    the schedule.
    """
    return 1 + scale * ((1 - math.cos(math.pi * ((num_steps - timestep) / num_steps) ** 5.0)) / 2)


def advise(settings: Settings) -> str | None:
    """Return a sentence if the size or the number of frames is not one of the published ones, else None."""
    if (settings.height, settings.width) == (HEIGHT, WIDTH) and settings.num_frames % 16 == 1:
        return None
    return compose(
        "model.size_unpublished", width=settings.width, height=settings.height,
        num_frames=settings.num_frames, width_2=WIDTH, height_2=HEIGHT,
    )  # fmt: skip


def denormalize_latents(sample: "torch.Tensor", vae_config: UpstreamConfig) -> "torch.Tensor":
    """Scale the solver's `sample` `[1, 16, frames, height, width]` to the VAE's own scale."""
    return 1 / vae_config["scaling_factor"] * sample


TEXT_ENCODER = t5.make_encoder(
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

# The published checkpoint's config.
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

# The alternatives of the model authors' script. For this model they recommend the second, with `use_dynamic_cfg`.
SCHEDULERS = {
    name: {"_class_name": name, "timestep_spacing": "trailing"}
    for name in ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler")
}

SPEC = ModelSpec(
    name="cogvideox1.5-5b",
    family="CogVideoX",
    title="CogVideoX 1.5 5B",
    category="CogVideoX",
    published=HubCheckpoint(hub_id="zai-org/CogVideoX1.5-5B", pipeline_classes=("CogVideoXPipeline",)),
    miniature=TinyModel(
        id="tiny/cogvideox",
        inputs={"height": 80, "width": 112, "num_frames": 9},
        texts={"prompt": "a red circle moves up on white", "negative_prompt": ""},
    ),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=GEOMETRY,
    text_encoders=(
        TextEncoding(
            tokenizer_class="T5Tokenizer",
            max_length=MAX_TOKENS,
            width_key="text_embed_dim",
            tokenize=partial(t5.tokenize, length=MAX_TOKENS),
            encode=t5.encode_unmasked,
            depth_key="num_layers",
            write_tokenizer=partial(t5.write_t5_tokenizer, texts=(PROMPT,)),
        ),
    ),
    inputs={
        "height": IntInput(default=HEIGHT, low=64, high=1920, multiple_of=16),
        "width": IntInput(default=WIDTH, low=64, high=1920, multiple_of=16),
        "num_frames": IntInput(default=81, low=1, high=161, multiple_of=8, plus=1),
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        "guidance_scale": FloatInput(default=6.0, low=1.0, high=20.0),
        "seed": IntInput(default=42, low=0, high=2**64 - 1),
        "fps": IntInput(default=16, low=1, high=120),
        "use_dynamic_cfg": BoolInput(default=False),
        **MAG_CACHE_INPUTS,
    },
    texts={"prompt": PROMPT, "negative_prompt": ""},
    recipe=SamplingConfig(
        scheduler=SCHEDULER, schedulers=SCHEDULERS, guidance_at=dynamic_guidance, noise=draw_noise, advice=advise
    ),
    denoiser=DenoiserSpec(
        forward=forward,
        head_norms=(
            HeadNorms(queries=("transformer_blocks.*.attn1.norm_q",), keys=("transformer_blocks.*.attn1.norm_k",)),
        ),
    ),
    vae=VaeSpec(latent_format="CogVideoX1_5", denormalize=denormalize_latents, decode=decode),
)
