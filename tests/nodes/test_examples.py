"""The example workflows fit the nodes: every link, every widget, in the page's format and in the API's."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli.main import main
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api, validate_workflow
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS
from PIL import Image

EXAMPLES = examples.FOLDER
# Recipes of few steps, or of a small model, by siblings and LoRAs.
FEW_STEPS = ("flux2_klein", "flux2_turbo", "wan21_1.3b", "wan22_i2v_4step", "wan22_t2v_4step")
PAGE_FILES, API_FILES = [*examples.PAGES, *examples.PIPELINES], examples.API


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def name(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@pytest.mark.parametrize("path", PAGE_FILES + API_FILES, ids=name)
def test_example_is_valid_workflow(path: Path):
    workflow = to_api(read(path), HEADLESS_NODES)
    assert validate_workflow(workflow, HEADLESS_NODES) == []
    make_tiny(workflow)
    assert validate_workflow(workflow, HEADLESS_NODES) == []


@pytest.mark.parametrize("path", PAGE_FILES, ids=name)
def test_example_page_has_one_value_per_widget(path: Path):
    """One value for each widget, and one after a seed for its control; our nodes name the pack they come from."""
    for node in read(path)["nodes"]:
        if node["type"] in DECLARATIONS:
            declared = [i for i in HEADLESS_NODES[node["type"]].inputs if i.is_widget]
            assert len(node["widgets_values"]) == len(declared) + sum(bool(i.companion) for i in declared)
            assert node["properties"]["cnr_id"] == "comfyui-tpu"


@pytest.mark.parametrize("path", PAGE_FILES, ids=name)
def test_example_page_links_agree_at_both_ends(path: Path):
    document = read(path)
    nodes = {node["id"]: node for node in document["nodes"]}
    for link_id, origin, output, target, slot, kind in document["links"]:
        source = nodes[origin]["outputs"][output]
        assert link_id in source["links"] and source["type"] == kind
        assert nodes[target]["inputs"][slot]["link"] == link_id


@pytest.mark.parametrize("path", API_FILES, ids=name)
def test_example_page_and_api_form_are_same_graph(path: Path):
    from_page = to_api(read(examples.page(path.stem)), HEADLESS_NODES)
    from_api = to_api(read(path), HEADLESS_NODES)
    assert sorted(from_page) == sorted(from_api)
    for node_id, node in from_api.items():
        assert from_page[node_id]["class_type"] == node["class_type"]
        assert node["inputs"].items() <= from_page[node_id]["inputs"].items()


def test_examples_exist_in_page_api_and_pipeline_form():
    stems = {path.stem for path in API_FILES}
    assert {examples.twin(path).stem for path in examples.PAGES} == stems
    assert {path.stem for path in examples.PIPELINES} == stems - {"try_it_now"}


def test_example_titles_are_readable_and_valid_file_names():
    """ComfyUI lists every JSON right in this folder, by the file's name."""
    titles = [path.stem for path in examples.PAGES]
    assert all(title[0].isupper() and " " in title and "_" not in title for title in titles)
    # Names that Windows takes, and that an address of the server holds as they are.
    assert not set("".join(titles)) & set('<>:"/\\|?*%#&+')


def test_flagship_models_have_examples_with_hub_id():
    texts = [path.read_text() for path in PAGE_FILES]
    for spec in FLAGSHIPS:
        assert any(spec.published.hub_id in text and f"{spec.family}TPUSampler" in text for text in texts), spec.name


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """What a script of `tools/` defines."""
    folder = EXAMPLES.parent / "tools"
    monkeypatch.syspath_prepend(folder)
    return lambda name: runpy.run_path(str(folder / f"{name}.py"))


def test_examples_equal_output_of_workflows_tool(tool: Callable[[str], dict[str, Any]]):
    """So their figures are those of `benchmarks/predicted.json`. If not: `python tools/workflows.py`."""
    written = tool("workflows")["files"]()
    assert {path for path in written if EXAMPLES in path.parents} == {*PAGE_FILES, *API_FILES}
    assert [path for path, text in written.items() if path.read_text("utf-8") != text] == []


def test_example_thumbnails_are_square_small_and_current(tool: Callable[[str], dict[str, Any]]):
    """As cards want it, square and small, and what it says is not out of date. Else: `python tools/thumbnails.py`."""
    script = tool("thumbnails")
    comments = {example.title: script["comment"](example) for example in script["workflows"].ALL}
    wrong = []
    for path in examples.PAGES:
        with Image.open(path.with_suffix(".jpg")) as picture:
            fits = picture.size == (512, 512) and path.with_suffix(".jpg").stat().st_size <= 40_000
            wrong += [] if fits and picture.info["comment"] == comments[path.stem].encode() else [path.stem]
    assert wrong == []


@pytest.mark.parametrize("path", PAGE_FILES + API_FILES, ids=name)
def test_example_names_model_once(path: Path):
    """By the loader, for all stages; by a pipeline node itself, if nothing is added to the model."""
    workflow = to_api(read(path), HEADLESS_NODES)
    ours = [node for node in workflow.values() if HEADLESS_NODES[node["class_type"]].family]
    loaders = [node for node in workflow.values() if node["class_type"] == "TPUModelLoader"]
    assert len(loaders) == 1 or (len(ours), len(loaders)) == (1, 0)
    assert len({tuple(node["inputs"].get("model", ())) for node in ours}) == 1
    if loaders:
        assert all("model" in node["inputs"] for node in ours)


@pytest.mark.slow
# Klein's miniature runs in `tests/browser/test_commands.py`, as the page makes it of the same graph.
@pytest.mark.parametrize("stem", slower(FEW_STEPS, "flux2_klein", *FEW_STEPS[2:]))
def test_example_runs_headless_on_tiny_model(stem: str, tmp_path: Path):
    assignments = ["Sampler.num_frames=5"] if stem.startswith("wan21") or "t2v" in stem else []
    assignments += ["Image Encoder.num_frames=5"] if "i2v" in stem else []
    words = [word for assignment in assignments for word in ("--set", assignment)]
    picture = ["--input", str(EXAMPLES)]
    assert (
        main(["run", str(EXAMPLES / "api" / f"{stem}.json"), "--tiny", "--out", str(tmp_path), *picture, *words]) == 0
    )
    (made,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert made.suffix == (".png" if stem.startswith("flux2") else ".mp4") and made.stat().st_size > 500
