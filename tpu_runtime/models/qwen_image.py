"""Qwen-Image, text to image: Qwen/Qwen-Image-2512. The oracle is `diffusers.QwenImagePipeline`.

The denoiser is that of Qwen-Image (https://arxiv.org/abs/2508.02324, section 2.4); its modules have the names of
diffusers' `QwenImageTransformer2DModel`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sharding.shape import MeshShape
from ..model_spec import (
    FLOW_SCHEDULERS,
    DenoiserSpec,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    Parallelism,
    SamplingConfig,
    TinyModel,
    VaeSpec,
    classifier_free_guidance,
)
from ..model_spec.upstream import Net, UpstreamConfig
from .common import layers, light
from .common.wan_vae import VAE_DECODER, decode, denormalize_latents
from .common.wan_vae_encoder import VAE_ENCODER, encode_video
from .denoisers.qwen_image import TRANSFORMER
from .text_encoders.qwen_image import NEGATIVE_PROMPT, PROMPT, TEXT, TEXT_ENCODER

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...attention.api import Placement
    from ..programs.sharded_ops import ShardedOps
    from .common.layers import Modulation, ResidualNorm

PATCH = (1, 2, 2)
EPS = 1e-6

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 16, 1, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `QwenImageTransformer2DModel`. run: operations on the mesh.
    inputs: `text` `[rows, tokens, joint_attention_dim]`, its valid tokens `text_length` `[rows]`, and reference latents
        `reference_0`, `reference_1`, ... `[1, 16, 1, height, width]`, which are more tokens. Models with `zero_cond_t`
        embed them at timestep 0. With `comfyui_positions`, whose value is ignored, tokens have ComfyUI's positions.

    The image tokens are always two sequences: the sample and its references, or the two halves of a sample without any.
    So the sums of one sequence are exchanged between chips while the other's products are computed.
    """
    import torch

    names = sorted((name for name in inputs if name.startswith("reference_")), key=lambda name: int(name[10:]))
    pictures = [sample, *(inputs[name].expand(len(sample), -1, -1, -1, -1) for name in names)]
    sizes = [latents.shape[3:] for latents in pictures]
    places = number_positions(sizes, inputs["text"].shape[1], as_comfyui="comfyui_positions" in inputs)
    image_tables, text_tables = (layers.rotary_tables(dit.pos_embed.theta, dit.pos_embed.axes_dim, x) for x in places)
    tokens = [dit.img_in(layers.cut_patches(picture, PATCH)) for picture in pictures]  # [rows, tokens, dim] each
    size = tokens[0].shape[1]
    run = run.with_length(size)

    text = run.spread(run.replicate(dit.txt_in(dit.txt_norm(inputs["text"]))), placement="replicated")
    times = [embed_time(dit, sample, timestep)] * 2  # [rows, dim], of the two sequences
    if names:
        sequences = [tokens[0], torch.cat(tokens[1:], dim=1)]
        tables = [[table[:, rows] for table in image_tables] for rows in (slice(size), slice(size, None))]
        lengths = [sequence.shape[1] for sequence in sequences]
        if dit.zero_cond_t:
            times[1] = embed_time(dit, sample, timestep * 0)
    else:
        sequences, tables = run.halves(tokens[0]), layers.halve_tables(run, image_tables)
        lengths = run.layout.half_lengths(sequences[0].shape[1])
    rotary = [[*map(run.pad, pair)] for pair in (*tables, text_tables)]

    def body(block: Net, streams: "list[torch.Tensor]") -> "list[torch.Tensor]":
        return run_block(block, run, streams, [*lengths, inputs["text_length"]], times, rotary)

    first, second, _ = run.scan(dit.transformer_blocks, [*map(run.spread, sequences), text], body)
    image = first if names else torch.cat([first, second], dim=1)
    flow = dit.proj_out(dit.norm_out(run.remove_padding(image), times[0]))
    return layers.join_patches(flow, sample, PATCH)


def embed_time(dit: Net, sample: "torch.Tensor", timestep: "torch.Tensor") -> "torch.Tensor":
    """Return the time embedding `[rows, dim]` of `timestep` `[1]` for every row of `sample` `[rows, ...]`.

    `dit` embeds 1000 times its input. Upstream's pipeline divides by 1000 first, both in the network's dtype.
    """
    return dit.time_text_embed(timestep.to(sample.dtype).expand(len(sample)) / 1000, sample)


