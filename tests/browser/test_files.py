"""The model loader in ComfyUI's page: it lists files, one of them runs, another may be typed, and one that is
missing is marked before anything runs.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.tests.browser.page import needs_browser, opened
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.test_gguf_and_tokenizers import sentencepiece_model
from comfyui_tpu.tests.files.test_hostile_files import quantised
from comfyui_tpu.tests.files.test_single_files import WAN
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui, tiny_workflow
from comfyui_tpu.tpu_runtime.checkpoints import tiny

pytestmark = [needs_comfyui, needs_browser]

DENOISER, ENCODER, VAE = "wan2.1_t2v_14B_fp8_scaled.safetensors", "umt5_xxl.safetensors", "wan_2.1_vae.safetensors"
LOADER = """() => {
    const node = LiteGraph.createNode("TPUModelLoader");
    app.graph.add(node);
    return node.id;
}"""
VALUES = """([id, name]) => app.graph.getNodeById(id).widgets.find((widget) => widget.name === name).options.values"""


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    """A ComfyUI whose folders hold a miniature's files: a denoiser in scaled fp8, an encoder with its tokenizer."""
    server = start_comfyui()
    source, models = tiny.ensure_random(WAN), server.base / "models"
    write, carried = single_files.write, torch.frombuffer(bytearray(sentencepiece_model()), dtype=torch.uint8)
    write(models / "diffusion_models" / DENOISER, source / "transformer", "WanTransformer3DModel", change=quantised)
    write(
        models / "text_encoders" / ENCODER, source / "text_encoder", "UMT5EncoderModel",
        change=lambda tensors: {**tensors, "spiece_model": carried},
    )  # fmt: skip
    write(models / "vae" / VAE, source / "vae", "AutoencoderKLWan")
    return server


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        yield page


def workflow(prefix: str, **loader: str) -> dict[str, Any]:
    """The Wan 2.1 example, with a loader that names the model for all of its nodes."""
    nodes = tiny_workflow(prefix)
    for node in nodes.values():
        if node["class_type"].startswith("Wan21"):
            node["inputs"]["model"] = ["90", 0]
    return {**nodes, "90": {"class_type": "TPUModelLoader", "inputs": {"family": "Wan21", **loader}}}


def test_model_loader_lists_files_and_accepts_typed_value(page: Any):
    node = page.evaluate(LOADER)
    listed = page.evaluate(VALUES, [node, "model_id"])
    assert {DENOISER, WAN.published.hub_id, WAN.miniature.id} <= set(listed)
    assert page.evaluate(VALUES, [node, "text_encoder"]) == ["auto", ENCODER]
    assert page.evaluate(VALUES, [node, "vae"]) == ["auto", VAE]
    typed = page.evaluate(
        """async (id) => {
            app.extensionManager.dialog.prompt = async () => "someone/model + another.gguf";
            const widget = app.graph.getNodeById(id).widgets.find((widget) => widget.name === "model_id");
            widget.value = widget.options.values.at(-1);
            widget.callback(widget.value);
            await new Promise((resolve) => setTimeout(resolve, 100));
            return [widget.value, (await app.graphToPrompt()).output[id].inputs.model_id];
        }""",
        node,
    )
    assert typed == ["someone/model + another.gguf"] * 2


def test_workflow_with_fp8_file_runs(server: Server):
    entry = server.run(workflow("files", model_id=DENOISER, text_encoder=ENCODER))
    videos = [path for path in Path(server.base / "output").rglob("files*.mp4")]
    assert videos and entry["status"]["completed"]


def test_queue_with_missing_model_file_returns_node_error(server: Server):
    refused = server.queue(workflow("missing", model_id="wan2.1_t2v_14B_fp8_e4m3fn.safetensors"))
    (error, *_), where = refused["node_errors"]["90"]["errors"], refused["node_errors"]["90"]["class_type"]
    assert where == "TPUModelLoader"
    assert "There is no file wan2.1_t2v_14B_fp8_e4m3fn.safetensors" in error["details"]
    assert f"Did you mean {DENOISER}" in error["details"]
