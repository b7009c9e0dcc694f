"""What ComfyUI's nodes ask of the objects of its loaders, by its sources: nothing that nobody looked at."""

import pytest
from comfyui_tpu.tests.corenodes import calls
from comfyui_tpu.tests.support.comfyui_server import COMFYUI, needs_comfyui

pytestmark = needs_comfyui


@pytest.mark.parametrize("kind", calls.KINDS)
def test_attribute_tables_match_names_used_by_core_nodes(kind: str):
    """`models.py` looks whether ours has what works, and says of the rest what it is."""
    found = calls.asked(COMFYUI)[kind]
    known = {name for table in (calls.WORKS, calls.REFUSED, calls.ABSENT) for name in table.get(kind, "").split()}
    assert {name: where for name, where in found.items() if name not in known} == {}
    assert known - found.keys() == set()


def test_attribute_scan_finds_names_in_both_node_forms(tmp_path):
    (tmp_path / "comfy_extras").mkdir()
    (tmp_path / "nodes.py").write_text(
        "class Old:\n"
        "    def INPUT_TYPES(s): return {'required': {'clip': ('CLIP',), 'text': ('STRING',)}}\n"
        "    def encode(self, clip, text):\n"
        "        m = clip.clone()\n"
        "        return m.new_thing(text).more, text.strip()\n"
    )
    (tmp_path / "comfy_extras" / "nodes_new.py").write_text(
        "class New(io.ComfyNode):\n"
        "    def define_schema(cls): return io.Schema(inputs=[io.Vae.Input('vae'), io.Int.Input('n')])\n"
        "    def execute(cls, vae, n): return vae.part.of_it(n)\n"
    )
    found = calls.asked(tmp_path)
    assert {kind: set(names) for kind, names in found.items()} == {
        "CLIP": {"clone", "new_thing"}, "VAE": {"part", "part.of_it"},
    }  # fmt: skip
