"""The built-in tiny checkpoints: trained ones, which are part of the pack, and random ones, created on first use.

They have the real layout, tokenizer class and components, at a size that a CPU runs in seconds. Results of random ones
are meaningless, but equal to those of diffusers.
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
# Components shared with another tiny model, by name: `{"vae": "wan21/vae"}`. The model's own folder has the files and
# tensors that differ; an empty tensor marks one that the model does not have.
_SHARED = "shared.json"
# Weights are packed there: a third smaller, without zeros and repetitions.
PACKED = ".safetensors.xz"


def find_trained(model_id: str) -> Path | None:
    """Return the folder of a trained one, assembled in the cache on first use; None for any other id."""
    packed = _find_packed_folder(model_id)
    return _join_shared(packed) if packed else None


def is_trained(model_id: str) -> bool:
    """Return whether an id is that of a trained tiny checkpoint."""
    return _find_packed_folder(model_id) is not None


def _find_packed_folder(model_id: str) -> Path | None:
    """Return the pack's folder of a trained one, or None."""
    folder = _TRAINED / model_id.removeprefix("tiny/")
    is_one = model_id.startswith("tiny/") and folder.parent == _TRAINED and (folder / "model_index.json").is_file()
    return folder if is_one else None


def _join_shared(own: Path) -> Path:
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

    return folders.ensure_cached_folder("tiny", f"trained-{own.name}-{digest}", make)


def _unpack(packed: Sequence[Path], path: Path) -> None:
    """Write weights; later files replace tensors of earlier ones. A single file needs no import of PyTorch."""
    if len(packed) == 1:
        path.write_bytes(_decompress(packed[0]))
        return
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for source in packed:
        tensors |= unpack_weights(source)
    nonempty = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    save_file(nonempty, path, metadata={"format": "pt"})


def unpack_weights(path: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of packed weights."""
    from safetensors.torch import load

    return load(_decompress(path))


def _decompress(path: Path) -> bytes:
    import lzma  # missing in a Python that was built without the library

    return lzma.decompress(path.read_bytes())


def find_trained_texts(spec: ModelSpec, model_id: str) -> Mapping[str, str]:
    """Return texts that a trained one understands, by input; {} for any other id."""
    return spec.miniature.texts if _find_packed_folder(model_id) else {}


def find_folder(spec: ModelSpec, model_id: str) -> Path:
    """Return the folder of one of `spec.miniature.ids`, created if it is not part of the pack."""
    return find_trained(model_id) or ensure_random(spec)


def ensure_random(spec: ModelSpec) -> Path:
    """Return the folder of a model's tiny checkpoint with random weights, created if need be."""
    description = {
        "version": VERSION,
        "scheduler": dict(spec.recipe.scheduler),
        "files": {path: dict(content) for path, content in spec.published.files.items()},
        "components": {component.name: dict(component.tiny) for component in spec.components},
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{spec.miniature.id.removeprefix('tiny/')}-{digest}"
    return folders.ensure_cached_folder("tiny", name, lambda scratch: _write_components(spec, scratch, 0))


def write_random(spec: ModelSpec, folder: Path, seed: int = 0) -> None:
    """Write a random checkpoint of `spec` to `folder`, completely or not at all.

    The networks have the components' `tiny` configs.

    seed: of the weights.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folders.open_scratch_folder(folder) as scratch:
        _write_components(spec, scratch, seed)


def _write_components(spec: ModelSpec, folder: Path, seed: int) -> None:
    written: list[str] = []
    for name, component in list_networks(spec).items():
        # Experts of one class must not be equal: mixing them up would not be noticed.
        same = written.count(component.class_name)
        written.append(component.class_name)
        write_weights(component, folder / name, seed + same)
    for text in spec.text_encoders:
        text.write_tokenizer(folder / text.tokenizer_folder)
    write_description(spec, folder)


def list_networks(spec: ModelSpec) -> dict[str, Component]:
    """Return the network in each folder, or the whole model of which several are parts."""
    by_folder: dict[str, Component] = {}
    for name in dict.fromkeys(component.folder for component in spec.components):
        first, *others = spec.list_components(name)
        by_folder[name] = first
        if (parent := first.whole(others)) != first.class_name:
            parts = {part.config_part: dict(part.tiny) for part in (first, *others)}
            by_folder[name] = replace(first, class_name=parent, config={}, tiny=parts)
    return by_folder


def write_description(spec: ModelSpec, folder: Path) -> None:
    """Write the files of a checkpoint other than networks and tokenizers.

    These are the index, the scheduler's config, and published files.
    """
    index: dict[str, object] = {"_class_name": spec.published.pipeline_classes[0], **spec.published.index}
    index |= {name: [component.library, component.class_name] for name, component in list_networks(spec).items()}
    index |= {text.tokenizer_folder: ["transformers", text.tokenizer_class] for text in spec.text_encoders}
    index["scheduler"] = ["diffusers", spec.recipe.scheduler["_class_name"]]
    described = {"scheduler/scheduler_config.json": spec.recipe.scheduler, "model_index.json": index}
    for path, content in {**spec.published.files, **described}.items():
        write_json(folder / path, content)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(content), indent=2), "utf-8")


def write_weights(component: Component, folder: Path, seed: int) -> None:
    """Write random weights with the `tiny` config, as upstream saves them.

    component: the network. folder: where to write. seed: of the weights.
    """
    import torch

    from ..programs import upstream_network

    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed)
        module = upstream_network.construct_upstream(component, component.tiny)
        for norm in module.modules():
            # Fresh running statistics are the identity: omitting them would not be noticed.
            if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm) and norm.track_running_stats:
                assert norm.running_mean is not None and norm.running_var is not None
                norm.running_mean.uniform_(-0.5, 0.5)
                norm.running_var.uniform_(0.5, 1.5)
        for name, parameter in module.named_parameters():
            # The same holds for tokens that are zeros until they are trained, as Z-Image's padding.
            if not name.endswith(".bias") and not parameter.any():
                parameter.data.normal_()
    # Small files, so that larger components have an index and several shards as real ones do.
    module.save_pretrained(folder, max_shard_size="1MB")
