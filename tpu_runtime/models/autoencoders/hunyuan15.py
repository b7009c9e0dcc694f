"""HunyuanVideo 1.5's VAE: decoding one latent frame at a time, with its attention in pieces that fit."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, Need, Report, has_length
from .frames import decode_by_frame, pixels
from .layers import attend_to_picture, convolved, in_turn

if TYPE_CHECKING:
    import jax
    import torch

# What a module computes: `(module, x, ...) -> x`.
Layer = Callable[..., Any]


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[Any]":
    """One latent frame a call, what later frames look back at carried from one to the next: 1 frame, then 4 each.

    Upstream decodes the full video at once. No frame sees later ones, neither by convolution nor by attention, so this
    is the same.
    """
    import torch

    unseen = torch.zeros(latents[:, :1].shape)
    return decode_by_frame(call, latents, report, before_first=before_first, decode_next=decode_next, given=(unseen,))


def before_first(vae: Any, latent: "torch.Tensor", unseen: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The memory before the first latent frame. `unseen`: zeros `[1, 1, T, h, w]` for a video of T."""
    import torch

    from ...programs import torch_bridge

    shapes = torch_bridge.shapes(lambda *given: decode_next(vae, given[0], [given[1]])[1], latent, unseen)
    return latent[:, :1], [torch.zeros(shape, dtype=latent.dtype, device=latent.device) for shape in shapes]


