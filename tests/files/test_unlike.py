"""Files that cannot be used as they were named: the sentence says what came, what is taken, and what to do."""

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, file_resolution, tiny
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import load_file, save_file

WAN, BOTH, EDIT, FLUX2, Z_IMAGE, FIVE_B = (
    "wan2.1-t2v-14b", "wan2.2-i2v-a14b", "qwen-image-edit-2511", "flux2-dev", "z-image-turbo", "wan2.2-ti2v-5b"
)  # fmt: skip


class Home:
    """A folder with networks of miniatures as single files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, model: str, part: str, name: str = "") -> Path:
        spec = lookup_spec(model)
        path = self.folder / (name or f"{model}-{part}.safetensors")
        return single_files.write_folder(path, tiny.ensure_random(spec), spec, part)

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> Path:
        save_file({key: x.clone().contiguous() for key, x in tensors.items()}, self.folder / name)
        return self.folder / name

    def said(self, model: str, *entries: Path | str) -> str:
        """Of a model of these files, whose other parts are the miniature's; empty where it is one."""
        spec = lookup_spec(model)
        try:
            found = checkpoint.locate(spec, " + ".join(map(str, entries)))
            found.check()
            found.configs(SilentProgress())
        except CheckpointError as error:
            return str(error)
        return ""

    def with_rest(self, model: str, *entries: Path | str) -> str:
        return self.said(model, *entries, lookup_spec(model).miniature.random_id)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


# --- one part of several ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan2.1_t2v_14B-0000{}-of-00002", "diffusion_pytorch_model-{}-of-2"])
@pytest.mark.parametrize("number", [1, 2])
def test_locate_single_shard_raises_checkpoint_error(name: str, number: int, home: Home):
    tensors = load_file(home.file(WAN, "transformer"))
    half = sorted(tensors)[:: 2 if number == 1 else 3]
    path = home.write(f"{name.format(number)}.safetensors", {key: tensors[key] for key in half})
    parameters = {"path": path, "number": number, "total": 2, "way": "file.choose_whole_folder_or_file"}
    assert_message(home.with_rest(WAN, path), "file.part_of_checkpoint", **parameters)


def test_locate_only_shard_of_one_is_accepted(home: Home):
    assert home.with_rest(WAN, home.file(WAN, "transformer", "wan2.1_t2v_14B-00001-of-00001.safetensors")) == ""


