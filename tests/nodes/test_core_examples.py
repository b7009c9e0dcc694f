"""ComfyUI's official templates: `examples/core` is made of them, and those that do not run get a known sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes.graphs.loader_swap import LOADERS, swap_loaders
from comfyui_tpu.tools import core_examples, official_templates
from comfyui_tpu.tpu_runtime.messages import TABLE

pytest.importorskip("comfyui_workflow_templates_json")

TEMPLATES = {one.name: one for one in official_templates.list_templates(official_templates.find_folder())}
RECORD = json.loads(core_examples.RECORD.read_text("utf-8"))
EXAMPLES = sorted(core_examples.FOLDER.glob("*.json"))


def test_core_examples_equal_output_of_tool():
    """Of the package that they are made of; of another one, its unchanged templates. Else: `tools/core_examples.py`."""
    assert [path.stem for path in EXAMPLES] == sorted(RECORD["templates"])
    folder = official_templates.find_folder()
    if official_templates.find_version(folder) == RECORD["package"]:
        files = core_examples.files(folder)
        assert files == {path: path.read_text("utf-8") for path in files}
    for name, template in TEMPLATES.items():
        if RECORD["templates"].get(name) == core_examples.hash_document(template.document):
            written = (core_examples.FOLDER / f"{name}.json").read_text("utf-8")
            assert written == core_examples.format_document(core_examples.make_example(template)), name


def restore_template(path: Path) -> official_templates.Template:
    """The template of an example, without the names of packs in the properties of its loaders."""
    example = json.loads(path.read_text("utf-8"))
    note, *nodes = example["nodes"]
    title = note["widgets_values"][0].partition("\n")[0].strip("*")
    document, _ = swap_loaders({**example, "last_node_id": note["id"] - 1, "nodes": nodes}, (), back=True)
    return official_templates.Template(name=path.stem, title=title, uses=0, document=document)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_core_example_is_made_again_from_its_template(path: Path):
    template = restore_template(path)
    assert path.read_text("utf-8") == core_examples.format_document(core_examples.make_example(template))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_core_example_has_only_loaders_of_this_pack(path: Path):
    document = json.loads(path.read_text("utf-8"))
    kinds = {node["type"] for node in official_templates.list_running(document)}
    assert not kinds & LOADERS.keys() and kinds & {ours for ours, _ in LOADERS.values()}
    ids = [node["id"] for node in document["nodes"]]
    assert len(set(ids)) == len(ids) and document["last_node_id"] >= max(i for i in ids if isinstance(i, int))


def test_choose_templates_writes_most_used_of_each_recipe():
    def template(name: str, uses: int, *kinds: str, denoiser: str = "z_image_bf16.safetensors") -> Any:
        nodes = [{"type": "UNETLoader", "widgets_values": [denoiser, "default"]}, *({"type": kind} for kind in kinds)]
        document = {"nodes": nodes, "links": []}
        return official_templates.Template(name=name, title=name, uses=uses, document=document)

    templates = [
        template("first", 9, "KSampler", "SaveImage"),
        template("another LoRA's values", 8, "KSampler", "PreviewImage", "PrimitiveInt", "Note"),
        template("another sampler", 7, "SamplerCustomAdvanced"),
        template("another file", 6, "KSampler", denoiser="z_image_turbo_bf16.safetensors"),
        template("an unknown file", 5, "KSampler", denoiser="z_image_of_nobody.safetensors"),
        template("a refused node", 5, "KSampler", "FluxKVCache"),
        template("not equal", 4, "KSamplerAdvanced"),
    ]
    chosen = core_examples.choose_templates(templates, ["not equal"])
    assert [one.name for one in chosen] == ["first", "another sampler", "another file"]


# In the package 0.11.44. Where only a file's name is unknown, the template runs with the file in ComfyUI's folders, but
# for other models: FLUX.2 klein KV, Lotus and PiD.
NOT_RUNNING = {
    "image_flux2_klein_9b_kv_image_edit": {"comfyui.a_patch_of_blocks", "workflow.file_unknown"},
    "image_qwen_image_edit": {"comfyui.prompt_too_long"},
    "image_qwen_image_instantx_controlnet": {"workflow.file_unknown"},
    "utility_pid_latent_upscale_dit": {"workflow.file_unknown", "workflow.type_unknown"},
    "video_wan2.1_alpha_t2v_14B": {"workflow.file_unknown"},
}


def test_templates_that_do_not_run_get_known_sentences():
    """A new package of templates shows what it brings; so do nodes that run from now on."""
    assert {name: keys for name, one in TEMPLATES.items() if (keys := core_examples.list_problems(one))} == NOT_RUNNING


def test_refused_templates_of_table_have_known_sentences():
    """The table has the sentences of a ComfyUI's server."""
    rows = json.loads(core_examples.TABLE.read_text("utf-8"))["templates"]
    refused = {row["template"]: row["reason"] for row in rows if row["verdict"] == "refused"}
    assert refused and refused.keys() <= NOT_RUNNING.keys()
    for name, reason in refused.items():
        keys = NOT_RUNNING[name] - {"workflow.file_unknown", "workflow.type_unknown"}
        assert any(in_reason(key, reason) for key in keys), (name, reason)


def in_reason(key: str, reason: str) -> bool:
    """Whether a sentence has the text of a message, whose holes are open."""
    text = json.loads(TABLE.read_text("utf-8"))[key]
    return re.search(re.sub(r"\\\{\w+\\\}", ".*", re.escape(text)), reason) is not None
