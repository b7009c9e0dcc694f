"""Score a trained tiny model: the share of held-out prompts whose properties its images or videos show.

    python tools/score_miniature.py [--family wan21] [--steps 4 10 50] [--guidance 1 5] [--prompts 64] [--frames 9]
        [--model FOLDER]

Prints a line for every kind of prompt, number of steps and guidance. The pack generates the frames, with previews, and
arithmetic on their pixels detects the properties. Without a TPU, set JAX_PLATFORMS=cpu.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import Preview, Progress, SilentProgress
from miniature import moving, still
from PIL import Image
from tqdm import tqdm

SEED = 100  # of the prompts
Verdict = moving.Verdict | still.Verdict


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, and how its result is judged."""

    prompt: str
    image: np.ndarray | None = None  # uint8 [height, width, 3], given with the prompt
    judge: Callable[[np.ndarray], Verdict]  # of uint8 frames [frames, height, width, 3]
    stray: Callable[[np.ndarray], float] | None = None  # share of the pixels that belong to no shape; for clips


@dataclass(frozen=True, kw_only=True)
class Family:
    """A trained tiny model, with endless tasks of each kind, and the steps and guidance of its card."""

    spec: ModelSpec
    kinds: Mapping[str, Callable[[], Iterator[Task]]]
    steps: tuple[int, ...]
    guidance: tuple[float, ...]

    def inputs(self, steps: int, guidance: float) -> dict[str, Any]:
        """Return the inputs of a run; both of two experts get the guidance."""
        second = {"guidance_scale_2": guidance} if "guidance_scale_2" in self.spec.inputs else {}
        return {"num_inference_steps": steps, "guidance_scale": guidance, **second}


def clips(*, given: bool) -> Iterator[Task]:
    for number, scene in enumerate(moving.scenes(SEED, held_out=True)):
        first = moving.draw(scene, 1, np.random.default_rng((SEED, number)))[0] if given else None
        judge, stray = partial(moving.judge, scene=scene), partial(moving.stray, scene=scene)
        yield Task(prompt=str(scene), image=first, judge=judge, stray=stray)


def pictures() -> Iterator[Task]:
    for picture in still.pictures(SEED, held_out=True):
        yield Task(prompt=str(picture), judge=partial(judge_picture, picture=picture))


def changes() -> Iterator[Task]:
    for number, change in enumerate(still.changes(SEED, held_out=True)):
        before = still.draw(change.before, still.random_jitter(np.random.default_rng((SEED, number))))
        yield Task(prompt=change.sentence, image=before, judge=partial(judge_picture, picture=change.after))


def judge_picture(frames: np.ndarray, picture: still.Picture) -> still.Verdict:
    return still.judge(frames[0], picture)


FAMILIES = {
    "wan21": Family(
        spec=lookup_spec("wan2.1-t2v-14b"),
        kinds={"clips": partial(clips, given=False)},
        steps=(4, 10, 50),
        guidance=(1.0, 5.0),
    ),
    "wan22i2v": Family(
        spec=lookup_spec("wan2.2-i2v-a14b"),
        kinds={"clips": partial(clips, given=True)},
        steps=(4, 10),
        guidance=(1.0, 3.5),
    ),
    "cogvideox": Family(
        spec=lookup_spec("cogvideox1.5-5b"),
        kinds={"clips": partial(clips, given=False)},
        steps=(10, 50),
        guidance=(1.0, 6.0),
    ),
    "cogvideoxi2v": Family(
        spec=lookup_spec("cogvideox1.5-5b-i2v"),
        kinds={"clips": partial(clips, given=True)},
        steps=(10, 50),
        guidance=(1.0, 6.0),
    ),
    "hunyuan15": Family(
        spec=lookup_spec("hunyuanvideo1.5-t2v-720p"),
        kinds={"clips": partial(clips, given=False)},
        steps=(10,),
        guidance=(6.0,),
    ),
    "hunyuan15i2v": Family(
        spec=lookup_spec("hunyuanvideo1.5-i2v-720p"),
        kinds={"clips": partial(clips, given=True)},
        steps=(10,),
        guidance=(6.0,),
    ),
    "flux2klein": Family(
        spec=lookup_spec("flux2-klein-4b"),
        kinds={"pictures": pictures, "changes": changes},
        steps=(4,),
        guidance=(1.0,),
    ),
    "flux2dev": Family(
        spec=lookup_spec("flux2-dev"), kinds={"pictures": pictures, "changes": changes}, steps=(8, 50), guidance=(4.0,)
    ),
    "qwenimage": Family(
        spec=lookup_spec("qwen-image-2512"), kinds={"pictures": pictures}, steps=(10,), guidance=(4.0,)
    ),
    "qwenimageedit": Family(
        spec=lookup_spec("qwen-image-edit-2511"), kinds={"changes": changes}, steps=(10,), guidance=(4.0,)
    ),
    "zimagebase": Family(spec=lookup_spec("z-image"), kinds={"pictures": pictures}, steps=(10,), guidance=(5.0,)),
    "zimage": Family(spec=lookup_spec("z-image-turbo"), kinds={"pictures": pictures}, steps=(8,), guidance=(1.0,)),
}