@pytest.mark.parametrize(
    ("name", "fields", "number"),
    [
        ("wan-00002-of-00003.gguf", {}, 2),
        ("wan-00001-of-00003.gguf", {"split.no": 0, "split.count": 3}, 1),
        ("renamed.gguf", {"split.no": 1, "split.count": 3}, 2),
    ],
)
def test_locate_gguf_split_part_raises_checkpoint_error(name: str, fields: dict[str, int], number: int, home: Home):
    """The fields are those of llama.cpp's gguf-split."""
    path = write_gguf(home.folder / name, {"blocks.0.self_attn.q.weight": np.ones((4, 4), np.float32)}, "wan", fields)
    parameters = {"path": path, "number": number, "total": 3, "way": "file.join_gguf_parts"}
    assert_message(home.with_rest(WAN, path), "file.part_of_checkpoint", **parameters)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], architecture: str, fields: dict[str, int]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        writer.add_uint16(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- what sees --------------------------------------------------------------------------------------------------------


def test_locate_mmproj_file_raises_checkpoint_error(home: Home):
    tensors = {"v.blk.0.attn_q.weight": np.ones((4, 4), np.float32), "mm.0.weight": np.ones((4, 4), np.float32)}
    path = write_gguf(home.folder / "mmproj-Qwen2.5-VL-7B-Instruct-F16.gguf", tensors, "clip", {})
    said = home.with_rest(EDIT, home.file(EDIT, "transformer"), path)
    assert_message(said, "file.vision_tower_only", path=path)


def test_locate_text_encoder_without_vision_raises_for_edit_model(home: Home):
    tensors = load_file(home.file(EDIT, "text_encoder"))
    blind = home.write("qwen_2.5_7b.safetensors", {name: x for name, x in tensors.items() if "visual." not in name})
    said = home.with_rest(EDIT, home.file(EDIT, "transformer"), blind)
    title, name = "Qwen-Image Edit 2511", "qwen_2.5_vl_7b_fp8_scaled.safetensors"
    advice = Expected("checkpoint.choose_model_such_as", title=title, name=name)
    key = "checkpoint.text_encoder_without_vision"
    assert_message(said, key, path=blind, prefixes="visual.", title=title, advice=advice)
    assert home.with_rest("qwen-image-2512", home.file("qwen-image-2512", "transformer"), blind) == ""


def test_resolve_edit_model_skips_text_encoder_without_vision(home: Home):
    folder = home.folder / "text_encoders"
    folder.mkdir()
    tensors = load_file(home.file(EDIT, "text_encoder"))
    save_file({name: x for name, x in tensors.items() if "visual." not in name}, folder / "blind.safetensors")
    entries = [str(home.file(EDIT, "transformer")), str(home.file(EDIT, "vae"))]
    spec = lookup_spec(EDIT)
    with raises_message(CheckpointError, "checkpoint.component_not_found", folder="text_encoder"):
        file_resolution.resolve(" + ".join(entries), [spec], (str(folder),))
    home.file(EDIT, "text_encoder", "text_encoders/sees.safetensors")
    found = file_resolution.resolve(" + ".join(entries), [spec], (str(folder),))
    assert found.parts["text_encoder"].path.name == "sees.safetensors"


# --- codes ------------------------------------------------------------------------------------------------------------

_I8, _I32 = torch.zeros(4, 4, dtype=torch.int8), torch.zeros(4, 4, dtype=torch.int32)
CODES = {
    "SVDQuant (Nunchaku)": {"qweight": _I8, "wscales": torch.ones(4), "smooth_factor": torch.ones(4)},
    "SVDQuant (Nunchaku), fp4": {"qweight": _I8, "wscales": torch.ones(4), "wtscale": torch.ones(1)},
    "SVDQuant (Nunchaku), its modulations": {"qweight": _I32, "wscales": torch.ones(4), "wzeros": torch.ones(4)},
    "GPTQ, AWQ or AutoRound": {"qweight": _I32, "scales": torch.ones(4), "qzeros": _I32},
}


@pytest.mark.parametrize("writer", CODES)
def test_locate_unsupported_codes_name_their_format(writer: str, home: Home):
    path = home.write(
        "svdq-int4_r32-qwen-image.safetensors",
        {f"transformer_blocks.0.attn.to_qkv.{name}": tensor for name, tensor in CODES[writer].items()},
    )
    said = home.with_rest(EDIT, path)
    method = re.compile("^" + re.escape(writer.partition(", ")[0]))
    assert_message(said, "file.weights_quantized", path=path, method=method, advice="file.codes_unsupported")


# --- networks of other models -----------------------------------------------------------------------------------------


def refuse_config(key: str, value: object, need: object, title: str, name: str, **parameters: object) -> Expected:
    return Expected(
        "compatibility.file_config_unsupported",
        title=title,
        key=key,
        state=Expected("compatibility.has_value", value=value),
        need=need,
        advice=Expected("checkpoint.choose_model_such_as", title=title, name=name),
        **parameters,
    )


@pytest.mark.parametrize(
    ("model", "other", "expected"),
    [
        (WAN, FIVE_B, refuse_config("is_residual", "true", "false", "Wan 2.1 T2V 14B", "wan_2.1_vae.safetensors")),
        (FIVE_B, WAN, refuse_config("in_channels", 3, 12, "Wan 2.2 TI2V 5B", "wan2.2_vae.safetensors")),
        (
            Z_IMAGE,
            FLUX2,
            Expected(
                "checkpoint.component_not_of_model",
                class_name="AutoencoderKLFlux2",
                title="Z-Image Turbo",
                free="Qwen3ForCausalLM, ZImageTransformer2DModel, AutoencoderKL",
            ),
        ),
    ],
)
def test_locate_vae_of_other_model_raises_checkpoint_error(model: str, other: str, expected: Expected, home: Home):
    found = home.with_rest(model, home.file(model, "transformer"), home.file(other, "vae"))
    assert_message(found, expected)
    assert "config" not in found, found


def test_locate_vae_with_other_latents_raises_checkpoint_error(home: Home):
    """Stable Diffusion's, of 4 channels."""
    tensors = load_file(home.file(Z_IMAGE, "vae"))
    tensors["decoder.conv_in.weight"] = tensors["decoder.conv_in.weight"][:, :4]
    path = home.write("sd_vae.safetensors", tensors)
    expected = refuse_config(
        "latent_channels", 4, 16, "Z-Image Turbo", "ae.safetensors", model_id=path, class_name="AutoencoderKL"
    )
    assert_message(home.with_rest(Z_IMAGE, home.file(Z_IMAGE, "transformer"), path), expected)


def test_locate_mismatched_files_raise_checkpoint_error(home: Home):
    """A denoiser for states of another width than the encoder's."""
    tensors = load_file(home.file(WAN, "transformer"))
    width = tensors["text_embedding.0.weight"].shape[1]
    tensors["text_embedding.0.weight"] = tensors["text_embedding.0.weight"].repeat(1, 2)
    denoiser, encoder = home.write("wide.safetensors", tensors), home.file(WAN, "text_encoder")
    assert_message(
        home.with_rest(WAN, denoiser, encoder),
        "compatibility.files_contradict",
        title="Wan 2.1 T2V 14B",
        key="text_dim",
        value=2 * width,
        file=denoiser,
        times="",
        other_key="d_model",
        other_file=encoder,
        other_value=width,
    )


def test_locate_vae_decoder_only_raises_checkpoint_error(home: Home):
    tensors = load_file(home.file(FLUX2, "vae"))
    path = home.write("small_decoder.safetensors", {n: x for n, x in tensors.items() if not n.startswith("encoder.")})
    assert_message(home.with_rest(FLUX2, home.file(FLUX2, "transformer"), path), "file.vae_decoder_only", path=path)


# --- two experts ------------------------------------------------------------------------------------------------------


def all_in_one(home: Home) -> Path:
    prefixes = {
        "transformer": "model.diffusion_model.", "vae": "vae.", "text_encoder": "text_encoders.umt5xxl.transformer."
    }  # fmt: skip
    tensors = {
        prefix + name: tensor
        for part, prefix in prefixes.items()
        for name, tensor in load_file(home.file(BOTH, part)).items()
    }
    return home.write("wan2.2-rapid-mega-aio.safetensors", tensors)


@pytest.mark.parametrize("make", [all_in_one, lambda home: home.file(BOTH, "transformer", "wan2.2_merged.safetensors")])
def test_locate_one_denoiser_file_for_two_experts_asks_for_both(make: Callable[[Home], Path], home: Home):
    merged, others = make(home), [home.file(BOTH, part) for part in ("text_encoder", "vae")]
    entries = [merged] if "aio" in merged.name else [merged, *others]
    assert_message(home.said(BOTH, *entries), "checkpoint.second_expert_missing", title="Wan 2.2 I2V A14B")
    spec = lookup_spec(BOTH)
    found = file_resolution.resolve(" + ".join(map(str, [merged, *entries])), [spec])
    assert {held.path for name, held in found.parts.items() if name.startswith("transformer")} == {merged}
    assert found.parts.keys() == {"transformer", "transformer_2", "text_encoder", "vae"}


@pytest.mark.parametrize(
    ("first", "second", "noise"),
    [
        ("wan2.2_i2v_high_noise_14B_fp16", "wan2.2_i2v_high_noise_14B_fp8_scaled", "high"),
        ("wan2.2_i2v_low_noise_14B_fp16", "wan2.2_i2v_low_noise_14B_fp8_scaled", "low"),
        ("Wan2_2-I2V-A14B-HIGH_fp8", "wan22I2VHighNoise_Q8", "high"),
        ("Wan2_2-I2V-A14B-LOW_bf16", "low-noise", "low"),
    ],
)
def test_locate_same_expert_twice_raises_checkpoint_error(first: str, second: str, noise: str, home: Home):
    names = [f"{name}.safetensors" for name in (first, second)]
    said = home.with_rest(BOTH, *(home.file(BOTH, "transformer", name) for name in names))
    parameters = {"title": "Wan 2.2 I2V A14B", "both": " and ".join(names), "first": noise}
    assert_message(said, "checkpoint.two_experts_for_one_noise", **parameters)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("wan2.2_i2v_high_noise_lowvram", "wan2.2_i2v_low_noise_lowvram"),
        ("slow_flow_a", "yellow_flow_b"),
        ("highres_a", "highres_b"),
        ("Wan22-HIGH", "Wan22-LOW"),
    ],
)
def test_locate_expert_names_match_whole_words_only(first: str, second: str, home: Home):
    files = [home.file(BOTH, part, f"{name}.safetensors") for part, name in
             (("transformer", first), ("transformer_2", second))]  # fmt: skip
    assert home.with_rest(BOTH, *files) == ""


def test_locate_duplicate_network_raises_checkpoint_error(home: Home):
    vaes = [home.file(WAN, "vae", f"{name}.safetensors") for name in ("one", "two")]
    said, kind = home.with_rest(WAN, home.file(WAN, "transformer"), *vaes), "AutoencoderKLWan"
    assert_message(said, "checkpoint.component_named_twice", path=vaes[1], class_name=kind, title="Wan 2.1 T2V 14B")
