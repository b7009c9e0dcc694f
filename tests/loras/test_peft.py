"""Adapters as the `peft` package saves them, merged by it and by us: each option is applied or refused by name."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.tests.loras.test_formats import File, base, merged, network
from comfyui_tpu.tests.support.closeness import OPERATION, difference
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.loras import adapter
from comfyui_tpu.tpu_runtime.loras.change import LoraError
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import save_file

TARGETS = ["attn1.to_q", "attn2.to_v", "ffn.net.0.proj", "ffn.net.2"]
STRENGTH = -0.6  # of `merged`


class Blocks(torch.nn.Module):
    """Modules by a network's names, with its weights."""

    def __init__(self) -> None:
        super().__init__()
        weights = base("Wan21")
        for name in weights:
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and any(module.endswith(target) for target in TARGETS):
                self.put(module, weights)

    def put(self, module: str, weights: dict[str, torch.Tensor]) -> None:
        *path, last = module.split(".")
        own: torch.nn.Module = self
        for part in path:
            if not hasattr(own, part):
                own.add_module(part, torch.nn.Module())
            own = getattr(own, part)
        weight = weights[f"{module}.weight"]
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data, linear.bias.data = weight.clone(), weights[f"{module}.bias"].clone()
        own.add_module(last, linear)


def save_adapter(folder: Path, config: PeftConfig) -> dict[str, torch.Tensor]:
    """Saves a drawn adapter with its config; the weights with it merged, by name."""
    torch.manual_seed(5)
    model = get_peft_model(Blocks(), config)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data = parameter.data * (0.5 + torch.rand_like(parameter))
        elif any(part in name for part in ("lora_", "hada_", "lokr_")):
            parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    model.save_pretrained(str(folder))
    return {name: x.detach() for name, x in model.merge_and_unload().state_dict().items()}


LORA, LOHA, LOKR = (
    {"r": 4, "lora_alpha": 6, "target_modules": TARGETS},
    {"r": 4, "alpha": 2, "target_modules": TARGETS},
    {"r": 4, "alpha": 64, "target_modules": TARGETS},
)
APPLIED = {
    "lora": LoraConfig(**LORA),
    "lora, defaults": LoraConfig(target_modules=TARGETS),
    "rslora": LoraConfig(**LORA, use_rslora=True),
    "dora": LoraConfig(**LORA, use_dora=True),
    "dora, rslora": LoraConfig(**LORA, use_dora=True, use_rslora=True),
    "lora_bias": LoraConfig(**LORA, lora_bias=True),
    "lora_bias, rslora": LoraConfig(**LORA, lora_bias=True, use_rslora=True),
    "patterns": LoraConfig(
        **LORA,
        rank_pattern={"attn1.to_q": 7, "ffn.net.2": 3},
        alpha_pattern={"ffn.net.2": 1, "blocks.1.attn1.to_q": 11, "to_q": 5},
    ),
    "escaped and anchored names": LoraConfig(
        **LORA, alpha_pattern={r"^blocks\.0\.attn1\.to_q$": 12, r"^to_v": 99, r"attn2\.to_v": 3}
    ),
    "patterns, rslora": LoraConfig(
        **LORA, use_rslora=True, rank_pattern={"attn1.to_q": 9}, alpha_pattern={"to_v": 3}
    ),
    "regular expressions of ranks": LoraConfig(**LORA, rank_pattern={r"blocks\.\d+\.attn.*to_q": 7}),
    "fan_in_fan_out": LoraConfig(**LORA, fan_in_fan_out=True),
    "layers": LoraConfig(**LORA, layers_to_transform=[0, 2], layers_pattern="blocks"),
    "gaussian": LoraConfig(**LORA, init_lora_weights="gaussian"),
    "orthogonal": LoraConfig(**LORA, init_lora_weights="orthogonal"),
    "loha": LoHaConfig(**LOHA),
    "loha, defaults": LoHaConfig(target_modules=TARGETS),
    "loha, patterns": LoHaConfig(**LOHA, rank_pattern={"to_q": 2}, alpha_pattern={"ffn.net.2": 7}),
    "loha, convolutions": LoHaConfig(**LOHA, use_effective_conv2d=True),
    "lokr": LoKrConfig(**LOKR),
    "lokr, defaults": LoKrConfig(target_modules=TARGETS),
    "lokr, whole": LoKrConfig(r=64, alpha=16, target_modules=TARGETS),
    "lokr, both": LoKrConfig(**LOKR, decompose_both=True),
    "lokr, factor": LoKrConfig(**LOKR, decompose_factor=4),
    "lokr, both and factor": LoKrConfig(r=1, alpha=3, target_modules=TARGETS, decompose_both=True, decompose_factor=4),
    "lokr, patterns": LoKrConfig(
        **LOKR, rank_pattern={"to_q": 64, "blocks.0.ffn.net.2": 2}, alpha_pattern={"ffn.net.2": 7, "to_q": 3}
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "beside it") for name in APPLIED),
        *((name, "in the file") for name in ("dora, rslora", "patterns", "lokr, patterns", "loha")),
    ],
)
def test_merge_peft_adapter_matches_peft(name: str, where: str, tmp_path: Path):
    theirs = save_adapter(tmp_path, APPLIED[name])
    path = tmp_path / "adapter_model.safetensors"
    if where == "in the file":
        path = move_config_into_file(path)
    found = {weight: value for weight, _, value in merged("Wan21", path)}
    changed = [weight for weight, value in theirs.items() if not torch.equal(value, base("Wan21")[weight])]
    assert changed and found.keys() >= set(changed)
    for weight in changed:
        old = base("Wan21")[weight]
        wanted = old + STRENGTH * (theirs[weight] - old)
        assert difference(found[weight].reshape(wanted.shape), wanted.numpy()) <= 4 * OPERATION, weight
    assert adapter.read_adapter(str(path), network("Wan21")).unused == ()