def decode_next(
    vae: Any, latent: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The next latent frame `[1, 32, 1, h, w]` to frames `[4, 16h, 16w, 3]` in 0..1, and the memory after it.

    `memory` is which of the last T frames there were, and, in the order of use, the last inputs of each convolution and
    the last T keys and values of the attention. Of the first latent frame, whose time upstream does not double, only
    the first of the four frames is meant, and it alone is remembered.
    """
    import torch

    from ...programs import torch_bridge

    seen, *past_inputs = memory
    given, is_first = iter(past_inputs), seen.amax() == 0
    seen = torch.cat([seen[:, :, 1:], torch.ones_like(seen[:, :, :1])], dim=2)
    kept = [seen]

    def convolve(conv: Any, x: "torch.Tensor", norm: Any = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        alone = x[:, :, :1]
        past = [torch.where(is_first, alone, next(given, alone)) for _ in range(frames_before(conv))]
        out = convolve_all(conv, x, past, norm, onto)
        # What is kept is taken behind the convolution, for it takes the place of the past, and before all else: the
        # compiler would do it last, and keep all inputs until then.
        out, x, *past = in_turn(out, x, *past)
        last = [*past, *x.split(1, dim=2)][-len(past) :]
        out, *now = in_turn(out, *(torch.where(is_first, x[:, :, :1], one) for one in last))
        kept.extend(now)
        return out

    def attend(attention: Any, x: "torch.Tensor") -> "torch.Tensor":
        normed = attention.norm(x)
        for new in (attention.to_k(normed), attention.to_v(normed)):
            past = next(given, torch.zeros_like(new).repeat_interleave(seen.shape[2], dim=2))
            kept.append(torch.cat([past[:, :, 1:], new], dim=2))
        return attention.proj_out(torch_bridge.call_jax(attend_to_seen, attention.to_q(normed), *kept[-2:], seen)) + x

    decoder = vae.decoder
    x = convolve(decoder.conv_in, latent) + latent.repeat_interleave(decoder.repeat, dim=1)
    x = middle(decoder.mid_block, x, convolve, attend)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = residual(resnet, x, convolve)
        for sampler in block.upsamplers or ():
            x = upsampled(sampler, x, convolve(sampler.conv, x), is_first)
    frames = convolve(decoder.conv_out, x, decoder.norm_out)
    return pixels(frames[0].permute(1, 2, 3, 0)), kept


def encode_picture(vae: Any, picture: "torch.Tensor") -> "torch.Tensor":
    """A picture `[1, 3, height, width]` in -1..1, as a video of one frame, to the mean of its latent
    `[1, 32, 1, h, w]`.
    """

    def convolve(conv: Any, x: "torch.Tensor", norm: Any = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        return convolve_all(conv, x, [x[:, :, :1]] * frames_before(conv), norm, onto)

    encoder = vae.encoder
    x = convolve(encoder.conv_in, picture.unsqueeze(2))
    for block in encoder.down_blocks:
        for resnet in block.resnets:
            x = residual(resnet, x, convolve)
        for sampler in block.downsamplers or ():
            x = downsampled(sampler, x, convolve(sampler.conv, x))
    x = middle(encoder.mid_block, x, convolve, attend_to_image)
    shortcut = x.unflatten(1, (-1, encoder.group_size)).mean(dim=2)
    return convolve(encoder.conv_out, x, encoder.norm_out, shortcut).chunk(2, dim=1)[0]


def middle(block: Any, x: "torch.Tensor", convolve: Layer, attend: Layer) -> "torch.Tensor":
    """`HunyuanVideo15MidBlock`."""
    first, *others = block.resnets
    x = residual(first, x, convolve)
    for attention, resnet in zip(block.attentions, others, strict=True):
        x = residual(resnet, attend(attention, x), convolve)
    return x


def residual(block: Any, x: "torch.Tensor", convolve: Layer) -> "torch.Tensor":
    """`HunyuanVideo15ResnetBlock`."""
    out = convolve(block.conv1, x, block.norm1)
    return convolve(block.conv2, out, block.norm2, x if block.conv_shortcut is None else block.conv_shortcut(x))


def frames_before(conv: Any) -> int:
    """How many a causal convolution sees before the first; there that frame stands for them."""
    return conv.time_causal_padding[4]


def convolve_all(
    conv: Any, x: "torch.Tensor", past: "list[torch.Tensor]", norm: Any = None, onto: "torch.Tensor | None" = None
) -> "torch.Tensor":
    """`HunyuanVideo15CausalConv3d` of `[1, dim, frames, h, w]` behind the frames of the past."""
    assert (conv.time_causal_padding[:4], conv.pad_mode) == ((1, 1, 1, 1), "replicate")
    return convolved(conv.conv, x, edges="replicate", past=past, kernel=True, norm=norm, onto=onto)


def upsampled(sampler: Any, x: "torch.Tensor", out: "torch.Tensor", is_first: "torch.Tensor") -> "torch.Tensor":
    """`HunyuanVideo15Upsample` in space and, some, in time, of `x` and its convolution `out`; the video's first frame
    alone is not doubled in time, here repeated. What skips the convolution is added while frames are small: upstream
    moves both to the large ones.
    """
    import torch

    enlarge, repeats = sampler._dcae_upsample_rearrange, sampler.repeats
    both = out + x.repeat_interleave(repeats, dim=1)
    if not sampler.add_temporal_upsample:
        return enlarge(both, r1=1, r2=2, r3=2)
    later = enlarge(both, r1=2, r2=2, r3=2)
    # Of four pixels' channels, those of the first of two frames.
    first = out[:, :, :1].unflatten(1, (4, 2, -1))[:, :, 0].flatten(1, 2)
    alone = enlarge(first + x[:, :, :1].repeat_interleave(repeats // 2, dim=1), r1=1, r2=2, r3=2)
    return torch.where(is_first, alone, later)


def downsampled(sampler: Any, x: "torch.Tensor", out: "torch.Tensor") -> "torch.Tensor":
    """`HunyuanVideo15Downsample` of a video's first frame `x` and its convolution `out`: time does not become less,
    and where that of later frames would, the frame stands for two.
    """
    import torch

    out, x = (sampler._dcae_downsample_rearrange(one, r1=1, r2=2, r3=2) for one in (out, x))
    out = torch.cat([out, out], dim=1) if sampler.add_temporal_downsample else out
    return out + x.unflatten(1, (out.shape[1], -1)).mean(dim=2)


def attend_to_image(attention: Any, x: "torch.Tensor") -> "torch.Tensor":
    """Upstream's attention of one frame `[1, dim, 1, h, w]`, without its mask of pixels by pixels."""
    from ...programs import torch_bridge

    normed = attention.norm(x)
    heads = (project(normed)[:, :, 0].movedim(1, -1) for project in (attention.to_q, attention.to_k, attention.to_v))
    found = torch_bridge.call_jax(attend_to_picture, *heads)
    return attention.proj_out(found.movedim(-1, 1)[:, :, None]) + x


def attend_to_seen(q: "jax.Array", k: "jax.Array", v: "jax.Array", seen: "jax.Array") -> "jax.Array":
    """Exact attention of one frame `[batch, dim, 1, h, w]` to all pixels of those frames `[batch, dim, T, h, w]` for
    which `seen` `[batch, 1, T, h, w]` is not zero.

    There is one head of 1024, too wide for the attention kernel; the scores of a 720p frame to 31 are 0.2 GiB on each
    of 8 chips.
    """
    import jax
    import jax.numpy as jnp

    batch, dim = q.shape[:2]
    keys, values, visible = (x.reshape(batch, x.shape[1], -1) for x in (k, v, seen))
    scores = jnp.einsum("bchw,bcs->bhws", q[:, :, 0], keys, preferred_element_type=jnp.float32) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, :, None] > 0, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhws,bcs->bchw", weights.astype(v.dtype), values)[:, :, None]


def denormalize_latents(sample: "torch.Tensor", vae_config: Mapping[str, Any]) -> "torch.Tensor":
    """Latents in the VAE's own scale."""
    return sample / vae_config["scaling_factor"]


VAE_DECODER = Component(
    name="vae_decoder",
    folder="vae",
    library="diffusers",
    class_name="AutoencoderKLHunyuanVideo15",
    config={
        "block_out_channels": (128, 256, 512, 1024, 1024),
        "latent_channels": 32,
        "layers_per_block": 2,
        "scaling_factor": 1.03682,
    },
    tiny={"block_out_channels": (4, 8, 8, 16, 64), "layers_per_block": 1},
    needs={
        "block_out_channels": Need(fits=has_length(5), wording="5 numbers"),
        "latent_channels": Need((32,)),
        "spatial_compression_ratio": Need((16,)),
        "temporal_compression_ratio": Need((4,)),
    },
    only=("decoder.",),
    rules=(
        # The upsampling convolutions of the first blocks have 216 and 108 million weights, all others at most 27.
        Rule("decoder.up_blocks.*.upsamplers.0.conv.conv.weight", ("fsdp", None, None, None, None)),
        Rule("decoder.**.weight", REPLICATED),
    ),
)