def run_block(
    block: Net,
    run: "ShardedOps",
    streams: "list[torch.Tensor]",
    lengths: "list[Any]",
    times: "list[torch.Tensor]",
    rotary: "list[list[torch.Tensor]]",
) -> "list[torch.Tensor]":
    """Run one `QwenImageTransformerBlock`: joint attention, then a feed-forward per stream. Returns the streams.

    block: diffusers' module. run: operations on the mesh.
    streams: two image sequences and the text, `[rows, tokens, dim]` each; the text has weights of its own.
    lengths: valid tokens of each stream, a number or `[rows]`. times: time embeddings `[rows, dim]` of the two
        sequences.
    rotary: cosines and sines `[1, tokens, head_dim]` of each stream.
    """
    attn = block.attn
    norm: ResidualNorm = partial(run.residual_norm, eps=EPS, spread=True)
    first = modulate(run, block.img_mod, times[0])
    second = first if times[1] is times[0] else modulate(run, block.img_mod, times[1])
    modulations = first, second, modulate(run, block.txt_mod, times[0])
    image_norms, text_norms = (attn.norm_q, attn.norm_k), (attn.norm_added_q, attn.norm_added_k)

    normed = [
        norm(x, None, None, msa.scale, msa.shift, placement=place)[1]
        for x, (msa, _), place in zip(streams, modulations, PLACEMENTS, strict=True)
    ]
    added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    heads = [
        *(layers.project_heads(run, attn, y, attn.to_q, attn.to_k, attn.to_v, split="outs") for y in normed[:2]),
        layers.project_heads(run, attn, normed[2], *added, placement="replicated", split="outs"),
    ]
    norms = image_norms, image_norms, text_norms
    prologues = [layers.make_prologue(*pair, tables) for pair, tables in zip(norms, rotary, strict=True)]
    attended = run.streams_attention(*heads, lengths=lengths, prologues=prologues)

    updated = []
    outs, feeds = [attn.to_out[0]] * 2 + [attn.to_add_out], [block.img_mlp] * 2 + [block.txt_mlp]
    for x, y, (msa, mlp), place, out, ff in zip(streams, attended, modulations, PLACEMENTS, outs, feeds, strict=True):
        x, y = norm(x, project(run, out, y.flatten(2), place), msa.gate, mlp.scale, mlp.shift, placement=place)
        (hidden,) = run.products(y, ff.net[0].proj, activation="gelu", placement=place, split="outs")
        updated.append(run.add_gated(x, project(run, ff.net[2], hidden, place), mlp.gate))
    return updated


# Placement of the tokens of each stream of a block.
PLACEMENTS: "tuple[Placement, ...]" = ("sharded", "sharded", "replicated")


def modulate(run: "ShardedOps", module: Net, temb: "torch.Tensor") -> "tuple[Modulation, Modulation]":
    """Return the modulation of the attention and of the feed-forward.

    module: diffusers' `img_mod` or `txt_mod`. temb: time embedding `[rows, dim]`.
    """
    chunks = run.gather_vector(module(temb)).chunk(6, dim=1)
    return layers.make_modulation(*chunks[:3]), layers.make_modulation(*chunks[3:])


def project(run: "ShardedOps", linear: Net, x: "torch.Tensor", placement: "Placement") -> "torch.Tensor":
    """Apply `linear` to `x` `[rows, tokens, in]`, whose features are split over chips; sums are scattered by tokens."""
    return run.sum_products(linear, x, placement=placement) + linear.bias


