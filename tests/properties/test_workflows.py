"""A workflow, what `--set` names, a batch's lines and a request's body may come from anyone."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from comfyui_tpu.distributed.fleet.jobs import JobTemplate, read_jobs
from comfyui_tpu.nodes.comfyui import routes
from comfyui_tpu.nodes.declare import Folders, Input, Node
from comfyui_tpu.nodes.graphs.graph import expand, is_link, plan_generations
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.overrides import apply_assignment, read_json
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, execution_order
from comfyui_tpu.nodes.headless.workflow import to_api, validate_workflow
from comfyui_tpu.tests.nodes import examples, separate_packs
from comfyui_tpu.tests.nodes.test_upgrade import in_api_form
from comfyui_tpu.tests.properties.hostile import VALUES, documents, ends_well, spoiled
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = json.loads((examples.page("wan21_t2v_720p")).read_text())
API = json.loads((EXAMPLES / "api" / "wan21_t2v_720p.json").read_text())
OLD_PAGE, OLD_API = separate_packs.cogvideox(), in_api_form("wan22_i2v")
BODY = {"ids": ["0123", "4567"]}


def up_to_running(path: Path, *sets: str) -> None:
    """What `comfyui-tpu run --tiny` does before the first node runs; a list of problems is sentences too."""
    workflow = to_api(read_json(path), HEADLESS_NODES)
    for one in sets:
        apply_assignment(workflow, one)
    make_tiny(workflow)
    if problems := validate_workflow(workflow, HEADLESS_NODES):
        raise ValueError("The workflow cannot run: " + "\n".join(problems))
    for node in workflow.values():
        constants = {name: value for name, value in node["inputs"].items() if not is_link(value)}
        linked = set(node["inputs"]) - set(constants)
        HEADLESS_NODES[node["class_type"]].validate_constants(Folders(), constants, linked)
    execution_order(expand(workflow, HEADLESS_NODES), HEADLESS_NODES)
    plan_generations(workflow, Folders(), HEADLESS_NODES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "workflow.json"


@pytest.mark.parametrize("document", [API, PAGE, OLD_API, OLD_PAGE], ids=["api", "page", "old api", "old page"])
def test_workflow_arbitrary_document_fails_cleanly(path: Path, document: Any):
    """Also one that the separate packs saved, which is brought to today's nodes first."""

    @settings(max_examples=150)
    @given(content=documents(document))
    def read(content: bytes) -> None:
        path.write_bytes(content)
        ends_well(lambda: up_to_running(path), len(content))

    path.write_text(json.dumps(document))
    up_to_running(path)
    read()


IDS = st.sampled_from(["1", "2", "3", "4"])
LINKS = st.tuples(IDS, st.integers(-2, 3)).map(list)


@settings(max_examples=100)
@given(links=st.dictionaries(IDS, st.dictionaries(st.sampled_from(["model", "latents", "images"]), LINKS), max_size=4))
def test_workflow_arbitrary_links_fail_cleanly(path: Path, links: dict):
    """Circles, nodes that are their own source, outputs that there are not."""
    kinds = ("TPUFreeMemory", "Wan21TPUVAEDecoder", "Wan21TPUSampler", "SaveVideo")
    nodes = {
        node_id: {"class_type": kind, "inputs": links.get(node_id, {})}
        for node_id, kind in zip("1234", kinds, strict=True)
    }
    path.write_text(json.dumps(nodes))
    ends_well(lambda: up_to_running(path), path.stat().st_size)


def test_execution_order_handles_chain_longer_than_recursion_limit():
    kinds = {
        "Pass": Node(
            id="Pass",
            title="",
            description="",
            inputs=(Input(name="x", type="X", tooltip=""),),
            run=lambda host, **_: (),
        ),
        "Save": Node(id="Save", title="", description="", inputs=(), run=lambda host, **_: (), is_output=True),
    }
    chain = {str(n): {"class_type": "Pass", "inputs": {"x": [str(n + 1), 0]}} for n in range(1, 20_000)}
    graph = {"0": {"class_type": "Save", "inputs": {"x": ["1", 0]}}, **chain}
    graph["20000"] = {"class_type": "Pass", "inputs": {}}
    assert execution_order(graph, kinds) == [str(n) for n in range(20_000, -1, -1)]
    graph["20000"]["inputs"]["x"] = ["19999", 0]
    with pytest.raises(ValueError, match=r"form a circle: 19999 -> 20000 -> 19999\.$"):
        execution_order(graph, kinds)


