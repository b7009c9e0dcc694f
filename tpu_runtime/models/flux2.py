"""FLUX.2 text to image: black-forest-labs/FLUX.2-dev, and the shared parts of its family.

The oracle is `diffusers.Flux2Pipeline`.

The denoiser is that of https://github.com/black-forest-labs/flux2, `src/flux2/model.py`; its modules have the names of
diffusers' `Flux2Transformer2DModel`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sharding.shape import MeshShape
from ..model_spec import (
    DenoiserSpec,
    EqualsConfig,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    ImageConditioning,
    IntInput,
    LatentGeometry,
    ModelSpec,
    Parallelism,
    SamplingConfig,
    TinyModel,
    VaeSpec,
)
from ..model_spec.upstream import Net, UpstreamConfig
from .autoencoders.flux2 import VAE, decode, denormalize_latents, encode_image, encode_pixels
from .common import layers
from .common.layers import Modulation, OverlappedHalves
from .denoisers.flux2 import GUIDANCE_KEYS, TRANSFORMER
from .text_encoders import mistral3

if TYPE_CHECKING:
    import torch

    from ...attention.api import Placement
    from ..programs.sharded_ops import ShardedOps
    from .common.layers import Pair, ResidualNorm

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    flux: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 128, height, width]` at one `timestep` `[1]`.

    flux: diffusers' `Flux2Transformer2DModel`. run: operations on the mesh.
    inputs: `text` `[rows, tokens, joint_attention_dim]`, all of it valid, and optionally `guidance` `[1]` and reference
        latents `reference_0`, `reference_1`, ... `[rows, 128, height, width]`, which are more tokens.
    """
    import torch

    rows, _, height, width = sample.shape
    num_references = sum(name.startswith("reference_") for name in inputs)
    pictures = [sample, *(inputs[f"reference_{index}"] for index in range(num_references))]
    norm = partial(run.residual_norm, eps=flux.config.eps, spread=True)

    # Upstream's pipeline divides by 1000 and its transformer multiplies by 1000, both in the network's dtype.
    time = timestep.to(sample.dtype).expand(rows) / 1000 * 1000
    guidance = inputs["guidance"].to(sample.dtype).expand(rows) * 1000 if "guidance" in inputs else None
    temb = flux.time_guidance_embed(time, guidance)  # [rows, dim]
    image_modulations = modulate(run, flux.double_stream_modulation_img, temb)
    text_modulations = modulate(run, flux.double_stream_modulation_txt, temb)
    (modulation,) = modulate(run, flux.single_stream_modulation, temb)

    image = flux.x_embedder(torch.cat([picture.flatten(2).transpose(1, 2) for picture in pictures], dim=1))
    text = flux.context_embedder(inputs["text"])  # [rows, tokens, dim], as the image
    image_size, text_size = image.shape[1], text.shape[1]
    text = run.spread(run.replicate(text), placement="replicated")
    image_rotary = rotary_tables(flux.pos_embed, [(picture.shape[2], picture.shape[3], 1) for picture in pictures])
    text_rotary = rotary_tables(flux.pos_embed, [(1, 1, text.shape[1])])

    run = run.with_length(image_size)
    stream = layers.start_overlap(run, norm, image, image_modulations[0])
    rotary = (*layers.halve_tables(run, image_rotary), text_rotary)

    def double_body(
        block: Net, carry: "tuple[torch.Tensor, OverlappedHalves]"
    ) -> "tuple[torch.Tensor, OverlappedHalves]":
        return run_double_block(block, run, norm, *carry, text_size, image_modulations, text_modulations, rotary)

    text, stream = run.scan(flux.transformer_blocks, (text, stream), double_body)
    image = run.remove_padding(layers.join_halves(run, stream, image_modulations[-1]))

    joint_run = run.with_length(text_size + image_size)
    stream = layers.start_overlap(joint_run, norm, torch.cat([text[:, :text_size], image], dim=1), modulation)
    pairs = zip(text_rotary, image_rotary, strict=True)
    tables = [torch.cat([words[:, :text_size], pixels], dim=1) for words, pixels in pairs]
    joint_rotary = layers.halve_tables(joint_run, tables)

    def single_body(block: Net, stream: OverlappedHalves) -> OverlappedHalves:
        return run_single_block(block, joint_run, norm, stream, modulation, joint_rotary)

    merged = ("attn.in_gate", "attn.in_fed", "attn.out")
    stream = joint_run.scan(flux.single_transformer_blocks, stream, single_body, merged=merged)
    image = layers.join_halves(joint_run, stream, modulation)[:, text_size : text_size + height * width]

    flow = flux.proj_out(flux.norm_out(image, temb))
    return flow.transpose(1, 2).unflatten(2, (height, width))


