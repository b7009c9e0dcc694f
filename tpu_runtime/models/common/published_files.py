"""Single files named as in ComfyUI's templates: the repository that publishes each, and the folder it belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SingleFile:
    """A published file of a model."""

    repository: str  # on the Hub
    path: str  # within the repository
    folder: str  # ComfyUI's folder for it, within `models`
    size_gb: float  # approximate

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


Files = tuple[SingleFile, ...]


@dataclass(frozen=True, kw_only=True)
class PublishedFiles:
    """The files of a family's models, by the model's name."""

    sets: Mapping[str, Mapping[str, Files]] = field(default_factory=dict)  # everything that a model needs, by format
    # Names of further files of the same networks, as ComfyUI's templates and Comfy-Org's repositories name them: other
    # formats, versions before the one in `sets`, and repackaged files. Networks with similar names that compute
    # something else are not listed: fun, vace, s2v, animate, layered, kv, super-resolution.
    more_denoisers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # text encoders and VAEs
    controls: tuple[str, ...] = ()  # names of files with control networks


def split_file(repository: str, folder: str, name: str, size_gb: float) -> SingleFile:
    """Return a file of Comfy-Org's repositories, which have a folder for each of ComfyUI's."""
    return SingleFile(repository, f"split_files/{folder}/{name}.safetensors", folder, size_gb)


def root_file(repository: str, folder: str, name: str, size_gb: float) -> SingleFile:
    """Return a file at the root of its repository."""
    return SingleFile(repository, f"{name}.safetensors", folder, size_gb)


def list_denoisers(repository: str, size_gb: float, *names: str) -> Files:
    return tuple(split_file(repository, "diffusion_models", name, size_gb) for name in names)


_ENDINGS = {"fp8": "fp8_scaled", "fp16": "fp16"}


def denoisers_by_format(repository: str, name: str, **sizes_gb: float) -> dict[str, Files]:
    """Return a denoiser's files by format, which is the ending of the name; `{}` in `name` is filled per expert."""
    return {
        kind: list_denoisers(repository, size, *(f"{expert}_{_ENDINGS[kind]}" for expert in _fill_experts(name)))
        for kind, size in sizes_gb.items()
    }


def join_parts(denoisers: Mapping[str, Files], *parts: Files | Mapping[str, Files]) -> dict[str, Files]:
    """Return all files of a model by format: denoisers, then `parts`, in the same format where they have several."""
    return {
        kind: sum((files[kind] if isinstance(files, Mapping) else files for files in parts), network)
        for kind, network in denoisers.items()
    }


def list_names(name: str, *endings: str) -> tuple[str, ...]:
    """Return the names of a denoiser's files in several formats; `{}` in `name` is filled per expert."""
    return tuple(f"{expert}_{ending}.safetensors" for expert in _fill_experts(name) for ending in endings)


def _fill_experts(name: str) -> list[str]:
    return [name.format(noise) for noise in ("high", "low")] if "{}" in name else [name]


_HUNYUAN = "Comfy-Org/HunyuanVideo_1.5_repackaged"
QWEN_VL = {
    "fp8": (split_file(_HUNYUAN, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled", 9.38),),
    "fp16": (split_file(_HUNYUAN, "text_encoders", "qwen_2.5_vl_7b", 16.58),),
}
