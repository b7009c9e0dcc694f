"""What ComfyUI's page says of the examples with wrong values in our widgets: a sentence for each, never a traceback."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.graphs.upgrade import upgraded
from comfyui_tpu.nodes.headless.runner import HEADLESS
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.nodes import separate_packs
from comfyui_tpu.tests.nodes.test_upgrade import HEADLINE, WRONG, in_api_form
from comfyui_tpu.tests.support.citizen import CITIZEN_PACK
from comfyui_tpu.tests.support.comfyui_server import PACK, Server, needs_comfyui

pytestmark = needs_comfyui

# Also what the separate packs saved, as ComfyUI queues it.
EXAMPLES = {path.stem: json.loads(path.read_text()) for path in sorted((PACK / "examples" / "api").glob("*.json"))}
EXAMPLES |= {f"separate {pack}": to_api(make(), HEADLESS) for pack, make in separate_packs.ALL.items()}
# What is a list is a link to ComfyUI.
VALUES = [value for value in WRONG if not isinstance(value, list)]


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui(packs={"citizen": CITIZEN_PACK})


def sentences(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """All that the page would show."""
    found = [error for node in answer["node_errors"].values() for error in node["errors"]]
    return [*found, *([answer["error"]] if answer["error"] else [])]


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_wrong_value_in_a_widget_is_a_sentence(server: Server, example: str):
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
def test_what_a_script_queues_has_todays_nodes(server: Server, pack: str):
    """At ComfyUI's own address. That the model is not on this machine ends it before anything is loaded."""
    workflow = in_api_form(pack)
    for node in workflow.values():
        if node["class_type"] == "SaveVideo":
            node["inputs"] |= {"format": "auto", "codec": "auto"}
    before = server.log.read_text().count(HEADLINE)
    answer = server.queue(workflow)
    assert "prompt_id" in answer and not answer["node_errors"], answer
    entry = server.finish(answer["prompt_id"])
    assert entry["prompt"][2] == upgraded(workflow, DECLARATIONS)[0] != workflow
    assert server.log.read_text().count(HEADLINE) == before + 1
    (failure,) = (data for kind, data in entry["status"]["messages"] if kind == "execution_error")
    assert failure["exception_type"] == "ComfyUI-TPU.HubError", failure
