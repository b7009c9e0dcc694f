"""FLUX.2 text to image: black-forest-labs/FLUX.2-dev, and what its family shares. The oracle is
`diffusers.Flux2Pipeline`.

The denoiser is that of https://github.com/black-forest-labs/flux2, `src/flux2/model.py`; its modules have the names of
diffusers' `Flux2Transformer2DModel`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sharding.shape import MeshShape
from ..model_spec import (
    Denoiser,
    FloatLimit,
    HeadNorms,
    IntLimit,
    LatentGeometry,
    Miniature,
    ModelSpec,
    Parallelism,
    Pictures,
    Published,
    Recipe,
    Same,
    Vae,
)
from .autoencoders.flux2 import VAE, decode, denormalize_latents, encode_image, encode_pixels
from .denoisers import layers
from .denoisers.flux2 import GUIDANCE_NAMES, TRANSFORMER
from .denoisers.layers import Modulation, Staggered
from .text_encoders import mistral3

if TYPE_CHECKING:
    import torch

    from ...attention.api import Placement
    from ..programs.denoiser_run import DenoiserRun
    from .denoisers.layers import Pair, ResidualNorm

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    flux: Any, run: "DenoiserRun", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The flow (velocity) of `[rows, 128, latent_height, latent_width]` at one timestep. All tokens of the `text`
    count; the latents of pictures, `reference_0` and so on, are more tokens. There may be no `guidance`.
    """
    import torch

    rows, _, height, width = sample.shape
    num_references = sum(name.startswith("reference_") for name in inputs)
    pictures = [sample, *(inputs[f"reference_{index}"] for index in range(num_references))]
    norm = partial(run.residual_norm, eps=flux.config.eps, spread=True)

    # Upstream's pipeline divides by what its transformer multiplies by, both rounded to the network's format.
    time = timestep.to(sample.dtype).expand(rows) / 1000 * 1000
    guidance = inputs["guidance"].to(sample.dtype).expand(rows) * 1000 if "guidance" in inputs else None
    temb = flux.time_guidance_embed(time, guidance)  # [rows, dim]
    image_modulations = modulate(run, flux.double_stream_modulation_img, temb)
    text_modulations = modulate(run, flux.double_stream_modulation_txt, temb)
    (modulation,) = modulate(run, flux.single_stream_modulation, temb)

    image = flux.x_embedder(torch.cat([picture.flatten(2).transpose(1, 2) for picture in pictures], dim=1))
    text = flux.context_embedder(inputs["text"])  # [rows, tokens, dim], as the image
    image_size, text_size = image.shape[1], text.shape[1]
    text = run.spread(run.replicated(text), placement="replicated")
    image_rotary = rotary_tables(flux.pos_embed, [(picture.shape[2], picture.shape[3], 1) for picture in pictures])
    text_rotary = rotary_tables(flux.pos_embed, [(1, 1, text.shape[1])])

    run = run.of_length(image_size)
    stream = layers.stagger(run, norm, image, image_modulations[0])
    rotary = (*layers.halve(run, image_rotary), text_rotary)

    def double_body(block: Any, carry: "tuple[torch.Tensor, Staggered]") -> "tuple[torch.Tensor, Staggered]":
        return run_double_block(block, run, norm, *carry, text_size, image_modulations, text_modulations, rotary)

    text, stream = run.scan(flux.transformer_blocks, (text, stream), double_body)
    image = run.unpadded(layers.join(run, stream, image_modulations[-1]))

    joint_run = run.of_length(text_size + image_size)
    stream = layers.stagger(joint_run, norm, torch.cat([text[:, :text_size], image], dim=1), modulation)
    tables = [torch.cat([own[:, :text_size], more], dim=1) for own, more in zip(text_rotary, image_rotary, strict=True)]
    joint_rotary = layers.halve(joint_run, tables)

    def single_body(block: Any, stream: Staggered) -> Staggered:
        return run_single_block(block, joint_run, norm, stream, modulation, joint_rotary)

    merged = ("attn.in_gate", "attn.in_fed", "attn.out")
    stream = joint_run.scan(flux.single_transformer_blocks, stream, single_body, merged=merged)
    image = layers.join(joint_run, stream, modulation)[:, text_size : text_size + height * width]

    flow = flux.proj_out(flux.norm_out(image, temb))
    return flow.transpose(1, 2).unflatten(2, (height, width))


