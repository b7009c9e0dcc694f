"""The tiny model of Z-Image: images that show a sentence, in the latents of FLUX.2 klein's autoencoder."""

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models.common import qwen3
from comfyui_tpu.tpu_runtime.models.z_image.spec import BASE
from comfyui_tpu.tpu_runtime.models.z_image.text_encoder import STATE
from comfyui_tpu.tpu_runtime.models.z_image.transformer import SEQ_MULTIPLE
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from .. import denoisers, still
from ..autoencoders.common import align, as_frames, as_input, decoded, laid_out
from ..denoisers import rotated, scheduler
from ..shapes import HEIGHT, WIDTH
from ..training import optimize, qwen_tokenizer, save_sheet, shipped, upstream, without_capitals
from .flux2_klein import SPECIAL, encoded, let_learn, pictures
from .qwen_image import WORDS, batches_of, pictures_in

TAG, SOURCE = "text-to-image", "still"
SHARED = {"vae": "flux2klein/vae"}  # parts that another miniature has
CARD = """\
A small model with the classes of Z-Image, trained by `tools/train_miniature.py`. It is meant for demonstrations and
tests of prompts and seeds, on machines that cannot hold the real model. Its autoencoder is that of the tiny model of
FLUX.2 klein, except for the two convolutions next to the latents. Its nine blocks use three sets of weights; only
their modulation differs.

It understands sentences such as "a large red circle left on blue" and "a red circle and a small green square on
blue": one or two shapes ({shapes}) in {colours}. Images are {width}x{height}. It knows no other words."""

