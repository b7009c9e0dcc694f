"""Qwen-Image's single files on the Hub."""

from ..common.published_files import QWEN_VL, Files, PublishedFiles, join_parts, list_denoisers, list_names, split_file

_REPOSITORY = "Comfy-Org/Qwen-Image_ComfyUI"
_VAE = (split_file(_REPOSITORY, "vae", "qwen_image_vae", 0.25),)


def _list_all(repository: str, name: str, **formats: tuple[str, float]) -> dict[str, Files]:
    """Return all files by format. `formats` has the ending of the denoiser's name and its size."""
    denoisers = {kind: list_denoisers(repository, size, f"{name}_{ending}") for kind, (ending, size) in formats.items()}
    return join_parts(denoisers, QWEN_VL["fp8"], _VAE)


FILES = PublishedFiles(
    sets={
        "qwen-image-2512": _list_all(_REPOSITORY, "qwen_image_2512", fp8=("fp8_e4m3fn", 20.43)),
        "qwen-image-edit-2511": _list_all(
            "Comfy-Org/Qwen-Image-Edit_ComfyUI",
            "qwen_image_edit_2511",
            fp8=("fp8mixed", 20.5),
            int8=("int8_convrot", 20.5),
            bf16=("bf16", 40.86),
        ),
    },
    more_denoisers={
        "qwen-image-2512": (*list_names("qwen_image", "bf16", "fp8_e4m3fn"), *list_names("qwen_image_2512", "bf16")),
        "qwen-image-edit-2511": (
            *list_names("qwen_image_edit", "bf16", "fp8_e4m3fn"),
            *list_names("qwen_image_edit_2509", "bf16", "fp8_e4m3fn", "fp8mixed", "int8_convrot"),
        ),
    },
    controls=(
        *(f"Qwen-Image-InstantX-ControlNet-{kind}.safetensors" for kind in ("Union", "Inpainting")),
        "Qwen-Image-2512-Fun-Controlnet-Union-2602.safetensors",
        *(f"qwen_image_{kind}_diffsynth_controlnet.safetensors" for kind in ("canny", "depth", "inpaint")),
    ),
)
