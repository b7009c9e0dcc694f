"""Single files named as in ComfyUI's templates: the repository that publishes each, and the folder it belongs to."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ..messages import compose

_WAN21, _WAN22 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
_HUNYUAN, _FLUX, _KLEIN = "Comfy-Org/HunyuanVideo_1.5_repackaged", "Comfy-Org/flux2-dev", "Comfy-Org/flux2-klein"
_ZIMAGE, _QWEN = "Comfy-Org/z_image_turbo", "Comfy-Org/Qwen-Image_ComfyUI"
_KLEIN_9B, _BFL, _COG = "Comfy-Org/flux2-klein-9B", "black-forest-labs/FLUX.2-", "Kijai/CogVideoX-comfy"


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


_Files = tuple[SingleFile, ...]


def _file(repository: str, folder: str, name: str, size_gb: float) -> SingleFile:
    return SingleFile(repository, f"split_files/{folder}/{name}.safetensors", folder, size_gb)


def _denoisers(repository: str, size_gb: float, *names: str) -> _Files:
    return tuple(_file(repository, "diffusion_models", name, size_gb) for name in names)


_ENDINGS = {"fp8": "fp8_scaled", "fp16": "fp16"}


def _in_formats(repository: str, name: str, **sizes_gb: float) -> dict[str, _Files]:
    """Return a denoiser's files by format, which is the ending of the name; `{}` in `name` is filled per expert."""
    experts = [name.format(noise) for noise in ("high", "low")] if "{}" in name else [name]
    return {
        kind: _denoisers(repository, size, *(f"{expert}_{_ENDINGS[kind]}" for expert in experts))
        for kind, size in sizes_gb.items()
    }


def _at_top(repository: str, folder: str, name: str, size_gb: float) -> SingleFile:
    """Return a file at the root of its repository."""
    return SingleFile(repository, f"{name}.safetensors", folder, size_gb)


def _of_bfl(name: str, size_gb: float) -> _Files:
    return (_at_top(f"{_BFL}klein-{name}-fp8", "diffusion_models", f"flux-2-klein-{name}-fp8", size_gb),)