def number_positions(
    sizes: "Sequence[Sequence[int]]", num_text_tokens: int, *, as_comfyui: bool
) -> "tuple[np.ndarray, np.ndarray]":
    """Return `QwenEmbedRope`'s positions `[3, tokens]`: number, row and column, of all image tokens and of the text.

    sizes: (height, width) of each image's latents, the sample's first.
    as_comfyui: the positions of ComfyUI's network, which differ for odd grids and for references that are larger than
        the sample.

    Numbers count images; rows and columns count from the image's middle. The text continues along the diagonal from
    the end of the largest image. In ComfyUI an odd grid has its middle one cell earlier, and the text continues from
    the end of the sample.
    """
    import numpy as np

    grids = [(height // PATCH[1], width // PATCH[2]) for height, width in sizes]
    odd = 0 if as_comfyui else 1
    middles = [[number, (height + odd) // 2, (width + odd) // 2] for number, (height, width) in enumerate(grids)]
    cells = [np.indices((1, *grid)).reshape(3, -1) for grid in grids]
    places = [indices + [[n], [-row], [-column]] for indices, (n, row, column) in zip(cells, middles, strict=True)]
    start = max(size // 2 for grid in grids[: 1 if as_comfyui else None] for size in grid)
    return np.hstack(places), np.tile(start + np.arange(num_text_tokens), (3, 1))


# --- the recipe -------------------------------------------------------------------------------------------------------


def apply_guidance(prompt: "torch.Tensor", negative: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """Return classifier-free guidance with each token rescaled to the norm of `prompt`'s, as upstream does.

    prompt, negative: predicted flows `[1, 16, 1, height, width]`, float32. scale: guidance scale, a scalar.
    """
    guided = layers.cut_patches(classifier_free_guidance(prompt, negative, scale), PATCH)
    length = layers.cut_patches(prompt, PATCH).norm(dim=-1, keepdim=True)
    return layers.join_patches(guided * (length / guided.norm(dim=-1, keepdim=True)), prompt, PATCH)


def solver_arguments(
    config: UpstreamConfig, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    """Return upstream's arguments of `set_timesteps`, besides the number of steps.

    config: the scheduler's. latent_shape: `(..., height, width)`. num_steps: of the schedule.
    shift: the user's; None or 0: the shift grows with the image, as the config says.
    """
    import numpy as np
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

    height, width = latent_shape[-2:]
    defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    numbers = (config.get(name, default) for name, default in defaults.items())
    mu = np.log(shift) if shift else calculate_shift(height // 2 * (width // 2), *numbers)
    return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}


SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
# Other schedulers use the fixed shift `flow_shift` and no terminal shift, as the Lightning LoRAs were trained.
_FIXED = {"shift_terminal": None, "use_dynamic_shifting": False}

# --- the spec ---------------------------------------------------------------------------------------------------------


def shard_heads_in_pairs(num_devices: int, branches: int) -> MeshShape:
    """Return the mesh: heads split over `tp`, over all chips or, from 8 chips on, over each half of them.

    num_devices: chips. branches: 2 with guidance, else 1. The sequence is short and the weights are 38 GiB, so weights
    stay split. With two groups, each holds all weights and takes one guidance branch, or half of the sequence.
    """
    pair = 2 if num_devices >= 8 and num_devices % 2 == 0 else 1
    return MeshShape(dp=pair if branches == 2 else 1, sp=pair if branches == 1 else 1, tp=num_devices // pair)


SPEC = ModelSpec(
    name="qwen-image-2512",
    family="QwenImage",
    title="Qwen-Image 2512",
    category="Qwen-Image",
    published=HubCheckpoint(hub_id="Qwen/Qwen-Image-2512", pipeline_classes=("QwenImagePipeline",)),
    miniature=TinyModel(
        id="tiny/qwenimage",
        inputs={"height": 80, "width": 112},
        texts={"prompt": "a large red circle left on blue", "negative_prompt": ""},
    ),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_ENCODER, VAE_DECODER),
    geometry=LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=PATCH),
    text_encoders=(TEXT,),
    inputs={
        "height": IntInput(default=1328, low=64, high=2048, multiple_of=16),
        "width": IntInput(default=1328, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        "guidance_scale": FloatInput(default=4.0, low=1.0, high=20.0),
        "seed": IntInput(default=42, low=0, high=2**64 - 1),
        # 0: the checkpoint's shift for an image of that size.
        "flow_shift": FloatInput(default=0.0, low=0.0, high=20.0, step=0.5),
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=SamplingConfig(
        scheduler=SCHEDULER,
        schedulers={name: {**changes, **_FIXED} for name, changes in FLOW_SCHEDULERS.items()},
        shift_key="shift",
        guide=apply_guidance,
        solver_arguments=solver_arguments,
    ),
    denoiser=DenoiserSpec(
        forward=forward,
        head_norms=(
            HeadNorms(
                queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
                keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
            ),
        ),
    ),
    parallelism=Parallelism(mesh=shard_heads_in_pairs),
    vae=VaeSpec(
        latent_format="Wan21", denormalize=denormalize_latents, decode=decode, encode=encode_video, light=light.WAN
    ),
)