def run_double_block(
    block: Any,
    run: "DenoiserRun",
    norm: "ResidualNorm",
    text: "torch.Tensor",
    image: "Staggered",
    text_size: int,
    image_modulations: "list[Modulation]",
    text_modulations: "list[Modulation]",
    rotary: "Sequence[Pair]",
) -> "tuple[torch.Tensor, Staggered]":
    """`Flux2TransformerBlock`: joint attention, then a feed-forward each, all in gated residuals of modulated norms."""
    attn, (msa, mlp), (text_msa, text_mlp) = block.attn, image_modulations, text_modulations
    text_norm, text_product = partial(norm, placement="replicated"), partial(run.summed, placement="replicated")
    norms = (attn.norm_q, attn.norm_k), (attn.norm_q, attn.norm_k), (attn.norm_added_q, attn.norm_added_k)

    _, y = text_norm(text, None, None, text_msa.scale, text_msa.shift)
    added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    text_heads = project_heads(run, attn, y, *added, placement="replicated")
    halves, normed = layers.catch_up(run, norm, image, mlp, msa)
    heads = [project_heads(run, attn, y, attn.to_q, attn.to_k, attn.to_v) for y in normed]
    *found, text_found = attend(run, [*heads, text_heads], norms, rotary, text_size)
    text_update = text_product(attn.to_add_out, text_found)
    sums = [run.partial_sums(attn.to_out[0], half) for half in found]
    image = layers.add_update(run, norm, halves, sums, msa, mlp)

    text, y = text_norm(text, text_update, text_msa.gate, text_mlp.scale, text_mlp.shift)
    text = run.add_gated(text, feed_forward(run, block.ff_context, y, text_product, "replicated"), text_mlp.gate)
    halves, normed = layers.catch_up(run, norm, image, msa, mlp)
    sums = [feed_forward(run, block.ff, y, run.partial_sums) for y in normed]
    return text, layers.add_update(run, norm, halves, sums, mlp, msa)


def run_single_block(
    block: Any,
    run: "DenoiserRun",
    norm: "ResidualNorm",
    x: "Staggered",
    modulation: "Modulation",
    rotary: "Sequence[Pair]",
) -> "Staggered":
    """`Flux2SingleTransformerBlock`: attention and feed-forward of one norm, with one output projection."""
    attn = block.attn
    halves, normed = layers.catch_up(run, norm, x, modulation, modulation)
    qkv = (attn, "in_query"), (attn, "in_key"), (attn, "in_value")
    heads = [project_heads(run, attn, y, *qkv) for y in normed]
    found = attend(run, heads, [(attn.norm_q, attn.norm_k)] * 2, rotary)
    fed = [swiglu(run, y, (attn, "in_gate"), (attn, "in_fed")) for y in normed]
    sums = [run.partial_sums((attn, "out"), *parts) for parts in zip(found, fed, strict=True)]
    return layers.add_update(run, norm, halves, sums, modulation, modulation)


def project_heads(
    run: "DenoiserRun", attn: Any, x: "torch.Tensor", *factors: Any, **how: Any
) -> "tuple[torch.Tensor, ...]":
    """Query, key and value, `[rows, tokens, heads, head_dim]`."""
    return tuple(each.unflatten(2, (-1, attn.head_dim)) for each in run.products(x, *factors, split="outs", **how))


def attend(
    run: "DenoiserRun", heads: "Sequence[Any]", norms: "Sequence[Any]", rotary: "Sequence[Pair]", text_size: int = 0
) -> "list[torch.Tensor]":
    """Attention of both halves, and of a text where one follows, to all: `[rows, tokens, heads * head_dim]` of each.

    Queries and keys of each have norms and rotary tables of their own.
    """
    prologues = [layers.prologue(query, key, tables) for (query, key), tables in zip(norms, rotary, strict=True)]
    lengths = [*run.layout.lengths_of_halves(heads[0][0].shape[1]), text_size][: len(heads)]
    found = run.streams_attention(*heads, lengths=lengths, prologues=prologues)
    return [each.flatten(2) for each in found]


