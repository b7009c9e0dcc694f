"""Config values, and models of a family, that tensors do not determine.

Marker tensors, metadata, the user's choice and file names determine them, or the user is asked. The files are as other
programs write them, without a config.
"""

import json
import logging
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.checkpoints.raw_files import MARK, denoiser, write_gguf, write_safetensors
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import file_resolution, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_partial_model, describe_ambiguity
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec

EDIT = lookup_spec("qwen-image-edit-2511")
EDITS = Expected("file.variant_ambiguous", meaning=re.compile("^2511 of Qwen-Image Edit"))
OTHER_MODEL = Expected("file.name_of_another_model")


@cache
def tensors_of(name: str, folder: str = "transformer") -> dict[str, torch.Tensor]:
    return denoiser(lookup_spec(name), folder)


def resolve_files(model_id: str, name: str, **options: bool) -> file_resolution.ResolvedFiles:
    """Return the model that an id resolves to, within the family of `name`."""
    family = [one for one in SPECS if one.family == lookup_spec(name).family]
    return file_resolution.resolve(model_id, family, **options)


# --- a config value ---------------------------------------------------------------------------------------------------

# The file's name, whether it has the marker, its metadata, the user's further choice, and the expected value.
ZERO_TIME = [
    ("qwen_image_edit_2511_fp8mixed.safetensors", True, {}, "", True),
    ("renamed.safetensors", True, {}, "qwen-image-edit-2511", True),
    ("qwen_image_edit_2511_fp8_e4m3fn.safetensors", False, {}, "", True),
    ("qwen-image-edit-2511-Q4_K_M.gguf", False, {}, "", True),
    ("Qwen-Image-Edit-2511-Lightning-bf16.safetensors", False, {}, "", True),
    ("qwen_image_edit_2509_fp8_e4m3fn.safetensors", False, {}, "", False),
    ("Qwen-Image-Edit-2509-Q8_0.gguf", False, {}, "", False),
    ("FireRed-Image-Edit-1.1-transformer.safetensors", False, {}, "qwen-image-edit-2511", OTHER_MODEL),
    ("my_edit.safetensors", False, {}, "qwen-image-edit-2511", True),
    ("my_edit.gguf", False, {}, "qwen-image-edit-2511", True),
    ("my_qwen_image_edit.safetensors", False, {}, "Qwen/Qwen-Image-Edit-2509", False),
    ("my_qwen_image_edit.safetensors", False, {"modelspec.title": "Qwen-Image-Edit-2511 merged"}, "", True),
    ("my_qwen_image_edit.gguf", False, {"general.name": "Qwen Image Edit 2509"}, "", False),
    ("my_qwen_image_edit.safetensors", False, {}, "", EDITS),
    ("qwen_image_edit_fp8_e4m3fn.safetensors", False, {}, "", EDITS),
    ("qwen-image-edit-2509-2511-merge.gguf", False, {}, "", EDITS),
    ("qwen_image_edit_step125110.safetensors", False, {}, "", EDITS),
    ("qwen_image_edit_2511.v2.safetensors", False, {"modelspec.title": "my edit"}, "", True),
    ("qwenImageEdit2511_fp8.safetensors", False, {}, "", True),
    ("qwen_image_edit_2509_bf16.safetensors", False, {}, "qwen-image-edit-2511", OTHER_MODEL),
]


@pytest.mark.parametrize(("name", "is_marked", "said", "more", "wanted"), ZERO_TIME)
def test_resolve_sets_zero_cond_t_for_qwen_image_edit_2511_only(
    name: str, is_marked: bool, said: dict[str, str], more: str, wanted: bool | Expected, tmp_path: Path
):
    tensors = {**tensors_of(EDIT.name), **({MARK: torch.zeros(0)} if is_marked else {})}
    if name.endswith(".gguf"):
        path = write_gguf(tmp_path / name, tensors, "qwen_image", **said)
    else:
        path = write_safetensors(tmp_path / name, tensors, said)
    rest = more if "/" in more else EDIT.miniature.random_id
    model_id = " + ".join(filter(None, [path, more if "/" not in more else "", rest]))
    if isinstance(wanted, Expected):
        with raises_message(CheckpointError, wanted):
            resolve_files(model_id, EDIT.name)
        return
    found = resolve_files(model_id, EDIT.name)
    assert (found.spec.name, found.configs["transformer"]["zero_cond_t"]) == (EDIT.name, wanted)


