"""How well the trained miniature does what it is told: held-out prompts, and what the frames show of them.

    python tools/score_miniature.py [--steps 4 10 50] [--guidance 1 5] [--prompts 64] [--frames 17] [--model FOLDER]

Prints a line for every number of steps and every guidance. The pack itself makes the frames, with previews on;
`moving_shapes.judge` reads them. Without a TPU: JAX_PLATFORMS=cpu.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comfyui_tpu.tpu_runtime import pipeline
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import spec_by_name
from comfyui_tpu.tpu_runtime.progress import Preview, Progress, Silent
from moving_shapes import Scene, Verdict, judge, scenes
from PIL import Image
from tqdm import tqdm

SPEC = spec_by_name("wan2.1-t2v-14b")
SEED = 100  # of the prompts
PARTS = ("colour", "shape", "motion", "all")


class WithPreviews(Silent):
    """Fetches every step's preview, as ComfyUI's page does."""

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if preview is not None:
            preview.latents()


def held_out(number: int) -> list[Scene]:
    """The scenes of the score, of which none was trained on."""
    return list(itertools.islice(scenes(SEED, held_out=True), number))


def frames_of(model: ModelRef, prompt: str, progress: Progress, **inputs: Any) -> np.ndarray:
    """The video of a prompt, `[frames, height, width, 3]` uint8; `inputs` are what is not the miniature's default."""
    settings = model.spec.settings(**{**SPEC.miniature.inputs, **inputs})
    embeds = pipeline.encode_prompt(model, prompt, SPEC.miniature.texts["negative_prompt"], progress=progress)
    latents = pipeline.denoise(model, settings, *embeds, progress=progress)
    return np.round(pipeline.decode(model, latents, progress=progress).numpy() * 255).astype(np.uint8)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The share of them that is right, for each part and for all."""
    return ", ".join(f"{part} {np.mean([getattr(one, part) for one in verdicts]):.0%}" for part in PARTS)


def scores(
    model_id: str,
    *,
    steps: Sequence[int],
    guidance: Sequence[float],
    prompts: int = 64,
    frames: int = 17,
    sheets: Path | None = None,
) -> Iterator[str]:
    """A line for every number of steps and every guidance; `sheets` is where frames of each video are kept."""
    model, drawn = ModelRef(spec_name=SPEC.name, model_id=model_id), held_out(prompts)
    for number, scale in itertools.product(steps, guidance):
        verdicts = []
        inputs = {"num_inference_steps": number, "guidance_scale": scale, "num_frames": frames}
        for seed, scene in enumerate(tqdm(drawn, f"{number} steps, guidance {scale:g}", leave=False)):
            video = frames_of(model, str(scene), WithPreviews(), seed=seed, **inputs)
            verdicts.append(judge(video, scene))
            if sheets:
                save_sheet(video, sheets / f"{seed:02} {scene}{'' if verdicts[-1].all else ' (wrong)'}.png")
        yield f"{number} steps, guidance {scale:g}, {frames} frames, {prompts} prompts: {summary(verdicts)}"


def save_sheet(video: np.ndarray, path: Path) -> None:
    """Five of the frames, side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(list(video[:: max(1, len(video) // 4)]), axis=1)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 10, 50])
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument(
        "--model", default=SPEC.miniature.id, help="a folder of the trainer's, in place of the built-in one"
    )
    parser.add_argument("--sheets", type=Path, metavar="FOLDER", help="keeps some frames of each video there")
    options = parser.parse_args()
    for line in scores(
        options.model,
        steps=options.steps,
        guidance=options.guidance,
        prompts=options.prompts,
        frames=options.frames,
        sheets=options.sheets,
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