def move_config_into_file(path: Path) -> Path:
    """The file with its config in its metadata, as diffusers writes it."""
    from safetensors.torch import load_file

    config = json.loads(path.with_name("adapter_config.json").read_text())
    said = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}
    tensors = {"transformer." + name.removeprefix("base_model.model."): x for name, x in load_file(path).items()}
    save_file(tensors, path.with_name("pytorch_lora_weights.safetensors"), said)
    return path.with_name("pytorch_lora_weights.safetensors")


# --- refused ----------------------------------------------------------------------------------------------------------


OTHER_METHODS = (
    "OFT", "BOFT", "VERA", "IA3", "ADALORA", "GLORA", "XLORA", "HRA", "MISS", "RANDLORA", "FOURIERFT", "LN_TUNING",
    "DELORA", "SHIRA", "C3A", "ROAD", "VBLORA", "lora2", "",
)  # fmt: skip
UNSUPPORTED = "lora.peft_option_unsupported"
# Options of other methods: each must be false, null or missing.
FOREIGN_OPTIONS: dict[str, Any] = {
    "target_parameters": ["proj.weight"], "layer_replication": [[0, 4]], "trainable_token_indices": [1, 2],
    "alora_invocation_tokens": [1], "use_qalora": True, "use_bdlora": {"nblocks": 2}, "monteclora_config": {"a": 1},
    "arrow_config": {"top_k": 1}, "kasa_config": {"beta": 1}, "use_quantum": True, "warp_config": {"x": 1},
}  # fmt: skip
EXPRESSION, LAYERS = "lora.pattern_regular_expression", "lora.peft_layers_contradict"
REFUSED: dict[str, tuple[dict[str, Any], Expected]] = {
    **{
        method: (
            {"peft_type": method},
            Expected(
                UNSUPPORTED,
                option="peft_type",
                value=repr(method),
                allowed="LORA, LOHA, LOKR",
                way_on="lora.merge_with_peft",
            ),
        )
        for method in OTHER_METHODS
    },
    **{
        way: ({"init_lora_weights": way}, Expected("lora.peft_init_unsupported", init_lora_weights=repr(way)))
        for way in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "unheard of")
    },
    **{
        option: (
            {option: value},
            Expected(
                UNSUPPORTED,
                option=option,
                value=str(value),
                allowed="false, null or nothing",
                way_on="lora.merge_with_peft",
            ),
        )
        for option, value in FOREIGN_OPTIONS.items()
    },
    "a DoRA without magnitudes": (
        {"use_dora": True},
        Expected("lora.peft_dora_contradicts", use_dora=True, module=re.compile("to_q'$"), has_magnitude=0),
    ),
    "other layers": (
        {"layers_to_transform": [1, 2]},
        Expected(LAYERS, chosen="[1, 2]", module=re.compile("blocks.0.attn1.to_q'$")),
    ),
    "another layer": ({"layers_to_transform": 1}, Expected(LAYERS, chosen=1)),
    "another list": ({"layers_to_transform": [0], "layers_pattern": "layers"}, Expected(LAYERS, chosen="[0]")),
    "alphas by expression": ({"alpha_pattern": {r".*\.to_q": 3}}, Expected(EXPRESSION, name="alpha_pattern")),
    "ranks of a LoKr by expression": (
        {"peft_type": "LOKR", "rank_pattern": {".*to_q": 3}},
        Expected(EXPRESSION, name="rank_pattern", key="'.*to_q'"),
    ),
    "a rank of 0": (
        {"peft_type": "LOKR", "r": 0},
        Expected("lora.peft_rank_outside", rank=0, largest_rank="1_000_000"),
    ),
    "half a rank": ({"peft_type": "LOKR", "rank_pattern": {"to_q": 1.5}}, Expected("lora.peft_rank_outside", rank=1.5)),
    "an alpha that is none": (
        {"peft_type": "LOHA", "alpha": "a lot"},
        Expected("lora.alpha_outside", name="alpha", alpha="'a lot'"),
    ),
}
MODULE = "base_model.model.blocks.0.attn1.to_q"
PLAIN = {f"{MODULE}.lora_A.weight": torch.ones(2, 144), f"{MODULE}.lora_B.weight": torch.ones(144, 2)}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("name", REFUSED)
def test_read_adapter_unsupported_option_raises_lora_error(name: str, tmp_path: Path):
    config, expected = REFUSED[name]
    with raises_message(LoraError, expected):
        adapter.read_adapter(write(tmp_path, PLAIN, config), network("Wan21"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("option", "value"), [("bias", "all"), ("bias", "lora_only"), ("modules_to_save", ["ffn.net.2"])]
)
def test_read_adapter_full_weights_raise_lora_error(option: str, value: Any, tmp_path: Path):
    targets = [name for name in TARGETS if name != "ffn.net.2"]
    save_adapter(tmp_path, LoraConfig(r=4, target_modules=targets, **{option: value}))
    with raises_message(LoraError, "lora.peft_whole_weights", option=option, way_on="lora.merge_with_peft"):
        adapter.read_adapter(str(tmp_path / "adapter_model.safetensors"), network("Wan21"))


def test_read_adapter_unexpected_magnitude_raises_lora_error(tmp_path: Path):
    tensors = {**PLAIN, f"{MODULE}.lora_magnitude_vector": torch.ones(144)}
    module = re.compile("to_q'$")
    with raises_message(LoraError, "lora.peft_dora_contradicts", use_dora=False, module=module, has_magnitude=1):
        adapter.read_adapter(write(tmp_path, tensors, {"use_dora": False}), network("Wan21"))
    assert adapter.read_adapter(write(tmp_path, tensors, {}), network("Wan21")).unused == ()


# --- numbers in other formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float64, torch.bfloat16, torch.float16,
     torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)  # fmt: skip