def test_workflow_long_reroute_chain_fails_cleanly(path: Path):
    reroutes = [{"id": n, "type": "Reroute", "inputs": [{"name": "", "link": n}]} for n in range(1, 5001)]
    save = {"id": 0, "type": "SaveVideo", "inputs": [{"name": "video", "link": 0}]}
    links = [[n, n + 1, 0, n, 0, "*"] for n in range(5000)]
    path.write_text(json.dumps({"nodes": [save, *reroutes], "links": links}))
    ends_well(lambda: up_to_running(path), path.stat().st_size)


TARGETS = st.sampled_from(
    ["1", "2", "1.prompt", "2.seed", "2.seed=7", "SaveVideo.format", ".", "=", "1.prompt=", "9.x=1"]
)


@settings(max_examples=200)
@given(text=st.text(max_size=20) | st.builds("".join, st.lists(TARGETS | st.text(max_size=3) | VALUES.map(json.dumps))))
def test_apply_assignment_arbitrary_text_fails_cleanly(path: Path, text: str):
    path.write_text(json.dumps(API))
    ends_well(lambda: up_to_running(path, text), path.stat().st_size + len(text))


LINE = {"2.seed": 7, "1.prompt": "a red circle", "2.height": 80, "SaveVideo.filename_prefix": "x"}


@settings(max_examples=150)
@given(
    content=documents(LINE)
    | st.lists(st.text(max_size=20)).map("\n".join).map(lambda text: text.encode("utf-8", "replace"))
)
def test_read_jobs_arbitrary_lines_fail_cleanly(content: bytes):
    workflow = to_api(API, HEADLESS_NODES)
    make_tiny(workflow)
    lines = content.decode("utf-8", "replace").splitlines()
    recipe = JobTemplate(workflow, Folders(), SilentProgress())
    read_jobs(recipe, [json.dumps(LINE)], "the file")  # what is imported is not the line's
    ends_well(lambda: read_jobs(recipe, lines, "the file"), len(content))


class Request:
    """A request with this body."""

    def __init__(self, body: bytes) -> None:
        self.content, self._body = self, body

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), size):
            yield self._body[start : start + size]


@settings(max_examples=100)
@given(content=documents(BODY) | spoiled(json.dumps(BODY).encode()))
def test_free_route_arbitrary_body_gives_200_or_400(content: bytes):
    """`POST /tpu/free` frees what was named, all, or answers 400 with a sentence."""
    freed = []
    status, said = answer("/tpu/free", content, freed)
    assert (status == 200) == bool(freed) or said == {"freed": []}
    assert status == 200 or (status == 400 and said["error"].startswith(("The body ", "ids is ")))


@settings(max_examples=150)
@given(content=documents(API) | spoiled(json.dumps(API).encode()))
def test_miniature_route_arbitrary_body_gives_200_or_400(content: bytes):
    """`POST /tpu/miniature` names nodes of the prompt alone and values of the pack's own, or answers 400."""
    status, said = answer("/tpu/miniature", content, [])
    assert status == 200 or (status == 400 and len(said["error"].split()) > 4)
    if status == 200:
        assert {*said["values"], *said["without"]} <= set(json.loads(content))
        ids = {node["model_id"] for node in said["values"].values() if "model_id" in node}
        assert all(one.startswith("tiny/") for one in ids)


def answer(path: str, content: bytes, freed: list[Any]) -> tuple[int, Any]:
    """Status and body of the pack's answer to a request."""
    table, answers = web.RouteTableDef(), []
    routes.add_routes(table, request_unload=lambda: freed.append(None), free=lambda *, ids: freed.append(ids))
    (handler,) = (route.handler for route in table if route.path == path)
    ends_well(lambda: answers.append(asyncio.run(handler(Request(content)))), len(content))
    *_, given_back = answers
    return given_back.status, json.loads(given_back.body)
