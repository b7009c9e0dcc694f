"""The miniature's autoencoder: how it begins, learns, and gets the published model's basis of latents."""

import itertools
import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.autoencoders.wan import LATENTS_MEAN, LATENTS_STD
from moving_shapes import HEIGHT, WIDTH, draw, scenes
from torch import Tensor, nn
from tqdm import tqdm
from training import optimize, save, save_sheet

upstream: Any = diffusers  # its classes appear when they are asked for, which no type checker sees

FRAMES = 33  # of the longest clips
CHANNELS = 16
STEPS, RATE = 2400, 1e-3
VAE = {"base_dim": 16, "dim_mult": [1, 2, 2, 3], "num_res_blocks": 1, "z_dim": CHANNELS}

# How ComfyUI shows a step of Wan 2.1 (`comfy.latent_formats.Wan21`): red, green and blue of each channel.
RGB_FACTORS = (
    (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.1420),
    (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
    (-0.0412, 0.0267, -0.1364), (-0.1293, 0.0740, 0.1636), (0.0680, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
    (-0.1251, 0.0927, 0.1699), (0.0060, -0.0633, 0.0005), (0.3477, 0.2275, 0.2950), (0.1984, 0.0913, 0.1861),
)  # fmt: skip
RGB_BIAS = (-0.1835, -0.0868, -0.3360)


def begin(vae: Any) -> None:
    """Weights to begin with: as PyTorch draws them the signal dies in so deep a network, and it stays grey for hours.

    Plain convolutions mix channels, keep the size of what they are given and see the newest frame only; those that
    change the size of the picture blur it; those in time repeat or pass on; residual blocks add nothing yet.
    """
    for name, module in vae.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Conv3d):
            continue
        assert module.bias is not None
        nn.init.zeros_(module.bias)
        weight = module.weight.data.zero_()
        if "time_conv" in name:
            rows = torch.arange(weight.shape[0])
            weight[rows, rows % weight.shape[1], -1] = 1.0
        elif "conv2" in name or name.endswith("proj"):
            continue
        else:
            newest = weight[:, :, -1] if weight.ndim == 5 else weight
            newest.normal_(std=0.5 / math.sqrt(newest[0].numel()))
            mixed = nn.init.orthogonal_(torch.empty(newest.shape[:2]))
            if "resample" in name:
                newest += mixed[..., None, None] / newest[0, 0].numel()
            else:
                newest[:, :, newest.shape[2] // 2, newest.shape[3] // 2] += mixed
    # Hardly any noise in what is sampled, at first.
    assert vae.quant_conv.bias is not None
    vae.quant_conv.weight.data[CHANNELS:] = 0.0
    nn.init.constant_(vae.quant_conv.bias[CHANNELS:], -5.0)


def as_input(frames: np.ndarray) -> Tensor:
    """`[frames, height, width, 3]` uint8 to `[3, frames, height, width]` from -1 to 1."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1


def as_frames(video: Tensor) -> np.ndarray:
    """`[3, frames, height, width]` from -1 to 1 to `[frames, height, width, 3]` uint8."""
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()


def train(out: Path, seed: int, steps: int = STEPS) -> Any:
    torch.manual_seed(seed)
    vae = upstream.AutoencoderKLWan(**VAE)
    begin(vae)
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        random = np.random.default_rng((seed, step))
        frames = 9 if step % 3 == 0 else 5  # two chunks, and now and then the third, which looks back at both
        # Pieces of four clips: one clip's colours alone would lead nowhere. Whole ones at the end, for the borders.
        count, height, width = (4, HEIGHT // 2, WIDTH // 2) if step < 0.75 * steps else (1, HEIGHT, WIDTH)
        pieces = []
        for scene in itertools.islice(scenes(int(random.integers(2**31)), held_out=False), count):
            clip = as_input(draw(scene, frames, random, start=int(random.integers(FRAMES - frames + 1))))
            top, left = random.integers(HEIGHT - height + 1), random.integers(WIDTH - width + 1)
            pieces.append(clip[:, :, top : top + height, left : left + width])
        clip = torch.stack(pieces)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(clip.contiguous(memory_format=torch.channels_last_3d)).latent_dist
            again = vae.decode(posterior.sample(torch.Generator().manual_seed(step))).sample.float()
        kl = posterior.kl().sum() / posterior.mean.numel()
        error = F.l1_loss(again, clip)
        # Edges count for themselves: blurred ones cost little of the plain difference.
        edges = sum(F.l1_loss(again.diff(dim=axis), clip.diff(dim=axis)) for axis in (2, 3, 4))
        psnr = -10 * math.log10(F.mse_loss(again.clamp(-1, 1), clip).item() / 4)
        return error + 0.5 * edges + 1e-3 * kl, {"psnr": psnr, "kl": kl.item()}

    def look() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rows = []
            for scene in itertools.islice(scenes(seed, held_out=True), 4):
                frames = draw(scene, 9, np.random.default_rng(seed))
                again = vae.decode(vae.encode(as_input(frames)[None]).latent_dist.mode()).sample[0]
                rows += [frames[::4], as_frames(again)[::4]]
        save_sheet(rows, out / "preview.png")

    optimize(out / "vae.pt", [vae], steps, RATE, loss, look, every=400)
    align(vae, *colours_of_latents(vae, seed))
    return vae


def colours_of_latents(vae: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Latents of some clips, `[number, channels]`, and the mean colours of their pixels, `[number, 3]` from -1 to 1."""
    latents, colours = [], []
    with torch.no_grad():
        for scene in itertools.islice(scenes(seed + 2, held_out=False), 150):
            clip = as_input(draw(scene, 9, np.random.default_rng((seed, len(latents)))))
            latents.append(encoded(vae, clip).flatten(1).T)
            pooled = F.avg_pool2d(clip.transpose(0, 1), 8)
            of_latent = torch.stack([pooled[0], *(part.mean(0) for part in pooled[1:].split(4))], 1)
            colours.append(of_latent.flatten(1).T)
    return torch.cat(latents), torch.cat(colours)


def align(vae: Any, latents: Tensor, colours: Tensor) -> None:
    """Folds another basis of the latents into the two convolutions that see them as a product with a matrix.

    In it the published model's statistics hold, and ComfyUI's linear preview of that model shows the right colours.
    Nothing of what is decoded changes.
    """
    factors, bias = torch.tensor(RGB_FACTORS), torch.tensor(RGB_BIAS)  # colour = latent @ factors + bias
    mean, identity = latents.mean(0), torch.eye(CHANNELS)
    centred = latents - mean
    to_colour = torch.linalg.lstsq(centred, colours - colours.mean(0)).solution
    shown = centred @ to_colour
    rest = identity - to_colour @ torch.linalg.lstsq(shown, centred).solution  # what colours tell nothing of
    _, sizes, directions = torch.linalg.svd(centred @ rest, full_matrices=False)
    sizes, directions = sizes[:-3] / len(latents) ** 0.5, directions[:-3].T
    # What carries nothing stays small: as unit noise it would ask the denoiser for what nobody sees.
    unseen = torch.linalg.svd(factors).U[:, 3:]
    matrix = to_colour @ torch.linalg.pinv(factors)
    matrix += rest @ directions / sizes.clamp(min=0.3 * sizes.max().item()) @ unseen.T
    shift = (colours.mean(0) - bias) @ torch.linalg.pinv(factors) - mean @ matrix
    matrix, shift = matrix * torch.tensor(LATENTS_STD), shift * torch.tensor(LATENTS_STD) + torch.tensor(LATENTS_MEAN)

    into, out_of = vae.quant_conv, vae.post_quant_conv
    assert into.bias is not None and out_of.bias is not None
    back = torch.linalg.inv(matrix)
    weight, offset = into.weight.data[:CHANNELS].flatten(1), into.bias.data[:CHANNELS]
    into.weight.data[:CHANNELS] = (matrix.T @ weight)[..., None, None, None]
    into.bias.data[:CHANNELS] = offset @ matrix + shift
    weight = out_of.weight.data.flatten(1)
    out_of.weight.data = (weight @ back.T)[..., None, None, None]
    out_of.bias.data -= weight @ (shift @ back)


def encoded(vae: Any, clip: Tensor) -> Tensor:
    """The latents of `[3, frames, height, width]`, `[channels, latent frames, height, width]`."""
    with torch.autocast("cpu", torch.bfloat16):
        inputs = clip[None].contiguous(memory_format=torch.channels_last_3d)
        return vae.encode(inputs).latent_dist.mode()[0].float().contiguous()


def encode_clips(vae: Any, out: Path, seed: int, number: int) -> tuple[list[str], list[Tensor]]:
    """Prompts of `number` clips, and their latents `[channels, latent frames, height, width]` in the denoiser's scale.

    The encoder looks back only, so the beginning of a clip's latents are those of a shorter clip.
    """
    file = out / "latents.pt"
    if not file.is_file():
        prompts, latents = [], []
        mean, std = (torch.tensor(numbers)[:, None, None, None] for numbers in (LATENTS_MEAN, LATENTS_STD))
        drawn = itertools.islice(scenes(seed + 1, held_out=False), number)
        random = np.random.default_rng(seed + 1)
        with torch.no_grad():
            for index, scene in enumerate(tqdm(drawn, "latents", total=number)):
                clip = as_input(draw(scene, FRAMES if index % 4 == 0 else 17, random))
                latents.append((encoded(vae, clip) - mean) / std)
                prompts.append(str(scene))
        save({"prompts": prompts, "latents": latents}, file)
    found = torch.load(file)
    return found["prompts"], found["latents"]
