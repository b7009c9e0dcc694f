"""Measure the cost of each quality and step cache: trained tiny models against exact float32, and harder cases.

PSNR and SSIM compare 8-bit frames or images with those of float32 for the same prompt, seed and steps. The score is the
tiny model's own (see `tools/score_miniature.py`). Its few tokens and lanes count as many, because int8 would not apply
otherwise. A video's tokens form tiles of at most 12, of which about half are kept. The harder cases imitate trained
models: 16384 keys, of which every 32nd channel is far from zero, peaked scores, and outlier channels for linear layers.

Run: JAX_PLATFORMS=cpu python benchmarks/quality.py [--family wan21 ...] [--prompts 32] [--steps 20] [--json FILE]
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from comfyui_tpu.attention import policy, tiles
from comfyui_tpu.kernels import attention, attention_int8, attention_reference, linear_int8
from comfyui_tpu.kernels.attention_config import SCORE_TILES, AttentionConfig
from comfyui_tpu.nodes.headless.compare import psnr
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.cache import magcache_curves
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import QUALITIES, ModelSpec
from comfyui_tpu.tpu_runtime.programs import denoise_step, weights
from comfyui_tpu.tpu_runtime.programs.denoising_plan import DenoisingPlan
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from PIL import Image
from scipy.ndimage import uniform_filter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from score_miniature import FAMILIES, Family, encoded, frames_of

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# One or two of each family, whose tables are in docs/quality.md.
SHOWN = ("wan21", "wan22i2v", "cogvideox", "cogvideoxi2v", "hunyuan15", "flux2klein", "zimage", "qwenimage")
EXACT = "exact, float32"  # what the others are compared with
THRESHOLDS = (0.03, 0.06, 0.12)
WINDOW = 7  # pixels, of SSIM


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Of one form: PSNR in dB (median and least of all results), the median SSIM, the shares of results that are right,
    and of steps that run whole.
    """

    model: str
    kind: str
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


def few_are_many(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Takes miniatures for large models; `put` sets what that needs."""
    put(policy, "MANY_KEYS", 0)
    put(weights, "FEWEST_LANES", 0)
    put(tiles, "ROWS", 16)
    # One of the real size would hold them all.
    put(denoise_step, "Tiling", lambda sizes, tile: tiles.Tiling(sizes=sizes, tile=(3, 2, 2)))


def forms_of(spec: ModelSpec, steps: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Precision and inputs of each form that a model's nodes offer. DeepCache begins, ends and looks again after as
    large a part of all steps as by default, but for at least every other step.
    """
    qualities = QUALITIES if spec.denoiser.tile else QUALITIES[:2]
    found: dict[str, tuple[str, dict[str, Any]]] = {
        f"{quality}, {precision}": (precision, {"quality": quality})
        for quality in qualities
        for precision in ("float32", "bfloat16")
    }
    if "step_cache" in spec.inputs:
        for threshold in THRESHOLDS:
            found[f"MagCache {threshold}, float32"] = ("float32", {"step_cache": True, "cache_threshold": threshold})
    if spec.denoiser.step_reuse:
        share = steps / spec.whole_numbers("num_inference_steps").default
        names = ("cache_start", "cache_end", "cache_interval")
        start, end, interval = (round(share * spec.whole_numbers(name).default) for name in names)
        reused = dict(zip(names, (start, end, max(2, interval)), strict=True))
        found["DeepCache, float32"] = ("float32", {"step_cache": True, "cache_threshold": 0.0, **reused})
    return found


def judged(family: Family, steps: int, guidance: float, prompts: int, chosen: Collection[str] = ()) -> Iterator[Judged]:
    """Every form, or exact float32 and those that are chosen, on so many held-out prompts of each kind."""
    forms, spec = forms_of(family.spec, steps), family.spec
    inputs = {form: family.inputs(steps, guidance) | more for form, (_, more) in forms.items()}
    for kind, tasks in family.kinds.items():
        asked, exact = list(itertools.islice(tasks(), prompts)), list[np.ndarray]()
        for form in (form for form in forms if form == EXACT or not chosen or form in chosen):
            model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, precision=forms[form][0])
            whole = share_of_whole_steps(model, inputs[form])
            found = [
                frames_of(model, task.prompt, SilentProgress(), image=task.image, seed=seed, **inputs[form])
                for seed, task in enumerate(asked)
            ]
            exact = exact or found
            distances = [psnr(*(frames / 255 for frames in pair)) for pair in zip(found, exact, strict=True)]
            yield Judged(
                model=spec.title,
                kind=kind,
                form=form,
                psnr=float(np.median(distances)),
                least_psnr=min(distances),
                ssim=float(np.median([ssim(*pair) for pair in zip(found, exact, strict=True)])),
                score=float(np.mean([task.judge(frames).all for task, frames in zip(asked, found, strict=True)])),
                whole=whole,
            )


