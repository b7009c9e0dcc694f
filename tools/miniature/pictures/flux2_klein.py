"""The tiny model of FLUX.2 klein: text to image, and changes of a reference image."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.common import causal, qwen3
from comfyui_tpu.tpu_runtime.models.common.qwen3 import MAX_TOKENS
from comfyui_tpu.tpu_runtime.models.flux2.klein import STEPS as STEPS_OF_A_PICTURE
from comfyui_tpu.tpu_runtime.models.flux2.spec import SCHEDULER
from comfyui_tpu.tpu_runtime.tokenization import load_tokenizer
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from .. import denoisers, still
from ..autoencoders.common import align, as_frames, as_input, decoded, laid_out, learn
from ..shapes import COLOURS, HEIGHT, SHAPES, WIDTH, is_held_out
from ..training import save, save_sheet, upstream, without_case

TAG, SOURCE = "text-to-image", "still"
SHARED: dict[str, str] = {}  # parts that another miniature has
CARD = """\
A small model with the classes of FLUX.2 klein, trained from scratch by `tools/train_miniature.py`. It is meant for
demonstrations and tests of prompts, references, seeds and previews, on machines that cannot hold the real model.

It understands sentences such as "a large red circle left on blue" and "a red circle and a small green square on
black": one or two shapes ({shapes}) in {colours}. A shape may be small or large, and a single shape may be left or
right. With a reference image of that kind, it understands "the circle becomes red", "the circle becomes a square",
"the circle becomes small", "on green" and "the circle becomes red on green". Images are {width}x{height}. It knows no
other words.

