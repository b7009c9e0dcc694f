"""The denoiser of Wan (https://arxiv.org/abs/2503.20314): forward pass, sizes, sharding, original keys.

Its modules have the names of diffusers' `WanTransformer3DModel`. The steps, with the sizes of Wan 2.1 14B and latents
`[rows, 16, T, h, w]`:

    patches    [rows, N, 16 * 1 * 2 * 2] -> [rows, N, 5120], N = T * h/2 * w/2, the width counted fastest
    time       sinusoids [rows, 256] -> [rows, 5120] -> modulation [rows, 6, 5120], one for all blocks
    text       UMT5's states [rows, 512, 4096] -> [rows, 512, 5120]
    40 blocks  self-attention with 40 heads of 128, cross-attention to the text, feed-forward of 13824
    output     norm, shift and scale, then a projection [rows, N, 1 * 2 * 2 * 16] -> flow [rows, 16, T, h, w]

Of a head's 128 channels, 44 are rotated by the frame, 42 by the row and 42 by the column, with a base of 10000.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....sharding.rules import BLOCK_PRODUCT, GATHERED, REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig
from ...model_spec.upstream import Net
from ..common import layers

if TYPE_CHECKING:
    import torch

    from ...programs.sharded_ops import ShardedOps

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 16, frames, height, width]` at one `timestep` `[1]`, 1000 to 0.

    dit: diffusers' `WanTransformer3DModel`. run: operations on the mesh.
    inputs: `text` `[rows, 512, text_dim]`; for image to video also `condition` `[1, 4 + 16, frames, height, width]`,
        mask and latents, which are more channels; in Wan 2.1 also `image_embeds` `[1, 257 * images, image_dim]`, CLIP's
        tokens of one or two images.
    """
    import torch

    latents = torch.cat([sample, inputs["condition"]], dim=1) if "condition" in inputs else sample
    return predict_flow(dit, run, latents, timestep.expand(len(sample)), inputs["text"], inputs.get("image_embeds"))


