"""The built-in tiny checkpoints: trained ones, which are part of the pack, and random ones, created on first use.

They have the real layout, the real tokenizer class and every part of the real model, at a size that a CPU runs in
seconds. What random ones generate means nothing; that it equals what diffusers generates does.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache import folders
from ..model_spec import Component, ModelSpec

if TYPE_CHECKING:
    import torch

# Part of the folder's name: increase it when the way of creating a checkpoint changes.
VERSION = 4

# Trained by `tools/train_miniature.py`; the model card in each folder says on what, and how well.
_TRAINED = Path(__file__).resolve().parents[2] / "miniatures"
# Of one that shares parts with another: where each lies, by its name, `{"vae": "wan21/vae"}`. Of such a part its own
# folder has the files, and the tensors, that differ; those of no numbers say what it does without.
_SHARED = "shared.json"
# How weights lie there: a third smaller, and without what is zeros or said before.
PACKED = ".safetensors.xz"


def trained(model_id: str) -> Path | None:
    """The folder of a trained one, put together in the cache on first use; None for an id that is something else."""
    own = _own(model_id)
    return _joined(own) if own else None


def is_trained(model_id: str) -> bool:
    return _own(model_id) is not None


def _own(model_id: str) -> Path | None:
    """What the pack has of a trained one."""
    folder = _TRAINED / model_id.removeprefix("tiny/")
    is_one = model_id.startswith("tiny/") and folder.parent == _TRAINED and (folder / "model_index.json").is_file()
    return folder if is_one else None


def _joined(own: Path) -> Path:
    shared = own / _SHARED
    parts = json.loads(shared.read_text("utf-8")) if shared.is_file() else {}
    sources = [*((_TRAINED / part, name) for name, part in parts.items()), (own, "")]
    files = [path for source, _ in sources for path in sorted(source.rglob("*")) if path.is_file()]
    states = [(str(path.relative_to(_TRAINED)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((sorted(parts), states)).encode()).hexdigest()[:12]

    def make(scratch: Path) -> None:
        weights: dict[Path, list[Path]] = {}
        for source, name in sources:
            ignored = shutil.ignore_patterns(_SHARED, f"*{PACKED}")
            shutil.copytree(source, scratch / name, ignore=ignored, dirs_exist_ok=True)
            for path in source.rglob(f"*{PACKED}"):
                here = scratch / name / path.relative_to(source).with_suffix("")
                weights.setdefault(here, []).append(path)
        for path, packed in weights.items():
            _unpack(packed, path)

    return folders.kept("tiny", f"trained-{own.name}-{digest}", make)


def _unpack(packed: Sequence[Path], path: Path) -> None:
    """Writes weights; of several files later ones have what differs. For one alone PyTorch need not be imported."""
    if len(packed) == 1:
        path.write_bytes(_decompressed(packed[0]))
        return
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for one in packed:
        tensors |= unpacked(one)
    kept = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    save_file(kept, path, metadata={"format": "pt"})


def unpacked(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of weights as they lie in the pack."""
    from safetensors.torch import load

    return load(_decompressed(path))


def _decompressed(path: Path) -> bytes:
    import lzma  # which a Python that was built without its library lacks

    return lzma.decompress(path.read_bytes())


def texts(spec: ModelSpec, model_id: str) -> Mapping[str, str]:
    """Texts that a trained one understands, by input; none for an id that is something else."""
    return spec.miniature.texts if _own(model_id) else {}


def folder(spec: ModelSpec, model_id: str) -> Path:
    """The folder of one of `spec.miniature.ids`; creates it if it is neither part of the pack nor there."""
    return trained(model_id) or ensure(spec)


def ensure(spec: ModelSpec) -> Path:
    """The folder of a spec's tiny checkpoint with random weights; creates it if it is not there."""
    description = {
        "version": VERSION,
        "scheduler": dict(spec.recipe.scheduler),
        "files": {path: dict(content) for path, content in spec.published.files.items()},
        "components": {component.name: dict(component.tiny) for component in spec.components},
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{spec.miniature.id.removeprefix('tiny/')}-{digest}"
    return folders.kept("tiny", name, lambda scratch: _write_parts(spec, scratch, 0))


def write(spec: ModelSpec, folder: Path, seed: int = 0) -> None:
    """Writes a checkpoint with the `tiny` configs of `spec`'s components to `folder`, all or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folders.scratch_for(folder) as scratch:
        _write_parts(spec, scratch, seed)


def _write_parts(spec: ModelSpec, folder: Path, seed: int) -> None:
    written: list[str] = []
    for name, component in networks(spec).items():
        # Experts of one class must not be equal: nobody would see them mixed up.
        same = written.count(component.class_name)
        written.append(component.class_name)
        write_weights(component, folder / name, seed + same)
    for text in spec.text_encoders:
        text.write_tokenizer(folder / text.tokenizer_folder)
    write_description(spec, folder)


def networks(spec: ModelSpec) -> dict[str, Component]:
    """What each folder holds: a network, or the whole model of which several are parts."""
    found: dict[str, Component] = {}
    for name in dict.fromkeys(component.folder for component in spec.components):
        first, *others = spec.parts_of(name)
        found[name] = first
        if (whole := first.whole(others)) != first.class_name:
            parts = {part.config_part: dict(part.tiny) for part in (first, *others)}
            found[name] = replace(first, class_name=whole, config={}, tiny=parts)
    return found


def write_description(spec: ModelSpec, folder: Path) -> None:
    """What a checkpoint in diffusers' layout has beside its networks and tokenizers: the index, the scheduler's config,
    and the files that it was published with.
    """
    index: dict[str, object] = {"_class_name": spec.published.pipeline_classes[0], **spec.published.index}
    index |= {name: [component.library, component.class_name] for name, component in networks(spec).items()}
    index |= {text.tokenizer_folder: ["transformers", text.tokenizer_class] for text in spec.text_encoders}
    index["scheduler"] = ["diffusers", spec.recipe.scheduler["_class_name"]]
    described = {"scheduler/scheduler_config.json": spec.recipe.scheduler, "model_index.json": index}
    for path, content in {**spec.published.files, **described}.items():
        write_json(folder / path, content)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(content), indent=2), "utf-8")


def write_weights(component: Component, folder: Path, seed: int) -> None:
    """Random weights of the sizes that are `tiny`, as upstream writes them."""
    import torch

    from ..programs import modules

    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        module = modules.construct(component, component.tiny)
        for norm in module.modules():
            # Fresh running statistics are the identity: nobody would see them missing.
            if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm) and norm.track_running_stats:
                assert norm.running_mean is not None and norm.running_var is not None
                norm.running_mean.uniform_(-0.5, 0.5)
                norm.running_var.uniform_(0.5, 1.5)
        for name, parameter in module.named_parameters():
            # Nor would anybody see tokens missing that are zeros until they are trained, as Z-Image's padding.
            if not name.endswith(".bias") and not parameter.any():
                parameter.data.normal_()
    # Small files, so that larger components have an index and several shards as real ones do.
    module.save_pretrained(folder, max_shard_size="1MB")
