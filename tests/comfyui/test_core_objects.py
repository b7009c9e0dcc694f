"""ComfyUI's own nodes on the TPU: its MODEL, CLIP and VAE against core's torch ones of the same files; in a server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.nodes.graphs import upgrade
from comfyui_tpu.tests.comfyui import core_graphs
from comfyui_tpu.tests.files import single_files, test_comfyui_encoders
from comfyui_tpu.tests.files.comfyui_oracle import DENOISERS, saved
from comfyui_tpu.tests.files.test_comfyui_encoders import BYT5, LANGUAGE, MISTRAL, QWEN3, QWEN25, T5, UMT5, Encoder
from comfyui_tpu.tests.support import comfyui_server
from comfyui_tpu.tests.support.comfyui_server import COMFYUI, Server, needs_comfyui
from comfyui_tpu.tests.support.patience import PATIENCE_S, slower, until
from comfyui_tpu.tpu_runtime.models import spec_by_name
from safetensors.torch import save_file

pytestmark = [needs_comfyui, pytest.mark.slow]

# Relative L2 of float32 networks; what was seen is at most 1.1e-5 (klein under guidance), else below 6e-6.
BOUND = 1e-4
SAMPLERS = ("euler", "dpmpp_2m", "uni_pc", "res_multistep")
WAN, FLUX2, COGVIDEOX, HUNYUAN15, ZIMAGE = DENOISERS


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
    cases: Sequence[str]

    def job(self, path: Path) -> dict[str, Any]:
        return {
            "path": str(path), "latents": self.latents, "text": [self.tokens, self.width], "cfg": self.cfg,
            "more": self.more, "cases": self.cases,
        }  # fmt: skip


def given(*shape: int) -> dict[str, Any]:
    """What image to video adds to a conditioning."""
    return {"concat_latent_image": shape, "concat_mask": (1, 1, *shape[2:])}


WAN_LATENTS, ALL = (1, 16, 3, 9, 6), tuple(core_graphs.CASES)
FLUX2_CASES = (
    *SAMPLERS, "a LoRA", "a guider", "a batch of two", "from latents, masked", "two samplers", "timed prompts",
)  # fmt: skip
DENOISERS_BY_NAME = {
    "wan t2v": Denoiser(
        kind=WAN, config={}, latents=WAN_LATENTS, width=4096, more={},
        cases=[name for name in ALL if name != "a first frame"],
    ),
    "wan 2.2 i2v": Denoiser(
        kind=WAN, config={"in_channels": 36}, latents=WAN_LATENTS, width=4096, more=given(*WAN_LATENTS),
        cases=(*SAMPLERS, "a batch of two"),
    ),
    "wan 2.1 i2v": Denoiser(
        kind=WAN, config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 128}, latents=WAN_LATENTS,
        width=4096, more={**given(*WAN_LATENTS), "clip_vision_output": (1, 257, 1280)}, cases=SAMPLERS,
    ),
    "wan 2.1 flf2v": Denoiser(
        kind=WAN,
        config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 128, "pos_embed_seq_len": 514},
        latents=WAN_LATENTS, width=4096, more={**given(*WAN_LATENTS), "clip_vision_output": (1, 514, 1280)},
        cases=SAMPLERS,
    ),
    "wan 2.2 ti2v": Denoiser(
        kind=WAN, config={"in_channels": 48, "out_channels": 48}, latents=(1, 48, 3, 9, 6), width=4096, more={},
        cases=(*SAMPLERS, "a first frame"),
    ),
    "flux.2 dev": Denoiser(
        kind=FLUX2, config={}, latents=(1, 128, 7, 5), width=96, tokens=(512, 300, 512), cfg=1.0,
        more={"guidance": 4.0, "reference_latents": [(1, 128, 4, 6), (1, 128, 3, 3)]}, cases=FLUX2_CASES,
    ),
    "flux.2 klein": Denoiser(
        kind=FLUX2, config={"guidance_embeds": False}, latents=(1, 128, 7, 5), width=96, tokens=(512, 300, 512),
        cfg=3.0, more={}, cases=FLUX2_CASES,
    ),
    "z-image": Denoiser(
        kind=ZIMAGE, config={}, latents=(1, 16, 9, 6), width=96, tokens=(40, 17, 33), cfg=3.0, more={},
        cases=("res_multistep", "a LoRA", "a batch of two"),
    ),
    "hunyuanvideo 1.5 t2v": Denoiser(
        kind=HUNYUAN15, config={"image_embed_dim": 1152}, latents=(1, 32, 3, 5, 6), width=96, tokens=(40, 17, 33),
        more={"conditioning_byt5small": (1, 19, 1472)}, cases=(*SAMPLERS, "a batch of two", "a guider"),
    ),
    "hunyuanvideo 1.5 i2v, distilled": Denoiser(
        kind=HUNYUAN15, config={"image_embed_dim": 1152, "use_meanflow": True}, latents=(1, 32, 3, 5, 6), width=96,
        tokens=(40, 17, 33),
        more={
            "conditioning_byt5small": (1, 19, 1472), "clip_vision_output": (1, 729, 1152), **given(1, 32, 3, 5, 6),
        },
        cases=("euler", "dpmpp_2m"),
    ),
    "cogvideox t2v": Denoiser(
        kind=COGVIDEOX, config={"in_channels": 16, "out_channels": 16}, latents=WAN_LATENTS, width=96,
        tokens=(226, 226, 226), more={}, cases=SAMPLERS,
    ),
    "cogvideox i2v": Denoiser(
        kind=COGVIDEOX, config={"in_channels": 32, "out_channels": 16, "ofs_embed_dim": 512}, latents=(1, 16, 4, 8, 6),
        width=96, tokens=(226, 226, 226), more={"concat_latent_image": (1, 16, 1, 8, 6)}, cases=SAMPLERS,
    ),
}  # fmt: skip


def write_denoiser(folder: Path, one: Denoiser, name: str) -> Path:
    home = saved(one.kind, folder / f"{name} folder", **{**DENOISERS[one.kind], **one.config})
    return single_files.write(folder / f"{name}.safetensors", home, one.kind)


def run_script(name: str, job: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """What a script beside this file prints last, of a job."""
    (folder / "stubs").mkdir(exist_ok=True)
    (folder / "stubs" / "sitecustomize.py").write_text(comfyui_server.dedent(comfyui_server.STUBS))
    command = [sys.executable, str(Path(__file__).with_name(name)), str(COMFYUI), json.dumps(job)]
    environment = {
        **os.environ, "PYTHONPATH": str(folder / "stubs"), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": comfyui_server.FLAGS.replace("count=8", "count=2"),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(errors: Mapping[str, float], bound: float = BOUND) -> None:
    for name, error in errors.items():
        print(f"{name}: {error:.2e}")
    assert errors and max(errors.values()) < bound, errors


@pytest.mark.parametrize(
    "name", slower(DENOISERS_BY_NAME, "wan 2.1 i2v", "wan 2.2 i2v", "hunyuanvideo 1.5 i2v, distilled", "cogvideox t2v")
)
def test_samplers_of_core_give_what_they_give_on_its_own_model(name: str, tmp_path: Path):
    one = DENOISERS_BY_NAME[name]
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
# By name: core's class and tokenizer, and the files with the tokenizer that each carries along.
TEXTS: Mapping[str, tuple[str, str, str, Sequence[tuple[Encoder, str]]]] = {
    "wan": ("wan", "wan.te", "wan.WanT5Tokenizer", [(UMT5, "spiece_model")]),
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
    "hunyuanvideo 1.5": (
        "hunyuan_video_15", "hunyuan_image.te", "hunyuan_video.HunyuanVideo15Tokenizer",
        [(replace(QWEN25, sizes=_QWEN25), ""), (replace(BYT5, sizes={**BYT5.sizes, "vocab_size": 1510}), "")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_encoded_as_core_encodes_them(name: str, tmp_path: Path):
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
    check(run_script("core_parts.py", job, tmp_path))


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
        "AutoencoderKL", dict(spec_by_name("z-image").component("vae_decoder").config), (1, 64, 96, 3),
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


@pytest.mark.parametrize("name", slower(VAES, "flux.2", "z-image"))
def test_pixels_and_latents_are_those_of_cores_vae(name: str, tmp_path: Path):
    kind, config, frames, latents, smaller = VAES[name]
    path = single_files.write(tmp_path / "vae.safetensors", saved(kind, tmp_path / "vae", **config), kind)
    job = {"kind": "vae", "paths": [str(path)], "frames": frames, "latents": latents, "sizes": smaller}
    errors = run_script("core_parts.py", job, tmp_path)
    if name == "cogvideox":
        # Core's group norms see the whole video at once, diffusers' and ours two latent frames: about a hundredth.
        assert errors.pop("decode") == errors.pop("decode tiled") < 0.05
    check(errors)


# --- in a server ------------------------------------------------------------------------------------------------------


def wan_files(models: Path, made: Path) -> Path:
    """A miniature of Wan in core's folders below `models`, and a LoRA for it."""
    sizes = {**UMT5.sizes, "num_layers": 2, "d_ff": 64, "d_model": 4096, "num_heads": 1}
    kind, config, *_ = VAES["wan"]
    module = "diffusion_model.blocks.0.self_attn.q"
    lora = {f"{module}.lora_down.weight": torch.ones(2, 128), f"{module}.lora_up.weight": torch.ones(128, 2)}
    save_file(lora, made / "style.safetensors")
    files = {
        "diffusion_models": write_denoiser(made, DENOISERS_BY_NAME["wan t2v"], "wan_t2v"),
        "text_encoders": replace(UMT5, sizes=sizes).write(made, "umt5", test_comfyui_encoders.carrying("spiece_model")),
        "vae": single_files.write(made / "wan_vae.safetensors", saved(kind, made / "vae", **config), kind),
        "loras": made / "style.safetensors",
    }
    for folder, source in files.items():
        (models / folder).mkdir(parents=True, exist_ok=True)
        source.rename(models / folder / source.name)
    return models


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    base = tmp_path_factory.mktemp("comfyui")
    wan_files(base / "models", tmp_path_factory.mktemp("files"))
    return start_comfyui(base)


