"""Checkpoints as they are published, and not as the installed versions write them: names, configs, formats."""

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.published import Rename, moved, rewrite
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, weight_loader, weight_names
from comfyui_tpu.tpu_runtime.files import read_json
from comfyui_tpu.tpu_runtime.model_spec import Component
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from packaging.version import Version

# Families share components: each once, by the names of a spec and of a component. A folder of a whole model that has
# several of them is in `tests/models/test_qwen_image_edit.py`.
PARTS = [
    *{
        id(part): (spec.name, part.name)
        for spec in reversed(SPECS)
        for part in spec.components
        if len({one.class_name for one in spec.list_components(part.folder)}) == 1
    }.values()
]

T5 = {
    "the embedding's other name": moved(("shared.", "encoder.embed_tokens.")),
    "beside a head": moved(("", "transformer.")),
    "beside a head, the embedding's other name": moved(
        ("shared.", "transformer.encoder.embed_tokens."), ("", "transformer.")
    ),
}
# By class: the names of other versions than the installed one, from those that this one writes.
RENAMED: Mapping[str, Mapping[str, Rename]] = {
    "T5EncoderModel": T5,
    "UMT5EncoderModel": T5,
    "SiglipVisionModel": {"transformers 4": moved(("", "vision_model."))},
    "CLIPVisionModel": {"transformers 4": moved(("", "vision_model."))},
    "Qwen3ForCausalLM": {"without a head": moved(("model.", ""))},
    "Qwen2_5_VLTextModel": {"beside a head": moved(("", "model."))},
    "Mistral3ForConditionalGeneration": {
        "as the module has them": moved(("language_model.model.", "model.language_model."), ("", "model.")),
        "without a head": moved(("language_model.model.", "language_model.")),
        "transformers 5.10": moved(("language_model.model.", "model.language_model.model."), ("", "model.")),
        "transformers 5.10, reverted": moved(("language_model.model.", "language_model.model.model.")),
    },
    "AutoencoderKLFlux2": {
        "old attention": lambda name: (
            name.replace(".to_q.", ".query.").replace(".to_k.", ".key.").replace(".to_v.", ".value.")
        ).replace(".to_out.0.", ".proj_attn.")
    },
}
# The transformers that first knew these names itself.
KNOWN_SINCE = {"transformers 5.10": Version("5.9"), "transformers 5.10, reverted": Version("5.23")}


def component_of(spec: str, name: str) -> Component:
    return lookup_spec(spec).component(name)


@functools.cache
def component_folder(spec: str, name: str) -> Path:
    """The folder of a component as the installed versions write it."""
    return tiny.ensure_random(lookup_spec(spec)) / component_of(spec, name).folder


Loaded = tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]


def load_component(component: Component, folder: Path) -> Loaded:
    """A component's weights, and the buffers that its module computes from its config."""
    network = upstream_network.build_network(component, read_json(folder / "config.json"))
    files = checkpoint.match_weights(network, checkpoint.read_headers(folder, network.component), folder)
    wanted = weights.abstract_weights(network, make_mesh(jax.devices()[:1], MeshShape()), "float32")
    loaded = weight_loader.load_weights(network, files, wanted, component.name, SilentProgress())
    buffers = {name: x for name, x in network.module.named_buffers() if x.device.type != "meta"}
    return jax.tree.map(np.asarray, loaded), buffers


def upstream(component: Component, folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What upstream loads."""
    option = "torch_dtype" if component.library == "diffusers" else "dtype"
    return upstream_network.upstream_class(component).from_pretrained(folder, **{option: dtype}).state_dict()


@functools.cache
def load_expected_weights(spec: str, name: str) -> tuple[Loaded, dict[str, torch.Tensor]]:
    component, folder = component_of(spec, name), component_folder(spec, name)
    return load_component(component, folder), upstream(component, folder, torch.float32)


def assert_same_weights(spec: str, name: str, folder: Path) -> None:
    (weights, buffers), _ = load_expected_weights(spec, name)
    found, computed = load_component(component_of(spec, name), folder)
    assert found.keys() == weights.keys() and computed.keys() == buffers.keys()
    for key, weight in weights.items():
        np.testing.assert_array_equal(found[key], weight, err_msg=key)
    for key, buffer in buffers.items():
        assert torch.equal(computed[key], buffer), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "name", "what", "rename"),
    [
        pytest.param(spec, name, what, rename, id=f"{spec}, {name}, {what}")
        for spec, name in PARTS
        for what, rename in {"other files": moved(), **RENAMED.get(component_of(spec, name).class_name, {})}.items()
    ],
)
def test_published_names_and_configs_load_equal_weights(
    spec: str, name: str, what: str, rename: Rename, tmp_path: Path
):
    """Upstream too loads the same from both: so these are names that it knows, if not yet in the oldest version."""
    component, folder = component_of(spec, name), tmp_path / "published"
    # Upstream knows attention's old names only in a file that is alone.
    rewrite(component_folder(spec, name), folder, rename, shards=1 if component.folder == "vae" else 2)
    assert_same_weights(spec, name, folder)
    if Version(transformers.__version__) < KNOWN_SINCE.get(what, Version("0")):
        return
    theirs = upstream(component, folder, torch.float32)
    for key, tensor in load_expected_weights(spec, name)[1].items():
        # A head that is not tied is not in the file.
        assert torch.equal(theirs[key], tensor) or key == "lm_head.weight", key


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model."])
def test_language_model_of_whole_qwen_loads_equal_weights(prefix: str, tmp_path: Path):
    """Upstream does not know these names for the language model alone."""
    part = ("hunyuanvideo1.5-t2v-720p", "text_encoder")
    rewrite(component_folder(*part), tmp_path / "whole", moved(("", prefix)))
    assert_same_weights(*part, tmp_path / "whole")


@pytest.mark.parametrize(("spec", "name"), PARTS)
def test_weight_dtype_bfloat16_matches_upstream_float32_modules(spec: str, name: str):
    """diffusers' list holds in bfloat16, transformers' only in float16."""
    assert formats(spec, name) == formats_upstream(spec, name)


def test_weight_dtype_keeps_strict_float32_modules_of_transformers(monkeypatch: pytest.MonkeyPatch):
    from transformers import T5EncoderModel

    monkeypatch.setattr(T5EncoderModel, "_keep_in_fp32_modules_strict", ["wo", "shared"])
    part = ("cogvideox1.5-5b", "text_encoder")
    assert formats(*part) == formats_upstream(*part)
    assert [name for name, dtype in formats(*part).items() if dtype == torch.float32] == [
        "shared.weight",
        *(f"encoder.block.{layer}.layer.1.DenseReluDense.wo.weight" for layer in range(3)),
    ]


def formats(spec: str, name: str) -> dict[str, torch.dtype]:
    """The format of each weight of a component in bfloat16."""
    network = upstream_network.build_network(
        component_of(spec, name), read_json(component_folder(spec, name) / "config.json")
    )
    float32 = {key for key in network.weights if weights.weight_dtype(network, key, "bfloat16") == np.float32}
    return {
        source: torch.float32 if key in float32 else torch.bfloat16
        for key, weight in network.weights.items()
        for source in weight.sources
    }


def formats_upstream(spec: str, name: str) -> dict[str, torch.dtype]:
    """The same as upstream has it."""
    component = component_of(spec, name)
    theirs = upstream(component, component_folder(spec, name), torch.bfloat16)
    named = {weight_names.to_module_name(key, component.aliases): tensor.dtype for key, tensor in theirs.items()}
    return {key: named[key] for key in formats(spec, name)}
