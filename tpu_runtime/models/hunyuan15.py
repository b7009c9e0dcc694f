"""HunyuanVideo 1.5, text to video: hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v.

Paper: https://arxiv.org/abs/2511.18870. The oracle is `diffusers.HunyuanVideo15Pipeline`; the denoiser's modules have
the names of diffusers' `HunyuanVideo15Transformer3DModel`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..model_spec import (
    BoolInput,
    DenoiserSpec,
    FeatureReuse,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    SamplingConfig,
    TinyModel,
    VaeSpec,
)
from ..model_spec.upstream import Net, UpstreamConfig
from .autoencoders.hunyuan15 import LIGHT_VAE, VAE_DECODER, decode, denormalize_latents
from .common import layers
from .denoisers.hunyuan15 import TRANSFORMER
from .text_encoders.hunyuan15 import GLYPH_ENCODER, NEGATIVE_PROMPT, PROMPT, TEXT_ENCODER, TEXT_ENCODERS

if TYPE_CHECKING:
    import torch

    from ..programs.sharded_ops import ShardedOps
    from .common.layers import Modulation, Pair

# Rows of `cond_type_embed`, which marks the source of a conditioning token.
TEXT, GLYPHS, IMAGE = 0, 1, 2

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 32, frames, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `HunyuanVideo15Transformer3DModel`. run: operations on the mesh. inputs: see `embed_tokens`,
    `join_texts` and `embed_time`.
    """
    x, text, text_length = embed_tokens(dit, run, sample, timestep, inputs)
    temb = embed_time(dit.time_embed, sample, timestep, inputs)
    x, _ = run_blocks(dit, run, (x, text), text_length, temb, sample)
    return predict_flow(dit, run, x, temb, sample)