def run_double_block(
    block: Net,
    run: "ShardedOps",
    norm: "ResidualNorm",
    text: "torch.Tensor",
    image: "OverlappedHalves",
    text_size: int,
    image_modulations: "list[Modulation]",
    text_modulations: "list[Modulation]",
    rotary: "Sequence[Pair]",
) -> "tuple[torch.Tensor, OverlappedHalves]":
    """Run one `Flux2TransformerBlock`: joint attention, then a feed-forward per stream. Returns text and image.

    block: diffusers' module. run: operations on the mesh. norm: the residual norm. text: `[rows, tokens, dim]`.
    image: the image tokens in two halves. text_size: valid text tokens. image_modulations, text_modulations: of
    attention and feed-forward. rotary: cosines and sines `[1, tokens, head_dim]` of both halves and of the text.
    """
    attn, (msa, mlp), (text_msa, text_mlp) = block.attn, image_modulations, text_modulations
    text_norm, text_product = partial(norm, placement="replicated"), partial(run.sum_products, placement="replicated")
    norms = (attn.norm_q, attn.norm_k), (attn.norm_q, attn.norm_k), (attn.norm_added_q, attn.norm_added_k)

    _, y = text_norm(text, None, None, text_msa.scale, text_msa.shift)
    added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    text_heads = project_heads(run, attn, y, *added, placement="replicated")
    halves, normed = layers.apply_pending_update(run, norm, image, mlp, msa)
    heads = [project_heads(run, attn, y, attn.to_q, attn.to_k, attn.to_v) for y in normed]
    *attended, text_attended = joint_attention(run, [*heads, text_heads], norms, rotary, text_size)
    text_update = text_product(attn.to_add_out, text_attended)
    sums = [run.partial_sums(attn.to_out[0], half) for half in attended]
    image = layers.add_update(run, norm, halves, sums, msa, mlp)

    text, y = text_norm(text, text_update, text_msa.gate, text_mlp.scale, text_mlp.shift)
    text = run.add_gated(text, feed_forward(run, block.ff_context, y, text_product, "replicated"), text_mlp.gate)
    halves, normed = layers.apply_pending_update(run, norm, image, msa, mlp)
    sums = [feed_forward(run, block.ff, y, run.partial_sums) for y in normed]
    return text, layers.add_update(run, norm, halves, sums, mlp, msa)


def run_single_block(
    block: Net,
    run: "ShardedOps",
    norm: "ResidualNorm",
    x: "OverlappedHalves",
    modulation: "Modulation",
    rotary: "Sequence[Pair]",
) -> "OverlappedHalves":
    """Run one `Flux2SingleTransformerBlock`: attention and feed-forward of one norm, with one output projection.

    block: diffusers' module. run: operations on the mesh. norm: the residual norm. x: text and image tokens, in two
        halves.
    modulation: of the block's only update. rotary: cosines and sines `[1, tokens, head_dim]` of both halves.
    """
    attn = block.attn
    halves, normed = layers.apply_pending_update(run, norm, x, modulation, modulation)
    qkv = (attn, "in_query"), (attn, "in_key"), (attn, "in_value")
    heads = [project_heads(run, attn, y, *qkv) for y in normed]
    attended = joint_attention(run, heads, [(attn.norm_q, attn.norm_k)] * 2, rotary)
    fed = [swiglu(run, y, (attn, "in_gate"), (attn, "in_fed")) for y in normed]
    sums = [run.partial_sums((attn, "out"), *pair) for pair in zip(attended, fed, strict=True)]
    return layers.add_update(run, norm, halves, sums, modulation, modulation)


