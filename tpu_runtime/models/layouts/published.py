"""Single files as ComfyUI's templates name them: where they are published, and the folder each goes to."""

from collections.abc import Mapping
from dataclasses import dataclass

_WAN21, _WAN22 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
_HUNYUAN, _FLUX, _KLEIN = "Comfy-Org/HunyuanVideo_1.5_repackaged", "Comfy-Org/flux2-dev", "Comfy-Org/flux2-klein"
_KLEIN_9B, _BFL = "Comfy-Org/flux2-klein-9B", "black-forest-labs/FLUX.2-"


@dataclass(frozen=True)
class SingleFile:
    """A file of a repository on the Hub, and ComfyUI's folder for it."""

    repository: str
    path: str
    folder: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def _file(repository: str, folder: str, name: str) -> SingleFile:
    return SingleFile(repository, f"split_files/{folder}/{name}.safetensors", folder)


def _denoisers(repository: str, *names: str) -> tuple[SingleFile, ...]:
    return tuple(_file(repository, "diffusion_models", name) for name in names)


def _in_formats(repository: str, name: str, *formats: str) -> dict[str, tuple[SingleFile, ...]]:
    """A denoiser by format, whose name ends with it; two experts have `{}` for which."""
    experts = [name.format(noise) for noise in ("high", "low")] if "{}" in name else [name]
    endings = {"fp8": "fp8_scaled", "fp16": "fp16"}
    return {kind: _denoisers(repository, *(f"{one}_{endings[kind]}" for one in experts)) for kind in formats}


def _of_bfl(name: str) -> tuple[SingleFile, ...]:
    """Black Forest Labs' own, at the top of their repositories."""
    return (SingleFile(f"{_BFL}klein-{name}-fp8", f"flux-2-klein-{name}-fp8.safetensors", "diffusion_models"),)


_UMT5 = {
    "fp8": (_file(_WAN21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled"),),
    "fp16": (_file(_WAN21, "text_encoders", "umt5_xxl_fp16"),),
}
_WAN_VAE = (_file(_WAN21, "vae", "wan_2.1_vae"),)
_CLIP = (_file(_WAN21, "clip_vision", "clip_vision_h"),)
_FLUX_VAE = (_file(_FLUX, "vae", "flux2-vae"),)
_QWEN_4B = (_file(_KLEIN, "text_encoders", "qwen_3_4b"),)
_QWEN_8B = (_file(_KLEIN_9B, "text_encoders", "qwen_3_8b_fp8mixed"),)
_HUNYUAN_PARTS = (
    _file(_HUNYUAN, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled"),
    _file(_HUNYUAN, "text_encoders", "byt5_small_glyphxl_fp16"),
    _file(_HUNYUAN, "vae", "hunyuanvideo15_vae_fp16"),
)
_SIGLIP = (_file(_HUNYUAN, "clip_vision", "sigclip_vision_patch14_384"),)


def _with(
    denoisers: Mapping[str, tuple[SingleFile, ...]],
    *parts: tuple[SingleFile, ...] | Mapping[str, tuple[SingleFile, ...]],
) -> dict[str, tuple[SingleFile, ...]]:
    """All files of a model by format: its denoisers first, then parts, in that format where they have several."""
    return {
        kind: sum((part[kind] if isinstance(part, Mapping) else part for part in parts), files)
        for kind, files in denoisers.items()
    }


# The files of each model, by its name and by format.
SETS: Mapping[str, Mapping[str, tuple[SingleFile, ...]]] = {
    "wan2.1-t2v-14b": _with(_in_formats(_WAN21, "wan2.1_t2v_14B", "fp8", "fp16"), _UMT5, _WAN_VAE),
    "wan2.1-t2v-1.3b": _with(_in_formats(_WAN21, "wan2.1_t2v_1.3B", "fp16"), _UMT5, _WAN_VAE),
    "wan2.1-i2v-14b-480p": _with(_in_formats(_WAN21, "wan2.1_i2v_480p_14B", "fp8", "fp16"), _UMT5, _WAN_VAE, _CLIP),
    "wan2.1-i2v-14b-720p": _with(_in_formats(_WAN21, "wan2.1_i2v_720p_14B", "fp8", "fp16"), _UMT5, _WAN_VAE, _CLIP),
    "wan2.1-flf2v-14b-720p": _with(_in_formats(_WAN21, "wan2.1_flf2v_720p_14B", "fp16"), _UMT5, _WAN_VAE, _CLIP),
    "wan2.2-t2v-a14b": _with(_in_formats(_WAN22, "wan2.2_t2v_{}_noise_14B", "fp8", "fp16"), _UMT5, _WAN_VAE),
    "wan2.2-i2v-a14b": _with(_in_formats(_WAN22, "wan2.2_i2v_{}_noise_14B", "fp8", "fp16"), _UMT5, _WAN_VAE),
    "wan2.2-ti2v-5b": _with(
        _in_formats(_WAN22, "wan2.2_ti2v_5B", "fp16"), _UMT5, (_file(_WAN22, "vae", "wan2.2_vae"),)
    ),
    "flux2-dev": {
        "fp8": (
            *_denoisers(_FLUX, "flux2_dev_fp8mixed"),
            _file(_FLUX, "text_encoders", "mistral_3_small_flux2_fp8"),
            *_FLUX_VAE,
        )
    },
    "flux2-klein-4b": _with({"fp16": _denoisers(_KLEIN, "flux-2-klein-4b"), "fp8": _of_bfl("4b")}, _QWEN_4B, _FLUX_VAE),
    "flux2-klein-base-4b": _with(
        {"fp16": _denoisers(_KLEIN, "flux-2-klein-base-4b"), "fp8": _of_bfl("base-4b")}, _QWEN_4B, _FLUX_VAE
    ),
    "flux2-klein-9b": _with({"fp8": _of_bfl("9b")}, _QWEN_8B, _FLUX_VAE),
    "flux2-klein-base-9b": _with({"fp8": _of_bfl("base-9b")}, _QWEN_8B, _FLUX_VAE),
    "hunyuanvideo1.5-t2v-720p": _with(_in_formats(_HUNYUAN, "hunyuanvideo1.5_720p_t2v", "fp16"), _HUNYUAN_PARTS),
    "hunyuanvideo1.5-i2v-720p": _with(
        _in_formats(_HUNYUAN, "hunyuanvideo1.5_720p_i2v", "fp16"), _HUNYUAN_PARTS, _SIGLIP
    ),
}


def files(model: str, kind: str) -> tuple[SingleFile, ...]:
    """The files of a model in a format; ValueError that says which formats there are."""
    if model not in SETS:
        raise ValueError(f"{model} is not known as single files; known are {', '.join(SETS)}.")
    if kind not in SETS[model]:
        raise ValueError(f"{model} is not known as files in {kind}; known is {' or '.join(SETS[model])}.")
    return SETS[model][kind]


def part(model: str, folder: str) -> SingleFile | None:
    """The file of a model that goes into one of ComfyUI's folders, the most exact one."""
    known = SETS.get(model, {})
    exact = known.get("fp16") or next(iter(known.values()), ())
    return next((file for file in exact if file.folder == folder), None)
