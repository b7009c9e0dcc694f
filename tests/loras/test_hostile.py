"""LoRA files of strangers: a sentence with the file's name, soon, whatever is in them."""

import contextlib
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef
from comfyui_tpu.tpu_runtime.loras import adapter, apply
from comfyui_tpu.tpu_runtime.loras.adapter import LoraError
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights
from comfyui_tpu.tpu_runtime.programs.upstream_network import Network
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import save_file

MODULE = "blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def network() -> Network:
    component = spec_for_family("Wan21").component("transformer")
    return upstream_network.build_network(component, component.tiny)


@pytest.fixture(scope="module")
def size(network: Network) -> int:
    return network.weights["blocks.*.attn1.to_q.weight"].tensor_shape[0]


def write(path: Path, size: int, config: Any = None, module: str = MODULE, rank: int = 2, **others: Any) -> str:
    tensors = {
        f"{module}.lora_A.weight": torch.ones(rank, size),
        f"{module}.lora_B.weight": torch.ones(size, rank),
        **{f"{module}.{name}": tensor for name, tensor in others.items()},
    }
    metadata = (
        {} if config is None else {"lora_adapter_metadata": config if isinstance(config, str) else json.dumps(config)}
    )
    save_file(tensors, path / "lora.safetensors", metadata)
    return str(path / "lora.safetensors")


def test_read_adapter_alpha_regex_is_refused_without_running(tmp_path: Path, network: Network, size: int):
    """This one takes longer than the universe has on a name of a few dozen letters."""
    config = {"lora_alpha": 2, "alpha_pattern": {r"(([\w.]+)+)+!": 4}}
    path = write(tmp_path, size, config)
    began = time.process_time()
    with raises_message(
        LoraError, "lora.pattern_regular_expression", path=re.compile(r"lora\.safetensors$"), name="alpha_pattern"
    ):
        adapter.read_adapter(path, network)
    assert time.process_time() - began < 10


def test_read_adapter_ignores_rank_pattern(tmp_path: Path, network: Network, size: int):
    """The rank is the matrices' own."""
    found = adapter.read_adapter(
        write(tmp_path, size, {"rank_pattern": {r"(([\w.]+)+)+!": 4}, "lora_alpha": 2}), network
    )
    assert found.changes[f"{MODULE}.weight"][0].scaling.alpha == 2


@pytest.mark.parametrize(
    ("pattern", "alpha"),
    [
        ({MODULE: 4}, 4.0),
        ({"to_q": 4}, 4.0),
        ({"attn1.to_q": 4, MODULE: 5}, 4.0),
        ({"o_q": 4}, 8.0),  # not from a dot on
        ({"attn1.to": 4}, 8.0),
        ({"blocks.0.attn1": 4}, 8.0),
        ({"attn1xto_q": 4}, 8.0),
        ({r"attn1\.to_q": 4}, 4.0),
    ],
)
def test_read_adapter_alpha_pattern_matches_whole_names_after_dots(
    pattern: dict[str, int], alpha: float, tmp_path: Path, network: Network, size: int
):
    path = write(tmp_path, size, {"lora_alpha": 8, "alpha_pattern": pattern}, f"transformer.{MODULE}")
    assert adapter.read_adapter(path, network).changes[f"{MODULE}.weight"][0].scaling.alpha == alpha


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("[]", Expected("lora.peft_config_not_object", config="[]")),
        ("3", Expected("lora.peft_config_not_object", config=3)),
        ("{", Expected("lora.peft_config_not_json")),
        ("[" * 100_000, Expected("lora.peft_config_not_json")),
        ('{"lora_alpha": NaN}', Expected("lora.alpha_outside", name="lora_alpha", alpha="nan", largest_alpha="1e+06")),
        ('{"lora_alpha": Infinity}', Expected("lora.alpha_outside", name="lora_alpha", alpha="inf")),
        ('{"lora_alpha": 1e300}', Expected("lora.alpha_outside", name="lora_alpha", alpha="1e+300")),
        ('{"lora_alpha": [1, 2]}', Expected("lora.alpha_outside", name="lora_alpha", alpha="[1, 2]")),
        ('{"lora_alpha": true}', Expected("lora.alpha_outside", name="lora_alpha", alpha="True")),
        ('{"lora_alpha": "a lot"}', Expected("lora.alpha_outside", name="lora_alpha", alpha="'a lot'")),
        ('{"alpha_pattern": [1]}', Expected("lora.pattern_not_object", name="alpha_pattern", patterns="[1]")),
        (
            '{"alpha_pattern": {"to_q": {}}, "lora_alpha": 2}',
            Expected("lora.alpha_outside", name="lora_alpha", alpha="{}"),
        ),
    ],
)
def test_read_adapter_invalid_peft_config_raises_lora_error(
    config: str, expected: Expected, tmp_path: Path, network: Network, size: int
):
    with raises_message(LoraError, expected) as error:
        adapter.read_adapter(write(tmp_path, size, config), network)
    assert "lora.safetensors" in str(error.value) and "Traceback" not in str(error.value)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf, 1e30])
