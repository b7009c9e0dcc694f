"""A ComfyUI whose torch is not supported: its log at the start, the page and every node say which one is."""

from collections.abc import Callable

import pytest
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui, tiny_workflow

pytestmark = needs_comfyui

SENTENCE = (
    "torch 2.16.1+cu132 is not supported: TPU nodes run with torch <2.16,>=2.13. Run this command, then start again: "
)


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Its torch is this environment's, under the version of another, which stands first on Python's path."""
    base = tmp_path_factory.mktemp("comfyui")
    info = base / "stubs" / "torch-2.16.1+cu132.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.16.1+cu132\n")
    return start_comfyui(base=base)


def test_server_log_reports_unsupported_torch_at_start(server: Server):
    log = server.log.read_text(errors="replace")
    assert log.count(SENTENCE) == 1 and log.index(SENTENCE) < log.index("To see the GUI")


def test_about_endpoint_reports_unsupported_torch(server: Server):
    (refusal,) = server.get("/tpu/about")["refusals"]
    assert refusal.startswith(SENTENCE)
    assert refusal.endswith(" -m pip install --index-url https://download.pytorch.org/whl/cpu 'torch<2.16,>=2.13' "
                            "torchvision torchaudio")  # fmt: skip


@pytest.mark.parametrize("node", ["TPUModelLoader", "TPUFreeMemory"])
def test_node_with_unsupported_torch_raises_unsupported_packages(node: str, server: Server):
    workflow = tiny_workflow("refused")
    if node == "TPUFreeMemory":
        workflow = {
            "1": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
            "2": {"class_type": node, "inputs": {"anything": ["1", 0]}},
            "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
        }
    answer = server.queue(workflow)
    assert "prompt_id" in answer, answer
    status = server.finish(answer["prompt_id"])["status"]
    (failure,) = [content for kind, content in status["messages"] if kind == "execution_error"]
    assert failure["node_type"] == node and failure["exception_message"].startswith(SENTENCE)
    assert failure["exception_type"] == "ComfyUI-TPU.UnsupportedPackages"