class WithPreviews(SilentProgress):
    """Progress that fetches the preview of every step, as ComfyUI's page does."""

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if preview is not None:
            preview.sample()


def frames_of(
    model: ModelRef, prompt: str, progress: Progress, *, image: np.ndarray | None = None, **inputs: Any
) -> np.ndarray:
    """Return the result of a prompt, uint8 `[frames, height, width, 3]`; `inputs` override its defaults."""
    given, condition = encoded(model, prompt, progress, image=image, **inputs)
    latents = api.denoise(model, *given, condition=condition, progress=progress)
    return np.round(api.decode(model, latents, progress=progress).numpy() * 255).astype(np.uint8)


def encoded(
    model: ModelRef, prompt: str, progress: Progress, *, image: np.ndarray | None = None, **inputs: Any
) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of a sampler: the settings and the encoded prompt, and the encoded image."""
    spec, condition = model.spec, None
    settings = spec.settings(**{**spec.miniature.inputs, **inputs})
    if image is not None:
        size = {name: getattr(settings, name) for name in spec.miniature.inputs}
        condition = api.encode_image(model, torch.from_numpy(image / np.float32(255))[None], size, progress=progress)
    return (settings, *api.encode_prompt(model, prompt, "", progress=progress, condition=condition)), condition


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the share of correct verdicts, for each property and for all together."""
    parts = [*(field.name for field in fields(verdicts[0])), "all"]
    return ", ".join(f"{part} {np.mean([getattr(one, part) for one in verdicts]):.0%}" for part in parts)


def scores(
    family: Family,
    model_id: str,
    *,
    steps: Sequence[int] = (),
    guidance: Sequence[float] = (),
    prompts: int = 64,
    frames: int | None = None,
    sheets: Path | None = None,
) -> Iterator[str]:
    """Yield a line for every kind of task, number of steps and guidance; `sheets` is a folder for frames of each."""
    model, is_video = ModelRef(spec_name=family.spec.name, model_id=model_id), not family.spec.is_image
    frames = frames or family.spec.miniature.inputs.get("num_frames")
    for (kind, tasks), number, scale in itertools.product(
        family.kinds.items(), steps or family.steps, guidance or family.guidance
    ):
        verdicts, strays = [], []
        inputs = family.inputs(number, scale) | ({"num_frames": frames} if is_video else {})
        drawn = itertools.islice(tasks(), prompts)
        for seed, task in enumerate(tqdm(drawn, f"{kind}, {number} steps, guidance {scale:g}", prompts, leave=False)):
            found = frames_of(model, task.prompt, WithPreviews(), image=task.image, seed=seed, **inputs)
            verdicts.append(task.judge(found))
            strays += [task.stray(found)] if task.stray else []
            if sheets:
                name = f"{seed:02} {task.prompt}{'' if verdicts[-1].all else ' (wrong)'}.png"
                save_sheet(found if task.image is None else np.stack([task.image, *found]), sheets / kind / name)
        length = f"{frames} frames, " if is_video else ""
        specks = f"; stray pixels {np.mean(strays):.2%}" if strays else ""
        yield f"{kind}: {number} steps, guidance {scale:g}, {length}{prompts} prompts: {summary(verdicts)}{specks}"


def save_sheet(video: np.ndarray, path: Path) -> None:
    """Save five of the frames side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(list(video[:: max(1, len(video) // 4)]), axis=1)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=list(FAMILIES), default="wan21")
    parser.add_argument("--steps", type=int, nargs="+", default=(), help="default: those of the model card")
    parser.add_argument("--guidance", type=float, nargs="+", default=(), help="default: those of the model card")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--frames", type=int, help="default: the tiny model's own")
    parser.add_argument("--model", help="folder of a checkpoint from the trainer, instead of the built-in one")
    parser.add_argument("--sheets", type=Path, metavar="FOLDER", help="keep some frames of each result there")
    options = parser.parse_args()
    family = FAMILIES[options.family]
    for line in scores(
        family,
        options.model or family.spec.miniature.id,
        steps=options.steps,
        guidance=options.guidance,
        prompts=options.prompts,
        frames=options.frames,
        sheets=options.sheets,
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