def project_heads(
    run: "ShardedOps", attn: Net, x: "torch.Tensor", *factors: Any, **how: Any
) -> "tuple[torch.Tensor, ...]":
    """Return query, key and value `[rows, tokens, heads, head_dim]` of `x` `[rows, tokens, dim]`.

    run: operations on the mesh. attn: diffusers' module. factors, how: as in `ShardedOps.products`.
    """
    products = run.products(x, *factors, split="outs", **how)
    return tuple(product.unflatten(2, (-1, attn.head_dim)) for product in products)


def joint_attention(
    run: "ShardedOps", heads: "Sequence[Any]", norms: "Sequence[Any]", rotary: "Sequence[Pair]", text_size: int = 0
) -> "list[torch.Tensor]":
    """Return joint attention over both halves and the text, if any: `[rows, tokens, heads * head_dim]` of each.

    run: operations on the mesh. heads: (query, key, value) of each sequence. norms: (query norm, key norm) of each.
    rotary: cosines and sines `[1, tokens, head_dim]` of each. text_size: valid text tokens.
    """
    prologues = [layers.make_prologue(query, key, tables) for (query, key), tables in zip(norms, rotary, strict=True)]
    lengths = [*run.layout.half_lengths(heads[0][0].shape[1]), text_size][: len(heads)]
    attended = run.streams_attention(*heads, lengths=lengths, prologues=prologues)
    return [sequence.flatten(2) for sequence in attended]


def feed_forward(
    run: "ShardedOps",
    ff: Net,
    x: "torch.Tensor",
    product: "Callable[..., torch.Tensor]",
    placement: "Placement" = "sharded",
) -> "torch.Tensor":
    """Run `Flux2FeedForward` `ff` on `x` `[rows, tokens, dim]`.

    run: operations on the mesh. product: `product(factor, hidden)` applies the output projection and decides how its
    partial sums are combined over chips. placement: of `x`.
    """
    return product(ff.linear_out, swiglu(run, x, (ff, "gate"), (ff, "value"), placement))


def swiglu(
    run: "ShardedOps", x: "torch.Tensor", gate: Any, value: Any, placement: "Placement" = "sharded"
) -> "torch.Tensor":
    """Return `silu(gate(x)) * value(x)`, `[rows, tokens, hidden]`, of `x` `[rows, tokens, dim]`.

    run: operations on the mesh. gate, value: weights as in `ShardedOps.products`. placement: of `x`.
    """
    (hidden,) = run.products(x, gate, value, activation="silu", placement=placement, split="outs")
    return hidden


def modulate(run: "ShardedOps", module: Net, temb: "torch.Tensor") -> list[Modulation]:
    """Return `Flux2Modulation`'s output, one per update of a block and the same for all blocks.

    run: operations on the mesh. module: diffusers'. temb: time embedding `[rows, dim]`.
    """
    chunks = run.replicate(module(temb)).chunk(3 * module.mod_param_sets, dim=-1)
    return [layers.make_modulation(*triple) for triple in zip(chunks[::3], chunks[1::3], chunks[2::3], strict=True)]


