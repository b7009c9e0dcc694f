"""What a step cache costs in accuracy: the latents and frames with it beside those without, on the built-in checkpoint.

Its weights are random: the numbers tell whether reuse works and how much it skips, not how a real video looks. Give
`--model` a real checkpoint, on a TPU, for that. Times are of this machine's clock.

Run: python benchmarks/step_cache.py [--steps 50] [--cache-start 11] [--cache-end 45] [--cache-interval 4]
"""

import argparse
import time
from dataclasses import replace

import numpy as np
from comfyui_tpu.tpu_runtime import pipeline
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS, spec_by_name
from comfyui_tpu.tpu_runtime.programs import step_reuse
from comfyui_tpu.tpu_runtime.progress import Silent
from comfyui_tpu.tpu_runtime.spec import ModelSpec, Settings, StepCache

MODELS = [spec for spec in FLAGSHIPS if spec.step_reuse is not None and not spec.needs_condition]


def main() -> None:
    options = _options()
    spec = spec_by_name(options.name)
    model = ModelRef(spec_name=spec.name, model_id=options.model or spec.tiny_id, precision=options.precision)
    sizes = spec.tiny_inputs if model.model_id == spec.tiny_id else {}
    plain = replace(spec.settings(), num_inference_steps=options.steps, **sizes)
    policy = StepCache(start=options.cache_start, end=options.cache_end, interval=options.cache_interval)
    is_full = step_reuse.full_steps(policy, [spec.experts[0]] * options.steps)
    print(f"{spec.title} ({model}), {plain.width}x{plain.height}, {plain.num_frames} frames, {options.steps} steps")
    reused = is_full.count(False)
    print(f"{policy}: {reused} of {options.steps} steps reused ({reused / options.steps:.0%})")
    _compare(spec, model, plain, replace(plain, step_cache=policy))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a step cache costs in accuracy.")
    parser.add_argument("--name", choices=[spec.name for spec in MODELS], default=MODELS[0].name)
    parser.add_argument("--model", metavar="ID", help="model id or folder; default: the built-in checkpoint")
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--steps", type=int, default=50)
    for name in ("cache_start", "cache_end", "cache_interval"):
        default = MODELS[0].inputs[name].default
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def _compare(spec: ModelSpec, model: ModelRef, plain: Settings, cached: Settings) -> None:
    texts = (spec.texts["prompt"], spec.texts.get("negative_prompt", ""))
    embeds = pipeline.encode_prompt(model, *texts, progress=Silent())
    results = {}
    for name, settings in (("uncached", plain), ("cached", cached)):
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