It uses four steps without guidance, as the real model does, but was not distilled."""

VAE = {
    "block_out_channels": [16, 24, 32, 48],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "latent_channels": 32,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
VAE_STEPS = 1500
# Of the 32 dimensions of a latent: a token has four of them, and noise in what carries nothing would ask for a wider
# denoiser. With 16 a picture is 0.2 dB worse.
KEPT = 16
TRANSFORMER = {
    "attention_head_dim": 32,
    "axes_dims_rope": (8, 8, 8, 8),
    "guidance_embeds": False,
    "in_channels": 128,
    "joint_attention_dim": 96,
    "mlp_ratio": 2.0,
    "num_attention_heads": 4,
    "num_layers": 2,
    "num_single_layers": 5,
    "rope_theta": 2000,
    "timestep_guidance_channels": 64,
}
TEXT_ENCODER = {
    "head_dim": 16,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    # The prompt is the states of three layers. The last layer is none of them.
    "num_hidden_layers": max(qwen3.STATES) + 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# The layers that learn, one before each state that is used; all others add nothing.
LAYERS = (0, *qwen3.STATES[:-1])
WORDS = (*COLOURS, *SHAPES, *filter(None, still.SIZES), *filter(None, still.PLACES), "a", "and", "on", "the", "becomes")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")

PICTURES, CHANGES = 4000, 4000
STEPS, RATE = 11500, 2e-3
# Pictures in a step, and where every other step has a reference.
COUNTS = (28, 18)
PADDING = 4  # of the tokens after the prompt are looked at in a step; they stand for all

# How ComfyUI shows a step of FLUX.2 (`comfy.latent_formats.Flux2`): red, green and blue of each channel.
RGB_FACTORS = (
    (0.0058, 0.0113, 0.0073), (0.0495, 0.0443, 0.0836), (-0.0099, 0.0096, 0.0644), (0.2144, 0.3009, 0.3652),
    (0.0166, -0.0039, -0.0054), (0.0157, 0.0103, -0.0160), (-0.0398, 0.0902, -0.0235), (-0.0052, 0.0095, 0.0109),
    (-0.3527, -0.2712, -0.1666), (-0.0301, -0.0356, -0.0180), (-0.0107, 0.0078, 0.0013), (0.0746, 0.0090, -0.0941),
    (0.0156, 0.0169, 0.0070), (-0.0034, -0.0040, -0.0114), (0.0032, 0.0181, 0.0080), (-0.0939, -0.0008, 0.0186),
    (0.0018, 0.0043, 0.0104), (0.0284, 0.0056, -0.0127), (-0.0024, -0.0022, -0.0030), (0.1207, -0.0026, 0.0065),
    (0.0128, 0.0101, 0.0142), (0.0137, -0.0072, -0.0007), (0.0095, 0.0092, -0.0059), (0.0000, -0.0077, -0.0049),
    (-0.0465, -0.0204, -0.0312), (0.0095, 0.0012, -0.0066), (0.0290, -0.0034, 0.0025), (0.0220, 0.0169, -0.0048),
    (-0.0332, -0.0457, -0.0468), (-0.0085, 0.0389, 0.0609), (-0.0076, 0.0003, -0.0043), (-0.0111, -0.0460, -0.0614),
)  # fmt: skip
RGB_BIAS = (-0.0329, -0.0718, -0.0851)


def pictures(seed: Any, *, spread: float = 1.0) -> Iterator[np.ndarray]:
    """Pictures without end, `[HEIGHT, WIDTH, 3]` uint8; `spread` is how far things are from their places."""
    random = np.random.default_rng(seed)
    while True:
        jitter = random.uniform(-1, 1, (2, 3)) * [spread, spread, 1]
        yield still.draw(still.random_picture(random), jitter.tolist())


def train_vae(out: Path, seed: int) -> tuple[Any, Tensor]:
    """The autoencoder, and the basis of its latents that counts."""
    torch.manual_seed(seed)
    vae = upstream.AutoencoderKLFlux2(**VAE)

    def pieces(step: int) -> Tensor:
        # Pieces of many pictures: one's colours alone would lead nowhere. Then whole ones, whose statistics norms see.
        count, height, width = (8, HEIGHT // 2, WIDTH // 2) if step < 0.5 * VAE_STEPS else (3, HEIGHT, WIDTH)
        random = np.random.default_rng((seed, step))
        found = []
        for picture in itertools.islice(pictures((seed, step), spread=3), count):
            top, left = random.integers(HEIGHT - height + 1), random.integers(WIDTH - width + 1)
            found.append(as_input(picture[top : top + height, left : left + width]))
        return torch.stack(found)

    def look() -> None:
        vae.eval()
        shown = list(itertools.islice(pictures(seed), 12))
        again = [as_frames(decoded(vae, one)) for one in encoded(vae, shown)]
        vae.train()
        save_sheet(map(np.stack, (shown[:6], again[:6], shown[6:], again[6:])), out / "preview.png")

    learn(vae, out / "vae.pt", VAE_STEPS, pieces, look)
    return vae, normalise(vae.eval(), seed)


def encoded(vae: Any, shown: Iterable[np.ndarray]) -> Tensor:
    """Pictures `[HEIGHT, WIDTH, 3]` uint8 to latents `[number, 32, height, width]` in the autoencoder's own scale."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return vae.encode(laid_out(torch.stack([*map(as_input, shown)]))).latent_dist.mode().float()


def normalise(vae: Any, seed: int) -> Tensor:
    """Gives the norm between autoencoder and denoiser the statistics of latents, and previews their colours.

    Returns `align`'s basis.
    """
    shown = list(itertools.islice(pictures((seed, 1)), 300))
    latents = torch.cat([encoded(vae, shown[first : first + 20]) for first in range(0, len(shown), 20)])
    colours = F.avg_pool2d(torch.stack([*map(as_input, shown)]), 8)
    latents, colours = (x.movedim(1, -1).flatten(0, -2) for x in (latents, colours))
    mean, std = latents.mean(0), latents.std(0)
    basis = align(vae, latents, colours, (RGB_FACTORS, RGB_BIAS), mean, std, KEPT)
    # A token is four latents: what is a channel's is that of all four.
    vae.bn.running_mean.copy_(mean.repeat_interleave(4))
    vae.bn.running_var.copy_(std.square().repeat_interleave(4) - vae.config.batch_norm_eps)
    return basis


# --- the denoiser and its text encoder --------------------------------------------------------------------------------