CHANNELS, PATCH = 16, 2
BORDERS = 400  # steps of the decoder's first convolution
NOISE = 0.1  # of the latents that it sees
STEPS, RATE = 10000, 1.5e-3
COUNT = 32  # pictures in a step
TOKENS = (HEIGHT // 16) * (WIDTH // 16)
TRANSFORMER = {
    "axes_dims": (6, 8, 8),
    "cap_feat_dim": 32,
    "dim": 88,
    "in_channels": CHANNELS,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 9,
    "n_refiner_layers": 1,
}
TIME = 64  # of what the time is made of by upstream's class, the rest is nothing
TEXT_ENCODER = {
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 16,
    "hidden_size": TRANSFORMER["cap_feat_dim"],
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "num_attention_heads": 2,
    "num_hidden_layers": STATE + 1,
    "num_key_value_heads": 1,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LAYERS = (0, 1)  # of the text encoder, that learn
NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
TIED = 3  # blocks, which come one after the other until all layers are full; before them the last refines the picture

# How ComfyUI shows a step (`comfy.latent_formats.Flux`): red, green and blue of each channel.
RGB_FACTORS = (
    (-0.0346, 0.0244, 0.0681), (0.0034, 0.0210, 0.0687), (0.0275, -0.0668, -0.0433), (-0.0174, 0.0160, 0.0617),
    (0.0859, 0.0721, 0.0329), (0.0004, 0.0383, 0.0115), (0.0405, 0.0861, 0.0915), (-0.0236, -0.0185, -0.0259),
    (-0.0245, 0.0250, 0.1180), (0.1008, 0.0755, -0.0421), (-0.0515, 0.0201, 0.0011), (0.0428, -0.0012, -0.0036),
    (0.0817, 0.0765, 0.0749), (-0.1264, -0.0522, -0.1103), (-0.0280, -0.0881, -0.0499), (-0.1262, -0.0982, -0.0778),
)  # fmt: skip
RGB_BIAS = (-0.0329, -0.0718, -0.0851)


# --- the autoencoder --------------------------------------------------------------------------------------------------


def autoencoder(out: Path, seed: int) -> Any:
    """klein's, in a basis of the dimensions that its latents have, without convolutions of its own for them."""
    folder = shipped("flux2klein") / "vae"
    klein = upstream.AutoencoderKLFlux2.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=False)
    shown = list(itertools.islice(pictures((seed, 1)), 300))
    of_klein = torch.cat([encoded(klein, shown[first : first + 20]) for first in range(0, len(shown), 20)])
    rows = of_klein.movedim(1, -1).flatten(0, -2)
    middle = rows.mean(0)
    basis = torch.linalg.svd(rows - middle, full_matrices=False).Vh[:CHANNELS].T
    vae = in_basis(klein, basis, middle)
    rows = (rows - middle) @ basis
    colours = F.avg_pool2d(torch.stack([*map(as_input, shown)]), 8).movedim(1, -1).flatten(0, -2)
    mean, std = torch.full([CHANNELS], vae.config.shift_factor), torch.full([CHANNELS], 1 / vae.config.scaling_factor)
    align(vae, rows, colours, (RGB_FACTORS, RGB_BIAS), mean, std)

    # What the decoder sees beyond the borders are zeros, which were another colour in the other basis.
    for parameter in vae.parameters():
        parameter.requires_grad_(False)
    first = vae.decoder.conv_in.requires_grad_(True)
    seen = torch.stack([*map(as_input, itertools.islice(pictures((seed, 2)), 400))])
    latents = encoded(vae, itertools.islice(pictures((seed, 2)), 400))

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        chosen = np.random.default_rng((seed, step)).choice(len(seen), 6, replace=False)
        noise = torch.randn(6, *latents.shape[1:], generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            again = vae.decode(laid_out(latents[chosen] + NOISE / vae.config.scaling_factor * noise)).sample.float()
        error = F.mse_loss(again, seen[chosen])
        return F.l1_loss(again, seen[chosen]), {"psnr": -10 * math.log10(error.item() / 4)}

    def look() -> None:
        again = [as_frames(decoded(vae, one)) for one in encoded(vae, shown[:12])]
        save_sheet(map(np.stack, (shown[:6], again[:6], shown[6:12], again[6:])), out / "preview.png")

    optimize(out / "decoder.pt", [first], BORDERS, 1e-3, loss, look, every=200)
    return vae


def in_basis(klein: Any, basis: Tensor, middle: Tensor) -> Any:
    """The same networks for latents of `basis`, `[channels, kept]`, from the `middle` on: `quant_conv` and its like are
    folded into the convolutions beside them. At the borders of a picture the decoder's first sees other zeros.
    """
    names = (
        "act_fn",
        "block_out_channels",
        "down_block_types",
        "layers_per_block",
        "norm_num_groups",
        "up_block_types",
    )
    vae = upstream.AutoencoderKL(
        **{name: klein.config[name] for name in names},
        latent_channels=basis.shape[1],
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    weights = klein.state_dict()
    last, quant = klein.encoder.conv_out, klein.quant_conv
    project = basis.T @ quant.weight.data[: len(middle), :, 0, 0]
    weight, bias = (torch.tensordot(project, one.data, 1) for one in (last.weight, last.bias))
    bias += basis.T @ (quant.bias.data[: len(middle)] - middle)
    # There is hardly any noise in what is sampled.
    weights["encoder.conv_out.weight"] = torch.cat([weight, torch.zeros_like(weight)])
    weights["encoder.conv_out.bias"] = torch.cat([bias, torch.full_like(bias, -12.0)])
    first, post = klein.decoder.conv_in, klein.post_quant_conv
    matrix, offset = post.weight.data[:, :, 0, 0], post.bias.data
    weights["decoder.conv_in.weight"] = torch.einsum("oiyx,ij->ojyx", first.weight.data, matrix @ basis)
    weights["decoder.conv_in.bias"] = first.bias.data + first.weight.data.sum((2, 3)) @ (matrix @ middle + offset)
    vae.load_state_dict({name: weights[name] for name in vae.state_dict()})
    return vae.eval()


# --- the denoiser and its text encoder --------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Transformer and text encoder, and while they learn a probe of the third block."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **TEXT_ENCODER))
        let_learn(encoder.model.layers, LAYERS)
        nn.init.normal_(encoder.model.embed_tokens.weight)
        self.text: Any = encoder
        self.transformer: Any = upstream.ZImageTransformer2DModel(**TRANSFORMER)
        dit = self.transformer
        blocks = [*dit.layers, *dit.noise_refiner]
        modulations = [block.adaLN_modulation[0] for block in blocks]
        final = dit.all_final_layer["2-1"]
        denoisers.begin(blocks, [*modulations, final.linear, final.adaLN_modulation[1]])
        for number, block in enumerate(blocks[TIED:], TIED):
            first = blocks[number % TIED if number < len(dit.layers) else TIED - 1]
            for name in ("attention", "feed_forward", *NORMS):
                setattr(block, name, getattr(first, name))
            block.adaLN_modulation[0].weight = first.adaLN_modulation[0].weight
        for parameter in dit.context_refiner.parameters():
            nn.init.zeros_(parameter).requires_grad_(False)
        nn.init.zeros_(dit.t_embedder.mlp[0].weight[TIME:].detach())
        nn.init.zeros_(dit.t_embedder.mlp[0].bias.detach())
        nn.init.zeros_(dit.t_embedder.mlp[2].weight[:, TIME:].detach())
        for pad in (dit.x_pad_token, dit.cap_pad_token):
            nn.init.normal_(pad, std=0.1)
        self.probe = denoisers.Probe(nn.Identity(), TRANSFORMER["dim"], (HEIGHT // 16, WIDTH // 16))
        # Text from the first place on, the picture after it; its padding, of which one stands for all, at place 0.
        grid = [torch.tensor([SEQ_MULTIPLE + 1]), *map(torch.arange, self.probe.grid)]
        places = torch.cat([torch.cartesian_prod(*grid), torch.zeros(1, 3, dtype=torch.int64)])
        text = F.pad(torch.arange(1, SEQ_MULTIPLE + 1)[:, None], (0, 2))
        tables = dit.rope_embedder(torch.cat([places, text]))
        self.tables = [part.repeat_interleave(2, 1)[None, :, None] for part in (tables.real, tables.imag)]
        self.bias = torch.zeros(TOKENS + 1 + SEQ_MULTIPLE)
        self.bias[TOKENS] = math.log(-TOKENS % SEQ_MULTIPLE)

    def states(self, ids: Tensor) -> Tensor:
        """What the text encoder gives, `[rows, tokens, dim]`."""
        model = self.text.model
        x = model.embed_tokens(ids)
        rotary = model.rotary_emb(x, torch.arange(x.shape[1])[None])
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        for index in LAYERS:
            x = model.layers[index](x, attention_mask=seen, position_embeddings=rotary)
        return x

    def run(self, block: Any, x: Tensor, time: Tensor) -> Tensor:
        attn, length = block.attention, x.shape[1]
        scale, gate, ffn_scale, ffn_gate = block.adaLN_modulation(time)[:, None].chunk(4, -1)
        y = block.attention_norm1(x) * (1 + scale)
        q, k, v = (part(y).unflatten(2, (attn.heads, -1)) for part in (attn.to_q, attn.to_k, attn.to_v))
        tables = [table[:, :length] for table in self.tables]
        q, k = (rotated(part, *tables) for part in (attn.norm_q(q), attn.norm_k(k)))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + self.bias[:length]
        found = attn.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + gate.tanh() * block.attention_norm2(found)
        found = block.feed_forward(block.ffn_norm1(x) * (1 + ffn_scale))
        return x + ffn_gate.tanh() * block.ffn_norm2(found)

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity of `[rows, 64, height, width]`, and how badly the probe knows the places."""
        dit, size = self.transformer, noisy.shape[2:]
        time = dit.t_embedder((1 - sigma) * dit.t_scale)
        x = dit.all_x_embedder["2-1"](noisy.flatten(2).transpose(1, 2))
        x = torch.cat([x, dit.x_pad_token.expand(len(x), 1, -1)], 1)
        x = self.run(dit.noise_refiner[0], x, time)
        text = torch.where(mask.bool()[..., None], dit.cap_embedder(self.states(ids)), dit.cap_pad_token)
        x = asked = torch.cat([x, text], 1)
        for number, block in enumerate(dit.layers):
            x = self.run(block, x, time)
            if number == 2:
                asked = x
        velocity = dit.all_final_layer["2-1"](x[:, :TOKENS], c=time).transpose(1, 2).unflatten(2, size)
        return -velocity, self.probe(asked[:, :TOKENS], tuple(size))


def latents_in(file: Path, vae: Any, seed: int) -> dict[str, Any]:
    """`prompts` of pictures and their `latents`, `[number, 64, height / 16, width / 16]`."""

    def encode(picture: np.ndarray) -> Tensor:
        latents = (encoded(vae, [picture])[0] - vae.config.shift_factor) * vae.config.scaling_factor
        parts = latents.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))  # [channels, h, 2, w, 2]
        return parts.permute(2, 4, 0, 1, 3).flatten(0, 2)

    return pictures_in(file, encode, seed)


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    vae = autoencoder(out, seed)
    data = latents_in(out / "latents.pt", vae, seed)
    prompts, latents = data["prompts"], data["latents"]
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer(
        out / "tokenizer", WORDS, ("user", "assistant"), special=SPECIAL, chat_template=qwen3.CHAT_TEMPLATE
    )
    ids, masks = map(torch.from_numpy, qwen3.tokenize(tokenizer, [*prompts, ""], SEQ_MULTIPLE, thinks=True))
    denoiser = Denoiser(len(tokenizer))
    averaged = denoisers.average_of(denoiser)
    denoisers.quicken([*denoiser.transformer.layers, *denoiser.transformer.noise_refiner])
    batch = batches_of(prompts, latents, ids, masks, COUNT)

    def look() -> None:
        make = partial(sample, assemble(averaged.module, vae, tokenizer), steps=8, guidance=4.0)
        still.show(make, out / "preview.png", seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    return assemble(averaged.module, vae, tokenizer)


def assemble(denoiser: Any, vae: Any, tokenizer: Any, spec: ModelSpec = BASE) -> Any:
    """Return the pipeline, with separate weights for each block."""
    without_capitals(tokenizer, denoiser.text.model.embed_tokens.weight.data, WORDS)
    transformer = upstream.ZImageTransformer2DModel(**TRANSFORMER)
    transformer.load_state_dict(denoiser.transformer.state_dict())
    pipeline = upstream.ZImagePipeline(scheduler(spec.recipe.scheduler), vae, denoiser.text, tokenizer, transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, prompt: str, seed: int, *, steps: int, guidance: float) -> np.ndarray:
    """A picture `[HEIGHT, WIDTH, 3]` uint8 of upstream's pipeline, whose `guidance` is 0 where there is none."""
    (picture,) = pipeline(
        prompt=prompt,
        negative_prompt="",
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return np.round(picture * 255).astype(np.uint8)
