"""ComfyUI's own nodes on the TPU in a server: its loaders swapped for ours."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.nodes.graphs import loader_swap
from comfyui_tpu.tests.comfyui.test_core_networks import DENOISERS_BY_NAME, VAES, check, write_denoiser
from comfyui_tpu.tests.files import single_files, test_comfyui_encoders
from comfyui_tpu.tests.files.comfyui_oracle import saved
from comfyui_tpu.tests.files.test_comfyui_encoders import UMT5
from comfyui_tpu.tests.support import comfyui_server
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui
from comfyui_tpu.tests.support.patience import until
from comfyui_tpu.tpu_runtime.model_spec import QUALITIES
from safetensors.torch import save_file

pytestmark = [needs_comfyui, pytest.mark.slow]


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
SWAPS = {theirs: ours for theirs, (ours, _) in loader_swap.LOADERS.items()}


def graph(prefix: str = "core", **sampler: Any) -> dict[str, Any]:
    """Core's nodes from files to a saved picture, with loaders of core's."""
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "unet": ("UNETLoader", {"unet_name": "wan_t2v.safetensors", "weight_dtype": "default"}),
        "clip": ("CLIPLoader", {"clip_name": "umt5.safetensors", "type": "wan", "device": "default"}),
        "vae": ("VAELoader", {"vae_name": "wan_vae.safetensors"}),
        "positive": ("CLIPTextEncode", {"clip": ["clip", 0], "text": "a cat and a (dog:1.3)"}),
        "negative": ("CLIPTextEncode", {"clip": ["clip", 0], "text": ""}),
        "latent": ("EmptyHunyuanLatentVideo", {"width": 64, "height": 48, "length": 5, "batch_size": 1}),
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


def test_tpu_loaders_have_same_inputs_and_outputs_as_core_loaders(server: Server):
    """The same widgets, in the same order, with the same choices and defaults; the same outputs."""
    offered = server.get("/object_info")
    for theirs, ours in SWAPS.items():
        wanted, found = offered[theirs], offered[ours]
        assert found["output"] == wanted["output"], ours
        for group in ("required", "optional"):
            own, core = found["input"].get(group, {}), wanted["input"].get(group, {})
            assert list(own) == list(core), (ours, group)
            for name in core:
                more = list(QUALITIES[1:]) if name == "weight_dtype" else []
                assert choices(own[name]) == [*choices(core[name]), *more], (ours, name)
                assert own[name][1]["tooltip"]


def choices(declared: list[Any]) -> list[str]:
    found = declared[0] if isinstance(declared[0], list) else declared[1]["options"]
    return [choice for choice in found if choice != "pixel_space"]  # no VAE, and no file


def test_core_graph_on_tpu_matches_core_images(server: Server):
    """But for steps of 8 bits that float32's rounding turns. Core makes this text encoder in one size only."""
    server.run(on_tpu(graph("theirs"), ["CLIPLoader"]))
    server.run(on_tpu(graph("ours")))
    theirs, ours = pictures(server, "theirs"), pictures(server, "ours")
    assert ours.shape == theirs.shape == (5, 48, 64, 3)
    check({"pictures": ((ours - theirs).norm() / theirs.norm()).item()}, 2e-3)


def of_model_loader(output: int = 1, prefix: str = "core") -> dict[str, Any]:
    """The graph with the objects that TPUModelLoader gives behind its first; the sampler's MODEL is this output."""
    workflow = graph(prefix)
    values = {"model_id": "tiny/random-wan21", "family": "Wan21", "precision": "float32"}
    workflow["loader"] = {"class_type": "TPUModelLoader", "inputs": values}
    for name, node in workflow.items():
        for socket, link in node["inputs"].items():
            places = {"unet": output, "clip": 2, "vae": 3}
            if isinstance(link, list) and link[0] in places:
                workflow[name]["inputs"][socket] = ["loader", places[link[0]]]
    return {name: node for name, node in workflow.items() if name not in ("unet", "clip", "vae")}


def test_model_loader_objects_run_in_core_nodes(server: Server):
    server.run(of_model_loader(prefix="loader"))
    assert pictures(server, "loader").shape == (5, 48, 64, 3)


def test_model_loader_without_second_denoiser_fails_at_sampler(server: Server):
    answer = server.queue(of_model_loader(output=4))
    assert not answer.get("node_errors"), answer
    messages = server.finish(answer["prompt_id"])["status"]["messages"]
    (error,) = [said for kind, said in messages if kind == "execution_error"]
    assert error["node_type"] == "KSampler" and "has only one denoiser" in error["exception_message"], error


