"""The pack in a real ComfyUI server, with the built-in tiny model on simulated chips; and what ComfyUI's page says of
the examples with wrong values in our widgets: a sentence for each, never a traceback.
"""

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.graphs.upgrade import upgrade_workflow
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.nodes import separate_packs
from comfyui_tpu.tests.nodes.test_upgrade import HEADLINE, WRONG, in_api_form
from comfyui_tpu.tests.support.citizen import CITIZEN_PACK
from comfyui_tpu.tests.support.comfyui_server import PACK, Server, needs_comfyui, saved_video, tiny_workflow
from safetensors.torch import save_file

pytestmark = needs_comfyui

# A neighbour pack: says what our import did to the process, and what torch is like after our nodes ran.
PROBE = """
    import json, sys
    import torch
    from aiohttp import web
    from server import PromptServer

    @PromptServer.instance.routes.get("/probe")
    async def probe(request):
        bridge = sys.modules.get("jax._src.xla_bridge")
        return web.json_response({"devices": sorted(getattr(bridge, "_backends", {}))})

    class TorchProbe:
        CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "run", (), True

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"after": ("IMAGE",)}}

        def run(self, after):
            product = torch.nn.Linear(3, 5)(torch.ones(2, 3))
            facts = [type(product), product.dtype, product.device, torch.get_default_dtype(), type(after), after.dtype]
            return {"ui": {"facts": [str(fact) for fact in facts]}}

    NODE_CLASS_MAPPINGS = {"TorchProbe": TorchProbe}
"""


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    found = start_comfyui(packs={"probe": PROBE, "citizen": CITIZEN_PACK})
    assert found.get("/probe")["devices"] == [], "importing the pack started the devices"
    return found


def test_server_log_shows_pack_import_without_failure(server: Server):
    """How long that takes ComfyUI says itself; `tests/test_setup.py` holds what it may bring along."""
    seconds, line = re.findall(r"([\d.]+) seconds(.*ComfyUI-TPU)$", server.log.read_text(), re.MULTILINE)[0]
    assert "FAILED" not in line, server.log_tail()
    print(f"imported in {seconds} s")


def test_example_input_images_are_in_input_folder(server: Server):
    assert {"wan_i2v_input.jpg", "wan_i2v_shapes.png"} <= {path.name for path in (server.base / "input").iterdir()}


def test_object_info_lists_every_node_with_input_tooltips(server: Server):
    offered = server.get("/object_info")
    for declaration in DECLARATIONS.values():
        info = offered[declaration.id]
        inputs = {**info["input"]["required"], **info["input"].get("optional", {})}
        assert list(inputs) == sorted(inputs, key=lambda name: _position(declaration, name))
        assert all(options["tooltip"] for _, options in inputs.values()), declaration.id
        assert info["category"] == declaration.category
        assert info["output"] == [output.type for output in declaration.outputs]


def _position(declaration, name: str) -> tuple[bool, int]:
    """ComfyUI lists first what it takes for required."""
    names = [declared.name for declared in declaration.inputs]
    return declaration.input(name).is_listed_optional, names.index(name)


def test_lora_loader_lists_applies_and_refuses_files(server: Server):
    """What is merged does not need a server; what ComfyUI lists, checks and caches does."""
    folder, module = server.base / "models" / "loras", "diffusion_model.blocks.0.self_attn.q"
    tensors = {f"{module}.lora_A.weight": torch.ones(2, 144), f"{module}.lora_B.weight": torch.ones(144, 2)}
    (folder / "wan").mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "wan" / "style.safetensors")
    kind, options = server.get("/object_info/TPULoraLoader")["TPULoraLoader"]["input"]["required"]["lora_name"]
    assert "wan/style.safetensors" in (kind if isinstance(kind, list) else options["options"])

    def workflow(name: str) -> dict:
        return {
            "1": {"class_type": "TPUModelLoader", "inputs": {"model_id": "tiny/wan21", "family": "Wan21"}},
            "2": {"class_type": "TPULoraLoader", "inputs": {"model": ["1", 0], "lora_name": name, "strength": 0.5}},
            "3": {"class_type": "PreviewAny", "inputs": {"source": ["2", 1]}},
        }

    def reported() -> str:
        return server.run(workflow("wan/style.safetensors"))["outputs"]["3"]["text"][0]

    assert reported() == "style.safetensors, strength 0.5: changes 1 weights of Wan 2.1 T2V 14B."
    save_file({**tensors, "unknown": torch.ones(1)}, folder / "wan" / "style.safetensors")
    assert reported().endswith("Not applied, 1 tensors: unknown.")  # the file changed: not from ComfyUI's cache
    refusal = server.queue(workflow("../style.safetensors"))
    assert "must be a file below" in str(refusal["node_errors"]["2"])


def test_api_workflow_saves_video_and_keeps_torch_state(server: Server):
    workflow = tiny_workflow("stages")
    workflow["probe"] = {"class_type": "TorchProbe", "inputs": {"after": ["3", 0]}}
    entry = server.run(workflow)
    assert saved_video(server, "stages") == (5, 112, 80, 16.0)
    tensor = "<class 'torch.Tensor'>"
    facts = [tensor, "torch.float32", "cpu", "torch.float32", tensor, "torch.float32"]
    assert entry["outputs"]["probe"]["facts"] == facts