def test_merge_invalid_alpha_raises_lora_error(alpha: float, tmp_path: Path, network: Network, size: int):
    path = write(tmp_path, size, alpha=torch.tensor(alpha))
    changes = apply.make_merge((Lora(path=path, strength=1.0),), network)
    name = "blocks.*.attn1.to_q.weight"
    folder = tiny.ensure_random(spec_for_family("Wan21")) / "transformer"
    files = checkpoint.match_weights(network, checkpoint.read_headers(folder, network.component), folder)
    want = weights.abstract_weights(network, make_mesh(jax.devices()[:1], MeshShape()), "float32")[name]
    key = "lora.alpha_outside" if math.isfinite(alpha) else "lora.not_finite"
    with contextlib.ExitStack() as stack, raises_message(LoraError, key, path=path, name=f"{MODULE}.alpha") as error:
        changes.read(weight_loader.TensorReader(stack, lambda: None), name, files[name], want)
    assert "heckpoint" not in str(error.value)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"alpha": torch.ones(2)}, Expected("lora.shape_wrong", name=f"{MODULE}.alpha", form=2, expected="one number")),
        ({"alpha": torch.ones(0)}, Expected("lora.shape_wrong", name=f"{MODULE}.alpha", form=0, expected="one number")),
        ({"rank": 0}, Expected("lora.shape_wrong", form=re.compile("^0x"), expected="a rank of 1 or more")),
        ({"alpha": torch.tensor(True)}, Expected("lora.not_floating_point", name=f"{MODULE}.alpha", dtype="BOOL")),
        (
            {"diff_b": torch.zeros(3, dtype=torch.int8)},
            Expected("lora.not_floating_point", name=f"{MODULE}.diff_b", dtype="I8"),
        ),
    ],
)
def test_read_adapter_invalid_tensors_raise_lora_error(
    others: dict[str, Any], expected: Expected, tmp_path: Path, network: Network, size: int
):
    with raises_message(LoraError, expected) as error:
        adapter.read_adapter(write(tmp_path, size, **others), network)
    assert "lora.safetensors" in str(error.value)


def test_read_adapter_long_names_take_linear_time(tmp_path: Path, network: Network, size: int):
    began = time.process_time()
    found = adapter.read_adapter(write(tmp_path, size, module="model." * 200_000 + MODULE), network)
    assert not found.changes and len(found.unused) == 2
    assert time.process_time() - began < 10


def test_read_adapter_two_named_adapters_give_two_changes(tmp_path: Path, network: Network, size: int):
    path = tmp_path / "lora.safetensors"
    names = [f"{MODULE}.lora_{matrix}.{name}.weight" for name in ("first", "second") for matrix in "AB"]
    save_file({name: torch.ones((2, size) if "_A" in name else (size, 2)) for name in names}, path)
    found = adapter.read_adapter(str(path), network)
    assert len(found.changes[f"{MODULE}.weight"]) == 2 and found.unused == ()


def test_read_adapter_expert_prefix_changes_only_that_expert(tmp_path: Path):
    spec = lookup_spec("wan2.2-t2v-a14b")
    networks = {
        name: upstream_network.build_network(spec.component(name), spec.component(name).tiny)
        for name in spec.denoiser.experts
    }
    size = networks["transformer"].weights["blocks.*.attn1.to_q.weight"].tensor_shape[0]
    tensors = {
        f"{expert}{module}.lora_{matrix}.weight": torch.ones((2, size) if matrix == "A" else (size, 2))
        for expert, module in (("transformer.", MODULE), ("transformer_2.", "blocks.1.attn1.to_q"))
        for matrix in "AB"
    }
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path)
    changed = {name: set(adapter.read_adapter(str(path), network).changes) for name, network in networks.items()}
    first, second = f"{MODULE}.weight", "blocks.1.attn1.to_q.weight"
    assert changed == {"transformer": {first}, "transformer_2": {second}}
    save_file({name: x for name, x in tensors.items() if name.startswith("transformer_2.")}, path)
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.random_id)
    added, report = apply.add_lora(model, Lora(path=str(path), strength=1.0), SilentProgress())
    assert added.loras and "Not applied" not in report
    with raises_message(LoraError, "lora.changes_nothing"):
        apply.add_lora(model, Lora(path=str(path), strength=1.0, expert="high"), SilentProgress())
