"""What a step cache costs: DeepCache beside all steps whole, in numbers and in what one sees.

Without `--name`, on the trained miniature of Wan 2.1: how many of the held-out prompts its frames still show, and their
PSNR. Wan's nodes have no DeepCache; this is where it is tried, and `quality.py` where MagCache is, which they have.
With `--name`, a model that has DeepCache, by one generation; the built-in checkpoint's weights are random there, so
give `--model` a real one, on a TPU.

Run: python benchmarks/step_cache.py [--steps 50] [--cache-start 11] [--cache-end 45] [--cache-interval 4]
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from comfyui_tpu.nodes.headless.compare import psnr
from comfyui_tpu.tpu_runtime import models, pipeline
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, StepCache, StepReuse
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS, spec_by_name, wan, wan21
from comfyui_tpu.tpu_runtime.programs import step_reuse
from comfyui_tpu.tpu_runtime.programs.denoiser_run import DenoiserRun
from comfyui_tpu.tpu_runtime.progress import Silent

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))  # scripts, which find each other in their folder
import score_miniature  # noqa: E402
from miniature.moving import judge  # noqa: E402

MODELS = [spec for spec in FLAGSHIPS if spec.denoiser.step_reuse is not None and not spec.needs_condition]
CACHED_INPUTS = {
    name: MODELS[0].inputs[name]
    for name in ("step_cache", "cache_start", "cache_end", "cache_interval", "cache_threshold")
}


# --- Wan with a step cache --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LastBlockApart(DenoiserRun):
    """Runs the last of Wan's blocks by itself, on what the others leave, or on `kept` of an earlier step."""

    kept: dict[str, Any]

    def scan(self, blocks: Any, carry: Any, body: Any, **_: Any) -> Any:
        if not self.kept:
            self.kept["hidden"] = super().scan(blocks, carry, body, layers=slice(None, -1))
        return super().scan(blocks, self.kept["hidden"], body, layers=slice(-1, None))


def keep(transformer: Any, run: DenoiserRun, *asked: Any) -> tuple[Any, dict[str, Any]]:
    """`forward`, and what the last block starts from."""
    kept: dict[str, Any] = {}
    return wan.forward(transformer, LastBlockApart(layout=run.layout, kept=kept), *asked), kept


def reuse(transformer: Any, run: DenoiserRun, features: dict[str, Any], *asked: Any) -> Any:
    """Only the last block, on what it got before, with this step's time."""
    return wan.forward(transformer, LastBlockApart(layout=run.layout, kept=features), *asked)


CACHED_WAN = replace(
    wan21.SPEC,
    name="wan2.1-with-a-step-cache",
    inputs={**wan21.SPEC.inputs, **CACHED_INPUTS},
    denoiser=replace(wan.DENOISER, step_reuse=StepReuse(keep=keep, reuse=reuse, tokens=("hidden",))),
)


# --- comparisons ------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    policy = StepCache(start=options.cache_start, end=options.cache_end, interval=options.cache_interval)
    reused = step_reuse.full_steps(policy, ["transformer"] * options.steps).count(False)
    print(f"{policy}: {reused} of {options.steps} steps reused ({reused / options.steps:.0%})")
    if options.name:
        _compare(spec_by_name(options.name), policy, options)
    else:
        _score(policy, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a step cache costs in accuracy.")
    parser.add_argument(
        "--name", choices=[spec.name for spec in MODELS], help="default: the trained miniature of Wan 2.1"
    )
    parser.add_argument("--model", metavar="ID", help="model id or folder; default: the built-in checkpoint")
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=64)
    for name in ("cache_start", "cache_end", "cache_interval"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=CACHED_INPUTS[name].default)
    return parser.parse_args()


def _score(policy: StepCache, options: argparse.Namespace) -> None:
    """The miniature's score with and without a cache, and the PSNR of each video with it."""
    models.SPECS += (CACHED_WAN,)
    verdicts, differences = {"all steps whole": [], "with the cache": []}, []
    model = ModelRef(spec_name=CACHED_WAN.name, model_id=options.model or CACHED_WAN.miniature.id)
    inputs = {"num_inference_steps": options.steps, "num_frames": 17}
    cached = {"step_cache": True, **{f"cache_{name}": value for name, value in vars(policy).items()}}
    for seed, scene in enumerate(score_miniature.held_out(options.prompts)):
        videos = [
            score_miniature.frames_of(model, str(scene), Silent(), seed=seed, **inputs, **more) for more in ({}, cached)
        ]
        for found, video in zip(verdicts.values(), videos, strict=True):
            found.append(judge(video, scene))
        differences.append(psnr(*(video / 255 for video in videos)))
    for name, found in verdicts.items():
        print(f"{name}: {score_miniature.summary(found)}")
    print(f"PSNR of {len(differences)} videos: median {np.median(differences):.1f} dB, lowest {min(differences):.1f}")


def _compare(spec: ModelSpec, policy: StepCache, options: argparse.Namespace) -> None:
    """One generation's latents and frames. Times are of this machine's clock."""
    model = ModelRef(spec_name=spec.name, model_id=options.model or spec.miniature.id, precision=options.precision)
    sizes = spec.miniature.inputs if model.model_id in spec.miniature.ids else {}
    plain = replace(spec.settings(), num_inference_steps=options.steps, **sizes)
    print(f"{spec.title} ({model}), {plain.width}x{plain.height}, {plain.num_frames} frames, {options.steps} steps")
    embeds = pipeline.encode_prompt(
        model, spec.texts["prompt"], spec.texts.get("negative_prompt", ""), progress=Silent()
    )
    results = {}
    for name, settings in (("uncached", plain), ("cached", replace(plain, step_cache=policy))):
        pipeline.denoise(model, settings, *embeds, progress=Silent())  # compiles
        start = time.perf_counter()
        latents = pipeline.denoise(model, settings, *embeds, progress=Silent())
        print(f"{name}: {time.perf_counter() - start:.2f} s for all steps (measured here)")
        results[name] = (latents["samples"].numpy(), pipeline.decode(model, latents, progress=Silent()).numpy())
    for index, what in enumerate(("latents", "frames")):
        expected, found = (results[name][index].astype(np.float64) for name in ("uncached", "cached"))
        difference = np.abs(found - expected)
        relative = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        print(f"{what}: relative L2 {relative:.4f}, largest {difference.max():.4f} of {np.abs(expected).max():.4f}")


if __name__ == "__main__":
    main()
