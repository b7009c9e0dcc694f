"""Trains the miniature of Wan 2.1 that the pack ships: upstream's classes, small, on clips of moving shapes.

    OMP_NUM_THREADS=1 python tools/train_miniature.py --out FOLDER

Three stages: the autoencoder, its latents of some thousand clips, and the denoiser together with its text encoder. Each
goes on where it was killed. FOLDER/preview.png is what the last look saw; FOLDER/miniature is the checkpoint in
diffusers' layout, with its model card. One thread is enough, and as fast as two where those are one core's.
"""

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import miniature_denoiser
import miniature_vae
import torch
from moving_shapes import COLOURS, HEIGHT, MOTIONS, SHAPES, WIDTH
from score_miniature import scores

CARD = """\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---

# A miniature of Wan 2.1

The classes of Wan 2.1's text-to-video model, made small and trained from nothing by `tools/train_miniature.py`: for
demonstrations and tests, of prompts, guidance, seeds and previews, on machines where the real model does not fit.

It knows sentences such as "a red circle moves right on blue" and "a white square turns and a green circle grows on
black": one or two shapes ({shapes}) in {colours}, that do one of these: {motions}. Of two, one does not move sideways.
Videos are {width}x{height}, of up to 33 frames. It knows no other words.

Data: clips drawn by `tools/moving_shapes.py`, a fifth of all sentences held out. Licence: Apache-2.0, as the pack.

Score, of held-out sentences: the share of videos whose frames show the colours, the shapes, the motions, and all of
them, read by plain arithmetic on the pixels (`tools/score_miniature.py`).

{score}
"""


def write_checkpoint(pipeline: Any, tokenizer: Path, folder: Path) -> None:
    """The checkpoint as published ones are: in bfloat16, the tokenizer's own files, its class as the makers name it.

    transformers 5 would save the tokenizer as a class of its own, which version 4 does not know.
    """
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(tokenizer, folder / "tokenizer")
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index["tokenizer"] = ["transformers", "T5TokenizerFast"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def write_card(folder: Path, lines: Iterable[str]) -> None:
    """The model card of what is in `folder`, with the lines of its score."""
    text = CARD.format(
        colours=", ".join(COLOURS),
        shapes=", ".join(SHAPES),
        motions=", ".join(MOTIONS),
        height=HEIGHT,
        width=WIDTH,
        score="\n".join(f"- {line}" for line in lines),
    )
    (folder / "README.md").write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where to work, and to go on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    vae = miniature_vae.train(options.out, options.seed)
    pipeline = miniature_denoiser.train(vae, options.out, options.seed)
    folder = options.out / "miniature"
    write_checkpoint(pipeline, options.out / "tokenizer", folder)
    write_card(folder, scores(str(folder), steps=(4, 10, 50), guidance=(1.0, 5.0)))


if __name__ == "__main__":
    main()