def graph_with_node(node: str, inputs: Mapping[str, Any], output: int = 0) -> dict[str, Any]:
    """The graph with a node between the loader and the sampler."""
    workflow = on_tpu(graph())
    workflow["patch"] = {"class_type": node, "inputs": {"model": ["unet", 0], **inputs}}
    workflow["sampler"]["inputs"]["model"] = ["patch", output]
    return workflow


# Nodes of core that change what is inside the network, with what is said.
REFUSED = {
    "NAGuidance": ({"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}, "a patch of attention or blocks"),
    "SkipLayerGuidanceDiT": (
        {"double_layers": "0", "single_layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0,
         "rescaling_scale": 0.0},
        "a replacement of attention or a block",
    ),
    "ScaleROPE": (
        {"scale_x": 1.5, "shift_x": 0.0, "scale_y": 1.0, "shift_y": 0.0, "scale_t": 1.0, "shift_t": 0.0},
        "another rotary embedding",
    ),
    "TorchCompileModel": ({"backend": "inductor"}, "another network or part of it"),
}  # fmt: skip


@pytest.mark.parametrize("node", REFUSED)
def test_unsupported_model_node_is_refused_at_sampler(server: Server, node: str):
    inputs, sentence = REFUSED[node]
    answer = server.queue(graph_with_node(node, inputs))
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
def test_supported_model_node_runs_with_tpu_model(server: Server, node: str):
    server.run(graph_with_node(node, AROUND[node]))


def test_clip_loader_unsupported_type_error_lists_types(server: Server):
    workflow = on_tpu(graph())
    workflow["clip"]["inputs"]["type"] = "sd3"
    answer = server.queue(workflow)
    (error,) = [
        said for kind, said in server.finish(answer["prompt_id"])["status"]["messages"] if kind == "execution_error"
    ]
    assert "type is sd3; the TPU runs text encoders of the types wan, " in error["exception_message"]


def test_unet_name_outside_model_folder_is_refused(server: Server):
    workflow = on_tpu(graph())
    workflow["unet"]["inputs"]["unet_name"] = "../vae/wan_vae.safetensors"
    assert "value_not_in_list" in json.dumps(server.queue(workflow)["node_errors"])


def test_free_unloads_core_models_and_next_run_reloads(server: Server):
    server.run(on_tpu(graph(seed=11)))
    assert server.get("/tpu/stats")["resident"]
    server.post("/free", {"unload_models": True, "free_memory": True})
    until(lambda: not server.get("/tpu/stats")["resident"], lambda: "the chips were not freed")
    server.run(on_tpu(graph(seed=12)))
    assert server.get("/tpu/stats")["resident"]


def test_cancel_interrupts_core_sampler_and_next_run_succeeds(server: Server):
    server.run(on_tpu(graph(seed=20)))
    answer = server.queue(on_tpu(graph(seed=21, steps=5000)))
    until(lambda: server.get("/queue")["queue_running"], lambda: "nothing ran")
    server.post("/interrupt", {})
    status = server.finish(answer["prompt_id"])["status"]
    assert [kind for kind, _ in status["messages"]][-1] == "execution_interrupted"
    server.run(on_tpu(graph(seed=22)))


@pytest.mark.recorded
def test_hundred_mixed_prompts_leak_no_memory(server: Server):
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
            graph_with_node("LoraLoaderModelOnly", AROUND["LoraLoaderModelOnly"]), graph_with_node("EasyCache",
            AROUND["EasyCache"]),
            on_tpu(graph(seed=seed, sampler_name="dpmpp_2m")), comfyui_server.tiny_workflow("again", seed=seed),
            on_tpu(graph(seed=seed, cfg=1.0)), on_tpu(graph(seed=seed, scheduler="beta")), ours,
            graph_with_node(node, inputs),
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
def test_memory_limit_raises_comfyui_out_of_memory_error(
    start_comfyui: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
):
    base = tmp_path_factory.mktemp("comfyui")
    wan_files(base / "models", tmp_path_factory.mktemp("files"))
    small = start_comfyui(base, environment={"COMFYUI_TPU_HBM_GIB": "0.0001"})
    status = small.finish(small.queue(on_tpu(graph()))["prompt_id"])["status"]
    (error,) = [said for kind, said in status["messages"] if kind == "execution_error"]
    assert "OutOfMemory" in error["exception_type"], error
    assert "out of memory" in error["exception_message"].lower() and "GiB" in error["exception_message"], error
