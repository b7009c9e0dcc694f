"""What is read before a prompt is queued takes work in proportion to what comes, whoever wrote it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
from comfyui_tpu.nodes.graphs import provenance
from comfyui_tpu.nodes.graphs.provenance import KEY, ProvenanceLog
from comfyui_tpu.tests.properties.hostile import ends_well
from comfyui_tpu.tests.properties.test_checkpoints import file_of
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import model_ref
from comfyui_tpu.tpu_runtime.files import MAX_HEADER_BYTES, CheckpointError
from comfyui_tpu.tpu_runtime.formats import quantization, single_file
from comfyui_tpu.tpu_runtime.models import LAYOUTS, SPECS

SAMPLER, TEXT = "Wan21TPUSampler", "Wan21TextEncoder"


class Counted:
    """`hashlib`, which adds up the bytes that are hashed."""

    def __init__(self) -> None:
        self.total = 0

    def sha256(self, content: bytes) -> Any:
        self.total += len(content)
        return hashlib.sha256(content)


def samplers(count: int, text: str) -> dict[str, Any]:
    """Samplers behind one text encoder, each of which also hangs on the one before."""
    links = {
        str(n): {"prompt_embeds": ["text", 0], **({"latents": [str(n - 1), 0]} if n else {})} for n in range(count)
    }
    nodes = {name: {"class_type": SAMPLER, "inputs": {**inputs, "seed": 1}} for name, inputs in links.items()}
    return {**nodes, "text": {"class_type": TEXT, "inputs": {"prompt": text}}}


def log_provenance(prompt: dict[str, Any], *names: str) -> ProvenanceLog:
    records = ProvenanceLog(frozenset({SAMPLER, TEXT}))
    for name in names:
        records.add(prompt, {"extra": {}}, name, [{"stage": "denoise"}])
    return records


def test_provenance_log_hashes_each_node_once(monkeypatch: pytest.MonkeyPatch):
    """An 88 kB prompt of many samplers froze the page for 2.6 s."""
    prompt = samplers(500, "a" * 50_000)
    records = log_provenance(prompt, "499")
    monkeypatch.setattr(provenance, "hashlib", counted := Counted())
    records.begin(prompt, workflow := {})
    assert counted.total < 3 * len(json.dumps(prompt))
    assert workflow["extra"][KEY] == {"499": [{"stage": "denoise"}]}


def test_provenance_log_node_identity_includes_its_inputs():
    prompt = samplers(4, "a")
    records = log_provenance(prompt, "0", "3")
    for changed, found in (("a", {"0", "3"}), ("b", set())):
        records.begin(samplers(4, changed), workflow := {})
        assert set(workflow["extra"].get(KEY, ())) == found
    nearer = samplers(4, "a")
    nearer["2"]["inputs"]["seed"] = 2
    records.begin(nearer, workflow := {})
    assert set(workflow["extra"][KEY]) == {"0"}


@pytest.mark.parametrize("name", ["a chain", "a circle", "its own source", "all of all", "nested", "no nodes"])
def test_provenance_log_arbitrary_graph_stays_within_limits(name: str):
    count = provenance.MAX_NODES
    links: dict[str, dict[str, Any]] = {
        "a chain": {str(n): {"x": [str(n + 1), 0]} for n in range(count)},
        "a circle": {str(n): {"x": [str((n + 1) % count), 0]} for n in range(count)},
        "its own source": {str(n): {"x": [str(n), 0]} for n in range(count)},
        "all of all": {str(n): {str(m): [str(m), 0] for m in range(300)} for n in range(300)},
        "nested": {"0": {"x": json.loads("[" * 900 + "]" * 900)}, "1": {"x": ["0", 0]}},
        "no nodes": {},
    }[name]
    prompt: dict[str, Any] = {one: {"class_type": SAMPLER, "inputs": inputs} for one, inputs in links.items()}
    prompt |= {"odd": None, "list": {"class_type": SAMPLER, "inputs": []}} if name == "no nodes" else {}
    records = log_provenance(samplers(1, ""), "0")
    ends_well(lambda: records.begin(prompt, {}), len(json.dumps(prompt)))
    records.add(prompt, {}, "0", [{"stage": "denoise"}])


def layers(count: int, **own: int) -> bytes:
    """A file of layers, each with a description of so many bytes."""
    said = json.dumps({"format": "float8_e4m3fn"}).encode().ljust(own.get("size", 32))
    header, at = {}, 0
    for number in range(count):
        for name, dtype, size in (
            ("weight", "F8_E4M3", 1),
            ("weight_scale", "F32", 4),
            ("comfy_quant", "U8", len(said)),
        ):
            shape = [1, 1] if name == "weight" else [size] if name == "comfy_quant" else []
            offsets = [at, at + size]
            header[f"blocks.{number}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            at += size
    data = (bytes(1) + bytes(4) + said) * count
    return file_of(json.dumps(header, separators=(",", ":")).encode())[:-33] + data


def test_read_contents_many_quantized_layers_open_file_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each layer's description opened it: 119 s with 4000 of them."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content := layers(2000))
    opened, safe_open = [], safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *args, **rest: opened.append(1) or safe_open(*args, **rest))
    found = single_file.read_contents(path)
    assert len(opened) <= 3 and len(found.tensors) == 2000
    single_file._read.cache_clear()
    ends_well(lambda: single_file.read_contents(path), len(content))


@pytest.mark.parametrize("size", [quantization.MAX_DESCRIPTION_BYTES + 1, 2**18])
def test_read_contents_long_description_raises_checkpoint_error(tmp_path: Path, size: int):
    path = tmp_path / "model.safetensors"
    path.write_bytes(layers(3, size=size))
    with raises_message(
        CheckpointError, "file.format_description_wrong", max_description_bytes=quantization.MAX_DESCRIPTION_BYTES
    ):
        single_file.read_contents(path)


def with_metadata(path: Path, **metadata: str) -> int:
    header = {"__metadata__": metadata} | {
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * n, 16 * n + 16]} for n, name in enumerate(MARKS)
    }
    content = file_of(json.dumps(header).encode())[:-33] + bytes(16 * len(MARKS))
    path.write_bytes(content)
    return len(content)


MARKS = [mark for mark in LAYOUTS[0].marks[0] if not mark.startswith("!")]


def test_choose_model_parses_embedded_config_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_metadata(path := tmp_path / "model.safetensors", config=json.dumps({"in_channels": 16}))
    parsed, parse_json = [], single_file.parse_json
    monkeypatch.setattr(single_file, "parse_json", lambda text: parsed.append(text) or parse_json(text))
    for spec in SPECS:
        with pytest.raises(ValueError):
            model_ref.choose_model(spec, str(path))
    assert len(parsed) == 1


@pytest.mark.parametrize("name", ["config", quantization.QUANTIZATION_METADATA])
@pytest.mark.parametrize("entry", ["[],", '{"a":0},', '"",', "0,"])
def test_choose_model_oversized_metadata_raises_checkpoint_error(tmp_path: Path, name: str, entry: str):
    """A config of 5 MiB took 11.5 s and 774 MiB."""
    path = tmp_path / "model.safetensors"
    for length in (quantization.MAX_METADATA_LENGTH // 2, 5 * 2**20):
        said = f'{{"layers": [{entry * (length // len(entry))}0]}}'
        size = with_metadata(path, **{name: said})
        single_file._read.cache_clear()
        ends_well(lambda: model_ref.choose_model(SPECS[0], str(path)), size)
    with raises_message(
        CheckpointError, "file.metadata_too_long", count=len(said), max_metadata_length=quantization.MAX_METADATA_LENGTH
    ):
        model_ref.choose_model(SPECS[0], str(path))


@pytest.mark.parametrize("name", ["text_encoders.x{}.transformer.a", "text_encoders.x{}.a", "vae.{}", "blocks.{}.a"])
def test_find_networks_arbitrary_names_stay_within_limits(tmp_path: Path, name: str):
    path = tmp_path / "model.safetensors"
    header = {name.format(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(15_000)}
    path.write_bytes(content := file_of(json.dumps(header, separators=(",", ":")).encode())[:-33])
    ends_well(lambda: single_file.find_networks(path, LAYOUTS), len(content))


def test_read_contents_oversized_header_raises_checkpoint_error(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}" + b" " * (MAX_HEADER_BYTES - 1))
    ends_well(lambda: single_file.read_contents(path), 0)
    with raises_message(
        CheckpointError, "file.header_too_large", size=MAX_HEADER_BYTES + 1, max_header_bytes=MAX_HEADER_BYTES
    ):
        single_file.read_contents(path)