def predict_flow(
    dit: Net,
    run: "ShardedOps",
    latents: "torch.Tensor",
    timesteps: "torch.Tensor",
    text: "torch.Tensor",
    image_tokens: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """Return the flow (velocity) of `latents` `[rows, channels, frames, height, width]`.

    dit: diffusers' `WanTransformer3DModel`. run: operations on the mesh.
    timesteps: `[rows]`, or `[rows, 2]`: for the first frame's tokens and for all others.
    text: `[rows, tokens, text_dim]`. image_tokens: CLIP's, `[rows, tokens, image_dim]`, or None.
    """
    cosines, sines = map(run.tokens, dit.rope(latents))  # [1, tokens, 1, head_dim] each
    x = run.tokens(layers.embed_patches(dit.patch_embedding, latents))  # [rows, tokens, dim]

    embedder = dit.condition_embedder
    time = embed_time(embedder, timesteps).type_as(text)  # [rows, dim] or [rows, 2, dim]
    modulation = embedder.time_proj(embedder.act_fn(time)).unflatten(-1, (6, -1))  # [rows, 6, dim], [rows, 2, 6, dim]
    text = embedder.text_embedder(text)  # [rows, tokens, dim]
    if image_tokens is not None:
        image_tokens = embed_images(embedder.image_embedder, image_tokens)
    elif embedder.image_embedder is not None:
        image_tokens = text  # as ComfyUI does without image tokens

    def body(block: Net, x: "torch.Tensor") -> "torch.Tensor":
        return run_block(block, run, x, modulation, (cosines, sines), text, image_tokens)

    x = run.remove_padding(run.scan(dit.blocks, x, body))
    # With two timesteps, use the second: the prediction for the given first frame is discarded.
    time = time.reshape(len(time), -1, time.shape[-1])[:, -1:]  # [rows, 1, dim]
    shift, scale = (dit.scale_shift_table + time).chunk(2, dim=1)
    x = (dit.norm_out(x.float()) * (1 + scale) + shift).type_as(x)  # in float32, as upstream
    return join_patches(run.remove_tiling(dit.proj_out(x)), latents, dit.config.patch_size)


def embed_time(embedder: Net, timesteps: "torch.Tensor") -> "torch.Tensor":
    """Return the time embedding `[..., dim]` of `timesteps` `[...]`, computed in float32 as upstream does."""
    waves = embedder.timesteps_proj(timesteps.flatten()).unflatten(0, timesteps.shape)
    return layers.in_float32(embedder.time_embedder)(waves)


def embed_images(embedder: Net, image_tokens: "torch.Tensor") -> "torch.Tensor":
    """Project CLIP's image tokens, `[rows, tokens, image_dim]` to `[rows, tokens, dim]`.

    `embedder` has position embeddings in FLF2V, which takes two images.
    """
    if embedder.pos_embed is not None:
        image_tokens = image_tokens + embedder.pos_embed[:, : image_tokens.shape[1]]
    return embedder.norm2(embedder.ff(embedder.norm1(image_tokens)))


def run_block(
    block: Net,
    run: "ShardedOps",
    x: "torch.Tensor",
    modulation: "torch.Tensor",
    rotary: "tuple[torch.Tensor, torch.Tensor]",
    text: "torch.Tensor",
    image_tokens: "torch.Tensor | None",
) -> "torch.Tensor":
    """Run one `WanTransformerBlock`: self-attention, cross-attention to the text, feed-forward. Returns `x`, updated.

    The first and third update have adaLN's shift, scale and gate; the second has a norm with weights and no gate.

    block: diffusers' module. run: operations on the mesh. Each residual sum is fused with the norm after it.
    x: video tokens `[rows, tokens, dim]`. modulation: `[rows, 6, dim]`, or `[rows, 2, 6, dim]` with two timesteps.
    rotary: cosines and sines `[1, tokens, 1, head_dim]` each.
    text, image_tokens: embedded tokens `[rows, tokens, dim]`; image_tokens may be None.
    """
    norm = partial(run.residual_norm, eps=block.norm1.eps)
    vectors = (block.scale_shift_table + modulation.float()).chunk(6, dim=-2)
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = vectors  # float32, [rows, 1, dim] or [rows, 2, 1, dim]
    _, y = norm(x, None, None, 1 + scale, shift)
    x, y = norm(x, self_attention(block.attn1, run, y, rotary), gate, block.norm2.weight, block.norm2.bias)
    x, y = norm(x, cross_attention(block.attn2, run, y, text, image_tokens), None, 1 + ffn_scale, ffn_shift)
    return run.add_feed_forward(x, block.ffn, y, ffn_gate)


def self_attention(
    attn: Net, run: "ShardedOps", x: "torch.Tensor", rotary: "tuple[torch.Tensor, torch.Tensor]"
) -> "torch.Tensor":
    """Return the self-attention update of `x` `[rows, tokens, dim]`.

    attn: diffusers' module. run: operations on the mesh. rotary: cosines and sines `[1, tokens, 1, head_dim]` each.
    Queries and keys are RMS-normed over all heads together, then rotated.
    """
    query, key, value = layers.project_heads(run, attn, x, attn.to_q, attn.to_k, attn.to_v)
    attended = run.self_attention(query, key, value, layers.make_prologue(attn.norm_q, attn.norm_k, rotary))
    (update,) = run.products(attended.flatten(2), attn.to_out[0])
    return update


def cross_attention(
    attn: Net, run: "ShardedOps", x: "torch.Tensor", text: "torch.Tensor", image_tokens: "torch.Tensor | None"
) -> "torch.Tensor":
    """Return the cross-attention update of `x` `[rows, tokens, dim]`.

    attn: diffusers' module. run: operations on the mesh.
    text: `[rows, tokens, dim]`, attended to with its padding.
    image_tokens: `[rows, tokens, dim]`, with a softmax of their own, whose result is added; None: text alone.
    """
    project_replicated = partial(layers.project_heads, run, attn, placement="replicated")
    (query,), (key, value) = (
        layers.project_heads(run, attn, x, attn.to_q),
        project_replicated(text, attn.to_k, attn.to_v),
    )
    prologue = layers.make_prologue(attn.norm_q, attn.norm_k)
    attended = run.cross_attention(query, key, value, prologue=prologue).flatten(2)
    if image_tokens is not None:
        key, value = project_replicated(image_tokens, attn.add_k_proj, attn.add_v_proj)
        prologue = layers.make_prologue(attn.norm_q, attn.norm_added_k)
        attended = attended + run.cross_attention(query, key, value, prologue=prologue).flatten(2)
    (update,) = run.products(attended, attn.to_out[0])
    return update


def join_patches(patches: "torch.Tensor", latents: "torch.Tensor", patch_size: tuple[int, int, int]) -> "torch.Tensor":
    """Unpatchify `[rows, tokens, patch_size * channels]` to a sample `[rows, channels, frames, height, width]`.

    latents: `[rows, channels, frames, height, width]` whose size the result has. patch_size: (frames, height, width).
    """
    sizes = [size // patch for size, patch in zip(latents.shape[2:], patch_size, strict=True)]
    cells = patches.reshape(len(patches), *sizes, *patch_size, -1)
    return cells.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


# --- components -------------------------------------------------------------------------------------------------------

TRANSFORMER_RULES = (
    # Biases, norms and modulation tables of the blocks are `[layers, dim]`: at most 2.4 MB in bfloat16.
    Rule("blocks.**.bias", REPLICATED),
    Rule("blocks.*.*.norm_q.weight", REPLICATED),
    Rule("blocks.*.*.norm_k.weight", REPLICATED),
    Rule("blocks.*.norm2.weight", REPLICATED),
    Rule("blocks.*.scale_shift_table", REPLICATED),
    Rule("blocks.*.*.to_out.0.weight", *BLOCK_PRODUCT),
    Rule("blocks.*.*.*.weight", *BLOCK_PRODUCT),
    Rule("blocks.*.ffn.net.0.proj.weight", *BLOCK_PRODUCT),
    Rule("blocks.*.ffn.net.2.weight", *BLOCK_PRODUCT),
    Rule("condition_embedder.time_proj.weight", *GATHERED),
    Rule("condition_embedder.*.*.weight", *GATHERED),
    # 5120 wide: in float32, or with more channels, above the size that needs no rule.
    Rule("patch_embedding.weight", REPLICATED),
    Rule("proj_out.weight", REPLICATED),
)

# Keys of https://github.com/Wan-Video/Wan2.1; as in
# `diffusers.loaders.single_file_utils.convert_wan_transformer_to_diffusers`.
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
ORIGINAL_KEYS = {
    **{
        f"blocks.*.{theirs}.{name}": f"blocks.*.{own}.{key}"
        for theirs, own in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for name, key in _ATTENTION.items()
    },
    "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
    "blocks.*.ffn.2": "blocks.*.ffn.net.2",
    "blocks.*.norm3": "blocks.*.norm2",
    "blocks.*.modulation": "blocks.*.scale_shift_table",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="WanTransformer3DModel",
    class_aliases=("SkyReelsV2Transformer3DModel",),
    config={
        "attention_head_dim": 128,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "ffn_dim": 13824,
        "freq_dim": 256,
        "in_channels": 16,
        "num_attention_heads": 40,
        "num_layers": 40,
        "out_channels": 16,
        "patch_size": (1, 2, 2),
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": 4096,
    },
    tiny={
        "attention_head_dim": 24,
        "ffn_dim": 200,
        "freq_dim": 32,
        "num_attention_heads": 6,
        "num_layers": 3,
        "text_dim": 40,
    },
    needs={
        # Set in models with cross-attention to image tokens, such as Wan 2.1's image to video.
        "added_kv_proj_dim": ConfigRequirement((None,)),
        "cross_attn_norm": ConfigRequirement((True,)),
        "image_dim": ConfigRequirement((None,)),
        "in_channels": ConfigRequirement((16,)),
        # SkyReels V2's: the frame rate as an input, and causal attention between frames.
        "inject_sample_info": ConfigRequirement((False,)),
        "num_frame_per_block": ConfigRequirement((1,)),
        "out_channels": ConfigRequirement((16,)),
        "patch_size": ConfigRequirement(((1, 2, 2),)),
        "pos_embed_seq_len": ConfigRequirement((None,)),
        "qk_norm": ConfigRequirement(("rms_norm_across_heads",)),
        "text_dim": EqualsConfig("text_encoder", "d_model"),
    },
    blocks=("blocks",),
    rules=TRANSFORMER_RULES,
    original_keys=ORIGINAL_KEYS,
)

# For image to video: 16 noisy latents, 4 channels of mask, 16 latents of the encoded video.
IMAGE_TRANSFORMER = TRANSFORMER.derive(
    config={"in_channels": 36},
    tiny={"in_channels": 36, "num_layers": 2},
    needs={"in_channels": ConfigRequirement((36,), required=True)},
)


def make_experts(first: Component) -> tuple[Component, Component]:
    """Return two experts, the transformers for high and for low noise, with the configuration of `first`."""
    return first, replace(first, name="transformer_2", folder="transformer_2")