def test_read_adapter_alpha_accepts_any_dtype(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path):
    """As `lora[alpha_name].item()` of `comfy.lora.load_lora`."""
    tensors = {**PLAIN, f"{MODULE}.alpha": torch.tensor(6).reshape(shape).to(dtype)}
    save_file(tensors, tmp_path / "lora.safetensors")
    assert scale(tmp_path / "lora.safetensors") == 3


@pytest.mark.parametrize(("alpha", "times"), [(0, 0.0), (-4, -2.0), (127, 63.5)])
def test_read_adapter_alpha_accepts_any_integer(alpha: int, times: float, tmp_path: Path):
    save_file({**PLAIN, f"{MODULE}.alpha": torch.tensor(alpha, dtype=torch.int8)}, tmp_path / "lora.safetensors")
    assert scale(tmp_path / "lora.safetensors") == times


def scale(path: Path) -> float:
    from comfyui_tpu.tpu_runtime.checkpoints import weight_loader
    from comfyui_tpu.tpu_runtime.loras import merge

    own = network("Wan21")
    read = adapter.read_adapter(str(path), own)
    (weight,) = (weight for weight in own.weights.values() if "blocks.0.attn1.to_q.weight" in weight.sources)
    (change,) = read.changes["blocks.0.attn1.to_q.weight"]
    with contextlib.ExitStack() as stack:
        return merge._read(weight_loader.TensorReader(stack, lambda: None), read, change, weight)[1]


def test_merge_integer_alpha_of_other_methods_matches_reference(tmp_path: Path):
    """Of a LoHa, a LoKr and a DoRA."""
    file = File("Wan21")
    file.loha("diffusion_model.blocks.0.self_attn.v", "blocks.0.attn1.to_v.weight", alpha=3)
    file.lokr("diffusion_model.blocks.0.self_attn.k", "blocks.0.attn1.to_k.weight", whole=(True, False), alpha=5)
    file.dora("lora_unet_blocks_1_ffn_2", "blocks.1.ffn.net.2.weight", 1)
    for name in [name for name in file.tensors if name.endswith(".alpha")]:
        file.tensors[name] = file.tensors[name].to(torch.int32)
    save_file(file.tensors, tmp_path / "lora.safetensors")
    found = {weight: value for weight, _, value in merged("Wan21", tmp_path / "lora.safetensors")}
    for weight, added in file.added.items():
        wanted = file.base[weight] + STRENGTH * added
        assert difference(found[weight].reshape(wanted.shape), wanted.numpy()) <= OPERATION, weight
