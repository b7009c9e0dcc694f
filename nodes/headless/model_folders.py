"""Finds the model folders of a ComfyUI on this machine, for commands that run without it.

These are its own folders, and those in its `extra_model_paths.yaml`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

# ComfyUI's kinds of files that a model id may name, each with its folder's current and older names.
KINDS = {
    "diffusers": ("diffusers",),
    "diffusion_models": ("diffusion_models", "unet"),
    "checkpoints": ("checkpoints",),
    "text_encoders": ("text_encoders", "clip"),
    "vae": ("vae",),
    "vae_approx": ("vae_approx",),
    "clip_vision": ("clip_vision",),
}
EXTRA = "extra_model_paths.yaml"


def find_model_folders(comfyui: Path) -> tuple[str, ...]:
    """Return the existing model folders of a ComfyUI, without duplicates, in the order of KINDS."""
    paths = (path for names in KINDS.values() for path in _list_folders(comfyui, *names))
    return tuple(path for path in dict.fromkeys(paths) if Path(path).is_dir())


def find_lora_folders(comfyui: Path) -> tuple[str, ...]:
    """Return the LoRA folders; the first is ComfyUI's own, the one to create if none exists."""
    return tuple(dict.fromkeys(_list_folders(comfyui, "loras")))


def _list_folders(comfyui: Path, *names: str) -> Iterator[str]:
    yield from (str(comfyui / "models" / name) for name in names)
    yield from (path for name, path in _extra(comfyui / EXTRA) if name in names)


def _extra(path: Path) -> Iterator[tuple[str, str]]:
    """Yield kinds and folders of a file in the format that ComfyUI's `utils/extra_config.py` reads."""
    import yaml

    if not path.is_file():
        return
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Correct it, or rename it.") from error
    for section in document.values() if isinstance(document, Mapping) else ():
        if not isinstance(section, Mapping):
            continue
        base = _absolute(section.get("base_path"), path.parent)
        for kind, folders in section.items():
            for line in folders.splitlines() if isinstance(folders, str) and kind not in ("base_path",) else ():
                if line.strip():
                    yield kind, str(_absolute(line.strip(), base or path.parent))


def _absolute(text: object, base: Path) -> Path | None:
    """Return an absolute path from one that may start with `~` or be relative to `base`; None if it is not text."""
    return (base / Path(text).expanduser()).absolute() if isinstance(text, str) else None
