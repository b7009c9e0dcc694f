"""Flux.2's VAE: references to latents, latents to an image, split over chips by rows and columns."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...spec import Call, Component, Need, Report, Settings, has_length
from .frames import pixels
from .layers import convolved, normed

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch


# Pixels of a token's side, and the most that a reference keeps.
STRIDE = 16
MAX_REFERENCE_AREA = 1024 * 1024


def denormalize_latents(sample: "torch.Tensor", settings: Settings, vae_config: Mapping[str, Any]) -> "torch.Tensor":
    """LATENT holds what the denoiser works on; the decoder knows the scale."""
    return sample


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[Any]":
    report(0, 1)
    yield call("vae_decoder", decode_image, latents, partition="spatial")[0]
    report(1, 1)


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: Mapping[str, Any]
) -> "dict[str, np.ndarray]":
    """The latents of references, each at its own size: at most a megapixel, cut to multiples of 16, as upstream."""
    import numpy as np
    import torch
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
    from PIL import Image

    processor, stride = Flux2ImageProcessor(vae_scale_factor=STRIDE), STRIDE
    latents = {}
    for index, array in enumerate(np.asarray(image)):
        picture = processor.check_image_input(Image.fromarray((array * 255.0).round().astype(np.uint8)))
        picture = processor._resize_if_exceeds_area(picture, MAX_REFERENCE_AREA)
        width, height = (size // stride * stride for size in picture.size)
        pixels = processor.preprocess(picture, height=height, width=width, resize_mode="crop")
        # Pixels travel by the cell that becomes a token: so they are split over chips as latents are.
        cells = torch.nn.functional.pixel_unshuffle(pixels, stride)
        latents[f"reference_{index}"] = call("vae_encoder", encode_reference, cells, partition="spatial")[0]
    return latents


def encode_reference(vae: Any, cells: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """A picture in -1..1, `[1, 3 * 16 * 16, h, w]`, to normalised latents `[1, 128, h, w]`."""
    import torch

    prepare(vae.encoder)
    moments = vae.encoder(torch.nn.functional.pixel_shuffle(cells, STRIDE))
    moments = moments if vae.quant_conv is None else vae.quant_conv(moments)
    latents = torch.nn.functional.pixel_unshuffle(moments.chunk(2, dim=1)[0], 2)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return (latents - vae.bn.running_mean.view(1, -1, 1, 1)) / std, None


def decode_image(vae: Any, latents: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """`[1, 128, h, w]` to a picture `[1, 16h, 16w, 3]` in 0..1."""
    import torch

    prepare(vae.decoder)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    latents = latents * std + vae.bn.running_mean.view(1, -1, 1, 1)
    image = vae.decode(torch.nn.functional.pixel_shuffle(latents, 2), return_dict=False)[0]
    return pixels(image.permute(0, 2, 3, 1)), None


def prepare(network: Any) -> None:
    """Puts forms of upstream's layers that keep each chip's part of the picture where it is."""
    import torch
    from diffusers.models.downsampling import Downsample2D
    from diffusers.models.upsampling import Upsample2D

    network.mid_block.attentions[0].set_processor(PictureProcessor())
    for module in network.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.forward = partial(normed, module)
        elif isinstance(module, torch.nn.Conv2d) and module.stride == (1, 1):
            module.forward = partial(convolved, module, kernel=True)
        # Upstream names their inputs otherwise, and gives them by position.
        elif isinstance(module, Upsample2D):
            doubled = partial(convolved, module.conv, doubled=True, kernel=True)
            module.forward = doubled  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(module, Downsample2D):
            halved = partial(convolved, module.conv, halved=True, kernel=True)
            module.forward = halved  # pyright: ignore[reportAttributeAccessIssue]


class PictureProcessor:
    """`AttnProcessor2_0` of one head over a picture that stays one, so that rows and columns stay on their chips."""

    def __call__(self, attn: Any, hidden_states: "torch.Tensor", temb: None = None, **_: Any) -> "torch.Tensor":
        from ...programs import torch_bridge

        normed = attn.group_norm(hidden_states).permute(0, 2, 3, 1)
        attended = torch_bridge.call_jax(
            attend_to_picture, *(project(normed) for project in (attn.to_q, attn.to_k, attn.to_v))
        )
        return hidden_states + attn.to_out[0](attended).permute(0, 3, 1, 2)


def attend_to_picture(q: "jax.Array", k: "jax.Array", v: "jax.Array") -> "jax.Array":
    """Exact attention of `[batch, height, width, dim]`: the softmax is carried over rows of keys, never whole."""
    import jax
    import jax.numpy as jnp

    def row(carry: tuple, keys: tuple) -> tuple[tuple, None]:
        top, total, out = carry
        key, value = keys
        scores = jnp.einsum("bhwd,bnd->bhwn", q, key, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        part = jnp.einsum("bhwn,bnd->bhwd", weights.astype(v.dtype), value, preferred_element_type=jnp.float32)
        return (higher, total * kept + weights.sum(axis=-1), out * kept[..., None] + part), None

    shape = q.shape[:-1]
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    (_, total, out), _ = jax.lax.scan(row, start, (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0)))
    return (out / total[..., None]).astype(q.dtype)


# diffusers' names of attention's weights before 0.13.
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _old_names(part: str) -> dict[str, str]:
    path = f"{part}.mid_block.attentions.0"
    return {f"{path}.{old}.": f"{path}.{new}." for old, new in OLD_ATTENTION.items()}


VAE_DECODER = Component(
    name="vae_decoder",
    folder="vae",
    library="diffusers",
    class_name="AutoencoderKLFlux2",
    config={"block_out_channels": (128, 256, 512, 512), "latent_channels": 32},
    tiny={"block_out_channels": (6, 6, 12, 12), "latent_channels": 32, "norm_num_groups": 3},
    needs={
        "block_out_channels": Need(fits=has_length(4), wording="4 numbers"),
        "latent_channels": Need((32,)),
        "mid_block_add_attention": Need((True,)),
        "patch_size": Need(((2, 2),)),
    },
    only=("decoder.", "post_quant_conv.", "bn."),
    aliases=_old_names("decoder"),
    # 0.1 GiB in all: whole on every chip.
    rules=(Rule("decoder.**.weight", REPLICATED),),
)

VAE_ENCODER = replace(
    VAE_DECODER,
    name="vae_encoder",
    only=("encoder.", "quant_conv.", "bn."),
    aliases=_old_names("encoder"),
    rules=(Rule("encoder.**.weight", REPLICATED),),
)