def tokens_of(vae: Any, shown: Sequence[np.ndarray]) -> Tensor:
    """Pictures to what the denoiser works on, `[number, 128, height / 16, width / 16]`."""
    latents = torch.cat([encoded(vae, shown[first : first + 25]) for first in range(0, len(shown), 25)])
    packed = F.pixel_unshuffle(latents, 2)
    mean, var = (x[:, None, None] for x in (vae.bn.running_mean, vae.bn.running_var))
    return (packed - mean) / (var + vae.config.batch_norm_eps).sqrt()


def encode_pictures(vae: Any, file: Path, seed: int) -> dict[str, Any]:
    """`prompts` and `latents` of pictures; `sentences` of changes and what is `after` them, of the last pictures."""
    if not file.is_file():
        random = np.random.default_rng(seed + 1)
        plain = list(itertools.islice(still.pictures(seed + 1, held_out=False), PICTURES))
        changes = list(itertools.islice(still.changes(seed + 1, held_out=False), CHANGES))
        jitters = [still.random_jitter(random) for _ in range(PICTURES + CHANGES)]
        shown = [still.draw(*one) for one in zip([*plain, *(one.before for one in changes)], jitters, strict=True)]
        after = [still.draw(one.after, jitter) for one, jitter in zip(changes, jitters[PICTURES:], strict=True)]
        save(
            {
                "prompts": [str(one) for one in [*plain, *(one.before for one in changes)]],
                "held_out": [is_held_out(str(one.before)) for one in changes],
                "sentences": [one.sentence for one in changes],
                "results": [str(one.after) for one in changes],
                "latents": tokens_of(vae, shown),
                "after": tokens_of(vae, after),
            },
            file,
        )
    return torch.load(file)


def text_encoder(vocabulary: int) -> Any:
    encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **TEXT_ENCODER))
    let_learn(encoder.model.layers, LAYERS)
    return encoder