# Core's loaders, and what takes their places.
SWAPS = {theirs: ours for theirs, (ours, _) in upgrade.LOADERS.items()}


def graph(prefix: str = "core", **sampler: Any) -> dict[str, Any]:
    """Core's nodes from files to a saved picture, with loaders of core's."""
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "unet": ("UNETLoader", {"unet_name": "wan_t2v.safetensors", "weight_dtype": "default"}),
        "clip": ("CLIPLoader", {"clip_name": "umt5.safetensors", "type": "wan", "device": "default"}),
        "vae": ("VAELoader", {"vae_name": "wan_vae.safetensors"}),
        "positive": ("CLIPTextEncode", {"clip": ["clip", 0], "text": "a cat and a (dog:1.3)"}),
        "negative": ("CLIPTextEncode", {"clip": ["clip", 0], "text": ""}),
        "latent": ("EmptyHunyuanLatentVideo", {"width": 64, "height": 48, "length": 9, "batch_size": 1}),
        "sampler": (
            "KSampler",
            {
                "model": ["unet", 0], "positive": ["positive", 0], "negative": ["negative", 0],
                "latent_image": ["latent", 0], "seed": 3, "steps": 3, "cfg": 4.0, "sampler_name": "euler",
                "scheduler": "simple", "denoise": 1.0, **sampler,
            },
        ),
        "frames": ("VAEDecode", {"samples": ["sampler", 0], "vae": ["vae", 0]}),
        "save": ("SaveImage", {"images": ["frames", 0], "filename_prefix": prefix}),
    }  # fmt: skip
    return {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}