def share_of_whole_steps(model: ModelRef, inputs: dict[str, Any]) -> float:
    """Of a generation's steps. MagCache's curve is measured first, on the miniature's own prompt and picture, which are
    none of those that are judged.
    """
    spec = model.spec
    picture = spec.miniature.picture
    image = np.asarray(Image.open(EXAMPLES / picture).convert("RGB")) if picture else None
    if inputs.get("cache_threshold"):
        whole = {name: value for name, value in inputs.items() if name != "step_cache"}
        given, condition = encoded(model, spec.miniature.texts["prompt"], SilentProgress(), image=image, **whole)
        api.calibrate(model, *given, condition=condition, progress=SilentProgress())
    settings = spec.settings(**{**spec.miniature.inputs, **inputs})
    reused = magcache_curves.attach_curve(spec, model.model_id, settings.step_cache)
    return float(np.mean(DenoisingPlan.published(spec, replace(settings, step_cache=reused)).is_full))


def harder_cases(keys: int = 16384, queries: int = 256) -> Iterator[dict[str, Any]]:
    """int8's kernel and its reference against exact attention in float32: relative RMS error and cosine."""
    random = np.random.default_rng(0)
    for head_dim in (64, 128):
        k, v = (random.normal(size=(1, keys, 2 * head_dim)).astype(np.float32) for _ in range(2))
        q = 1.5 * (0.6 * k[:, :queries] + 0.8 * random.normal(size=(1, queries, 2 * head_dim)).astype(np.float32))
        k[..., ::32] += 5
        scale = head_dim**-0.5
        parts = [attention_reference.keys_of_length(jax.numpy.asarray(k), jax.numpy.asarray(v), keys)]
        exact, _ = attention_reference.flat_attention(q, parts, head_dim=head_dim, log_sums=False)
        rounded, rounded_parts = attention_int8.fake_quantize(q, parts, head_dim, scale)
        reference, _ = attention_reference.flat_attention(rounded, rounded_parts, head_dim=head_dim, log_sums=False)
        form = AttentionConfig(scores="int8", **SCORE_TILES["int8"][head_dim])
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
    block, wide = linear_int8.rotation_block(lanes, chips=1), plain.copy()
    wide[:, ::128] *= 20
    for name, x in (("normal", plain), ("outlying channels", wide), ("GELU", np.asarray(jax.nn.gelu(plain)))):
        factor = linear_int8.rotate_weight(jax.numpy.asarray(weight), 1, block)
        rounded, how = (
            linear_int8.Int8Weight(*linear_int8.quantize(factor, (1,))),
            {"activation": None, "turned": False},
        )
        (found,) = linear_int8.linear_int8_kernel([x[None]], [rounded], block=block, **how, interpret=True)
        yield {"tokens": name, **distance(found[0], x.astype(np.float64) @ weight.T)}


def distance(found: Any, exact: Any) -> dict[str, float]:
    x, y = np.asarray(found, np.float64).ravel(), np.asarray(exact, np.float64).ravel()
    rms, cosine = np.linalg.norm(x - y) / np.linalg.norm(y), x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    return {"relative_rms": float(rms), "cosine": float(cosine)}


def kernels() -> dict[str, list[dict[str, Any]]]:
    """The harder cases, each said when it is there."""
    cases, linears = [], []
    for case in harder_cases():
        cases.append(case)
        print(f"{case['keys']} keys, heads of {case['head_dim']}, {case['of']}: relative RMS "
              f"{case['relative_rms']:.1e}, cosine {case['cosine']:.6f}", flush=True)  # fmt: skip
    for case in linear_cases():
        linears.append(case)
        print(f"linear layer, {case['tokens']}: relative RMS {case['relative_rms']:.1e}, cosine {case['cosine']:.6f}",
              flush=True)  # fmt: skip
    return {"kernels": cases, "linears": linears}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    measured: dict[str, list[dict[str, Any]]] = {} if options.family else kernels()
    few_are_many()
    measured["results"] = []
    for name in options.family or SHOWN:
        family = FAMILIES[name]
        steps, guidance = options.steps or family.steps[-1], family.guidance[-1]
        print(f"{family.spec.title}, {steps} steps, guidance {guidance:g}, {options.prompts} prompts", flush=True)
        for row in judged(family, steps, guidance, options.prompts, options.forms):
            measured["results"].append(asdict(row))
            print(f"{row.kind}, {row.form}: PSNR {row.psnr:.1f} dB, least {row.least_psnr:.1f}; SSIM {row.ssim:.4f}; "
                  f"score {row.score:.0%}; {row.whole:.0%} of steps whole", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--family", nargs="+", choices=FAMILIES, default=(), help=f"default: {' '.join(SHOWN)}, and kernels"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--steps", type=int, help="default: the most of the miniature's card")
    names = dict.fromkeys(form for name in SHOWN for form in forms_of(FAMILIES[name].spec, 50))
    parser.add_argument("--forms", nargs="+", choices=names, default=(), help=f"beside {EXACT}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
