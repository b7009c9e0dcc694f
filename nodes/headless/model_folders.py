"""Where a ComfyUI on this machine keeps models, for commands that run without it: its own folders, and those that its
`extra_model_paths.yaml` names.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# ComfyUI's kinds of files that a model id may name, with the older names of their folders.
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


def find(comfyui: Path) -> tuple[str, ...]:
    """The folders there are, each once, of the kinds in order."""
    found = (path for names in KINDS.values() for path in _named(comfyui, *names))
    return tuple(path for path in dict.fromkeys(found) if Path(path).is_dir())


def loras(comfyui: Path) -> tuple[str, ...]:
    """The folders of LoRAs, ComfyUI's own first, which is the one to create where there is none."""
    return tuple(dict.fromkeys(_named(comfyui, "loras")))


def _named(comfyui: Path, *names: str) -> Iterator[str]:
    yield from (str(comfyui / "models" / name) for name in names)
    yield from (path for name, path in _extra(comfyui / EXTRA) if name in names)


def _extra(path: Path) -> Iterator[tuple[str, str]]:
    """Kinds and folders of a file as ComfyUI's `utils/extra_config.py` reads it."""
    import yaml

    if not path.is_file():
        return
    try:
        said = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Correct it, or rename it.") from error
    for section in said.values() if isinstance(said, Mapping) else ():
        if not isinstance(section, Mapping):
            continue
        base = _absolute(section.get("base_path"), path.parent)
        for kind, folders in section.items():
            for line in folders.splitlines() if isinstance(folders, str) and kind not in ("base_path",) else ():
                if line.strip():
                    yield kind, str(_absolute(line.strip(), base or path.parent))


def _absolute(text: Any, base: Path) -> Path | None:
    """A path that may begin with `~`, or be relative to `base`."""
    return (base / Path(text).expanduser()).absolute() if isinstance(text, str) else None