def on_tpu(workflow: dict[str, Any], kinds: Collection[str] = tuple(SWAPS)) -> dict[str, Any]:
    """With loaders of these kinds swapped."""
    return {
        name: {**node, "class_type": SWAPS[node["class_type"]] if node["class_type"] in kinds else node["class_type"]}
        for name, node in workflow.items()
    }


def pictures(server: Server, prefix: str) -> torch.Tensor:
    """The pictures saved under a prefix, in order, as numbers from 0 to 255."""
    import numpy as np
    from PIL import Image

    paths = sorted((server.base / "output").glob(f"{prefix}_*.png"))
    return torch.stack([torch.from_numpy(np.asarray(Image.open(path))).float() for path in paths])


def test_loaders_are_one_for_one_with_cores(server: Server):
    """The same widgets, in the same order, with the same choices and defaults; the same outputs."""
    offered = server.get("/object_info")
    for theirs, ours in SWAPS.items():
        wanted, found = offered[theirs], offered[ours]
        assert found["output"] == wanted["output"], ours
        for group in ("required", "optional"):
            own, core = found["input"].get(group, {}), wanted["input"].get(group, {})
            assert list(own) == list(core), (ours, group)
            for name in core:
                assert choices(own[name]) == choices(core[name]), (ours, name)
                assert own[name][1]["tooltip"]


