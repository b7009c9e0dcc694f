"""HunyuanVideo 1.5's single files on the Hub."""

from ..common.published_files import QWEN_VL, Files, PublishedFiles, denoisers_by_format, join_parts, split_file

_REPOSITORY = "Comfy-Org/HunyuanVideo_1.5_repackaged"
_PARTS = (
    split_file(_REPOSITORY, "text_encoders", "byt5_small_glyphxl_fp16", 0.44),
    split_file(_REPOSITORY, "vae", "hunyuanvideo15_vae_fp16", 2.52),
)
_SIGLIP = (split_file(_REPOSITORY, "clip_vision", "sigclip_vision_patch14_384", 0.86),)


def _list_all(name: str, *parts: Files, **sizes_gb: float) -> dict[str, Files]:
    denoisers = denoisers_by_format(_REPOSITORY, f"hunyuanvideo1.5_{name}", **sizes_gb)
    return join_parts(denoisers, QWEN_VL, _PARTS, *parts)


FILES = PublishedFiles(
    sets={
        "hunyuanvideo1.5-t2v-720p": _list_all("720p_t2v", fp16=16.65),
        "hunyuanvideo1.5-i2v-720p": _list_all("720p_i2v", _SIGLIP, fp16=16.65),
        "hunyuanvideo1.5-t2v-480p": _list_all("480p_t2v", fp16=16.65),
        "hunyuanvideo1.5-i2v-480p": _list_all("480p_i2v", _SIGLIP, fp16=16.65),
        "hunyuanvideo1.5-t2v-480p-distilled": _list_all("480p_t2v_cfg_distilled", fp8=8.33, fp16=16.65),
        "hunyuanvideo1.5-i2v-480p-distilled": _list_all("480p_i2v_cfg_distilled", _SIGLIP, fp8=8.33, fp16=16.65),
        "hunyuanvideo1.5-i2v-720p-distilled": _list_all("720p_i2v_cfg_distilled", _SIGLIP, fp8=8.33, fp16=16.65),
        "hunyuanvideo1.5-i2v-480p-step-distilled": _list_all("480p_i2v_step_distilled", _SIGLIP, fp8=8.33, fp16=16.65),
    }
)
