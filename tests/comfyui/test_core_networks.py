"""ComfyUI's MODEL, CLIP and VAE on the TPU against core's torch ones of the same files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.tests.comfyui import core_graphs
from comfyui_tpu.tests.comfyui.core import rows as core_rows
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.files import single_files, test_comfyui_encoders
from comfyui_tpu.tests.files.comfyui_oracle import DENOISERS, saved
from comfyui_tpu.tests.files.test_comfyui_encoders import BYT5, LANGUAGE, MISTRAL, QWEN3, QWEN25, T5, UMT5, Encoder
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tests.support.messages import assert_message
from comfyui_tpu.tests.support.patience import mostly, slower
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.messages import read_message
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.models.common.taehv import TAEHV
from safetensors.torch import save_file

pytestmark = [needs_comfyui, pytest.mark.slow]

# Relative L2 of float32 networks; what was seen is at most 1.1e-5 (klein under guidance), else below 6e-6.
BOUND = 1e-4
# Of one model for each way in which core reads a network's output; of its siblings one sampler tells the same.
SAMPLERS = ("euler", "dpmpp_2m", "uni_pc", "res_multistep")
WAN, FLUX2, COGVIDEOX, HUNYUAN15, ZIMAGE, QWEN_IMAGE = DENOISERS


@dataclass(frozen=True, kw_only=True)
class Denoiser:
    """A miniature of one that ComfyUI's detection allows, and the graphs that it is put through.

    Sizes of latents are odd: core pads what is no multiple of a patch.
    """

    kind: str
    config: Mapping[str, Any]
    latents: tuple[int, ...]
    width: int  # of the text
    tokens: Sequence[int] = (512, 512, 512)
    cfg: float = 5.0
    more: Mapping[str, Any]
    # The node of core's that makes such latents, and pixels of a side of one; without it what it is asked is not known
    # before it runs.
    latent: str = ""
    stride: int = 8
    cases: Sequence[str]
    # Cases of core's own code around ours, which another of these has too.
    repeats: Sequence[str] = ()

    def job(self, path: Path) -> dict[str, Any]:
        return {
            "path": str(path), "latents": self.latents, "text": [self.tokens, self.width], "cfg": self.cfg,
            "more": self.more, "cases": self.cases,
            **({"latent": self.latent, "stride": self.stride} if self.latent else {}),
        }  # fmt: skip


def image_conditioning(*shape: int) -> dict[str, Any]:
    """What image to video adds to a conditioning."""
    return {"concat_latent_image": shape, "concat_mask": (1, 1, *shape[2:])}


WAN_LATENTS = (1, 16, 3, 9, 6)
# Those of any model.
OF_VIDEOS = [
    name for name in core_graphs.CASES if name not in {*core_rows.CASES, "a LoRA", "a first frame", "unlike prompts"}
]
# Samplers are core's own, and others sample by these. Free noise has windows too, and both caches are one mechanism.
REPEATED = ("dpmpp_2m", "uni_pc", "res_multistep", "dpmpp_sde", "context windows", "LazyCache")
DENOISERS_BY_NAME = {
    "wan t2v": Denoiser(
        kind=WAN, config={}, latents=WAN_LATENTS, width=4096, more={},
        cases=[
            *(name for name in OF_VIDEOS if name not in REPEATED), "EasyCache", "joined prompts", "unlike timesteps",
            "free noise",
        ],
        repeats=REPEATED,
        latent="EmptyHunyuanLatentVideo",
    ),
    "wan 2.2 i2v": Denoiser(
        kind=WAN, config={"in_channels": 36}, latents=WAN_LATENTS, width=4096, more=image_conditioning(*WAN_LATENTS),
        cases=(*SAMPLERS, "a batch of two"),
        latent="WanImageToVideo",
    ),
    "wan 2.1 i2v": Denoiser(
        kind=WAN, config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 128}, latents=WAN_LATENTS,
        width=4096, more={**image_conditioning(*WAN_LATENTS), "clip_vision_output": (1, 257, 1280)},
        cases=("euler", "no pictures", "two seen"),
        latent="WanImageToVideo",
    ),
    "wan 2.1 flf2v": Denoiser(
        kind=WAN,
        config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 128, "pos_embed_seq_len": 514},
        latents=WAN_LATENTS, width=4096, more={**image_conditioning(*WAN_LATENTS), "clip_vision_output": (1, 514,
        1280)},
        cases=("uni_pc", "no pictures"),
        latent="WanFirstLastFrameToVideo",
    ),
    "wan 2.2 ti2v": Denoiser(
        kind=WAN, config={"in_channels": 48, "out_channels": 48}, latents=(1, 48, 3, 9, 6), width=4096, more={},
        cases=("euler", "a first frame"),
        latent="Wan22ImageToVideoLatent", stride=16,
    ),
    "flux.2 dev": Denoiser(
        kind=FLUX2, config={}, latents=(1, 128, 7, 5), width=96, tokens=(512, 300, 512), cfg=1.0,
        more={"guidance": 4.0, "reference_latents": [(1, 128, 4, 6), (1, 128, 3, 3)]},
        cases=(
            "res_multistep", "a batch of two", "no guidance", "default guidance", "unlike guidance",
            "unlike references", "joined prompts",
        ),
        repeats=("a guider",),
        latent="EmptyFlux2LatentImage", stride=16,
    ),
    "flux.2 klein": Denoiser(
        kind=FLUX2, config={"guidance_embeds": False}, latents=(1, 128, 7, 5), width=96, tokens=(512, 300, 512),
        cfg=3.0, more={}, cases=(
            "dpmpp_2m", "a LoRA", "from latents, masked", "unlike guidance",
        ), repeats=("two samplers", "timed prompts"),
        latent="EmptyFlux2LatentImage", stride=16,
    ),
    "z-image": Denoiser(
        kind=ZIMAGE, config={}, latents=(1, 16, 9, 6), width=96, tokens=(40, 17, 33), cfg=3.0, more={},
        cases=("res_multistep", "a LoRA", "two models"),
        latent="EmptySD3LatentImage",
    ),
    "qwen-image": Denoiser(
        kind=QWEN_IMAGE, config={}, latents=(1, 16, 1, 9, 6), width=96, tokens=(40, 17, 33), cfg=3.0, more={},
        cases=("res_multistep", "a LoRA", "a batch of two"),
        latent="EmptySD3LatentImage",
    ),
    "qwen-image edit": Denoiser(
        kind=QWEN_IMAGE, config={"zero_cond_t": True}, latents=(1, 16, 1, 9, 6), width=96, tokens=(40, 17, 33),
        cfg=3.0,
        # Larger than the sample, and odd grids: core's positions are not diffusers'.
        more={"reference_latents": [(1, 16, 1, 8, 12), (1, 16, 1, 4, 9)]},
        cases=("euler", "unlike references"), repeats=("a batch of two",),
        latent="EmptySD3LatentImage",
    ),
    "hunyuanvideo 1.5 t2v": Denoiser(
        kind=HUNYUAN15, config={"image_embed_dim": 1152}, latents=(1, 32, 3, 5, 6), width=96, tokens=(40, 17, 33),
        more={"conditioning_byt5small": (1, 19, 1472)},
        cases=("dpmpp_2m", "unlike prompts", "no glyphs"), repeats=("EasyCache",),
        latent="EmptyHunyuanVideo15Latent", stride=16,
    ),
    "hunyuanvideo 1.5 i2v, distilled": Denoiser(
        kind=HUNYUAN15, config={"image_embed_dim": 1152, "use_meanflow": True}, latents=(1, 32, 3, 5, 6), width=96,
        tokens=(40, 17, 33),
        more={
            "conditioning_byt5small": (1, 19, 1472), "clip_vision_output": (1, 729, 1152),
            **image_conditioning(1, 32, 3, 5, 6),
        },
        cases=("euler", "dpmpp_sde", "no pictures"),
        latent="HunyuanVideo15ImageToVideo", stride=16,
    ),
    "cogvideox t2v": Denoiser(
        kind=COGVIDEOX, config={"in_channels": 16, "out_channels": 16}, latents=WAN_LATENTS, width=96,
        tokens=(226, 226, 226), more={}, cases=SAMPLERS,
        latent="EmptyHunyuanLatentVideo",
    ),
    "cogvideox i2v": Denoiser(
        kind=COGVIDEOX, config={"in_channels": 32, "out_channels": 16, "ofs_embed_dim": 512}, latents=(1, 16, 4, 8, 6),
        width=96, tokens=(226, 226, 226), more={"concat_latent_image": (1, 16, 1, 8, 6)},
        cases=("uni_pc", "joined prompts", "no pictures"), repeats=("euler",),
    ),
}  # fmt: skip


# Networks and ways through core that others of these have too.
SIBLINGS = (
    "wan 2.1 flf2v", "wan 2.2 i2v", "cogvideox t2v", "qwen-image",
)  # fmt: skip


def write_denoiser(folder: Path, one: Denoiser, name: str) -> Path:
    home = saved(one.kind, folder / f"{name} folder", **{**DENOISERS[one.kind], **one.config})
    return single_files.write(folder / f"{name}.safetensors", home, one.kind)


def check(errors: Mapping[str, float], bound: float = BOUND) -> None:
    for name, error in errors.items():
        print(f"{name}: {error:.2e}")
    assert errors and max(errors.values()) < bound, errors


@pytest.mark.parametrize(
    ("name", "repeats"),
    mostly(
        [
            *((name, False) for name in DENOISERS_BY_NAME),
            *((name, True) for name, one in DENOISERS_BY_NAME.items() if one.repeats),
        ],
        *((name, False) for name in DENOISERS_BY_NAME if name not in SIBLINGS),
    ),
    ids=lambda value: {False: "", True: "repeats"}.get(value, value),
)  # fmt: skip
def test_core_samplers_match_core_torch_model(name: str, repeats: bool, tmp_path: Path):
    one = DENOISERS_BY_NAME[name]
    # The first of them is also compiled ahead.
    one = replace(one, cases=(one.cases[0], *one.repeats)) if repeats else one
    path = write_denoiser(tmp_path, one, name.replace(" ", "_"))
    errors = run_script("core_graphs.py", one.job(path), tmp_path)
    assert errors.keys() == set(one.cases)
    check(errors)


# --- CLIP and VAE -----------------------------------------------------------------------------------------------------

# Sizes of our own: what core's classes are told here need not be recognised.
_LANGUAGE = {**LANGUAGE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_QWEN3 = {**_LANGUAGE, "vocab_size": 151936, "rope_theta": 1e6}
_QWEN25 = {
    **QWEN25.sizes, "hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 152064,
    "rope_theta": 1e6, "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
}  # fmt: skip
_QWEN25_VISION = {
    "comfy.text_encoders.qwen_vl.Qwen2VLVisionTransformer": {
        "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_layers": 1,
    }
}  # fmt: skip
# By name: core's class and tokenizer, and the files with the tokenizer that each carries along.
TEXTS: Mapping[str, tuple[str, str, str, Sequence[tuple[Encoder, str]]]] = {
    "wan": (
        "wan", "wan.te", "wan.WanT5Tokenizer",
        [(replace(UMT5, sizes={**UMT5.sizes, "num_layers": 2, "d_ff": 64}), "spiece_model")],
    ),
    "cogvideox": (
        "cogvideox", "cogvideo.cogvideo_te", "cogvideo.CogVideoXTokenizer",
        [(replace(T5, sizes={**T5.sizes, "num_layers": 2, "d_ff": 64, "vocab_size": 32128}), "")],
    ),
    "flux.2 dev": (
        "flux2", "flux.flux2_te", "flux.Flux2Tokenizer",
        [(replace(MISTRAL, sizes={**_LANGUAGE, "num_hidden_layers": 31, "vocab_size": 320, "rope_theta": 1e9}),
          "tekken_model")],
    ),
    "flux.2 klein": (
        "flux2", "flux.klein_te", "flux.KleinTokenizer",
        [(replace(QWEN3, sizes={**_QWEN3, "num_hidden_layers": 28}), "")],
    ),
    "z-image": (
        "lumina2", "z_image.te", "z_image.ZImageTokenizer",
        [(replace(QWEN3, model="z-image-turbo", sizes={**_QWEN3, "num_hidden_layers": 36}), "")],
    ),
    "qwen-image": (
        "qwen_image", "qwen_image.te", "qwen_image.QwenImageTokenizer",
        [(replace(QWEN25, model="qwen-image-2512", sizes=_QWEN25), "")],
    ),
    "hunyuanvideo 1.5": (
        "hunyuan_video_15", "hunyuan_image.te", "hunyuan_video.HunyuanVideo15Tokenizer",
        [(replace(QWEN25, sizes=_QWEN25), ""), (replace(BYT5, sizes={**BYT5.sizes, "vocab_size": 1510}), "")],
    ),
}  # fmt: skip


# Both have the other's encoder, Qwen3 and T5.
@pytest.mark.parametrize("name", slower(TEXTS, "z-image", "cogvideox"))
def test_text_encoder_matches_core_clip(name: str, tmp_path: Path):
    """With its weights of words, templates, and what goes along with a conditioning."""
    kind, te, tokenizer, encoders = TEXTS[name]
    paths, options = [], {}
    for number, (encoder, carried) in enumerate(encoders):
        change = test_comfyui_encoders.carrying(carried) if carried else single_files.same
        paths.append(str(encoder.write(tmp_path, f"file{number}", change)))
        options |= encoder.job()["options"]
    for sizes in options.values():
        sizes.pop("rope_scaling", None)  # core's own
    job = {"kind": "clip", "type": kind, "te": te, "tokenizer": tokenizer, "paths": paths, "options": options}
    if "qwen25_7b_model_config" in options:  # Core makes, and saves, its vision network even where a file has none.
        job["sizes"] = _QWEN25_VISION
    found = run_script("core_parts.py", {**job, "changes": name == "wan"}, tmp_path)
    refused = {change: what for change, what in found.items() if isinstance(what, str)}
    check({change: what for change, what in found.items() if change not in refused})
    check_refused(name, refused)


def check_refused(name: str, refused: Mapping[str, str]) -> None:
    """Where core takes another layer, ours does so of T5, and says so of others. Of FLUX.2 core takes no other."""
    for change, what in refused.items():
        print(f"{change}: {what}")
    always = {"LoraLoaderBypass": "more modules", "TextGenerate": "writes text"}
    layers = {f"CLIPSetLastLayer {number}": "CLIPSetLastLayer chooses" for number in (-1, -2, -3, -24)}
    own = {"z-image": ("-2",), "qwen-image": ("-24",), "hunyuanvideo 1.5": ("-3", "-24")}.get(name)
    if own is not None:
        always |= {change: said for change, said in layers.items() if change.split()[1] not in own}
    assert refused.keys() == always.keys(), refused.keys() ^ always.keys()
    for change, said in always.items():
        assert said in refused[change], refused[change]


def test_text_encoder_with_image_prompts_matches_core_clip(tmp_path: Path):
    """Qwen-Image Edit's, with pictures of other shapes, by core's own node."""
    spec = lookup_spec("qwen-image-edit-2511")
    whole = tiny.list_networks(spec)["text_encoder"]
    text = {**spec.component("text_encoder").tiny, **_QWEN25}
    # Core has all layers but those of these numbers look at windows.
    seeing = {**spec.component("image_encoder").tiny, "depth": 8, "fullatt_block_indexes": (7,), "window_size": 112}
    sizes = {"text_config": text, "vision_config": {**seeing, "out_hidden_size": _QWEN25["hidden_size"]}}
    tiny.write_weights(replace(whole, tiny=sizes), tmp_path / "text_encoder", 0)
    path = single_files.write_folder(tmp_path / "qwen25vl.safetensors", tmp_path, spec, "text_encoder")
    options = {"qwen25_7b_model_config": {name: x for name, x in _QWEN25.items() if name != "rope_scaling"}}
    smaller = {name: seeing[name] for name in ("hidden_size", "intermediate_size", "num_heads")}
    job = {
        "kind": "clip", "type": "qwen_image", "te": "qwen_image.te", "tokenizer": "qwen_image.QwenImageTokenizer",
        "paths": [str(path)], "options": options, "pictures": [(60, 90), (64, 40)],
        "sizes": {"comfy.text_encoders.qwen_vl.Qwen2VLVisionTransformer": {**smaller, "num_layers": 8}},
    }  # fmt: skip
    check(run_script("core_parts.py", job, tmp_path))


@pytest.mark.parametrize("name", ["wan2.1-i2v-14b-480p", "hunyuanvideo1.5-i2v-720p"])
def test_image_encoder_matches_core_clip_vision(name: str, tmp_path: Path):
    spec = lookup_spec(name)
    component = spec.component("image_encoder")
    tiny.write_weights(component, tmp_path / "image_encoder", 0)
    path = single_files.write(tmp_path / "vision.safetensors", tmp_path / "image_encoder", component.class_name)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    job = {
        "kind": "vision", "paths": [str(path)], "options": {size: component.tiny[size] for size in sizes},
        "frames": [(1, 90, 160, 3), (2, 64, 40, 3)],
    }  # fmt: skip
    check(run_script("core_parts.py", job, tmp_path))


def test_model_patch_nodes_match_core_or_are_refused(tmp_path: Path):
    path = write_denoiser(tmp_path, DENOISERS_BY_NAME["wan t2v"], "wan")
    found = run_script("core_refusals.py", str(path), tmp_path)
    for name, what in found.items():
        print(f"{name}: {what}")
    ran = {name: what for name, what in found.items() if isinstance(what, float)}
    refused = {name for name, what in found.items() if isinstance(what, str) and not what.startswith("as core")}
    check(ran)
    assert {"RescaleCFG", "CFGZeroStar", "APG", "ModelSamplingSD3", "CFGOverride", "FreSca", "PerpNeg"} <= ran.keys()
    assert refused >= {
        "NAGuidance", "SkipLayerGuidanceDiT", "PerturbedAttentionGuidance", "ScaleROPE", "TorchCompileModel", "hooks",
        "ControlNet", "LoraLoaderBypass", "ModelAttentionBackend",
    }  # fmt: skip
    assert found["LoraLoaderBypass"] == (
        "This MODEL runs compiled on the TPU, where a LoRA outside the weights is not supported "
        "(LoraLoaderBypass, LoraLoaderBypassModelOnly). Use LoraLoaderModelOnly with the same file and "
        "strength: it is merged into the weights."
    )


def test_text_encoder_without_vision_refuses_prompt_with_image(tmp_path: Path):
    said = run_script("core_blind.py", {"qwen-image-2512": "blind.safetensors", "z-image": "qwen_3_4b.gguf"}, tmp_path)
    blind, other = (read_message(said[name]) for name in ("qwen-image-2512", "z-image"))
    key = "comfyui.text_encoder_cannot_see"
    assert_message(blind, key, title="Qwen-Image 2512", model_id="blind.safetensors")
    assert_message(other, "comfyui.prompt_entry_unsupported", title="Z-Image", what="an image")


def test_model_hooks_run_in_core_order_or_are_refused(tmp_path: Path):
    path = write_denoiser(tmp_path, DENOISERS_BY_NAME["wan t2v"], "wan")
    found = run_script("core/hooks.py", str(path), tmp_path)
    # Both round to bfloat16, each in its own places; with the sampler's own sample it would be 1.
    assert found.pop("EasyCache in bfloat16") < 0.05
    refused = {name: what for name, what in found.items() if isinstance(what, str)}
    check({name: what for name, what in found.items() if name not in refused})
    assert refused.keys() == {"replaced forward", "injections"}, refused
    assert "(forward_orig)" in refused["replaced forward"] and "ComfyUI's own loader" in refused["replaced forward"]
    assert "is not supported" in refused["injections"]


# With as many layers as the published ones, which core takes for granted; sizes that it does not read from a file it is
# told.
WAN22_VAE = {
    "base_dim": 6, "decoder_base_dim": 10, "num_res_blocks": 2, "z_dim": 48, "in_channels": 12, "out_channels": 12,
    "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": (0.0,) * 48,
    "latents_std": (1.0,) * 48,
}  # fmt: skip
_HUNYUAN15_SIZES, _COGVIDEOX_SIZES = (4, 8, 8, 16, 64), (8, 8, 16, 16)
# Of one frame: in core's attention every frame sees all, in diffusers' and ours it sees those before it.
_REFINER = "comfy.ldm.hunyuan_video.vae_refiner."
VAES = {
    "wan": ("AutoencoderKLWan", {"base_dim": 8, "num_res_blocks": 2}, (10, 64, 48, 3), (2, 16, 3, 9, 6), {}),
    "wan 2.2 ti2v": (
        "AutoencoderKLWan", WAN22_VAE, (5, 64, 96, 3), (1, 48, 3, 3, 5),
        {"comfy.ldm.wan.vae2_2.WanVAE": {"dim": 6, "dec_dim": 10}},
    ),
    "flux.2": (
        "AutoencoderKLFlux2",
        {"block_out_channels": (128, 256, 512, 512), "decoder_block_out_channels": (32, 64, 128, 128)},
        (1, 64, 96, 3), (2, 128, 3, 5), {},
    ),
    "z-image": (
        "AutoencoderKL", dict(lookup_spec("z-image").component("vae_decoder").config), (1, 64, 96, 3),
        (2, 16, 6, 5), {},
    ),
    "hunyuanvideo 1.5": (
        "AutoencoderKLHunyuanVideo15", {"block_out_channels": _HUNYUAN15_SIZES}, (1, 64, 96, 3), (1, 32, 1, 3, 5),
        {_REFINER + name: {"block_out_channels": list(_HUNYUAN15_SIZES)} for name in ("Encoder", "Decoder")},
    ),
    "cogvideox": (
        "AutoencoderKLCogVideoX",
        {
            "latent_channels": 16, "block_out_channels": _COGVIDEOX_SIZES, "layers_per_block": 3, "norm_num_groups": 4,
            "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        },
        (1, 64, 48, 3), (1, 16, 3, 9, 6),
        {"comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX": {"block_out_channels": _COGVIDEOX_SIZES, "groups": 4}},
    ),
}  # fmt: skip


# Core's group norms allow CogVideoX's only a coarse bound: `tests/models` compares it with diffusers, and
# `tests/files/test_single_files.py` its file with a folder. FLUX.2's and Z-Image's are one class, which
# `tests/files/test_comfyui_oracle.py` compares with core's.
@pytest.mark.parametrize("name", slower(VAES, "flux.2", "z-image", "cogvideox"))
def test_vae_matches_core_vae(name: str, tmp_path: Path):
    kind, config, frames, latents, smaller = VAES[name]
    path = single_files.write(tmp_path / "vae.safetensors", saved(kind, tmp_path / "vae", **config), kind)
    job = {"kind": "vae", "paths": [str(path)], "frames": frames, "latents": latents, "sizes": smaller}
    errors = run_script("core_parts.py", job, tmp_path)
    if name == "cogvideox":
        # Core's group norms see the whole video at once, diffusers' and ours two latent frames: about a hundredth.
        assert errors.pop("decode") == errors.pop("decode tiled") < 0.05
    check(errors)


@pytest.mark.parametrize(
    ("name", "latents"),
    [("lighttaew2_1", (2, 16, 3, 5, 6)), pytest.param("lighttaew2_2", (1, 48, 2, 3, 4), marks=pytest.mark.recorded)],
)
def test_light_decoder_matches_core_vae(name: str, latents: tuple[int, ...], tmp_path: Path):
    torch.manual_seed(0)
    module = TAEHV(latent_channels=latents[1], patch_size=1 if latents[1] == 16 else 2)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=(1.3 / weight[0].numel()) ** 0.5 if weight.ndim > 1 else 0.1)
    save_file(module.state_dict(), tmp_path / f"{name}.safetensors")
    job = {"kind": "vae", "paths": [str(tmp_path / f"{name}.safetensors")], "frames": None, "latents": latents}
    check(run_script("core_parts.py", job, tmp_path))