_UMT5 = {
    "fp8": (_file(_WAN21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled", 6.74),),
    "fp16": (_file(_WAN21, "text_encoders", "umt5_xxl_fp16", 11.37),),
}
_WAN_VAE = (_file(_WAN21, "vae", "wan_2.1_vae", 0.25),)
_CLIP = (_file(_WAN21, "clip_vision", "clip_vision_h", 1.26),)
_FLUX_VAE = (_file(_FLUX, "vae", "flux2-vae", 0.34),)
_QWEN_4B = (_file(_KLEIN, "text_encoders", "qwen_3_4b", 8.04),)
_QWEN_8B = (_file(_KLEIN_9B, "text_encoders", "qwen_3_8b_fp8mixed", 8.66),)
_QWEN_VL = {
    "fp8": (_file(_HUNYUAN, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled", 9.38),),
    "fp16": (_file(_HUNYUAN, "text_encoders", "qwen_2.5_vl_7b", 16.58),),
}
_HUNYUAN_PARTS = (
    _file(_HUNYUAN, "text_encoders", "byt5_small_glyphxl_fp16", 0.44),
    _file(_HUNYUAN, "vae", "hunyuanvideo15_vae_fp16", 2.52),
)
_SIGLIP = (_file(_HUNYUAN, "clip_vision", "sigclip_vision_patch14_384", 0.86),)
_ZIMAGE_PARTS = (_file(_ZIMAGE, "text_encoders", "qwen_3_4b", 8.04), _file(_ZIMAGE, "vae", "ae", 0.34))
_COG_PARTS = (
    _at_top("comfyanonymous/flux_text_encoders", "text_encoders", "t5xxl_fp16", 9.79),
    _at_top(_COG, "vae", "cogvideox_vae_bf16", 0.41),
)


def _with_parts(denoisers: Mapping[str, _Files], *parts: _Files | Mapping[str, _Files]) -> dict[str, _Files]:
    """Return all files of a model by format: denoisers, then `parts`, in the same format where they have several."""
    return {
        kind: sum((files[kind] if isinstance(files, Mapping) else files for files in parts), network)
        for kind, network in denoisers.items()
    }


def _hunyuan(name: str, *parts: _Files, **sizes_gb: float) -> dict[str, _Files]:
    return _with_parts(_in_formats(_HUNYUAN, f"hunyuanvideo1.5_{name}", **sizes_gb), _QWEN_VL, _HUNYUAN_PARTS, *parts)


def _z_image(repository: str, name: str) -> dict[str, _Files]:
    formats = {"bf16": ("bf16", 12.31), "int8": ("int8_convrot", 6.2)}
    denoisers = {kind: _denoisers(repository, size, f"{name}_{ending}") for kind, (ending, size) in formats.items()}
    return _with_parts(denoisers, _ZIMAGE_PARTS)


def _qwen_image(repository: str, name: str, **formats: tuple[str, float]) -> dict[str, _Files]:
    """Return all files by format. `formats` has the ending of the denoiser's name and its size."""
    denoisers = {kind: _denoisers(repository, size, f"{name}_{ending}") for kind, (ending, size) in formats.items()}
    return _with_parts(denoisers, _QWEN_VL["fp8"], (_file(_QWEN, "vae", "qwen_image_vae", 0.25),))


def _cogvideox(name: str) -> dict[str, _Files]:
    """Return all files, which exist in one format, with diffusers' keys."""
    return {"bf16": (_at_top(_COG, "diffusion_models", f"CogVideoX_1_5_5b_{name}_bf16", 10.92), *_COG_PARTS)}


# The files of each model, by its name and by format.
SETS: Mapping[str, Mapping[str, _Files]] = {
    "wan2.1-t2v-14b": _with_parts(_in_formats(_WAN21, "wan2.1_t2v_14B", fp8=14.29, fp16=28.58), _UMT5, _WAN_VAE),
    "wan2.1-t2v-1.3b": _with_parts(_in_formats(_WAN21, "wan2.1_t2v_1.3B", fp16=2.84), _UMT5, _WAN_VAE),
    "wan2.1-i2v-14b-480p": _with_parts(
        _in_formats(_WAN21, "wan2.1_i2v_480p_14B", fp8=16.4, fp16=32.79), _UMT5, _WAN_VAE, _CLIP
    ),
    "wan2.1-i2v-14b-720p": _with_parts(
        _in_formats(_WAN21, "wan2.1_i2v_720p_14B", fp8=16.4, fp16=32.79), _UMT5, _WAN_VAE, _CLIP
    ),
    "wan2.1-flf2v-14b-720p": _with_parts(
        _in_formats(_WAN21, "wan2.1_flf2v_720p_14B", fp16=32.79), _UMT5, _WAN_VAE, _CLIP
    ),
    "wan2.2-t2v-a14b": _with_parts(
        _in_formats(_WAN22, "wan2.2_t2v_{}_noise_14B", fp8=14.29, fp16=28.58), _UMT5, _WAN_VAE
    ),
    "wan2.2-i2v-a14b": _with_parts(
        _in_formats(_WAN22, "wan2.2_i2v_{}_noise_14B", fp8=14.29, fp16=28.58), _UMT5, _WAN_VAE
    ),
    "wan2.2-ti2v-5b": _with_parts(
        _in_formats(_WAN22, "wan2.2_ti2v_5B", fp16=10.0), _UMT5, (_file(_WAN22, "vae", "wan2.2_vae", 1.41),)
    ),
    "flux2-dev": {
        "fp8": (
            *_denoisers(_FLUX, 35.46, "flux2_dev_fp8mixed"),
            _file(_FLUX, "text_encoders", "mistral_3_small_flux2_fp8", 18.03),
            *_FLUX_VAE,
        )
    },
    "flux2-klein-4b": _with_parts(
        {"fp16": _denoisers(_KLEIN, 7.75, "flux-2-klein-4b"), "fp8": _of_bfl("4b", 4.07)}, _QWEN_4B, _FLUX_VAE
    ),
    "flux2-klein-base-4b": _with_parts(
        {"fp16": _denoisers(_KLEIN, 7.75, "flux-2-klein-base-4b"), "fp8": _of_bfl("base-4b", 4.07)}, _QWEN_4B, _FLUX_VAE
    ),
    "flux2-klein-9b": _with_parts({"fp8": _of_bfl("9b", 9.43)}, _QWEN_8B, _FLUX_VAE),
    "flux2-klein-base-9b": _with_parts({"fp8": _of_bfl("base-9b", 9.43)}, _QWEN_8B, _FLUX_VAE),
    "z-image-turbo": _z_image(_ZIMAGE, "z_image_turbo"),
    "z-image": _z_image("Comfy-Org/z_image", "z_image"),
    "qwen-image-2512": _qwen_image(_QWEN, "qwen_image_2512", fp8=("fp8_e4m3fn", 20.43)),
    "qwen-image-edit-2511": _qwen_image(
        "Comfy-Org/Qwen-Image-Edit_ComfyUI",
        "qwen_image_edit_2511",
        fp8=("fp8mixed", 20.5),
        int8=("int8_convrot", 20.5),
        bf16=("bf16", 40.86),
    ),
    "hunyuanvideo1.5-t2v-720p": _hunyuan("720p_t2v", fp16=16.65),
    "hunyuanvideo1.5-i2v-720p": _hunyuan("720p_i2v", _SIGLIP, fp16=16.65),
    "hunyuanvideo1.5-t2v-480p": _hunyuan("480p_t2v", fp16=16.65),
    "hunyuanvideo1.5-i2v-480p": _hunyuan("480p_i2v", _SIGLIP, fp16=16.65),
    "hunyuanvideo1.5-t2v-480p-distilled": _hunyuan("480p_t2v_cfg_distilled", fp8=8.33, fp16=16.65),
    "hunyuanvideo1.5-i2v-480p-distilled": _hunyuan("480p_i2v_cfg_distilled", _SIGLIP, fp8=8.33, fp16=16.65),
    "hunyuanvideo1.5-i2v-720p-distilled": _hunyuan("720p_i2v_cfg_distilled", _SIGLIP, fp8=8.33, fp16=16.65),
    "hunyuanvideo1.5-i2v-480p-step-distilled": _hunyuan("480p_i2v_step_distilled", _SIGLIP, fp8=8.33, fp16=16.65),
    "cogvideox1.5-5b": _cogvideox("T2V"),
    "cogvideox1.5-5b-i2v": _cogvideox("I2V"),
}


def describe_sizes(model: str) -> str:
    """Return the approximate size of a model's files by format, such as "fp8 29 GB"; "" without files."""
    totals = {kind: sum(file.size_gb for file in files) for kind, files in SETS.get(model, {}).items()}
    return ", ".join(f"{kind} {total:.0f} GB" for kind, total in sorted(totals.items(), key=lambda item: item[1]))


def list_files(model: str, kind: str) -> _Files:
    """Return the files of a model in a format. Raises ValueError that lists the formats."""
    if model not in SETS:
        raise ValueError(compose("file.published_model_unknown", model=model, sets=", ".join(SETS)))
    if kind not in SETS[model]:
        raise ValueError(compose("file.published_kind_unknown", model=model, kind=kind, sets=" or ".join(SETS[model])))
    return SETS[model][kind]


def find_part(model: str, folder: str) -> SingleFile | None:
    """Return the most exact file of a model for one of ComfyUI's folders, or None."""
    known = SETS.get(model, {})
    exact = known.get("fp16") or next(iter(known.values()), ())
    return next((file for file in exact if file.folder == folder), None)


def _all(name: str, *endings: str) -> tuple[str, ...]:
    """Return the names of a denoiser's files in several formats; `{}` in `name` is filled per expert."""
    experts = [name.format(noise) for noise in ("high", "low")] if "{}" in name else [name]
    return tuple(f"{expert}_{ending}.safetensors" for expert in experts for ending in endings)


_WAN21_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_scaled")
# Further files of the same networks, as ComfyUI's templates and Comfy-Org's repositories name them: other formats,
# versions before the one in `SETS`, and repackaged files. Networks with similar names that compute something else are
# not listed: fun, vace, s2v, animate, layered, kv, super-resolution.
_MORE_DENOISERS: Mapping[str, tuple[str, ...]] = {
    "wan2.1-t2v-14b": _all("wan2.1_t2v_14B", *_WAN21_FORMATS),
    "wan2.1-t2v-1.3b": _all("wan2.1_t2v_1.3B", "bf16"),
    "wan2.1-i2v-14b-480p": (
        *_all("wan2.1_i2v_480p_14B", *_WAN21_FORMATS),
        "Wan2_1-I2V-14B-480p_fp8_e4m3fn_scaled_KJ.safetensors",
    ),
    "wan2.1-i2v-14b-720p": _all("wan2.1_i2v_720p_14B", *_WAN21_FORMATS),
    "wan2.1-flf2v-14b-720p": _all("wan2.1_flf2v_720p_14B", *_WAN21_FORMATS),
    "wan2.2-t2v-a14b": _all("wan2.2_t2v_{}_noise_14B", "int8_convrot"),
    "wan2.2-i2v-a14b": _all("wan2.2_i2v_{}_noise_14B", "int8_convrot"),
    "flux2-klein-9b": ("flux-2-klein-9b.safetensors",),
    "flux2-klein-base-9b": ("flux-2-klein-base-9b.safetensors",),
    "qwen-image-2512": (*_all("qwen_image", "bf16", "fp8_e4m3fn"), *_all("qwen_image_2512", "bf16")),
    "qwen-image-edit-2511": (
        *_all("qwen_image_edit", "bf16", "fp8_e4m3fn"),
        *_all("qwen_image_edit_2509", "bf16", "fp8_e4m3fn", "fp8mixed", "int8_convrot"),
    ),
}
_MORE_PARTS: Mapping[str, tuple[str, ...]] = {
    "wan2.1-t2v-14b": ("Wan2_1_VAE_bf16.safetensors",),
    # A VAE with a smaller decoder.
    "flux2-dev": ("mistral_3_small_flux2_bf16.safetensors", "full_encoder_small_decoder.safetensors"),
    "flux2-klein-4b": ("qwen_3_4b_fp8_mixed.safetensors",),
    "flux2-klein-9b": ("qwen_3_8b.safetensors",),
}


def list_denoisers(model: str) -> tuple[str, ...]:
    """Return the names of files that hold a denoiser of this model; with two experts in `SETS`, the first one's."""
    return (*(files[0].name for files in SETS.get(model, {}).values()), *_MORE_DENOISERS.get(model, ()))


@functools.cache
def list_models() -> Mapping[str, str]:
    """Return the model of each known file, by file name; for a file that several models share, the first of them."""
    model_of_file: dict[str, str] = {}
    for model, formats in SETS.items():
        known = (file.name for files in formats.values() for file in files)
        for name in (*known, *_MORE_DENOISERS.get(model, ()), *_MORE_PARTS.get(model, ())):
            model_of_file.setdefault(name, model)
    return model_of_file
