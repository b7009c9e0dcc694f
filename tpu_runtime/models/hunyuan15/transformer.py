"""The denoiser of HunyuanVideo 1.5 (https://arxiv.org/abs/2511.18870): forward pass, sizes, sharding, original keys.

Its modules have the names of diffusers' `HunyuanVideo15Transformer3DModel`. The steps, with the published sizes and
latents `[rows, 32, T, h, w]`:

    texts      glyphs: ByT5's states [rows, 256, 1472] -> [rows, 256, 2048]
               prompt: Qwen2.5-VL's states [rows, 1000, 3584] -> token refiner of 2 blocks -> [rows, 1000, 2048]
               image: SigLIP's tokens [rows, 729, 1152] -> [rows, 729, 2048], in image to video
               all in one sequence: image, glyphs, prompt, without their padding
    latents    the sample, known latents and their mask [rows, 32 + 32 + 1, T, h, w] -> [rows, N, 2048], N = T * h * w
    time       sinusoids [rows, 256] -> [rows, 2048]; each block projects it to its own modulation, one per stream
    54 blocks  two streams with weights of their own (MM-DiT, https://arxiv.org/abs/2403.03206): joint attention with 16
               heads of 128, then a feed-forward of 8192 per stream
    output     norm, scale and shift, then a projection [rows, N, 32] -> flow [rows, 32, T, h, w]

Of a head's 128 channels, 16 are rotated by frame, 56 by row and 56 by column, with a base of 256.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ....sharding.rules import BLOCK_PRODUCT, GATHERED, REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig, KeyTable, RowSlice, split_rows, swap_halves
from ...model_spec.upstream import Net
from ..common import layers

if TYPE_CHECKING:
    import torch

    from ...programs.sharded_ops import ShardedOps
    from ..common.layers import Modulation, Pair

# Rows of `cond_type_embed`, which marks the source of a conditioning token.
TEXT, GLYPHS, IMAGE = 0, 1, 2

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 32, frames, height, width]` at one `timestep` `[1]`, 1000 to 0.

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
    x = layers.embed_patches(dit.x_embedder.proj, latents)  # [rows, frames * height * width, dim]
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

    from ...programs import torch_bridge

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
    timesteps: `[rows]`; with the mean of the text they gate both updates of each block.

    Padding is masked as keys. Upstream masks it as queries too, which leaves rows without any key.
    """
    import torch

    is_valid = torch.arange(text.shape[1], device=text.device)[None] < length[:, None]
    weights = is_valid.float()[..., None]
    mean = ((text * weights).sum(dim=1) / weights.sum(dim=1)).type_as(text)
    temb = embedder.time_text_embed(timesteps, mean)
    x = embedder.proj_in(text)
    for block in embedder.token_refiner.refiner_blocks:
        gate, ff_gate = block.norm_out(temb)
        x = x + gate * masked_self_attention(block.attn, run, block.norm1(x), is_valid)
        x = x + ff_gate * block.ff(block.norm2(x))
    return x


def masked_self_attention(attn: Net, run: "ShardedOps", x: "torch.Tensor", is_valid: "torch.Tensor") -> "torch.Tensor":
    """Return the self-attention of a replicated text `x` `[rows, tokens, dim]` to its valid tokens.

    attn: diffusers' module. run: operations on the mesh. is_valid: `[rows, tokens]`, false for padding.
    """
    from torch.nn.functional import scaled_dot_product_attention

    heads = (head.transpose(1, 2) for head in layers.project_heads(run, attn, x, attn.to_q, attn.to_k, attn.to_v))
    keys = is_valid[:, None, None].expand(-1, -1, x.shape[1], -1)
    return attn.to_out[0](scaled_dot_product_attention(*heads, attn_mask=keys).transpose(1, 2).flatten(2))