def feed_forward(
    run: "DenoiserRun",
    ff: Any,
    x: "torch.Tensor",
    product: "Callable[..., torch.Tensor]",
    placement: "Placement" = "sharded",
) -> "torch.Tensor":
    """`Flux2FeedForward`; `product(factor, hidden)` says what becomes of the sums over chips."""
    return product(ff.linear_out, swiglu(run, x, (ff, "gate"), (ff, "value"), placement))


def swiglu(
    run: "DenoiserRun", x: "torch.Tensor", gate: Any, value: Any, placement: "Placement" = "sharded"
) -> "torch.Tensor":
    (found,) = run.products(x, gate, value, activation="silu", placement=placement, split="outs")
    return found


def modulate(run: "DenoiserRun", module: Any, temb: "torch.Tensor") -> list[Modulation]:
    """`Flux2Modulation`: one for each update of a block, the same for all blocks."""
    parts = run.replicated(module(temb)).chunk(3 * module.mod_param_sets, dim=-1)
    return [layers.modulated(*each) for each in zip(parts[::3], parts[1::3], parts[2::3], strict=True)]


def rotary_tables(pos_embed: Any, sizes: "Sequence[tuple[int, int, int]]") -> "Pair":
    """`Flux2PosEmbed`: `[1, tokens, head_dim]` of tokens in grids of (height, width, place in the text), which are ten
    apart in time.
    """
    import numpy as np

    grids = [np.indices((1, *size)).reshape(4, -1) for size in sizes]
    places = np.concatenate([grid + [[10 * index], [0], [0], [0]] for index, grid in enumerate(grids)], axis=1)
    return layers.rotary_tables(pos_embed.theta, pos_embed.axes_dim, places)


# --- what it is made of -----------------------------------------------------------------------------------------------

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
    "height": IntLimit(default=1024, low=64, high=2048, multiple_of=16),
    "width": IntLimit(default=1024, low=64, high=2048, multiple_of=16),
    "num_inference_steps": IntLimit(default=50, low=1, high=100),
    "guidance_scale": FloatLimit(default=4.0, low=0.0, high=20.0),
    "seed": IntLimit(default=42, low=0, high=2**64 - 1),
}


def heads_first(num_devices: int, branches: int) -> MeshShape:
    """A short sequence and 60 GiB of weights: these stay split over all chips, and activations are summed instead."""
    return MeshShape(tp=num_devices)


def solver_arguments(
    config: Mapping[str, Any], latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    import numpy as np
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    sigmas = None if config.get("use_flow_sigmas") else np.linspace(1.0, 1 / num_steps, num_steps)
    return {"sigmas": sigmas, "mu": compute_empirical_mu(latent_shape[-2] * latent_shape[-1], num_steps)}


GEOMETRY = LatentGeometry(channels=128, stride_t=0, stride_hw=16, patch_thw=(1, 1, 1))
MINIATURE = Miniature(
    id="tiny/flux2", inputs={"height": 80, "width": 112}, texts={"prompt": "a red circle and a green square on blue"}
)
RECIPE = Recipe(scheduler=SCHEDULER, guidance="embedded", solver_arguments=solver_arguments)

_DEV = TRANSFORMER.extended(
    config={
        "guidance_embeds": True,
        "joint_attention_dim": 15360,
        "num_attention_heads": 48,
        "num_layers": 8,
        "num_single_layers": 48,
    },
    tiny={"num_attention_heads": 6},
    needs={"joint_attention_dim": Same("text_encoder", "text_config.hidden_size", times=len(mistral3.STATES))},
    makers_names=GUIDANCE_NAMES,
)

SPEC = ModelSpec(
    name="flux2-dev",
    family="Flux2",
    title="FLUX.2 dev",
    category="FLUX.2",
    published=Published(hub_id="black-forest-labs/FLUX.2-dev", pipeline_classes=("Flux2Pipeline",)),
    miniature=MINIATURE,
    components=(mistral3.TEXT_ENCODER, _DEV, *VAE),
    geometry=GEOMETRY,
    text_encoders=(mistral3.TEXT,),
    inputs=INPUTS,
    texts={"prompt": "A beautiful sunset over the ocean"},
    recipe=RECIPE,
    denoiser=Denoiser(forward=forward, head_norms=HEAD_NORMS),
    parallelism=Parallelism(mesh=heads_first),
    vae=Vae(latent_format="Flux2", denormalize=denormalize_latents, decode=decode, encode=encode_pixels),
    pictures=Pictures(encode=encode_image, are_references=True),
)