def test_pipeline_node_saves_video_of_same_shape(server: Server):
    inputs = {
        "height": 80,
        "width": 112,
        "num_frames": 5,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "seed": 2025,
    }
    spec = DECLARATIONS["Wan21TPUPipeline"]
    texts = {name: spec.input(name).default for name in ("prompt", "negative_prompt")}
    workflow = {
        "1": {"class_type": "TPUModelLoader", "inputs": {"model_id": "tiny/random-wan21", "family": "Wan21"}},
        "2": {"class_type": "Wan21TPUPipeline", "inputs": {**inputs, **texts, "model": ["1", 0]}},
        "3": {
            "class_type": "SaveVideo",
            "inputs": {"video": ["2", 2], "filename_prefix": "pipeline", "format": "auto", "codec": "auto"},
        },
    }
    server.run(workflow)
    assert saved_video(server, "pipeline") == (5, 112, 80, 16.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"height": 721}, "Wan 2.1 T2V 14B: height is 721; it must be a multiple of 16 between"),
        ({"num_frames": 80}, "Wan 2.1 T2V 14B: length is 80; it must be 4k + 1 between"),
        ({"model_id": ""}, "Wan 2.1 T2V 14B: model_id is empty."),
        ({"num_inference_steps": -1}, "Value -1 smaller than min of 1"),
    ],
)
def test_queue_with_invalid_input_returns_node_error(server: Server, change: dict, sentence: str):
    answer = server.queue(tiny_workflow("never", **change))
    (error,) = answer["node_errors"]["2"]["errors"]
    assert sentence in f"{error['message']} {error['details']}", error
    assert error["extra_info"].get("input_name", "") in {*change, "input_types"}, error
    assert not list((server.base / "output").glob("never*"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": None}, "TPU Save Stage: model is missing."),
        ({"model": ["1", 0]}, "TPU Save Stage: model takes TPU_MODEL; it is linked to CONDITIONING."),
        ({"folder": "../never"}, "folder is '../never'; stage files stay in ComfyUI's output folder."),
        ({"folder": "/tmp/never"}, "folder is '/tmp/never'; stage files stay in ComfyUI's output folder."),
    ],
)
def test_queue_with_invalid_save_stage_returns_node_error(server: Server, change: dict, sentence: str):
    """Its page lists `model` among the optional inputs, and ComfyUI leaves its links to us."""
    inputs = {"folder": "never", "model": ["6", 0], "prompt_embeds": ["1", 0], **change}
    encoder, loader = (tiny_workflow("never")[node_id] for node_id in ("1", "6"))
    workflow = {
        "1": encoder,
        "6": loader,
        "2": {"class_type": "TPUSaveStage", "inputs": {name: x for name, x in inputs.items() if x is not None}},
    }
    (error,) = server.queue(workflow)["node_errors"]["2"]["errors"]
    assert sentence in error["details"], error
    assert not (server.base / "output" / "never").exists()


# --- wrong values -----------------------------------------------------------------------------------------------------


# Also what the separate packs saved, as ComfyUI queues it.
EXAMPLES = {path.stem: json.loads(path.read_text()) for path in sorted((PACK / "examples" / "api").glob("*.json"))}
EXAMPLES |= {f"separate {pack}": to_api(make(), HEADLESS_NODES) for pack, make in separate_packs.ALL.items()}
# What is a list is a link to ComfyUI.
VALUES = [value for value in WRONG if not isinstance(value, list)]


def sentences(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """All that the page would show."""
    found = [error for node in answer["node_errors"].values() for error in node["errors"]]
    return [*found, *([answer["error"]] if answer["error"] else [])]


@pytest.mark.parametrize("example", EXAMPLES)
def test_validation_of_random_widget_values_returns_no_traceback(server: Server, example: str):
    draw, refused = random.Random(example), 0
    for _ in range(20):
        workflow = copy.deepcopy(EXAMPLES[example])
        widgets = [
            (node["inputs"], name)
            for node in workflow.values()
            for name, value in node["inputs"].items()
            if node["class_type"] in DECLARATIONS and not isinstance(value, list)
        ]
        inputs, name = draw.choice(widgets)
        inputs[name] = draw.choice(VALUES)
        answer = server.post("/citizen/validate", {"prompt": workflow})
        found = sentences(answer)
        assert bool(found) != answer["is_valid"], (name, inputs[name], answer)
        for error in found:
            assert error["message"], (name, inputs[name])
            assert "exception" not in error["type"] and "traceback" not in error["extra_info"], (name, error)
        refused += not answer["is_valid"]
    assert refused


@pytest.mark.parametrize("pack", ["cogvideox", "flux2"])
def test_queued_separate_pack_workflow_is_upgraded(server: Server, pack: str):
    """At ComfyUI's own address. That the model is not on this machine ends it before anything is loaded."""
    workflow = in_api_form(pack)
    for node in workflow.values():
        if node["class_type"] == "SaveVideo":
            node["inputs"] |= {"format": "auto", "codec": "auto"}
    before = server.log.read_text().count(HEADLINE)
    answer = server.queue(workflow)
    assert "prompt_id" in answer and not answer["node_errors"], answer
    entry = server.finish(answer["prompt_id"])
    assert entry["prompt"][2] == upgrade_workflow(workflow, DECLARATIONS)[0] != workflow
    assert server.log.read_text().count(HEADLINE) == before + 1
    (failure,) = (data for kind, data in entry["status"]["messages"] if kind == "execution_error")
    assert failure["exception_type"] == "ComfyUI-TPU.HubError", failure
