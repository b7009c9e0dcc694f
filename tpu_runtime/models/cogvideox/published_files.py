"""CogVideoX's single files on the Hub."""

from ..common.published_files import Files, PublishedFiles, root_file

_REPOSITORY = "Kijai/CogVideoX-comfy"
_PARTS = (
    root_file("comfyanonymous/flux_text_encoders", "text_encoders", "t5xxl_fp16", 9.79),
    root_file(_REPOSITORY, "vae", "cogvideox_vae_bf16", 0.41),
)


def _list_all(name: str) -> dict[str, Files]:
    """Return all files, which exist in one format, with diffusers' keys."""
    return {"bf16": (root_file(_REPOSITORY, "diffusion_models", f"CogVideoX_1_5_5b_{name}_bf16", 10.92), *_PARTS)}


FILES = PublishedFiles(sets={"cogvideox1.5-5b": _list_all("T2V"), "cogvideox1.5-5b-i2v": _list_all("I2V")})