def let_learn(layers: Any, chosen: Sequence[int]) -> None:
    """Of a language model's layers the `chosen` learn, and add nothing yet; all others never do."""
    for index, layer in enumerate(layers):
        layer.requires_grad_(index in chosen)
        silent = (
            layer.parameters() if index not in chosen else (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
        )
        for weight in silent:
            nn.init.zeros_(weight)


class Text(nn.Module):
    """What the transformer is given of prompts by `layers` of a language `model`, which fills them up to a fixed length
    with the token `padding`, `before` them or after.
    """

    def __init__(self, model: Any, layers: Sequence[int], padding: int, *, before: bool = False) -> None:
        super().__init__()
        self.model, self.layers, self.padding, self.before = model, layers, padding, before

    def forward(self, ids: Tensor, mask: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states of three layers, `[rows, tokens, 3 * dim]`, where the tokens stand, and the logarithm of how many
        each stands for: of the filling those at `places` are looked at, as often as all.
        """
        length, count = ids.shape[1], len(places)
        more = (count, 0) if self.before else (0, count)
        ids, mask = F.pad(ids, more, value=self.padding), F.pad(mask, more)
        first = MAX_TOKENS - length if self.before else 0
        weights = F.pad(torch.zeros(length), more, value=math.log((MAX_TOKENS - length) / count))
        parts = [places, torch.arange(first, first + length)]
        places = torch.cat(parts if self.before else parts[::-1])
        x = self.model.embed_tokens(ids)
        rotary = self.model.rotary_emb(x, places[None])
        seen = mask[:, None, None].bool() & torch.ones(len(places), len(places), dtype=torch.bool).tril()
        found = []
        for index in self.layers:
            x = self.model.layers[index](x, attention_mask=seen, position_embeddings=rotary)
            found.append(x)
        return torch.cat(found, -1), places, weights


class Denoiser(nn.Module):
    """Transformer and text encoders, and while they learn a probe."""

    def __init__(self, *texts: Text) -> None:
        super().__init__()
        self.texts: Any = nn.ModuleList(texts)
        self.transformer: Any = upstream.Flux2Transformer2DModel(**TRANSFORMER)
        width = TRANSFORMER["attention_head_dim"] * TRANSFORMER["num_attention_heads"]
        flux = self.transformer
        self.probe = denoisers.Probe(flux.transformer_blocks[1], width, (HEIGHT // 16, WIDTH // 16))
        modulations = (
            flux.double_stream_modulation_img,
            flux.double_stream_modulation_txt,
            flux.single_stream_modulation,
        )
        silent = (flux.proj_out, flux.norm_out.linear, *(one.linear for one in modulations))
        denoisers.begin(self.blocks, silent)

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]

    def forward(
        self,
        noisy: Tensor,
        sigma: Tensor,
        ids: Tensor,
        mask: Tensor,
        padding: Tensor,
        reference: Tensor | None = None,
        text: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Velocity of `[rows, 128, height, width]`, and how badly the probe knows the places, by the text encoder of
        the number `text`.
        """
        size = noisy.shape[2] * noisy.shape[3]
        states, places, weights = self.texts[text](ids, mask, padding)
        pictures = [noisy] if reference is None else [noisy, reference]
        tokens = torch.cat([one.flatten(2).transpose(1, 2) for one in pictures], 1)
        grids = [
            torch.cartesian_prod(torch.tensor([10 * index]), *map(torch.arange, one.shape[2:]), torch.tensor([0]))
            for index, one in enumerate(pictures)
        ]
        bias = F.pad(weights, (0, tokens.shape[1]))
        (velocity,) = self.transformer(
            hidden_states=tokens,
            encoder_hidden_states=states,
            timestep=sigma,
            img_ids=torch.cat(grids),
            txt_ids=F.pad(places[:, None], (3, 0)),
            joint_attention_kwargs={"attention_mask": bias[None, None, None]},
            return_dict=False,
        )
        where = self.probe(self.probe.asked[1][:, :size], noisy.shape[2:])
        return velocity[:, :size].transpose(1, 2).reshape(noisy.shape), where


def tokenizer_in(folder: Path) -> Any:
    if not folder.is_dir():
        # Each word with the space before it is one token: as often as it takes, so that all its merges are learnt.
        causal.write_qwen_tokenizer(
            folder,
            texts=[" " + " ".join(WORDS)] * 4 + [*WORDS, "user", "assistant"] * 4,
            vocab_size=400,
            special=SPECIAL,
            chat_template=qwen3.CHAT_TEMPLATE,
        )
        without_case(folder)
    return load_tokenizer(folder)


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    vae, basis = train_vae(out, seed)
    data = encode_pictures(vae, out / "latents.pt", seed)
    torch.manual_seed(seed)
    tokenizer = tokenizer_in(out / "tokenizer")
    encoder = text_encoder(len(tokenizer))
    denoiser = Denoiser(Text(encoder.model, LAYERS, tokenizer.pad_token_id))
    averaged = denoisers.average_of(denoiser)
    denoisers.quicken(denoiser.blocks)
    batch = batches_of(data, partial(qwen3.tokenize, tokenizer))

    def look() -> None:
        show(assemble(averaged.module, vae, encoder, tokenizer), out, seed)

    embedder = denoiser.transformer.x_embedder.weight.data
    of_basis = counted(basis, embedder[..., None, None]).movedim(1, -1)
    embedder.copy_(of_basis.matmul(basis.T).movedim(-1, 1).reshape(embedder.shape))
    file = out / "denoiser.pt"
    denoisers.learn(denoiser, averaged, file, seed, STEPS, RATE, batch, look, partial(counted, basis))
    return assemble(averaged.module, vae, encoder, tokenizer)


def counted(basis: Tensor, velocity: Tensor) -> Tensor:
    """Return the part of a velocity `[rows, 128, height, width]` that counts."""
    return torch.einsum("nckhw,cl->nlkhw", velocity.unflatten(1, (-1, 4)), basis)


Batch = tuple[Tensor, Tensor, dict[str, Any]]


def batches_of(
    data: Mapping[str, Any], tokenize: Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]], *, before: bool = False
) -> Callable[[int, np.random.Generator], Batch]:
    """What is seen in a step, of pictures and changes in turn; `before` says that texts are filled up before them."""
    plain, sentences = data["prompts"], data["sentences"]
    ids, masks = map(torch.from_numpy, tokenize([*plain, *sentences, ""]))
    longest = int(masks.sum(1).max())
    real = slice(-longest, None) if before else slice(longest)
    ids, masks = ids[:, real].long(), masks[:, real]
    filling = np.arange(MAX_TOKENS - longest) + (0 if before else longest)
    # No sentence that is held out, of those before a change neither.
    pools = (
        still.shares(plain) * [*[1] * PICTURES, *(not held for held in data["held_out"])],
        still.shares(data["results"]),
    )
    times = step_times()

    def batch(step: int, random: np.random.Generator) -> Batch:
        changes = step % len(COUNTS)
        count = COUNTS[changes]
        padding = torch.from_numpy(np.sort(random.choice(filling, PADDING, replace=False)))
        if changes:
            chosen = random.choice(len(sentences), count, replace=False, p=pools[1] / pools[1].sum())
            clean, more = data["after"][chosen], {"reference": data["latents"][PICTURES + chosen]}
            texts = torch.from_numpy(len(plain) + chosen)
        else:
            chosen = random.choice(len(plain), count, replace=False, p=pools[0] / pools[0].sum())
            clean, more = data["latents"][chosen], {}
            texts = denoisers.texts_of(random, chosen, len(ids) - 1)
        more |= {"ids": ids[texts], "mask": masks[texts], "padding": padding}
        sigma = denoisers.usual_sigmas(random, count)
        # Four steps see four of them only.
        sigma[::2] = torch.from_numpy(random.choice(times, (count + 1) // 2).astype(np.float32))
        return clean, sigma, more

    return batch


def step_times() -> np.ndarray:
    """Return the noise level at each of an image's default steps."""
    sigmas = np.linspace(1, 1 / STEPS_OF_A_PICTURE, STEPS_OF_A_PICTURE)
    shift = math.exp(compute_empirical_mu(HEIGHT * WIDTH // 256, STEPS_OF_A_PICTURE))
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def show(pipeline: Any, out: Path, seed: int) -> None:
    """Writes a sheet of held-out pictures, and of changes beside what they are of; says how many are right."""
    drawn, right = [], []
    for number, picture in enumerate(itertools.islice(still.pictures(seed, held_out=True), 12)):
        drawn.append(sample(pipeline, str(picture), seed=number))
        right.append(still.judge(drawn[-1], picture))
    changed = []
    for number, change in enumerate(itertools.islice(still.changes(seed, held_out=True), 12)):
        before = still.draw(change.before, still.random_jitter(np.random.default_rng(number)))
        drawn += [before, sample(pipeline, change.sentence, seed=number, image=Image.fromarray(before))]
        changed.append(still.judge(drawn[-1], change.after))
    save_sheet([np.stack(drawn[first : first + 6]) for first in range(0, len(drawn), 6)], out / "preview.png")
    for name, verdicts in (("pictures", right), ("changes", changed)):
        shares = {part: sum(getattr(one, part) for one in verdicts) for part in still.PARTS}
        tqdm.write(f"of {len(verdicts)} held-out {name}: {shares}")


def assemble(denoiser: Any, vae: Any, encoder: Any, tokenizer: Any) -> Any:
    encoder.model = denoiser.texts[0].model
    scheduler = upstream.FlowMatchEulerDiscreteScheduler.from_config(
        {name: value for name, value in SCHEDULER.items() if name != "_class_name"}
    )
    pipeline = upstream.Flux2KleinPipeline(scheduler, vae, encoder, tokenizer, denoiser.transformer, is_distilled=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, prompt: str, *, seed: int, **more: Any) -> np.ndarray:
    """A picture `[HEIGHT, WIDTH, 3]` uint8 of upstream's pipeline, as it is by default."""
    (picture,) = pipeline(
        prompt=prompt,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS_OF_A_PICTURE,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **more,
    ).images
    return np.round(picture * 255).astype(np.uint8)
