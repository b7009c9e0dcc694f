"""Lists into the pipeline nodes, as ComfyUI maps any node over them."""

from pathlib import Path

from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Expansion
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui

pytestmark = needs_comfyui


def test_pipeline_node_maps_lists_like_ordinary_node(tmp_path: Path):
    """Every input, alone and with others, of every node that expands; its outputs in their places."""
    found = run_script(Path(__file__).with_name("lists.py"), "", tmp_path)
    assert found.keys() == {one.id for one in DECLARATIONS.values() if isinstance(one, Expansion)}
    wrong = [
        (pipeline, case, ours, ordinary)
        for pipeline, cases in found.items()
        for case, (ours, ordinary) in cases.items()
        if ours != ordinary
    ]
    assert not wrong, wrong[0]
    lengths = [len(ours[0]) for ours, _ in found["Wan21TPUPipeline"].values()]
    assert lengths[:7] == [1, 1, 2, 3, 3, 3, 4]
