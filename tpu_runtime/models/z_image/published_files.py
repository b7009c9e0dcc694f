"""Z-Image's single files on the Hub."""

from ..common.published_files import Files, PublishedFiles, join_parts, list_denoisers, split_file

_TURBO = "Comfy-Org/z_image_turbo"
_PARTS = (split_file(_TURBO, "text_encoders", "qwen_3_4b", 8.04), split_file(_TURBO, "vae", "ae", 0.34))


def _list_all(repository: str, name: str) -> dict[str, Files]:
    formats = {"bf16": ("bf16", 12.31), "int8": ("int8_convrot", 6.2)}
    denoisers = {kind: list_denoisers(repository, size, f"{name}_{ending}") for kind, (ending, size) in formats.items()}
    return join_parts(denoisers, _PARTS)


FILES = PublishedFiles(
    sets={"z-image-turbo": _list_all(_TURBO, "z_image_turbo"), "z-image": _list_all("Comfy-Org/z_image", "z_image")},
    controls=("Z-Image-Turbo-Fun-Controlnet-Union.safetensors",),
)
