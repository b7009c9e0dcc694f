"""Wan's single files on the Hub: Comfy-Org's repackaged weights."""

from ..common.published_files import Files, PublishedFiles, denoisers_by_format, join_parts, list_names, split_file

_WAN21, _WAN22 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
_UMT5 = {
    "fp8": (split_file(_WAN21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled", 6.74),),
    "fp16": (split_file(_WAN21, "text_encoders", "umt5_xxl_fp16", 11.37),),
}
_VAE = (split_file(_WAN21, "vae", "wan_2.1_vae", 0.25),)
_VAE22 = (split_file(_WAN22, "vae", "wan2.2_vae", 1.41),)
_CLIP = (split_file(_WAN21, "clip_vision", "clip_vision_h", 1.26),)


def _list_all(repository: str, name: str, *parts: Files, **sizes_gb: float) -> dict[str, Files]:
    return join_parts(denoisers_by_format(repository, name, **sizes_gb), _UMT5, *parts)


_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_scaled")
FILES = PublishedFiles(
    sets={
        "wan2.1-t2v-14b": _list_all(_WAN21, "wan2.1_t2v_14B", _VAE, fp8=14.29, fp16=28.58),
        "wan2.1-t2v-1.3b": _list_all(_WAN21, "wan2.1_t2v_1.3B", _VAE, fp16=2.84),
        "wan2.1-i2v-14b-480p": _list_all(_WAN21, "wan2.1_i2v_480p_14B", _VAE, _CLIP, fp8=16.4, fp16=32.79),
        "wan2.1-i2v-14b-720p": _list_all(_WAN21, "wan2.1_i2v_720p_14B", _VAE, _CLIP, fp8=16.4, fp16=32.79),
        "wan2.1-flf2v-14b-720p": _list_all(_WAN21, "wan2.1_flf2v_720p_14B", _VAE, _CLIP, fp16=32.79),
        "wan2.2-t2v-a14b": _list_all(_WAN22, "wan2.2_t2v_{}_noise_14B", _VAE, fp8=14.29, fp16=28.58),
        "wan2.2-i2v-a14b": _list_all(_WAN22, "wan2.2_i2v_{}_noise_14B", _VAE, fp8=14.29, fp16=28.58),
        "wan2.2-ti2v-5b": _list_all(_WAN22, "wan2.2_ti2v_5B", _VAE22, fp16=10.0),
    },
    more_denoisers={
        "wan2.1-t2v-14b": list_names("wan2.1_t2v_14B", *_FORMATS),
        "wan2.1-t2v-1.3b": list_names("wan2.1_t2v_1.3B", "bf16"),
        "wan2.1-i2v-14b-480p": (
            *list_names("wan2.1_i2v_480p_14B", *_FORMATS),
            "Wan2_1-I2V-14B-480p_fp8_e4m3fn_scaled_KJ.safetensors",
        ),
        "wan2.1-i2v-14b-720p": list_names("wan2.1_i2v_720p_14B", *_FORMATS),
        "wan2.1-flf2v-14b-720p": list_names("wan2.1_flf2v_720p_14B", *_FORMATS),
        "wan2.2-t2v-a14b": list_names("wan2.2_t2v_{}_noise_14B", "int8_convrot"),
        "wan2.2-i2v-a14b": list_names("wan2.2_i2v_{}_noise_14B", "int8_convrot"),
    },
    more_parts={"wan2.1-t2v-14b": ("Wan2_1_VAE_bf16.safetensors",)},
)