def embed_tokens(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Embed `sample` and all texts: `[rows, tokens, dim]` each. Also returns the texts' valid tokens `[rows]`.

    dit: diffusers' module. run: operations on the mesh. sample: `[rows, 32, frames, height, width]`. timestep: `[1]`.
    inputs: those of `join_texts`, and optionally `condition` `[1, 33, frames, height, width]`, known latents and
        their mask as further channels. Without it they are zeros.
    """
    import torch

    text, text_length = join_texts(dit, run, timestep.expand(len(sample)), inputs)
    rows, channels, *size = sample.shape
    no_condition = torch.zeros((rows, channels + 1, *size), dtype=sample.dtype, device=sample.device)
    latents = torch.cat([sample, inputs.get("condition", no_condition)], dim=1)
    x = layers.embed_patches(dit.x_embedder.proj, latents)
    return run.tokens(x), run.replicate(text), text_length


def join_texts(
    dit: Net, run: "ShardedOps", timesteps: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Concatenate all texts: `[rows, tokens, dim]` with the valid tokens first, and their number `[rows]`.

    dit: diffusers' module. run: operations on the mesh. timesteps: `[rows]`.
    inputs: `text` `[rows, 1000, text_embed_dim]`, `text_2` `[rows, 256, text_embed_2_dim]`, `text_length` and
        `text_2_length` `[rows]`, and optionally `image_embeds` `[1, 729, image_embed_dim]`.

    Image tokens come first; without an image upstream masks them all, so they are left out. Upstream sorts tokens by
    their mask, which depends on values; a traced program gathers by the texts' lengths instead.
    """
    import torch

    from ..programs import torch_bridge

    kind = dit.cond_type_embed.weight
    lengths = [inputs["text_2_length"], inputs["text_length"]]
    texts = [
        dit.context_embedder_2(inputs["text_2"]) + kind[GLYPHS],
        refine_text(dit.context_embedder, run, inputs["text"], inputs["text_length"], timesteps) + kind[TEXT],
    ]
    if "image_embeds" in inputs:
        image = dit.image_embedder(inputs["image_embeds"]) + kind[IMAGE]
        lengths.insert(0, torch.full_like(lengths[0], image.shape[1]))
        texts.insert(0, image)
    return torch_bridge.call_jax(layers.pack_valid_tokens, tuple(texts), tuple(lengths))


def refine_text(
    embedder: Net, run: "ShardedOps", text: "torch.Tensor", length: "torch.Tensor", timesteps: "torch.Tensor"
) -> "torch.Tensor":
    """Run the token refiner: `text` `[rows, tokens, text_dim]` to `[rows, tokens, dim]`.

    embedder: diffusers' `context_embedder`. run: operations on the mesh. length: valid tokens `[rows]`.
    timesteps: `[rows]`; with the mean of the text they gate the blocks.

    Padding is masked as keys. Upstream masks it as queries too, which leaves rows without any key.
    """
    import torch

    is_real = torch.arange(text.shape[1], device=text.device)[None] < length[:, None]
    weights = is_real.float()[..., None]
    mean = ((text * weights).sum(dim=1) / weights.sum(dim=1)).type_as(text)
    temb = embedder.time_text_embed(timesteps, mean)
    x = embedder.proj_in(text)
    for block in embedder.token_refiner.refiner_blocks:
        gate, ff_gate = block.norm_out(temb)
        x = x + gate * masked_self_attention(block.attn, run, block.norm1(x), is_real)
        x = x + ff_gate * block.ff(block.norm2(x))
    return x


def masked_self_attention(attn: Net, run: "ShardedOps", x: "torch.Tensor", is_real: "torch.Tensor") -> "torch.Tensor":
    """Return the self-attention of a replicated text `x` `[rows, tokens, dim]` to its valid tokens.

    attn: diffusers' module. run: operations on the mesh. is_real: `[rows, tokens]`, false for padding.
    """
    from torch.nn.functional import scaled_dot_product_attention

    heads = (head.transpose(1, 2) for head in layers.project_heads(run, attn, x, attn.to_q, attn.to_k, attn.to_v))
    keys = is_real[:, None, None].expand(-1, -1, x.shape[1], -1)
    return attn.to_out[0](scaled_dot_product_attention(*heads, attn_mask=keys).transpose(1, 2).flatten(2))


def embed_time(
    time_embed: Net, sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the time embedding `[rows, dim]` of `timestep` `[1]`.

    time_embed: diffusers' module. sample: gives the number of rows and the dtype. inputs: `next_timestep` `[1]`, where
    the step ends, which only mean-flow models embed too.
    """
    rows = len(sample)
    temb = time_embed.timestep_embedder(time_embed.time_proj(timestep.expand(rows)).to(sample.dtype))
    if not time_embed.use_meanflow or "next_timestep" not in inputs:
        return temb
    end = time_embed.time_proj_r(inputs["next_timestep"].expand(rows))
    return temb + time_embed.timestep_embedder_r(end.to(sample.dtype))


def run_blocks(
    dit: Net,
    run: "ShardedOps",
    streams: "Pair",
    text_length: "torch.Tensor",
    temb: "torch.Tensor",
    sample: "torch.Tensor",
    part: slice | None = None,
) -> "Pair":
    """Run the transformer blocks on `streams`, video tokens and text tokens `[rows, tokens, dim]`, and return both.

    dit: diffusers' module. run: operations on the mesh. text_length: valid text tokens `[rows]`. temb: `[rows, dim]`.
    sample: `[rows, 32, frames, height, width]`, whose size the rotary tables have. part: the blocks to run; None: all.
    """
    cosines, sines = (run.tokens(table[None]) for table in dit.rope(sample))

    def body(block: Net, streams: "Pair") -> "Pair":
        return run_block(block, run, *streams, text_length, temb, (cosines, sines))

    return run.scan(dit.transformer_blocks, streams, body, layers=part)


def run_block(
    block: Net,
    run: "ShardedOps",
    x: "torch.Tensor",
    text: "torch.Tensor",
    text_length: "torch.Tensor",
    temb: "torch.Tensor",
    rotary: "Pair",
) -> "Pair":
    """Run one `HunyuanVideo15TransformerBlock`: joint attention, then a feed-forward per stream. Returns both streams.

    block: diffusers' module. run: operations on the mesh. x, text: `[rows, tokens, dim]`. text_length: valid tokens
    `[rows]`. temb: time embedding `[rows, dim]`. rotary: cosines and sines `[1, tokens, head_dim]` of the video.
    """
    norm = partial(run.residual_norm, eps=block.norm2.eps)
    text_norm = partial(norm, placement="replicated")
    (msa, mlp), (text_msa, text_mlp) = modulate(block.norm1, temb), modulate(block.norm1_context, temb)

    _, y = norm(x, None, None, msa.scale, msa.shift)
    _, text_y = text_norm(text, None, None, text_msa.scale, text_msa.shift)
    update, text_update = joint_attention(block.attn, run, y, text_y, text_length, rotary)
    x, y = norm(x, update, msa.gate, mlp.scale, mlp.shift)
    x = run.add_feed_forward(x, block.ff, y, mlp.gate)
    text, text_y = text_norm(text, text_update, text_msa.gate, text_mlp.scale, text_mlp.shift)
    return x, run.add_feed_forward(text, block.ff_context, text_y, text_mlp.gate, "replicated")


def modulate(norm: Net, temb: "torch.Tensor") -> "Sequence[Modulation]":
    """Return the modulation of the attention and of the feed-forward, as `AdaLayerNormZero` `norm` does.

    temb: time embedding `[rows, dim]`.
    """
    chunks = norm.linear(norm.silu(temb)).chunk(6, dim=1)
    return layers.make_modulation(*chunks[:3]), layers.make_modulation(*chunks[3:])


def joint_attention(
    attn: Net, run: "ShardedOps", x: "torch.Tensor", text: "torch.Tensor", text_length: "torch.Tensor", rotary: "Pair"
) -> "Pair":
    """Return the joint-attention updates of `x` and `text`, `[rows, tokens, dim]` each.

    attn: diffusers' module. run: operations on the mesh. text_length: valid tokens `[rows]`. rotary: cosines and sines
    `[1, tokens, head_dim]` of the video. Each stream has its own projections and norms; the text has no positions.
    """
    prologues = (
        layers.make_prologue(attn.norm_q, attn.norm_k, rotary),
        layers.make_prologue(attn.norm_added_q, attn.norm_added_k),
    )
    latent_heads = layers.project_heads(run, attn, x, attn.to_q, attn.to_k, attn.to_v)
    added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    text_heads = layers.project_heads(run, attn, text, *added, placement="replicated")
    attended, text_attended = run.joint_attention(latent_heads, text_heads, text_length, prologues)
    (update,) = run.products(attended.flatten(2), attn.to_out[0])
    (text_update,) = run.products(text_attended.flatten(2), attn.to_add_out, placement="replicated")
    return update, text_update


def predict_flow(
    dit: Net, run: "ShardedOps", x: "torch.Tensor", temb: "torch.Tensor", sample: "torch.Tensor"
) -> "torch.Tensor":
    """Return the flow `[rows, 32, frames, height, width]` of the video tokens `x` after the last block.

    dit: diffusers' module. run: operations on the mesh. x: `[rows, tokens, dim]`. temb: `[rows, dim]`. sample: gives
    the shape. A patch is one latent.
    """
    flow = run.remove_tiling(dit.proj_out(dit.norm_out(run.remove_padding(x), temb)))
    return flow.transpose(1, 2).unflatten(2, sample.shape[2:])


# --- steps that start from an earlier step's features (DeepCache, https://arxiv.org/abs/2312.00858) -------------------


def keep_features(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """Return the flow as `forward` does, and the input of the last block, for `reuse`.

    dit, run, sample `[rows, 32, frames, height, width]`, timestep `[1]`, inputs: as in `forward`. The features are
    `hidden` and `text`, `[rows, tokens, dim]` each, and `text_length` `[rows]`.
    """
    x, text, text_length = embed_tokens(dit, run, sample, timestep, inputs)
    temb = embed_time(dit.time_embed, sample, timestep, inputs)
    x, text = run_blocks(dit, run, (x, text), text_length, temb, sample, slice(None, -1))
    features = {"hidden": x, "text": text, "text_length": text_length}
    x, _ = run_blocks(dit, run, (x, text), text_length, temb, sample, slice(-1, None))
    return predict_flow(dit, run, x, temb, sample), features


def reuse_features(
    dit: Net,
    run: "ShardedOps",
    features: "dict[str, torch.Tensor]",
    sample: "torch.Tensor",
    timestep: "torch.Tensor",
    inputs: "dict[str, torch.Tensor]",
) -> "torch.Tensor":
    """Return the flow from the last block alone, run on the `features` of an earlier `keep` with this step's time.

    dit, run, timestep `[1]`, inputs: as in `forward`. sample: gives the shape `[rows, 32, frames, height, width]`; its
    values are unused.
    """
    temb = embed_time(dit.time_embed, sample, timestep, inputs)
    streams = features["hidden"], features["text"]
    x, _ = run_blocks(dit, run, streams, features["text_length"], temb, sample, slice(-1, None))
    return predict_flow(dit, run, x, temb, sample)


def solver_arguments(
    config: UpstreamConfig, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    """Return upstream's arguments of `set_timesteps`, besides the number of steps: evenly spaced sigmas.

    config, latent_shape, shift: unused here; the shift is a key of the scheduler's config. num_steps: of the schedule.
    """
    import numpy as np

    return {"sigmas": np.linspace(1.0, 0.0, num_steps + 1)[:-1]}


# The published 720p checkpoint's config; for 480p the shift is 5.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 9.0,
    "use_dynamic_shifting": False,
}

SPEC = ModelSpec(
    name="hunyuanvideo1.5-t2v-720p",
    family="HunyuanVideo15",
    title="HunyuanVideo 1.5 T2V",
    category="HunyuanVideo1.5",
    published=HubCheckpoint(
        hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        pipeline_classes=("HunyuanVideo15Pipeline",),
        index={"guider": ("diffusers", "ClassifierFreeGuidance")},
        files={"guider/guider_config.json": {"_class_name": "ClassifierFreeGuidance", "guidance_scale": 6.0}},
    ),
    miniature=TinyModel(
        id="tiny/hunyuan15",
        inputs={"height": 80, "width": 112, "num_frames": 9},
        texts={"prompt": "a red circle moves right on blue", "negative_prompt": ""},
    ),
    components=(TEXT_ENCODER, GLYPH_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=LatentGeometry(channels=32, stride_t=4, stride_hw=16, patch_thw=(1, 1, 1)),
    text_encoders=TEXT_ENCODERS,
    inputs={
        "height": IntInput(default=720, low=64, high=1920, multiple_of=16),
        "width": IntInput(default=1280, low=64, high=1920, multiple_of=16),
        "num_frames": IntInput(default=121, low=1, high=241, multiple_of=4, plus=1),
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        "guidance_scale": FloatInput(default=6.0, low=1.0, high=20.0),  # below 1 upstream still guides
        "seed": IntInput(default=42, low=0, high=2**64 - 1),
        # 0: the checkpoint's own shift, which differs between 480p, 720p and image to video.
        "flow_shift": FloatInput(default=0.0, low=0.0, high=20.0, step=0.5),
        "fps": IntInput(default=24, low=1, high=120),
        "step_cache": BoolInput(default=False),
        # Reuse suits the middle of 50 steps: the first steps compose the video, the last add its details.
        "cache_start": IntInput(default=11, low=0, high=100),
        "cache_end": IntInput(default=45, low=0, high=100),
        "cache_interval": IntInput(default=4, low=1, high=100),
        "cache_threshold": FloatInput(default=0.0, low=0.0, high=1.0, step=0.01),  # 0: DeepCache
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=SamplingConfig(scheduler=SCHEDULER, shift_key="shift", solver_arguments=solver_arguments),
    denoiser=DenoiserSpec(
        forward=forward,
        tile=(8, 8, 16),
        step_reuse=FeatureReuse(
            keep=keep_features, reuse=reuse_features, tokens=("hidden",), whole=("text", "text_length")
        ),
        head_norms=(
            HeadNorms(
                queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
                keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
            ),
        ),
    ),
    vae=VaeSpec(latent_format="HunyuanVideo15", denormalize=denormalize_latents, decode=decode, light=LIGHT_VAE),
)