def choices(declared: list[Any]) -> list[str]:
    found = declared[0] if isinstance(declared[0], list) else declared[1]["options"]
    return [choice for choice in found if choice != "pixel_space"]  # no VAE, and no file


def test_a_graph_of_core_gives_the_same_pictures(server: Server):
    """But for steps of 8 bits that float32's rounding turns. Core makes this text encoder in one size only."""
    server.run(on_tpu(graph("theirs"), ["CLIPLoader"]))
    server.run(on_tpu(graph("ours")))
    theirs, ours = pictures(server, "theirs"), pictures(server, "ours")
    assert ours.shape == theirs.shape == (9, 48, 64, 3)
    check({"pictures": ((ours - theirs).norm() / theirs.norm()).item()}, 2e-3)


def patched(node: str, inputs: Mapping[str, Any], output: int = 0) -> dict[str, Any]:
    """The graph with a node between the loader and the sampler."""
    workflow = on_tpu(graph())
    workflow["patch"] = {"class_type": node, "inputs": {"model": ["unet", 0], **inputs}}
    workflow["sampler"]["inputs"]["model"] = ["patch", output]
    return workflow


# Nodes of core that change what is inside the network, with what is said.
REFUSED = {
    "NAGuidance": ({"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}, "changes attention or blocks inside"),
    "SkipLayerGuidanceDiT": (
        {"double_layers": "0", "single_layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0,
         "rescaling_scale": 0.0},
        "takes the place of attention or a block",
    ),
    "ScaleROPE": (
        {"scale_x": 1.5, "shift_x": 0.0, "scale_y": 1.0, "shift_y": 0.0, "scale_t": 1.0, "shift_t": 0.0},
        "another rotary embedding",
    ),
    "TorchCompileModel": ({"backend": "inductor"}, "another network or part of it"),
}  # fmt: skip


@pytest.mark.parametrize("node", REFUSED)
def test_what_works_inside_the_network_is_refused_with_a_sentence(server: Server, node: str):
    inputs, sentence = REFUSED[node]
    answer = server.queue(patched(node, inputs))
    assert not answer.get("node_errors"), answer
    status = server.finish(answer["prompt_id"])["status"]
    (error,) = [said for kind, said in status["messages"] if kind == "execution_error"]
    assert error["node_type"] == "KSampler" and sentence in error["exception_message"], error
    assert "ComfyUI's own loader" in error["exception_message"] or "Remove" in error["exception_message"]


# Nodes of core around the network: they run.
AROUND = {
    "ModelSamplingSD3": {"shift": 4.0},
    "RescaleCFG": {"multiplier": 0.7},
    "CFGZeroStar": {},
    "EasyCache": {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False},
    "LoraLoaderModelOnly": {"lora_name": "style.safetensors", "strength_model": 0.5},
}


@pytest.mark.parametrize("node", AROUND)
def test_what_works_around_the_network_runs(server: Server, node: str):
    server.run(patched(node, AROUND[node]))


def test_what_the_loaders_do_not_run_is_said(server: Server):
    workflow = on_tpu(graph())
    workflow["clip"]["inputs"]["type"] = "sd3"
    answer = server.queue(workflow)
    (error,) = [
        said for kind, said in server.finish(answer["prompt_id"])["status"]["messages"] if kind == "execution_error"
    ]
    assert "type is sd3; on the TPU run text encoders of the types wan, flux2" in error["exception_message"]


def test_a_file_outside_cores_folders_is_not_read(server: Server):
    workflow = on_tpu(graph())
    workflow["unet"]["inputs"]["unet_name"] = "../vae/wan_vae.safetensors"
    assert "value_not_in_list" in json.dumps(server.queue(workflow)["node_errors"])


def test_free_empties_the_chips_and_the_next_run_loads_again(server: Server):
    server.run(on_tpu(graph(seed=11)))
    assert server.get("/tpu/stats")["resident"]
    server.post("/free", {"unload_models": True, "free_memory": True})
    until(lambda: not server.get("/tpu/stats")["resident"], lambda: "the chips were not freed")
    server.run(on_tpu(graph(seed=12)))
    assert server.get("/tpu/stats")["resident"]


def test_cancel_ends_between_two_steps_and_the_next_run_works(server: Server):
    server.run(on_tpu(graph(seed=20)))
    answer = server.queue(on_tpu(graph(seed=21, steps=5000)))
    until(lambda: server.get("/queue")["queue_running"], lambda: "nothing ran")
    server.post("/interrupt", {})
    status = server.finish(answer["prompt_id"])["status"]
    assert [kind for kind, _ in status["messages"]][-1] == "execution_interrupted"
    server.run(on_tpu(graph(seed=22)))


@pytest.mark.recorded
def test_a_hundred_prompts_of_core_and_of_ours_fail_nowhere_and_leave_nothing(server: Server):
    """Ten workflows in turn, with a cancel, an unload and a refusal among each ten."""

    def held() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])

    node, (inputs, sentence) = next(iter(REFUSED.items()))
    ours = comfyui_server.tiny_workflow("ours")
    sizes = []
    for number in range(100):
        seed = 1000 + number
        workflows = [
            on_tpu(graph(seed=seed)), comfyui_server.tiny_workflow("ours", seed=seed),
            patched("LoraLoaderModelOnly", AROUND["LoraLoaderModelOnly"]), patched("EasyCache", AROUND["EasyCache"]),
            on_tpu(graph(seed=seed, sampler_name="dpmpp_2m")), comfyui_server.tiny_workflow("again", seed=seed),
            on_tpu(graph(seed=seed, cfg=1.0)), on_tpu(graph(seed=seed, scheduler="beta")), ours, patched(node, inputs),
        ]  # fmt: skip
        workflow = workflows[number % 10]
        for part in workflow.values():
            if part["class_type"] == "KSampler":
                part["inputs"]["seed"] = seed
        answer = server.queue(workflow)
        if number % 10 == 4:
            server.post("/interrupt", {})
        status = server.finish(answer["prompt_id"])["status"]
        ended = status["messages"][-1]
        wanted = {4: ("execution_success", "execution_interrupted"), 9: ("execution_error",)}
        assert ended[0] in wanted.get(number % 10, ("execution_success",)), (number, status)
        assert number % 10 != 9 or sentence in ended[1]["exception_message"]
        if number % 10 == 7:
            server.post("/free", {"unload_models": True, "free_memory": True})
        if number % 10 == 9:
            sizes.append(held())
    print("MB held after each ten:", [size // 1024 for size in sizes])
    # From the third ten on: programs, and what libraries keep, are there then.
    assert max(sizes[3:]) < 1.1 * sizes[2]


@pytest.mark.recorded
def test_too_little_memory_is_comfyuis_own_error_with_advice(
    start_comfyui: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
):
    base = tmp_path_factory.mktemp("comfyui")
    wan_files(base / "models", tmp_path_factory.mktemp("files"))
    small = start_comfyui(base, environment={"COMFYUI_TPU_HBM_GIB": "0.0001"})
    status = small.finish(small.queue(on_tpu(graph()))["prompt_id"])["status"]
    (error,) = [said for kind, said in status["messages"] if kind == "execution_error"]
    assert "OutOfMemory" in error["exception_type"], error
    assert "out of memory" in error["exception_message"].lower() and "GiB" in error["exception_message"], error
