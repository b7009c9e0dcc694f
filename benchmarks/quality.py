"""What each quality costs: videos of Wan 2.1's trained miniature beside exact float32's, and kernels on a harder case.

A video's PSNR and SSIM are of its frames in 8 bits, against the same prompt, seed and steps in float32. The score is
the miniature's own (see `tools/score_miniature.py`). Its few tokens and lanes are taken for many, or int8 would leave
them alone, and lie in 15 tiles of at most 12, of which 7 are kept. The harder cases have what trained models
have: 16384 keys, every 32nd channel of them far from zero, peaked scores; and for a linear layer tokens with outlying
channels.

Run: JAX_PLATFORMS=cpu python benchmarks/quality.py [--prompts 32] [--steps 20] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from comfyui_tpu.attention import policy, tiles
from comfyui_tpu.kernels import attention, attention_int8, attention_reference, linear_int8
from comfyui_tpu.kernels.attention_form import INT8_TILES, Form
from comfyui_tpu.nodes.headless.compare import psnr
from comfyui_tpu.tpu_runtime import pipeline
from comfyui_tpu.tpu_runtime.cache import curves
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.programs import weights
from comfyui_tpu.tpu_runtime.programs.generation import Denoising
from comfyui_tpu.tpu_runtime.progress import Silent
from scipy.ndimage import uniform_filter

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from miniature.moving import judge
from score_miniature import SPEC, frames_of, held_out

# Precision and inputs of each form; the first is what the others are compared with.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact, float32": ("float32", {}),
    "exact, bfloat16": ("bfloat16", {}),
    "int8, float32": ("float32", {"quality": "int8"}),
    "int8, bfloat16": ("bfloat16", {"quality": "int8"}),
    "int8+sparse, float32": ("float32", {"quality": "int8+sparse"}),
    "int8+sparse, bfloat16": ("bfloat16", {"quality": "int8+sparse"}),
    **{
        f"MagCache {threshold}, float32": ("float32", {"step_cache": True, "cache_threshold": threshold})
        for threshold in (0.03, 0.06, 0.12)
    },
}
WINDOW = 7  # pixels, of SSIM


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Of one form: PSNR in dB (median and least of all videos), the median SSIM, the shares of videos that are right,
    and of steps that run whole.
    """

    form: str
    psnr: float
    least_psnr: float
    ssim: float
    score: float
    whole: float


def ssim(one: np.ndarray, other: np.ndarray) -> float:
    """The mean over `[frames, height, width, 3]`, of windows of 7 x 7 (Wang et al., 2004, with uniform windows)."""

    def smooth(x: np.ndarray) -> np.ndarray:
        return uniform_filter(x, WINDOW, axes=(1, 2))

    x, y = one.astype(np.float64), other.astype(np.float64)
    mean_x, mean_y = smooth(x), smooth(y)
    spread_x, spread_y, both = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2, smooth(x * y) - mean_x * mean_y
    small, least = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    found = (2 * mean_x * mean_y + small) * (2 * both + least)
    return float(np.mean(found / ((mean_x**2 + mean_y**2 + small) * (spread_x + spread_y + least))))


def few_are_many() -> None:
    """Takes the miniature for a large model."""
    policy.MANY_KEYS = weights.FEWEST_LANES = 0
    tiles.ROWS = 16
    object.__setattr__(SPEC.denoiser, "tile", (3, 2, 2))  # one of the real size would hold them all


def videos(prompts: int, steps: int, forms: Sequence[str]) -> Iterator[Judged]:
    """Every form on so many held-out prompts. MagCache's curve is measured first, on a prompt that is none of them."""
    scenes, exact = held_out(prompts), list[np.ndarray]()
    for form in forms:
        precision, more = FORMS[form]
        model = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.id, precision=precision)
        inputs = {"num_inference_steps": steps, "guidance_scale": 5.0, "num_frames": 17, **more}
        settings = SPEC.settings(**{**SPEC.miniature.inputs, **inputs})
        if settings.step_cache:
            texts = (SPEC.miniature.texts[name] for name in ("prompt", "negative_prompt"))
            embeds = pipeline.encode_prompt(model, *texts, progress=Silent())
            pipeline.calibrate(model, settings, *embeds, progress=Silent())
            policy = curves.with_curve(SPEC, model.model_id, settings.step_cache)
            settings = replace(settings, step_cache=policy)
        found = [frames_of(model, str(scene), Silent(), seed=seed, **inputs) for seed, scene in enumerate(scenes)]
        exact = exact or found
        distances = [psnr(*(frames / 255 for frames in pair)) for pair in zip(found, exact, strict=True)]
        yield Judged(
            form=form,
            psnr=float(np.median(distances)),
            least_psnr=min(distances),
            ssim=float(np.median([ssim(*pair) for pair in zip(found, exact, strict=True)])),
            score=float(np.mean([judge(*pair).all for pair in zip(found, scenes, strict=True)])),
            whole=float(np.mean(Denoising.published(SPEC, settings).is_full)),
        )


