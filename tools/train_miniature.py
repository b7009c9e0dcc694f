"""Train a tiny model that the pack ships: small versions of upstream's classes, on sentences about coloured shapes.

    OMP_NUM_THREADS=1 python tools/train_miniature.py --family FAMILY --out FOLDER

Training has several stages: an autoencoder, its latents of some thousand images or clips, and the denoiser with its
text encoder. Each stage resumes after an interruption. FOLDER/preview.png shows recent results. FOLDER/miniature is
the checkpoint in diffusers' layout, with its model card. If another tiny model is trained along, its new transformer is
in a folder of its name. One thread is enough, and as fast as two threads of one core.
"""

import argparse
import importlib
import json
import lzma
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models import lookup_spec
from miniature.moving import MOTIONS
from miniature.shapes import COLOURS, HEIGHT, SHAPES, WIDTH
from safetensors.torch import load_file, save_file
from score_miniature import FAMILIES, Family, scores

# The module that trains each model.
MODULES = {
    "wan21": "miniature.videos.wan",
    "wan22i2v": "miniature.videos.wan_i2v",
    "cogvideox": "miniature.videos.cogvideox",
    "cogvideoxi2v": "miniature.videos.cogvideox_i2v",
    "hunyuan15": "miniature.videos.hunyuan15",
    "hunyuan15i2v": "miniature.videos.hunyuan15_i2v",
    "flux2klein": "miniature.pictures.flux2_klein",
    "flux2dev": "miniature.pictures.flux2_dev",
    "qwenimage": "miniature.pictures.qwen_image",
    "qwenimageedit": "miniature.pictures.qwen_image_edit",
    "zimagebase": "miniature.pictures.z_image",
    "zimage": "miniature.pictures.z_image_turbo",
}
# Models whose tiny versions have the same networks in their own layout.
SIBLINGS = {
    "wan21": ("wan2.1-t2v-1.3b", "wan2.2-t2v-a14b"),
    "flux2klein": ("flux2-klein-9b", "flux2-klein-base-4b", "flux2-klein-base-9b"),
}
CARD = """\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: {tag}
---

# Tiny model of {title}

{text}

Training data: drawn by `tools/miniature/{source}.py`; one fifth of all sentences is held out. Licence: Apache-2.0, like
the pack.

Scores are for held-out sentences: the share of results that show each property in the sentence, and all of them.
`tools/score_miniature.py` reads the properties from the pixels.

{score}
"""
MINIATURES = Path(__file__).resolve().parents[1] / "miniatures"
SIBLING_CARD = """\
---
license: apache-2.0
library_name: diffusers
---

# Tiny model of {title}

The networks of [{original}](../{original}/README.md) in this model's layout. `shared.json` lists the folder of each
network.
"""


def write_checkpoint(pipeline: Any, tokenizer: Path, folder: Path, family: Family) -> None:
    """Save the checkpoint as published ones are: in bfloat16, with the tokenizer's own files and upstream's class.

    transformers 5 would save the tokenizer as a new class that version 4 does not have. diffusers would also record the
    local path from which a network was loaded.
    """
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(tokenizer, folder / "tokenizer")
    index = json.loads((folder / "model_index.json").read_text("utf-8")) | family.spec.published.index
    index |= {text.tokenizer_folder: ["transformers", text.tokenizer_class] for text in family.spec.text_encoders}
    if index.get("processor") == [None, None]:  # required by upstream, and created by the loader
        del index["processor"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    for path, content in family.spec.published.files.items():
        tiny.write_json(folder / path, content)
    for path in folder.glob("*/config.json"):
        config = {name: value for name, value in json.loads(path.read_text("utf-8")).items() if name != "_name_or_path"}
        # "axial" is the default of published ones; transformers before 5.17 reject the explicit value.
        config.get("vision_config", {}).pop("rope_parameters", None)
        path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def write_card(folder: Path, family: Family, module: Any, lines: Iterable[str]) -> None:
    """Write the model card into `folder`, with the lines of its score."""
    text = module.CARD.format(
        colours=", ".join(COLOURS), shapes=", ".join(SHAPES), motions=", ".join(MOTIONS), height=HEIGHT, width=WIDTH
    )
    score = "\n".join(f"- {line}" for line in lines)
    card = CARD.format(tag=module.TAG, title=family.spec.title, text=text, source=module.SOURCE, score=score)
    (folder / "README.md").write_text(card, "utf-8")


def share(folder: Path, parts: Mapping[str, str], out: Path) -> None:
    """Remove from the checkpoint in `folder` what another tiny model already has; only differences stay.

    parts: folder of the other model's network, by component; in `out` if it was trained along, else in the pack.
    """
    for name, part in parts.items():
        own, other = folder / name, next(one for one in (out / part, MINIATURES / part) if one.is_dir())
        for path in own.iterdir():
            there = other / path.name
            if path.suffix == ".safetensors":
                known = load_file(there) if there.is_file() else tiny.unpack_weights(there.with_suffix(tiny.PACKED))
                found = load_file(path)
                kept = {key: x for key, x in found.items() if key not in known or not x.equal(known[key])}
                kept |= {key: x.new_empty(0) for key, x in known.items() if key not in found}
                path.unlink()
                if kept:
                    save_file(kept, path)
            elif there.is_file() and there.read_bytes() == path.read_bytes():
                path.unlink()
        if not any(own.iterdir()):
            own.rmdir()
    for path in out.rglob("*.safetensors"):
        pack(path)
    if parts:
        write_shared(folder, parts)


def pack(path: Path) -> None:
    """Compress a file of bfloat16 weights without loss. `lp`: every other byte has sign and exponent."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 2, "lp": 1, "pb": 1}]
    path.with_suffix(tiny.PACKED).write_bytes(lzma.compress(path.read_bytes(), filters=filters))
    path.unlink()


def write_shared(folder: Path, parts: Mapping[str, str]) -> None:
    (folder / "shared.json").write_text(json.dumps(dict(sorted(parts.items())), indent=2) + "\n", "utf-8")


def write_sibling(spec: ModelSpec, original: str, folder: Path) -> None:
    """Write a checkpoint of `spec` with the networks of `original`; two experts share its only denoiser."""
    tiny.write_description(spec, folder)
    names = [*tiny.list_networks(spec), *(text.tokenizer_folder for text in spec.text_encoders)]
    parts = {name: f"{original}/{name.removesuffix('_2')}" for name in names}
    write_shared(folder, parts)
    (folder / "README.md").write_text(SIBLING_CARD.format(title=spec.title, original=original), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=list(MODULES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="working folder; training resumes from its files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    family, module = FAMILIES[options.family], importlib.import_module(MODULES[options.family])
    pipeline = module.train(options.out, options.seed)
    folder = options.out / "miniature"
    write_checkpoint(pipeline, options.out / "tokenizer", folder, family)
    write_card(folder, family, module, scores(family, str(folder)))
    share(folder, module.SHARED, options.out)
    for spec in map(lookup_spec, SIBLINGS.get(options.family, ())):
        write_sibling(spec, options.family, options.out / spec.miniature.id.removeprefix("tiny/"))


if __name__ == "__main__":
    main()