def rotary_tables(pos_embed: Net, sizes: "Sequence[tuple[int, int, int]]") -> "Pair":
    """Return `Flux2PosEmbed`'s cosines and sines `[1, tokens, head_dim]`.

    pos_embed: diffusers' module. sizes: a grid (height, width, text position) per image or text; successive grids are
    10 apart on the time axis.
    """
    import numpy as np

    grids = [np.indices((1, *size)).reshape(4, -1) for size in sizes]
    places = np.concatenate([grid + [[10 * index], [0], [0], [0]] for index, grid in enumerate(grids)], axis=1)
    return layers.rotary_tables(pos_embed.theta, pos_embed.axes_dim, places)


# --- recipe and spec --------------------------------------------------------------------------------------------------

HEAD_NORMS = (
    HeadNorms(
        queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
        keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
    ),
    HeadNorms(queries=("single_transformer_blocks.*.attn.norm_q",), keys=("single_transformer_blocks.*.attn.norm_k",)),
)

SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

INPUTS = {
    "height": IntInput(default=1024, low=64, high=2048, multiple_of=16),
    "width": IntInput(default=1024, low=64, high=2048, multiple_of=16),
    "num_inference_steps": IntInput(default=50, low=1, high=100),
    "guidance_scale": FloatInput(default=4.0, low=0.0, high=20.0),
    "seed": IntInput(default=42, low=0, high=2**64 - 1),
}


def shard_heads(num_devices: int, branches: int) -> MeshShape:
    """Return the mesh: heads split over all chips. The sequence is short and the weights are 60 GiB.

    num_devices: chips. branches: unused; there is one. Weights stay split; activations are summed instead.
    """
    return MeshShape(tp=num_devices)


def solver_arguments(
    config: UpstreamConfig, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    """Return upstream's arguments of `set_timesteps`, besides the number of steps.

    config: the scheduler's. latent_shape: `(..., height, width)`. num_steps: of the schedule. shift: unused; upstream
    computes `mu` from the image's size and the number of steps.
    """
    import numpy as np
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    sigmas = None if config.get("use_flow_sigmas") else np.linspace(1.0, 1 / num_steps, num_steps)
    return {"sigmas": sigmas, "mu": compute_empirical_mu(latent_shape[-2] * latent_shape[-1], num_steps)}


GEOMETRY = LatentGeometry(channels=128, stride_t=0, stride_hw=16, patch_thw=(1, 1, 1))
MINIATURE = TinyModel(
    id="tiny/flux2", inputs={"height": 80, "width": 112}, texts={"prompt": "a red circle and a green square on blue"}
)
RECIPE = SamplingConfig(scheduler=SCHEDULER, guidance="embedded", solver_arguments=solver_arguments)

_DEV = TRANSFORMER.derive(
    config={
        "guidance_embeds": True,
        "joint_attention_dim": 15360,
        "num_attention_heads": 48,
        "num_layers": 8,
        "num_single_layers": 48,
    },
    tiny={"num_attention_heads": 6},
    needs={"joint_attention_dim": EqualsConfig("text_encoder", "text_config.hidden_size", times=len(mistral3.STATES))},
    original_keys=GUIDANCE_KEYS,
)

SPEC = ModelSpec(
    name="flux2-dev",
    family="Flux2",
    title="FLUX.2 dev",
    category="FLUX.2",
    published=HubCheckpoint(hub_id="black-forest-labs/FLUX.2-dev", pipeline_classes=("Flux2Pipeline",)),
    miniature=MINIATURE,
    components=(mistral3.TEXT_ENCODER, _DEV, *VAE),
    geometry=GEOMETRY,
    text_encoders=(mistral3.TEXT,),
    inputs=INPUTS,
    texts={"prompt": "A beautiful sunset over the ocean"},
    recipe=RECIPE,
    denoiser=DenoiserSpec(forward=forward, head_norms=HEAD_NORMS),
    parallelism=Parallelism(mesh=shard_heads),
    vae=VaeSpec(latent_format="Flux2", denormalize=denormalize_latents, decode=decode, encode=encode_pixels),
    pictures=ImageConditioning(encode=encode_image, are_references=True),
)
