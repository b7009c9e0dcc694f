"""CogVideoX 1.5, image to video: zai-org/CogVideoX1.5-5B-I2V, under the CogVideoX license.

The oracle is `diffusers.CogVideoXImageToVideoPipeline`.

The denoiser gets the encoded image as more channels of the first latent frame, and zeros for the other frames. If
frames were added to fill a temporal patch, the first latent frame is one of those, which are not shown. Upstream
samples the image's latent from the VAE's distribution with the generator that then draws the noise. So the encoder
returns the distribution, and the sample is drawn with the seed when denoising starts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ....sharding.rules import GATHERED, REPLICATED, Rule
from ...messages import compose
from ...model_spec import Call, ConfigRequirement, HubCheckpoint, ImageConditioning, Report, Settings
from ...model_spec.upstream import Net, UpstreamConfig
from ..common import IMAGE_PROMPT, frames
from . import spec as t2v
from .text_encoder import TEXT_ENCODER
from .transformer import TRANSFORMER, embed_time, predict_velocity
from .vae import VAE_DECODER, encode_to_latents

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...programs.sharded_ops import ShardedOps

# Pixels on a side of a latent.
STRIDE_HW = 8
# The constant input of upstream's `ofs_embedding`, which only this model has.
OFS = 2.0


def condition_shapes(latent_shape: tuple[int, ...]) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes `[rows, 16, 1, height, width]` of `image` and `image_std`.

    `image` is the mean of the image's latent, and later the sample; `image_std` is the standard deviation.

    latent_shape: `(rows, channels, frames, height, width)`.
    """
    rows, channels, _, *size = latent_shape
    return {name: (rows, channels, 1, *size) for name in ("image", "image_std")}


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: UpstreamConfig
) -> "dict[str, np.ndarray]":
    """Return mean and standard deviation of the image's latent, `[1, 16, 1, h, w]` each, in the denoiser's scale.

    call: runs a component. image: `[number, height, width, 3]` in 0..1, of which the first is used.
    settings: of the generation. vae_config: the VAE's config.
    """
    import numpy as np
    import torch

    # Pixels are passed in cells of 8 x 8, one per latent, so that they are split over chips as latents are.
    cells = torch.nn.functional.pixel_unshuffle(image[:1].movedim(-1, 1) * 2.0 - 1.0, STRIDE_HW)
    moments, _ = call("vae_encoder", encode_moments, cells, partition="spatial")
    mean, log_variance = np.split(np.asarray(moments, np.float32), 2, axis=1)
    scale = vae_config["scaling_factor"]
    # The model was trained with this scale; upstream's comment calls it awkward but required.
    scale = np.float32(1 / scale if vae_config.get("invert_scale_latents", False) else scale)
    return {"image": scale * mean, "image_std": scale * np.exp(0.5 * np.clip(log_variance, -30.0, 20.0))}


def encode_pixels(call: Call, pixels: "torch.Tensor", report: Report) -> "torch.Tensor":
    """Encode an image `[1, 3, 1, height, width]` in -1..1 to the mean of its latent `[1, 16, 1, h, w]`.

    call: runs a component. pixels: the image. report: unused.
    """
    return frames.encode_still(call, pixels, encode_moments, STRIDE_HW).chunk(2, dim=1)[0]


def encode_moments(vae: Net, cells: "torch.Tensor") -> "tuple[torch.Tensor, tuple]":
    """Encode an image in -1..1, as cells `[1, 3 * 8 * 8, h, w]`, to mean and log variance `[1, 2 * 16, 1, h, w]`."""
    import torch

    return encode_to_latents(vae, torch.nn.functional.pixel_shuffle(cells, STRIDE_HW)), ()


def draw_inputs(inputs: "Mapping[str, np.ndarray]", generator: "torch.Generator") -> "dict[str, np.ndarray]":
    """Replace `image` in `inputs` by a sample `[1, 16, 1, h, w]` of the latent's distribution.

    generator: advanced by the draw, before it draws the noise.
    """
    import torch

    std = inputs["image_std"]
    return {**inputs, "image": inputs["image"] + std * torch.randn(std.shape, generator=generator).numpy()}


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the velocity of `sample` `[rows, 16, frames, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `CogVideoXTransformer3DModel`. run: operations on the mesh.
    inputs: `text` `[rows, 226, text_embed_dim]`, and `image` `[rows, 16, 1, height, width]`, which are more channels.
    """
    import torch

    ofs = torch.full((1,), OFS, dtype=sample.dtype, device=sample.device)
    temb = embed_time(dit, sample, timestep)  # [rows, 512]
    temb = temb + dit.ofs_embedding(dit.ofs_proj(ofs).to(sample.dtype))
    image = torch.cat([inputs["image"], torch.zeros_like(sample[:, :, 1:])], dim=2)
    return predict_velocity(dit, run, torch.cat([sample, image], dim=1), temb, inputs["text"])


def advise(settings: Settings) -> str | None:
    """Return a sentence if the size or the number of frames is not one of the published ones, else None."""
    shorter, longer = sorted((settings.height, settings.width))
    if shorter == t2v.HEIGHT and longer <= t2v.WIDTH and settings.num_frames % 16 == 1:
        return None
    return compose(
        "model.size_outside_published", width=settings.width, height=settings.height,
        num_frames=settings.num_frames, published_height=t2v.HEIGHT, published_width=t2v.WIDTH,
    )  # fmt: skip


_TRANSFORMER = TRANSFORMER.derive(
    config={"in_channels": 32, "ofs_embed_dim": 512},
    tiny={"in_channels": 32, "ofs_embed_dim": 36},
    needs={
        "in_channels": ConfigRequirement((32,), required=True),
        "ofs_embed_dim": ConfigRequirement(fits=bool, wording=compose("settings.a_number"), required=True),
    },
    rules=(Rule("ofs_embedding.linear_*.weight", *GATHERED),),
    original_keys={
        "ofs_embedding_linear_1": "ofs_embedding.linear_1",
        "ofs_embedding_linear_2": "ofs_embedding.linear_2",
    },
)

VAE_ENCODER = replace(
    VAE_DECODER, name="vae_encoder", only=("encoder.", "quant_conv."), rules=(Rule("encoder.**.weight", REPLICATED),)
)

SPEC = replace(
    t2v.SPEC,
    name="cogvideox1.5-5b-i2v",
    title="CogVideoX 1.5 5B I2V",
    published=HubCheckpoint(hub_id="zai-org/CogVideoX1.5-5B-I2V", pipeline_classes=("CogVideoXImageToVideoPipeline",)),
    miniature=replace(
        t2v.SPEC.miniature,
        id="tiny/cogvideox15i2v",
        texts={"prompt": "a red circle moves right on blue", "negative_prompt": ""},
        picture="wan_i2v_shapes.png",
    ),
    components=(TEXT_ENCODER, _TRANSFORMER, VAE_ENCODER, VAE_DECODER),
    texts={"prompt": IMAGE_PROMPT, "negative_prompt": ""},
    vae=replace(t2v.SPEC.vae, encode=encode_pixels),
    recipe=replace(t2v.SPEC.recipe, draw_inputs=draw_inputs, advice=advise),
    denoiser=replace(t2v.SPEC.denoiser, forward=forward),
    pictures=ImageConditioning(encode=encode_image, condition_shapes=condition_shapes),
)
