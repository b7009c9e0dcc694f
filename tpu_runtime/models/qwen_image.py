"""Qwen-Image, text to image: Qwen/Qwen-Image-2512. The oracle is `diffusers.QwenImagePipeline`.

The denoiser is that of Qwen-Image (https://arxiv.org/abs/2508.02324, section 2.4); its modules have the names of
diffusers' `QwenImageTransformer2DModel`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sharding.shape import MeshShape
from ..model_spec import (
    FLOW_SCHEDULERS,
    Denoiser,
    FloatLimit,
    HeadNorms,
    IntLimit,
    LatentGeometry,
    Miniature,
    ModelSpec,
    Parallelism,
    Published,
    Recipe,
    Settings,
    Vae,
    plain_guidance,
)
from .autoencoders.wan import VAE_DECODER, decode, denormalize_latents
from .autoencoders.wan_encoder import VAE_ENCODER, encode_video
from .denoisers import layers
from .denoisers.qwen_image import TRANSFORMER
from .text_encoders.qwen_image import NEGATIVE_PROMPT, PROMPT, TEXT, TEXT_ENCODER

if TYPE_CHECKING:
    import torch

    from ..programs.denoiser_run import DenoiserRun
    from .denoisers.layers import Modulation, Pair, ResidualNorm

PATCH = (1, 2, 2)
EPS = 1e-6
# The text, and both halves of the picture.
Streams = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Any, run: "DenoiserRun", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The flow (velocity) of `[rows, 16, 1, latent_height, latent_width]` at one timestep."""
    import torch

    # Upstream's pipeline divides by what its embedding multiplies by, both in the network's format.
    temb = dit.time_text_embed(timestep.to(sample.dtype).expand(len(sample)) / 1000, sample)  # [rows, dim]
    text = run.spread(run.replicated(dit.txt_in(dit.txt_norm(inputs["text"]))), placement="replicated")
    image = dit.img_in(layers.cut_patches(sample, PATCH))  # [rows, tokens, dim], as the text

    run = run.of_length(image.shape[1])
    grid = (sample.shape[3] // PATCH[1], sample.shape[4] // PATCH[2])
    image_tables, text_tables = rotary_tables(dit.pos_embed, grid, text.shape[1])
    rotary = (text_tables, *layers.halve(run, image_tables))

    def body(block: Any, streams: "Streams") -> "Streams":
        return run_block(block, run, streams, inputs["text_length"], temb, rotary)

    _, *halves = run.scan(dit.transformer_blocks, (text, *map(run.spread, run.halves(image))), body)
    flow = dit.proj_out(dit.norm_out(run.unpadded(torch.cat(halves, dim=1)), temb))
    return layers.join_patches(flow, sample, PATCH)


def run_block(
    block: Any,
    run: "DenoiserRun",
    streams: "Streams",
    text_length: "torch.Tensor",
    temb: "torch.Tensor",
    rotary: "Sequence[Pair]",
) -> "Streams":
    """Joint attention, then a feed-forward each, all in gated residuals of modulated norms. Text and picture have
    weights of their own; the picture comes in halves, so that one's sums are exchanged next to the other's products.
    """
    text, *halves = streams
    norm: ResidualNorm = partial(run.residual_norm, eps=EPS, spread=True)
    of_text, of_image = modulate(run, block.txt_mod, temb), modulate(run, block.img_mod, temb)
    places = ((text, "replicated", of_text), *((half, "sharded", of_image) for half in halves))

    normed = [norm(x, None, None, own[0].scale, own[0].shift, placement=place)[1] for x, place, own in places]
    updates = attend(block.attn, run, normed, text_length, rotary)

    found = []
    for (x, place, (msa, mlp)), update in zip(places, updates, strict=True):
        x, y = norm(x, update, msa.gate, mlp.scale, mlp.shift, placement=place)
        ff = block.txt_mlp if place == "replicated" else block.img_mlp
        found.append(run.add_gated(x, project(run, ff.net[2], ff.net[0](y), place), mlp.gate))
    return tuple(found)


def modulate(run: "DenoiserRun", module: Any, temb: "torch.Tensor") -> "tuple[Modulation, Modulation]":
    """Of attention, and of the feed-forward."""
    parts = run.vector(module(temb)).chunk(6, dim=1)
    return layers.modulated(*parts[:3]), layers.modulated(*parts[3:])


def attend(
    attn: Any,
    run: "DenoiserRun",
    normed: "Sequence[torch.Tensor]",
    text_length: "torch.Tensor",
    rotary: "Sequence[Pair]",
) -> "list[torch.Tensor]":
    """The updates of text and halves, whose tokens attend to all real ones. Padding of the text is not looked at."""
    text, *halves = normed
    text_heads = layers.heads(attn, text, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    heads = [layers.heads(attn, half, attn.to_q, attn.to_k, attn.to_v) for half in halves]
    norms = (attn.norm_added_q, attn.norm_added_k), *[(attn.norm_q, attn.norm_k)] * len(halves)
    of_text, *of_halves = (layers.prologue(*each, tables) for each, tables in zip(norms, rotary, strict=True))
    *found, text_found = run.halves_attention(
        *heads, text_heads, prologues=(*of_halves, of_text), text_length=text_length
    )
    text_update = project(run, attn.to_add_out, text_found.flatten(2), "replicated")
    return [text_update, *(project(run, attn.to_out[0], half.flatten(2), "sharded") for half in found)]


def project(run: "DenoiserRun", linear: Any, x: "torch.Tensor", placement: Any) -> "torch.Tensor":
    """A product whose sums lie over the chips, summed and spread over them by tokens."""
    return run.summed(linear.weight.T, x, placement=placement) + linear.bias


def rotary_tables(rope: Any, grid: tuple[int, int], text_size: int) -> "tuple[Pair, Pair]":
    """`QwenEmbedRope`: cosines and sines `[1, tokens, head_dim]` of a picture's tokens, whose rows and columns count
    from its middle, and of a text's, which go on along the diagonal from where the picture ends.
    """
    import numpy as np

    middle = [size - size // 2 for size in grid]
    image = np.indices((1, *grid)).reshape(3, -1) - [[0], [middle[0]], [middle[1]]]
    text = np.tile(max(size // 2 for size in grid) + np.arange(text_size), (3, 1))
    image_tables, text_tables = (layers.rotary_tables(rope.theta, rope.axes_dim, places) for places in (image, text))
    return image_tables, text_tables


# --- the recipe -------------------------------------------------------------------------------------------------------


def guide(prompt: "torch.Tensor", negative: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """Guidance that leaves every token as long as the prompt's own flow is."""
    guided = layers.cut_patches(plain_guidance(prompt, negative, scale), PATCH)
    length = layers.cut_patches(prompt, PATCH).norm(dim=-1, keepdim=True)
    return layers.join_patches(guided * (length / guided.norm(dim=-1, keepdim=True)), prompt, PATCH)


def solver_arguments(config: Mapping[str, Any], latent_shape: tuple[int, ...], settings: Settings) -> dict[str, Any]:
    """The schedule's shift grows with the picture, unless the settings have one."""
    import numpy as np
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

    height, width = latent_shape[-2:]
    defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    numbers = (config.get(name, default) for name, default in defaults.items())
    mu = np.log(settings.shift) if settings.shift else calculate_shift(height // 2 * (width // 2), *numbers)
    steps = settings.num_inference_steps
    return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": mu}


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
# Those that are chosen in its place have the shift of `flow_shift`, and end where they end: as Lightning was trained.
_FIXED = {"shift_terminal": None, "use_dynamic_shifting": False}

# --- what it is made of -----------------------------------------------------------------------------------------------


def heads_by_twos(num_devices: int, branches: int) -> MeshShape:
    """A short sequence and 38 GiB of weights: these stay split over all chips. Of eight or more each half has all of
    them, and a branch of guidance, or half of the sequence where there is one branch.
    """
    pair = 2 if num_devices >= 8 and num_devices % 2 == 0 else 1
    return MeshShape(dp=pair if branches == 2 else 1, sp=pair if branches == 1 else 1, tp=num_devices // pair)


SPEC = ModelSpec(
    name="qwen-image-2512",
    family="QwenImage",
    title="Qwen-Image 2512",
    category="Qwen-Image",
    published=Published(hub_id="Qwen/Qwen-Image-2512", pipeline_classes=("QwenImagePipeline",)),
    miniature=Miniature(id="tiny/qwenimage", inputs={"height": 80, "width": 112}),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_ENCODER, VAE_DECODER),
    geometry=LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=PATCH),
    text_encoders=(TEXT,),
    inputs={
        "height": IntLimit(default=1328, low=64, high=2048, multiple_of=16),
        "width": IntLimit(default=1328, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntLimit(default=50, low=1, high=100),
        "guidance_scale": FloatLimit(default=4.0, low=1.0, high=20.0),
        "seed": IntLimit(default=42, low=0, high=2**64 - 1),
        # 0: what the checkpoint says of a picture of that size.
        "flow_shift": FloatLimit(default=0.0, low=0.0, high=20.0, step=0.5),
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=Recipe(
        scheduler=SCHEDULER,
        schedulers={name: {**changes, **_FIXED} for name, changes in FLOW_SCHEDULERS.items()},
        shift_key="shift",
        guide=guide,
        solver_arguments=solver_arguments,
    ),
    denoiser=Denoiser(
        forward=forward,
        head_norms=(
            HeadNorms(
                queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
                keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
            ),
        ),
    ),
    parallelism=Parallelism(mesh=heads_by_twos),
    vae=Vae(latent_format="Wan21", denormalize=denormalize_latents, decode=decode, encode=encode_video),
)