def harder_cases(keys: int = 16384, queries: int = 256) -> Iterator[dict[str, Any]]:
    """int8's kernel and its reference against exact attention in float32: relative RMS error and cosine."""
    random = np.random.default_rng(0)
    for head_dim in (64, 128):
        k, v = (random.normal(size=(1, keys, 2 * head_dim)).astype(np.float32) for _ in range(2))
        q = 1.5 * (0.6 * k[:, :queries] + 0.8 * random.normal(size=(1, queries, 2 * head_dim)).astype(np.float32))
        k[..., ::32] += 5
        scale = head_dim**-0.5
        parts = [attention_reference.first(jax.numpy.asarray(k), jax.numpy.asarray(v), keys)]
        exact, _ = attention_reference.flat_attention(q, parts, head_dim=head_dim, log_sums=False)
        rounded, rounded_parts = attention_int8.rounded(q, parts, head_dim, scale)
        reference, _ = attention_reference.flat_attention(rounded, rounded_parts, head_dim=head_dim, log_sums=False)
        form = Form(scores="int8", **INT8_TILES[head_dim])
        kernel, _ = attention.flat_attention(
            q, parts, head_dim=head_dim, form=form, log_sums=False, scale=scale, interpret=True
        )
        for name, found in (("reference", reference), ("kernel", kernel)):
            yield {"head_dim": head_dim, "keys": keys, "of": name, **distance(found, exact)}


def linear_cases(lanes: int = 5120, tokens: int = 256, outs: int = 512) -> Iterator[dict[str, Any]]:
    """int8's kernel for linear layers against float64: tokens of normal values, with outlying channels as trained
    models have them, and behind a GELU.
    """
    random = np.random.default_rng(0)
    plain, weight = (random.normal(size=size).astype(np.float32) for size in ((tokens, lanes), (outs, lanes)))
    block, wide = linear_int8.block_of(lanes, chips=1), plain.copy()
    wide[:, ::128] *= 20
    for name, x in (("normal", plain), ("outlying channels", wide), ("GELU", np.asarray(jax.nn.gelu(plain)))):
        factor = linear_int8.rotated_weight(jax.numpy.asarray(weight), 1, block)
        rounded, how = linear_int8.Rounded(*linear_int8.rounded(factor, (1,))), {"activation": None, "turned": False}
        (found,) = linear_int8.by_kernel([x[None]], [rounded], block=block, **how, interpret=True)
        yield {"tokens": name, **distance(found[0], x.astype(np.float64) @ weight.T)}


def distance(found: Any, exact: Any) -> dict[str, float]:
    x, y = np.asarray(found, np.float64).ravel(), np.asarray(exact, np.float64).ravel()
    rms, cosine = np.linalg.norm(x - y) / np.linalg.norm(y), x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    return {"relative_rms": float(rms), "cosine": float(cosine)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="beside the first of these")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    cases = []
    for case in harder_cases():
        cases.append(case)
        print(f"{case['keys']} keys, heads of {case['head_dim']}, {case['of']}: relative RMS "
              f"{case['relative_rms']:.1e}, cosine {case['cosine']:.6f}", flush=True)  # fmt: skip
    linears = []
    for case in linear_cases():
        linears.append(case)
        print(f"linear layer, {case['tokens']}: relative RMS {case['relative_rms']:.1e}, cosine {case['cosine']:.6f}",
              flush=True)  # fmt: skip
    few_are_many()
    judged = []
    for row in videos(options.prompts, options.steps, options.forms):
        judged.append(row)
        print(f"{row.form}: PSNR {row.psnr:.1f} dB, least {row.least_psnr:.1f}; SSIM {row.ssim:.4f}; score "
              f"{row.score:.0%}; {row.whole:.0%} of steps whole", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(
            json.dumps({"videos": [asdict(row) for row in judged], "kernels": cases, "linears": linears}, indent=1)
        )


if __name__ == "__main__":
    main()