def embed_time(
    time_embed: Net, sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the time embedding `[rows, dim]` of `timestep` `[1]`.

    time_embed: diffusers' module. sample: gives the number of rows and the dtype. inputs: `next_timestep` `[1]`, where
    the step ends, which only mean-flow models (https://arxiv.org/abs/2505.13447) embed too.
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
    cosines, sines = (run.tokens(table[None]) for table in dit.rope(sample))  # [1, tokens, head_dim] each

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

    Each update is `x + gate * f(norm(x) * (1 + scale) + shift)`, with a layer norm.

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
    """Return the modulation of the attention and the feed-forward, `[rows, dim]` each, as `AdaLayerNormZero` `norm`.

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
    """Return the flow as `forward` does, and the input of the last block, for `reuse_features`.

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
    """Return the flow from the last block alone, with this step's time, on `features` that `keep_features` returned.

    dit, run, timestep `[1]`, inputs: as in `forward`. sample: gives the shape `[rows, 32, frames, height, width]`; its
    values are unused.
    """
    temb = embed_time(dit.time_embed, sample, timestep, inputs)
    streams = features["hidden"], features["text"]
    x, _ = run_blocks(dit, run, streams, features["text_length"], temb, sample, slice(-1, None))
    return predict_flow(dit, run, x, temb, sample)


# --- the component ----------------------------------------------------------------------------------------------------

_TIME = {"mlp.0": "linear_1", "in_layer": "linear_1", "mlp.2": "linear_2", "out_layer": "linear_2"}
_TEXT = {"linear_1": "linear_1", "in_layer": "linear_1", "linear_2": "linear_2", "out_layer": "linear_2"}
_FEED_FORWARD = {"fc1": "net.0.proj", "0": "net.0.proj", "fc2": "net.2", "2": "net.2"}


def _attention_keys(theirs: str, own: str, qkv: Sequence[str], out: str) -> dict[str, str | tuple[RowSlice, ...]]:
    """Return the keys of an attention, with both marks: `_` and `.`."""
    rows = split_rows(*(f"{own}.{name}" for name in qkv))
    return {f"{theirs}{mark}qkv": rows for mark in "_."} | {f"{theirs}{mark}proj": f"{own}.{out}" for mark in "_."}


def _stream_keys(stream: str, norm: str, qkv: Sequence[str], norms: str, out: str, ff: str) -> KeyTable:
    """Return the keys of a stream of the blocks, `img` or `txt`."""
    theirs, own = f"double_blocks.*.{stream}", "transformer_blocks.*"
    return {
        **{f"{theirs}_mod.{name}": f"{own}.{norm}.linear" for name in ("linear", "lin")},
        **{f"{theirs}_attn_{letter}": f"{own}.attn.{name}" for letter, name in zip("qkv", qkv, strict=True)},
        **_attention_keys(f"{theirs}_attn", f"{own}.attn", qkv, out),
        **{f"{theirs}_attn_{letter}_norm": f"{own}.attn.{norms}_{letter}" for letter in "qk"},
        **{f"{theirs}_attn.norm.{name}_norm": f"{own}.attn.{norms}_{name[0]}" for name in ("query", "key")},
        **{f"{theirs}_mlp.{name}": f"{own}.{ff}.{key}" for name, key in _FEED_FORWARD.items()},
    }


# Paths of a block of the token refiner.
_THEIRS, _REFINER = "txt_in.individual_token_refiner.blocks.*", "context_embedder.token_refiner.refiner_blocks.*"
_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
# Keys of https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5, and those that only ComfyUI has.
ORIGINAL_KEYS: KeyTable = {
    "img_in.proj": "x_embedder.proj",
    **{f"time_in.{name}": f"time_embed.timestep_embedder.{key}" for name, key in _TIME.items()},
    **{
        f"txt_in.{theirs}.{name}": f"context_embedder.time_text_embed.{own}.{key}"
        for theirs, own, keys in (("t_embedder", "timestep_embedder", _TIME), ("c_embedder", "text_embedder", _TEXT))
        for name, key in keys.items()
    },
    "txt_in.input_embedder": "context_embedder.proj_in",
    f"{_THEIRS}.norm1": f"{_REFINER}.norm1",
    f"{_THEIRS}.norm2": f"{_REFINER}.norm2",
    **_attention_keys(f"{_THEIRS}.self_attn", f"{_REFINER}.attn", _QKV, "to_out.0"),
    **{f"{_THEIRS}.mlp.{name}": f"{_REFINER}.ff.{key}" for name, key in _FEED_FORWARD.items()},
    f"{_THEIRS}.adaLN_modulation.1": f"{_REFINER}.norm_out.linear",
    "byt5_in.layernorm": "context_embedder_2.norm",
    **{f"byt5_in.fc{number}": f"context_embedder_2.linear_{number}" for number in (1, 2, 3)},
    "vision_in.proj.0": "image_embedder.norm_in",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "vision_in.proj.4": "image_embedder.norm_out",
    "cond_type_embedding": "cond_type_embed",
    **_stream_keys("img", "norm1", _QKV, "norm", "to_out.0", "ff"),
    **_stream_keys("txt", "norm1_context", _ADDED_QKV, "norm_added", "to_add_out", "ff_context"),
    "final_layer.adaLN_modulation.1": swap_halves("norm_out.linear"),
    "final_layer.linear": "proj_out",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="HunyuanVideo15Transformer3DModel",
    config={
        "attention_head_dim": 128,
        "image_embed_dim": 1152,
        "in_channels": 65,
        "mlp_ratio": 4.0,
        "num_attention_heads": 16,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "out_channels": 32,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "rope_axes_dim": (16, 56, 56),
        "rope_theta": 256.0,
        "target_size": 960,
        "task_type": "t2v",
        "text_embed_2_dim": 1472,
        "text_embed_dim": 3584,
        "use_meanflow": False,
    },
    tiny={
        "attention_head_dim": 20,
        "image_embed_dim": 28,
        "mlp_ratio": 3.0,
        "num_attention_heads": 6,
        "num_layers": 3,
        "rope_axes_dim": (4, 8, 8),
        "target_size": 96,
        "text_embed_2_dim": 44,
        "text_embed_dim": 60,
    },
    needs={
        # Noisy latents, the image's latents and the mask of given frames.
        "in_channels": ConfigRequirement((2 * 32 + 1,)),
        "out_channels": ConfigRequirement((32,)),
        "patch_size": ConfigRequirement((1,)),
        "patch_size_t": ConfigRequirement((1,)),
        "qk_norm": ConfigRequirement(("rms_norm",)),
        "text_embed_2_dim": EqualsConfig("text_encoder_2", "d_model"),
        "text_embed_dim": EqualsConfig("text_encoder", "hidden_size"),
        # True in step-distilled checkpoints, which also embed the next timestep.
        "use_meanflow": ConfigRequirement((False,)),
    },
    blocks=("transformer_blocks",),
    original_keys=ORIGINAL_KEYS,
    rules=(
        Rule("transformer_blocks.**.bias", REPLICATED),
        Rule("transformer_blocks.*.attn.norm_*.weight", REPLICATED),
        # Modulation applies to one vector: it is computed on the chips that hold its weights, then gathered.
        Rule("transformer_blocks.*.norm1.linear.weight", (None, "all_embed", None)),
        Rule("transformer_blocks.*.norm1_context.linear.weight", (None, "all_embed", None)),
        Rule("transformer_blocks.*.attn.to_out.0.weight", *BLOCK_PRODUCT),
        Rule("transformer_blocks.*.attn.*.weight", *BLOCK_PRODUCT),
        Rule("transformer_blocks.*.*.net.0.proj.weight", *BLOCK_PRODUCT),
        Rule("transformer_blocks.*.*.net.2.weight", *BLOCK_PRODUCT),
        Rule("context_embedder.token_refiner.refiner_blocks.*.norm*.weight", REPLICATED),
        Rule("context_embedder.token_refiner.refiner_blocks.**.weight", *GATHERED),
        Rule("context_embedder.proj_in.weight", *GATHERED),
        Rule("context_embedder.time_text_embed.*.*.weight", *GATHERED),
        Rule("context_embedder_2.linear_*.weight", *GATHERED),
        Rule("image_embedder.linear_*.weight", *GATHERED),
        Rule("time_embed.timestep_embedder.*.weight", *GATHERED),
        Rule("norm_out.linear.weight", *GATHERED),
    ),
)