def find_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the log that ask which edit model a file is; the log has texts alone, without keys."""
    return [text for text in caplog.messages if "Qwen-Image Edit" in text and "2511" in text]


def test_resolve_ambiguous_edit_for_comfyui_graph_warns_and_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """`default_ref_method` of its `model_detection.py` is "index" there; its own node chooses another."""
    path = write_safetensors(tmp_path / "my_qwen_image_edit.safetensors", tensors_of(EDIT.name))
    with caplog.at_level(logging.WARNING):
        found = resolve_files(path, EDIT.name, needs_all=False)
    assert found.configs["transformer"]["zero_cond_t"] is False
    (warned,) = find_warnings(caplog)
    assert "Until then it runs as ComfyUI runs it" in warned


@pytest.mark.parametrize("name", ["qwen_image_2512_bf16.safetensors", "my_portraits.safetensors"])
def test_resolve_text_to_image_file_has_no_edit_warning(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write_safetensors(tmp_path / name, tensors_of(EDIT.name))
    with caplog.at_level(logging.WARNING):
        assert choose_partial_model(SPECS, path).spec.name == "qwen-image-2512"
        assert resolve_files(f"{path} + {tmp_path / 'folder'}", EDIT.name).spec.name == "qwen-image-2512"
    assert "zero_cond_t" not in caplog.text and not find_warnings(caplog)


LANGUAGE = {
    "blk.0.attn_q.weight": (64, 32), "blk.0.attn_k.weight": (32, 32), "blk.0.ffn_gate.weight": (48, 32),
    "token_embd.weight": (50, 32), "blk.35.attn_q.weight": (64, 32),
}  # fmt: skip
NORMED = {"blk.0.attn_q_norm.weight": (16,), "blk.0.attn_k_norm.weight": (16,)}
BIASED = {"blk.0.attn_k.bias": (32,)}


@pytest.mark.parametrize(
    ("model", "architecture", "more"),
    [("flux2-klein-4b", "qwen3", NORMED), ("qwen-image-2512", "qwen2vl", BIASED), ("flux2-dev", "other", {})],
)
def test_resolve_gguf_language_model_takes_rope_and_eps_from_fields(
    model: str, architecture: str, more: dict, tmp_path: Path
):
    """Qwen3 of 2507 has another base of its rotary embedding than the one before, and the same tensors."""
    spec = lookup_spec(model)
    tensors = {name: torch.zeros(shape) for name, shape in (LANGUAGE | more).items()}
    own = {f"{architecture}.rope.freq_base": 5e6, f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5}
    path = write_gguf(tmp_path / "encoder.gguf", tensors, architecture, **own)
    config = file_resolution.resolve(f"{path} + {spec.miniature.random_id}", [spec]).configs["text_encoder"]
    config = config.get("text_config", config)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (5e6, 1e-5)
    path = write_gguf(tmp_path / "plain.gguf", tensors, architecture)
    config = file_resolution.resolve(f"{path} + {spec.miniature.random_id}", [spec]).configs["text_encoder"]
    published = spec.component("text_encoder").config
    published = published.get("text_config", published)
    assert config.get("text_config", config)["rope_theta"] == published["rope_theta"]
    for number in (-1.0, 0.0, 3e38, float("nan"), float("inf")):
        path = write_gguf(tmp_path / "bad.gguf", tensors, architecture, **{f"{architecture}.rope.freq_base": number})
        with raises_message(
            CheckpointError,
            "file.number_outside",
            title=re.compile(r"rope\.freq_base$"),
            low="1.0",
            high=re.compile(r"^1"),
        ):
            file_resolution.resolve(f"{path} + {spec.miniature.random_id}", [spec])


# --- a model of a family ----------------------------------------------------------------------------------------------

# A model, how its denoiser's file is called, and the model that it is taken for; None where the user is asked.
MODELS = [
    ("flux2-klein-4b", "flux-2-klein-4b.safetensors", "flux2-klein-4b"),
    ("flux2-klein-4b", "flux-2-klein-base-4b-Q4_K_M.gguf", "flux2-klein-base-4b"),
    ("flux2-klein-4b", "flux-2-klein-4b-Q8_0.gguf", "flux2-klein-4b"),
    ("flux2-klein-4b", "my_4b_base_of_klein.safetensors", "flux2-klein-base-4b"),
    ("flux2-klein-4b", "my_klein.safetensors", None),
    ("flux2-klein-4b", "flux-2-klein-4b-portraits.safetensors", None),
    ("z-image-turbo", "z_image_turbo_bf16.safetensors", "z-image-turbo"),
    ("z-image-turbo", "z_image_bf16.safetensors", "z-image"),
    ("z-image-turbo", "z-image-turbo-Q5_K_S.gguf", "z-image-turbo"),
    ("z-image-turbo", "z_image_portraits.safetensors", None),
    ("z-image-turbo", "portraits.safetensors", None),
    (
        "hunyuanvideo1.5-t2v-720p", "hunyuanvideo1.5_480p_t2v_cfg_distilled_fp16.safetensors",
        "hunyuanvideo1.5-t2v-480p-distilled",
    ),
    ("hunyuanvideo1.5-t2v-720p", "hunyuanvideo1.5_720p_t2v_fp16.safetensors", "hunyuanvideo1.5-t2v-720p"),
    ("hunyuanvideo1.5-t2v-720p", "hunyuanvideo1.5-480p-t2v-Q6_K.gguf", "hunyuanvideo1.5-t2v-480p"),
    ("hunyuanvideo1.5-t2v-720p", "hunyuan_t2v.safetensors", None),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name", "wanted"), MODELS)
def test_resolve_ambiguous_model_uses_file_name_or_raises(model: str, name: str, wanted: str | None, tmp_path: Path):
    spec = lookup_spec(model)
    write = write_gguf if name.endswith(".gguf") else write_safetensors
    path = write(tmp_path / name, tensors_of(model), *(["any"] if write is write_gguf else []))
    others = tmp_path / "folder"  # of a model that says nothing of itself
    if wanted:
        found = resolve_files(f"{path} + {others}", model)
        assert (found.spec.name, found.assumed) == (wanted, "")
        return
    with raises_message(CheckpointError, "file.model_ambiguous", names=re.compile(f"[+] {spec.name}")):
        resolve_files(f"{path} + {others}", model)
    assert resolve_files(f"{path} + {spec.name} + {others}", model).spec is spec
    assert resolve_files(f"{path} + {spec.published.hub_id}", model).spec is spec
    # ComfyUI's own samplers are told shift and guidance by the graph.
    choose_partial_model(SPECS, path)


@pytest.mark.parametrize(
    ("name", "is_marked", "wanted", "is_assumed"),
    [
        ("qwen_image_2512_fp8_e4m3fn.safetensors", False, "qwen-image-2512", False),
        ("qwen-image-2512-Q4_K_M.gguf", False, "qwen-image-2512", False),
        ("qwen_image_edit_2509_bf16.safetensors", False, "qwen-image-edit-2511", False),
        ("renamed.safetensors", True, "qwen-image-edit-2511", False),
        ("my_portraits.safetensors", False, "qwen-image-2512", True),
    ],
)
def test_resolve_edit_model_by_marker_or_file_name(
    name: str, is_marked: bool, wanted: str, is_assumed: bool, tmp_path: Path
):
    tensors = {**tensors_of(EDIT.name), **({MARK: torch.zeros(0)} if is_marked else {})}
    write = write_gguf if name.endswith(".gguf") else write_safetensors
    path = write(tmp_path / name, tensors, *(["any"] if write is write_gguf else []))
    found = resolve_files(f"{path} + {tmp_path / 'folder'}", EDIT.name)
    assert found.spec.name == wanted
    assert ("neither tensors nor names tell it from another" in found.assumed) == is_assumed


def test_resolve_models_with_equal_network_assumes_first_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write_safetensors(tmp_path / "my_video.safetensors", tensors_of("wan2.1-i2v-14b-480p"))
    model_id = f"{path} + {tmp_path / 'folder'}"
    with caplog.at_level(logging.WARNING):
        found = resolve_files(model_id, "wan2.1-i2v-14b-480p")
    others = {"wan2.1-i2v-14b-480p", "wan2.1-i2v-14b-720p"} - {found.spec.name}
    said = f"neither tensors nor names tell it from another: add + {others.pop()} to model_id if it is that"
    assert found.assumed == said and said in caplog.text
    assert describe_ambiguity(found.spec, model_id) == said
    assert resolve_files(f"{path} + wan2.1-i2v-14b-720p + {tmp_path}", "wan2.1-i2v-14b-480p").spec.name.endswith("720p")


def test_resolve_folder_prefers_published_vae_name(tmp_path: Path):
    """Qwen-Image's VAE has the tensors of Wan 2.1's, with other values."""
    wan, source = lookup_spec("wan2.1-t2v-14b"), tiny.ensure_random(lookup_spec("wan2.1-t2v-14b"))
    vae, encoder = tmp_path / "vae", tmp_path / "text_encoders"
    for name in ("qwen_image_vae", "wan_2.1_vae", "zz_vae"):
        single_files.write(vae / f"{name}.safetensors", source / "vae", "AutoencoderKLWan")
    single_files.write(encoder / "umt5.safetensors", source / "text_encoder", "UMT5EncoderModel")
    path = single_files.write(tmp_path / "wan2.1_t2v_14B.safetensors", source / "transformer", "WanTransformer3DModel")
    found = file_resolution.resolve(str(path), [wan], (str(vae), str(encoder)))
    assert found.parts["vae"].path.name == "wan_2.1_vae.safetensors"
    (vae / "wan_2.1_vae.safetensors").unlink()
    assert (
        file_resolution.resolve(str(path), [wan], (str(vae), str(encoder))).parts["vae"].path.name
        == "zz_vae.safetensors"
    )


# --- relatives that compute something else ----------------------------------------------------------------------------

RELATIVES = [
    ("wan2.2-t2v-a14b", "wan2.2_bernini_r_{}_noise_fp8_scaled.safetensors", "Bernini-R"),
    ("wan2.2-t2v-a14b", "Bernini-R-{}-noise-Q4_K_M.gguf", "Bernini-R"),
    ("wan2.2-t2v-a14b", "Wan22_BerniniR_{}_fp8.safetensors", "Bernini-R"),
    ("wan2.1-t2v-14b", "Phantom-Wan-14B_fp16.safetensors", "Phantom"),
    ("wan2.1-t2v-1.3b", "Wan2_1-Phantom-1.3B_fp16.safetensors", "Phantom"),
    ("wan2.1-t2v-1.3b", "causal_forcing-framewise.safetensors", "makes blocks of frames in turn"),
    ("wan2.1-t2v-1.3b", "self_forcing_dmd.safetensors", "makes blocks of frames in turn"),
    ("wan2.1-t2v-14b", "Wan2_1-SkyReels-V2-DF-14B-540P_fp16.safetensors", "SkyReels V2"),
    ("wan2.1-i2v-14b-480p", "chrono_edit_14B_fp16.safetensors", "ChronoEdit"),
    ("wan2.1-t2v-14b", "Wan2_1-T2V-14B-Phantom_fp8_e4m3fn_scaled_KJ.safetensors", "Phantom"),
    ("wan2.1-t2v-14b", "Wan2_1_mocha-14B-preview_fp8_e4m3fn_scaled_KJ.safetensors", "MoCha"),
    ("wan2.1-i2v-14b-480p", "Wan2_1-I2V-14B-Bindweave_fp8_scaled_KJ.safetensors", "BindWeave"),
    ("wan2.1-i2v-14b-480p", "Wan2_1_SkyreelsA2_fp8_e4m3fn.safetensors", "SkyReels A2 or V3"),
    ("wan2.1-t2v-14b", "Wan21-SkyReelsV3-R2V_fp8_scaled_mixed.safetensors", "SkyReels A2 or V3"),
    ("wan2.1-t2v-1.3b", "Wan2_1-SkyReels-V2-DF-1_3B-540P_fp32.safetensors", "SkyReels V2"),
    ("wan2.1-t2v-1.3b", "rolling_forcing_dmd.safetensors", "makes blocks of frames in turn"),
    ("wan2.1-t2v-1.3b", "LongLive-1.3B.safetensors", "makes blocks of frames in turn"),
    ("wan2.1-t2v-14b", "krea-realtime-video-14b-Q4_K_M.gguf", "makes blocks of frames in turn"),
    ("wan2.1-t2v-1.3b", "Wan2_1-T2V-1_3B_FlashVSR_fp32.safetensors", "FlashVSR"),
    ("wan2.1-t2v-1.3b", "Wan2_1_UniLumos_1_3B_bf16.safetensors", "UniLumos"),
    ("wan2.1-t2v-1.3b", "Wan2_1-T2V-1-3B-EchoShot_fp16.safetensors", "several shots"),
    ("wan2.2-t2v-a14b", "Wan2_2-T2V-A14B-{}-HoloCine-full_fp8_e4m3fn_scaled_KJ.safetensors", "several shots"),
    ("wan2.2-t2v-a14b", "HoloCine-Full-{}Noise-Q4_K_M.gguf", "several shots"),
    ("wan2.1-t2v-1.3b", "FlowRVS_dit.safetensors", "FlowRVS"),
    ("wan2.1-t2v-1.3b", "flow_rvs_1.3B_bf16.safetensors", "FlowRVS"),
    ("wan2.2-i2v-a14b", "wandancer_{}_noise_14B_fp8_scaled.safetensors", "music or poses"),
    ("wan2.1-i2v-14b-480p", "Wan21_SteadyDancer_fp8_e4m3fn_scaled_KJ.safetensors", "music or poses"),
    ("wan2.1-i2v-14b-480p", "Wan21_I2V_SteadyDancer_fp16-Q5_K_M_fix_5d_tensor.gguf", "music or poses"),
    ("wan2.1-t2v-14b", "LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors", "LongCat-Video"),
    ("wan2.1-t2v-1.3b", "Wan2_1_kwai_recammaster_1_3B_step20000_bf16.safetensors", "given a video"),
    ("wan2.2-ti2v-5b", "Lucy-Edit-Dev-fp16.safetensors", "given a video"),
    ("wan2.2-ti2v-5b", "Wan2_2-Fun-5B-Control_bf16.safetensors", "Fun Control or Fun Camera"),
    ("wan2.2-ti2v-5b", "Wan_2_2_Ovi_video_model_bf16.safetensors", "more than text"),
    ("wan2.1-t2v-14b", "Wan2_1-T2V-Lynx_full_14B.safetensors", "more than text"),
    ("wan2.1-i2v-14b-480p", "Wan2_1-InfiniteTalk_Single_Q8.gguf", "more than text"),
    ("wan2.2-i2v-a14b", "Wan2_2-Fun-Control-A14B-{}_fp8_e4m3fn_scaled_KJ_fixed.safetensors", "Fun Control"),
    ("flux2-klein-9b", "flux-2-klein-9b-kv-fp8.safetensors", "klein KV"),
    ("flux2-klein-4b", "flux-2-klein-4b-kv-Q4_K_M.gguf", "klein KV"),
    ("z-image", "z_image_de_turbo_v1_bf16.safetensors", "trained to be guided again"),
    ("hunyuanvideo1.5-i2v-720p", "hunyuanvideo1.5_720p_i2v_distilled_sparse.safetensors", "sparse attention"),
    (
        "wan2.1-t2v-14b",
        "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
        Expected("file.expert_of_another_model", level="high"),
    ),
    ("wan2.1-t2v-14b", "Wan2.2-T2V-A14B-LowNoise-Q4_K_M.gguf", Expected("file.expert_of_another_model", level="low")),
    (
        "wan2.1-t2v-14b",
        "Wan2_2-T2V-A14B_HIGH_fp8_e4m3fn_scaled_KJ.safetensors",
        Expected("file.expert_of_another_model", level="high"),
    ),
]


@pytest.mark.parametrize(("model", "name", "what"), RELATIVES)
def test_resolve_incompatible_relative_by_name_raises_checkpoint_error(
    model: str, name: str, what: str | Expected, tmp_path: Path
):
    names = [name.format(noise) for noise in ("High", "Low")] if "{}" in name else [name]
    paths = []
    for one in names:
        write = write_gguf if one.endswith(".gguf") else write_safetensors
        paths.append(write(tmp_path / one, tensors_of(model), *(["any"] if write is write_gguf else [])))
    model_id = " + ".join(paths)
    if isinstance(what, str):
        what = Expected("file.name_contradicts_tensors", what=re.compile(what))
    with raises_message(CheckpointError, what):
        resolve_files(model_id, model)
    # A model that the user names is used; with ComfyUI's own nodes, the graph determines the rest.
    assert resolve_files(f"{model_id} + {model} + {tmp_path}", model).spec.name == model
    assert choose_partial_model(SPECS, paths[0]).spec.family == lookup_spec(model).family


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wan2.1_t2v_14B_bf16", ""),
        ("Wan2_1-MoviiGen1_1_fp8_low_vram", ""),
        ("FastWan_T2V_14B_480p", "distilled by its name (fastwan)"),
        ("wan2.1-t2v-14b-StepDistill-CfgDistill-Lightx2v", "distilled by its name (distill)"),
        ("Wan2_1-T2V-14B_CausVid_fp8_e4m3fn", "distilled by its name (causvid)"),
        ("Wan2_1-AccVideo-T2V-14B_fp8", "distilled by its name (accvid)"),
        ("TurboWan2.1-T2V-14B-480P", "distilled by its name (turbo)"),
        ("Wan2_1-Wan-I2V-MAGREF-14B_low_vram", ""),
        ("wan2.1_t2v_14B_4steps", "distilled by its name (4steps)"),
    ],
)
def test_resolve_distilled_relative_reports_assumption(name: str, said: str, tmp_path: Path):
    path = write_safetensors(tmp_path / f"{name}.safetensors", tensors_of("wan2.1-t2v-14b"))
    found = resolve_files(f"{path} + wan2.1-t2v-14b + {tmp_path / 'folder'}", "wan2.1-t2v-14b")
    assert found.spec.name == "wan2.1-t2v-14b" and said in found.assumed and bool(said) == bool(found.assumed)


def refuse_wan(other: str) -> Expected:
    return Expected("file.wan_variant_unsupported", other=re.compile(f"^{re.escape(other)}"))


def refuse_cogvideox(other: str) -> Expected:
    return Expected("file.cogvideox_variant_unsupported", of_channels=re.compile(f"^{re.escape(other)}"))


# A model, the additional or differently shaped tensors of another network, and that network's name, or the message.
OTHERS = [
    ("qwen-image-2512", {"time_text_embed.addition_t_embedding.weight": (2, 8)}, "Qwen-Image Layered"),
    ("qwen-image-2512", {"controlnet_blocks.0.weight": (8, 8)}, "a ControlNet of Qwen-Image"),
    ("z-image-turbo", {"siglip_embedder.0.weight": (8,)}, "Z-Image Omni"),
    ("z-image-turbo", {"dec_net.cond_embed.weight": (8, 8)}, "Z-Image in pixels"),
    ("wan2.1-t2v-1.3b", {"blocks.0.to_gate_compress.weight": (8, 8)}, "FastWan with sparse attention"),
    ("wan2.1-t2v-14b", {"patch_embedding.weight": (96, 48, 1, 2, 2)}, refuse_wan("Wan 2.1 Fun Control")),
    ("wan2.1-t2v-14b", {"patch_embedding.weight": (96, 52, 1, 2, 2)}, refuse_wan("Wan 2.2 Fun Control")),
    ("wan2.2-ti2v-5b", {"patch_embedding.weight": (96, 100, 1, 2, 2)}, refuse_wan("Wan 2.2 Fun Inpaint 5B")),
    ("wan2.2-ti2v-5b", {"patch_embedding.weight": (96, 148, 1, 2, 2)}, refuse_wan("Wan 2.2 Fun Control 5B")),
    ("wan2.2-ti2v-5b", {"patch_embedding.weight": (96, 96, 1, 2, 2)}, refuse_wan("Lucy Edit")),
    # Names of the published files, as WanVideoWrapper's loader and ComfyUI's detection read them.
    ("wan2.1-t2v-14b", {"blocks.0.cross_attn.ip_adapter.registers": (1, 16, 8)}, "Lynx"),
    ("wan2.1-t2v-14b", {"blocks.0.cross_attn.ip_adapter.to_v_ip.weight": (8, 8)}, "Lynx"),
    ("wan2.1-t2v-14b", {"blocks.0.self_attn.ref_adapter.to_k_ref.weight": (8, 8)}, "Lynx"),
    ("wan2.1-t2v-1.3b", {"blocks.0.self_attn.attn_op.local_attn.proj_l.weight": (8, 8)}, "TurboDiffusion's Wan"),
    ("wan2.1-t2v-1.3b", {"blocks.0.attn1.attn_impl.proj_l.weight": (8, 8)}, "TurboDiffusion's Wan"),
    ("wan2.1-t2v-1.3b", {"blocks.0.cam_encoder.weight": (8, 12), "blocks.0.projector.weight": (8, 8)}, "ReCamMaster"),
    (
        "wan2.1-i2v-14b-480p",
        {
            "condition_embedding_align.cross_attn.in_proj_bias": (8,),
            "patch_embedding_fuse.weight": (8, 68, 1, 2, 2),
            "patch_embedding_ref_c.weight": (8, 16, 1, 2, 2),
            "condition_embedding_temporal.0.conv.weight": (8,),
        },
        "SteadyDancer",
    ),
    ("wan2.1-i2v-14b-480p", {"text_projection.0.weight": (8, 8)}, "BindWeave"),
    ("wan2.1-t2v-14b", {"image_to_cond.conv_in.bias": (16,)}, "One-to-All Animation"),
    ("wan2.1-t2v-14b", {"blocks.0.ref_attn_k_img.weight": (8, 8)}, "One-to-All Animation"),
    ("wan2.1-t2v-14b", {"blocks.0.control_blocks_dense.cross_attn.k.weight": (8, 8)}, "LongVie 2"),
    ("wan2.1-t2v-14b", {"blocks.0.motion_attn.k.weight": (8, 8)}, "MTV-Crafter"),
    ("wan2.1-t2v-14b", {"blocks.0.ffn.w1.weight": (8, 8)}, "LongCat-Video"),
    ("wan2.1-i2v-14b-480p", {"patch_embedding_global.weight": (8, 36, 1, 2, 2)}, "WanDancer"),
    ("wan2.1-i2v-14b-480p", {"pose_patch_embedding.weight": (8, 16, 1, 2, 2)}, "Wan 2.2 Animate"),
    ("wan2.1-i2v-14b-480p", {"blocks.0.cross_attn.emo_k_proj.weight": (8, 8)}, "FlashPortrait"),
    ("wan2.1-t2v-14b", {"audio_proj.audio_proj_glob_1.layer.weight": (8, 8)}, "a model with sound"),
    ("wan2.1-i2v-14b-480p", {"blocks.0.audio_cross_attn.kv_linear.weight": (8, 8)}, "a model with sound"),
    ("wan2.2-ti2v-5b", {"blocks.0.cross_attn.k_fusion.weight": (8, 8)}, "Ovi"),
    ("wan2.1-t2v-1.3b", {"fps_embedding.weight": (2, 8)}, "SkyReels V2"),
    ("wan2.1-t2v-1.3b", {"LQ_proj_in.norm1.gamma": (8,)}, "FlashVSR"),
    ("wan2.1-t2v-1.3b", {"add_conv_in.weight": (8, 32, 1, 2, 2)}, "given more latents"),
    ("hunyuanvideo1.5-t2v-720p", {"img_in.proj.weight": (96, 98, 1, 1, 1)}, Expected("file.upscaler_unsupported")),
    ("cogvideox1.5-5b", {"patch_embed.proj.weight": (96, 48 * 8)}, refuse_cogvideox("a CogVideoX that inpaints")),
    ("cogvideox1.5-5b", {"patch_embed.proj.weight": (96, 33 * 8)}, refuse_cogvideox("CogVideoX Fun")),
]


@pytest.mark.parametrize(("model", "more", "what"), OTHERS)
def test_resolve_other_network_raises_checkpoint_error_with_its_name(
    model: str, more: dict[str, tuple], what: str | Expected, tmp_path: Path
):
    tensors = {**tensors_of(model), **{name: torch.zeros(shape) for name, shape in more.items()}}
    path = write_safetensors(tmp_path / "file.safetensors", tensors)
    if isinstance(what, str):
        what = Expected("file.network_unsupported", what=re.compile(re.escape(what)))
    with raises_message(CheckpointError, what):
        resolve_files(f"{path} + {tmp_path / 'folder'}", model)


def test_resolve_gguf_with_invalid_title_bytes_ignores_title(tmp_path: Path):
    """A field may contain any bytes."""
    path = Path(
        write_gguf(tmp_path / "my.gguf", tensors_of("z-image-turbo"), "any", **{"general.name": "z image turbo"})
    )
    assert resolve_files(f"{path} + {tmp_path}", "z-image-turbo").spec.name == "z-image-turbo"
    path.write_bytes(path.read_bytes().replace(b"z image turbo", b"z image \xff\xfe\xfdbo"))
    with raises_message(CheckpointError, "file.model_ambiguous"):
        resolve_files(f"{path} + {tmp_path}", "z-image-turbo")


def test_resolve_safetensors_ignores_non_numeric_metadata(tmp_path: Path):
    spec = lookup_spec("qwen-image-2512")
    layers = {"model.layers.0.self_attn.q_proj.weight": (64, 32), "model.layers.0.self_attn.k_proj.weight": (32, 32)}
    layers |= {"model.layers.0.self_attn.k_proj.bias": (32,), "model.layers.0.mlp.gate_proj.weight": (48, 32)}
    tensors = {name: torch.zeros(shape) for name, shape in {**layers, "model.embed_tokens.weight": (50, 32)}.items()}
    path = write_safetensors(tmp_path / "encoder.safetensors", tensors, {"rope_theta": "many", "rms_norm_eps": "1e300"})
    config = file_resolution.resolve(f"{path} + {spec.miniature.random_id}", [spec]).configs["text_encoder"]
    own = spec.component("text_encoder").config
    assert all(config[key] == own[key] for key in ("rope_theta", "rms_norm_eps"))


@pytest.mark.parametrize("said", [{"causal_ar": True}, {"model_type": "flow_rvs"}, {"model_type": "vace"}], ids=str)
def test_choose_partial_model_reads_comfyui_metadata(said: dict, tmp_path: Path):
    """As in `detect_unet_config`."""
    metadata = {"config": json.dumps({"transformer": said})}
    path = write_safetensors(tmp_path / "file.safetensors", tensors_of("wan2.1-t2v-14b"), metadata)
    with raises_message(CheckpointError, "file.wan_variant_unsupported"):
        choose_partial_model(SPECS, path)
