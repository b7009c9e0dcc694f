"""Z-Image, text to image: Tongyi-MAI/Z-Image-Turbo, distilled to 8 steps, and Tongyi-MAI/Z-Image, which is not. The
oracle is `diffusers.ZImagePipeline`.

The denoiser is that of Z-Image (https://arxiv.org/abs/2511.22699, section 4); its modules have the names of diffusers'
`ZImageTransformer2DModel`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..model_spec import (
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
    Vae,
    distilled,
)
from .autoencoders import kl
from .denoisers import layers
from .denoisers.z_image import STACKS, TRANSFORMER
from .text_encoders import qwen3

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

    from ..programs.denoiser_run import DenoiserRun
    from .denoisers.layers import Pair

# Sequences are padded to a multiple of this by tokens that are learnt, and attended to as any other.
MULTIPLE = 32
PATCH = 2
# What the makers distilled Turbo to.
STEPS = 8

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Any, run: "DenoiserRun", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The flow (velocity) of `[rows, 16, latent_height, latent_width]` at one timestep.

    Upstream's time runs the other way, from noise at 0 to the picture at 1, and so does its flow.
    """
    import torch

    rows, _, height, width = sample.shape
    time = dit.t_embedder((1000 - timestep.expand(rows)) / 1000 * dit.t_scale).type_as(sample)  # [rows, 256]
    text, text_length = embed_text(dit, inputs["text"], inputs["text_length"])
    image, num_patches = embed_image(dit, sample)
    image_size, grid = image.shape[1], (height // PATCH, width // PATCH)
    image_tables, text_tables = rotary_tables(dit.rope_embedder, grid, image_size, text.shape[1], text_length)

    image = run_stack(dit.noise_refiner, run.of_length(image_size), image, image_tables, None, time)
    text = run_stack(dit.context_refiner, run.of_length(text.shape[1]), text, text_tables, text_length, None)

    x = torch.cat([image, text], dim=1)
    tables = [torch.cat(pair, dim=1) for pair in zip(image_tables, text_tables, strict=True)]
    x = run_stack(dit.layers, run.of_length(x.shape[1]), x, tables, image_size + text_length, time)
    patches = dit.all_final_layer["2-1"](x[:, :num_patches], c=time)
    return -join_patches(patches, grid)


def embed_text(dit: Any, states: "torch.Tensor", length: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """`[rows, tokens, dim]` of the prompts, and how many of each count, `[rows]`: padding to a multiple does."""
    import torch

    is_real = torch.arange(states.shape[1], device=states.device)[None] < length[:, None]
    text = torch.where(is_real[..., None], dit.cap_embedder(states), dit.cap_pad_token)
    return text, (length + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def embed_image(dit: Any, sample: "torch.Tensor") -> "tuple[torch.Tensor, int]":
    """`[rows, tokens, dim]` of the patches, padded to a multiple, and the number of patches."""
    import torch

    rows, channels, height, width = sample.shape
    patches = sample.view(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    x = dit.all_x_embedder["2-1"](patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
    padding = dit.x_pad_token.expand(rows, -x.shape[1] % MULTIPLE, -1)
    return torch.cat([x, padding.type_as(x)], dim=1), x.shape[1]


def join_patches(patches: "torch.Tensor", grid: tuple[int, int]) -> "torch.Tensor":
    """`[rows, tokens, 2 * 2 * channels]` to `[rows, channels, 2 * height, 2 * width]`, of a `grid` of patches."""
    parts = patches.unflatten(1, grid).unflatten(3, (PATCH, PATCH, -1))
    return parts.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def run_stack(
    blocks: Any,
    run: "DenoiserRun",
    x: "torch.Tensor",
    tables: "Pair | list[torch.Tensor]",
    length: "torch.Tensor | None",
    time: "torch.Tensor | None",
) -> "torch.Tensor":
    """`[rows, tokens, dim]` after all `blocks`; of each row the first `length` tokens count, by default all."""
    rotary = tuple(run.tokens(table) for table in tables)

    def body(block: Any, x: "torch.Tensor") -> "torch.Tensor":
        return run_block(block, run, x, rotary, length, time)

    return run.unpadded(run.scan(blocks, run.tokens(x), body))


def run_block(
    block: Any,
    run: "DenoiserRun",
    x: "torch.Tensor",
    rotary: "tuple[torch.Tensor, ...]",
    length: "torch.Tensor | None",
    time: "torch.Tensor | None",
) -> "torch.Tensor":
    """Attention and feed-forward, each between two norms; without a `time` nothing is modulated."""
    scale, gate, ffn_scale, ffn_gate = (1, 1, 1, 1) if time is None else modulate(block, time)
    update = attend(block.attention, run, block.attention_norm1(x) * scale, rotary, length)
    x = x + gate * block.attention_norm2(update)
    update = feed_forward(block.feed_forward, run, block.ffn_norm1(x) * ffn_scale)
    return x + ffn_gate * block.ffn_norm2(update)


def modulate(block: Any, time: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """What the norms before the two updates are multiplied by, and the gates: scale, gate, and those of the
    feed-forward, `[rows, 1, dim]`.
    """
    scale, gate, ffn_scale, ffn_gate = block.adaLN_modulation(time)[:, None].chunk(4, dim=2)
    return 1 + scale, gate.tanh(), 1 + ffn_scale, ffn_gate.tanh()


def attend(
    attn: Any, run: "DenoiserRun", x: "torch.Tensor", rotary: "tuple[torch.Tensor, ...]", length: "torch.Tensor | None"
) -> "torch.Tensor":
    query, key, value = layers.heads(run, attn, x, attn.to_q, attn.to_k, attn.to_v)
    found = run.self_attention(query, key, value, layers.prologue(attn.norm_q, attn.norm_k, rotary), length)
    return next(run.products(found.flatten(2), attn.to_out[0]))


def feed_forward(ff: Any, run: "DenoiserRun", x: "torch.Tensor") -> "torch.Tensor":
    (hidden,) = run.products(x, ff.w1, ff.w3, activation="silu")
    return next(run.products(hidden, ff.w2))


def rotary_tables(
    embedder: Any, grid: tuple[int, int], image_size: int, text_size: int, text_length: "torch.Tensor"
) -> "tuple[Pair, Pair]":
    """`RopeEmbedder`: cosines and sines `[rows, tokens, head_dim]` of an image's tokens and of a text's.

    Upstream has the image's padding at place 0 of the first axis, the text from 1 on, and the image after the text,
    which is as long as `text_length` `[rows]` says. Only differences of places count, so all are given from the image:
    its own places, nearly all there are, are the same for every text.
    """
    import jax.numpy as jnp
    import numpy as np

    from ..programs import torch_bridge

    image = np.indices((1, *grid)).reshape(3, -1)
    is_image = np.arange(image_size) < image.shape[1]
    image = np.pad(image, ((0, 0), (0, image_size - image.shape[1])))

    def tables(length: "jax.Array") -> Any:
        behind = length[:, None] + 1  # from the image back to its padding
        image_places = (jnp.where(is_image, 0, behind), image[1], image[2])
        text_places = (jnp.clip(behind - 1 - np.arange(text_size), 0), *np.zeros((2, text_size), int))
        return tuple(axis_tables(embedder, places, text_size) for places in (image_places, text_places))

    return torch_bridge.call_jax(tables, text_length)


def axis_tables(embedder: Any, places: "tuple[jax.Array | np.ndarray, ...]", longest: int) -> "tuple[jax.Array, ...]":
    """Cosines and sines `[rows, tokens, head_dim]` at `places` of the three axes; those of the first, `[rows, tokens]`
    and up to `longest + 1`, count backwards. Angles are rounded to float32, as upstream's.
    """
    import jax.numpy as jnp
    import numpy as np

    rows, found = len(places[0]), ([], [])
    for axis, (dim, at) in enumerate(zip(embedder.axes_dims, places, strict=True)):
        numbers = -np.arange(longest + 2) if axis == 0 else np.arange(np.max(at) + 1)
        angles = layers.rotary_angles(embedder.theta, dim, numbers).astype(np.float32).astype(np.float64)
        for table, function in zip(found, (np.cos, np.sin), strict=True):
            each = jnp.asarray(function(angles), jnp.float32)[jnp.asarray(at, jnp.int32)]
            table.append(jnp.broadcast_to(each, (rows, *each.shape[-2:])))
    return tuple(jnp.concatenate(table, axis=-1) for table in found)


# --- what it is made of -----------------------------------------------------------------------------------------------


def solver_arguments(
    config: Mapping[str, Any], latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    import numpy as np
    from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift

    height, width = latent_shape[-2:]
    defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    numbers = (config.get(name, default) for name, default in defaults.items())
    mu = calculate_shift(height // 2 * (width // 2), *numbers)
    return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}


SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": False,
}

RECIPE = Recipe(scheduler=SCHEDULER, shift_key="shift", solver_arguments=solver_arguments)
PROMPT = "A small steam train on a snowy mountain at sunrise, its smoke spells the word JAX"

SPEC = ModelSpec(
    name="z-image-turbo",
    family="ZImage",
    title="Z-Image Turbo",
    category="Z-Image",
    published=Published(hub_id="Tongyi-MAI/Z-Image-Turbo", pipeline_classes=("ZImagePipeline",)),
    miniature=Miniature(
        id="tiny/zimage",
        inputs={"height": 80, "width": 112},
        texts={"prompt": "a large red circle left on blue", "negative_prompt": ""},
    ),
    components=(
        qwen3.LATE_TEXT_ENCODER,
        TRANSFORMER,
        *kl.vae(
            {
                "latent_channels": 16,
                "scaling_factor": 0.3611,
                "shift_factor": 0.1159,
                "use_post_quant_conv": False,
                "use_quant_conv": False,
            }
        ),
    ),
    geometry=LatentGeometry(channels=16, stride_t=0, stride_hw=8, patch_thw=(1, PATCH, PATCH)),
    text_encoders=(qwen3.LATE_TEXT,),
    inputs={
        "height": IntLimit(default=1024, low=64, high=2048, multiple_of=16),
        "width": IntLimit(default=1024, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntLimit(default=STEPS, low=1, high=100),
        # 1 is off, as in ComfyUI: upstream's scale is one less.
        "guidance_scale": FloatLimit(default=1.0, low=1.0, high=20.0),
        "seed": IntLimit(default=42, low=0, high=2**64 - 1),
        # 0: the checkpoint's own shift.
        "flow_shift": FloatLimit(default=0.0, low=0.0, high=20.0, step=0.5),
    },
    texts={"prompt": PROMPT, "negative_prompt": ""},
    recipe=replace(RECIPE, advice=distilled(STEPS, "needs none (1.0)")),
    denoiser=Denoiser(
        forward=forward,
        head_norms=tuple(
            HeadNorms(queries=(f"{stack}.*.attention.norm_q",), keys=(f"{stack}.*.attention.norm_k",))
            for stack in STACKS
        ),
    ),
    parallelism=Parallelism(heads_key="n_heads"),
    vae=Vae(latent_format="Flux", denormalize=kl.denormalize_latents, decode=kl.decode, encode=kl.encode_pixels),
)

BASE = replace(
    SPEC,
    name="z-image",
    title="Z-Image",
    published=replace(SPEC.published, hub_id="Tongyi-MAI/Z-Image"),
    miniature=replace(SPEC.miniature, id="tiny/zimagebase"),
    inputs={
        **SPEC.inputs,
        "num_inference_steps": IntLimit(default=50, low=1, high=100),
        # The card's 4, which upstream adds to the prompt's own.
        "guidance_scale": FloatLimit(default=5.0, low=1.0, high=20.0),
    },
    recipe=replace(RECIPE, scheduler={**SCHEDULER, "shift": 6.0}),
)
