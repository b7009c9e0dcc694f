"""Stage files in strangers' hands: where they may lie, what is overwritten, and files that are not as we write them."""

import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext, run_workflow
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import conditioning, stage_files, stage_values
from comfyui_tpu.tpu_runtime.engine.stage_values import ImageCondition
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs.denoising_plan import DenoisingPlan
from safetensors.torch import save, save_file

MODEL = ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21")
PICTURE_MODEL = ModelRef(spec_name="wan2.2-i2v-a14b", model_id="tiny/wan22i2v")
SAVE, LOAD = HEADLESS_NODES["TPUSaveStage"], HEADLESS_NODES["TPULoadStage"]
NAMES = (stage_files.EMBEDDINGS, stage_files.LATENTS, stage_files.CONFIG)


def prompt(**info: Any) -> list:
    return [[torch.rand(1, 4, 6), {"tpu_family": "Wan21", "length": 3, **info}]]


def latents() -> dict[str, Any]:
    return {"samples": torch.rand(1, 16, 2, 8, 8)}


def host(output: Path, *, confined: bool = False) -> TerminalContext:
    return TerminalContext(Folders(output=output, confined=confined), stream=io.StringIO())


def save_node(runner: TerminalContext, folder: str, **given: Any) -> tuple:
    SAVE.validate_constants(runner.folders, {"folder": folder})
    return SAVE.run(runner, **SAVE.values({"folder": folder, "model": MODEL, "prompt_embeds": prompt(), **given}))


# --- where they may lie -----------------------------------------------------------------------------------------------


def make_escaping_folders(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "output" / "deep").mkdir(parents=True)
    (tmp_path / "output" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "output" / "circle").symlink_to(tmp_path / "output" / "circle")
    return {
        "up": "../elsewhere", "up again": "deep/../../elsewhere", "absolute": str(tmp_path / "elsewhere"),
        "home": "~/elsewhere", "home itself": "~", "someone's home": "~root/elsewhere", "no one's home": "~nouser/x",
        "link": "link", "below a link": "link/deep", "prefix": "../output2", "circle": "circle", "no path": "a\0b",
        "no text": "a\ud800b",
    }  # fmt: skip


WAYS_OUT = (
    "up", "up again", "absolute", "home", "home itself", "someone's home", "no one's home", "link", "below a link",
    "prefix", "circle", "no path", "no text",
)  # fmt: skip


IMPOSSIBLE = ("circle", "no path", "no text")


@pytest.mark.parametrize("way", WAYS_OUT)
def test_stage_nodes_in_comfyui_reject_folders_outside_output(tmp_path: Path, way: str):
    folder, runner = make_escaping_folders(tmp_path)[way], host(tmp_path / "output", confined=True)
    key = "node.folder_impossible" if way in IMPOSSIBLE else "node.folder_outside_output"
    before = sorted(tmp_path.rglob("*"))
    for node in (SAVE, LOAD):
        with raises_message(ValueError, key, folder=repr(folder)):
            node.validate_constants(runner.folders, {"folder": folder})  # when queued
    given = {"folder": folder, "model": MODEL}
    for node in (SAVE, LOAD):
        with raises_message(ValueError, key, folder=repr(folder)):
            node.run(runner, **node.values({**given, "prompt_embeds": prompt()}))
    with raises_message(ValueError, key, folder=repr(folder)):
        LOAD.fingerprint(runner.folders, folder=folder)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("folder", ["a", "a/b", "a/../b", ".", "a~b"])
def test_stage_nodes_in_comfyui_accept_folders_inside_output(tmp_path: Path, folder: str):
    (tmp_path / "real").mkdir()
    (tmp_path / "output").symlink_to(tmp_path / "real")  # as a whole it may lie anywhere
    runner = host(tmp_path / "output", confined=True)
    save_node(runner, folder)
    assert (tmp_path / "real" / folder / stage_files.EMBEDDINGS).is_file()
    assert LOAD.run(runner, folder=folder, model=MODEL)[0] is not None


@pytest.mark.parametrize("way", ["up", "absolute", "link", "home"])
def test_save_stage_headless_accepts_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_node(host(tmp_path / "output"), make_escaping_folders(tmp_path)[way])
    assert (tmp_path / "elsewhere" / stage_files.EMBEDDINGS).is_file()


@pytest.mark.parametrize("folder", ["~nouser/x", "a\0b", "a\ud800b", "x" * 300])
def test_stage_nodes_impossible_folder_raises_value_error(tmp_path: Path, folder: str):
    workflow = {
        "1": {"class_type": "TPUModelLoader", "inputs": {"model_id": "tiny/wan21", "family": "Wan21"}},
        "2": {"class_type": "TPULoadStage", "inputs": {"folder": folder, "model": ["1", 0]}},
        "3": {
            "class_type": "TPUSaveStage",
            "inputs": {"folder": folder, "model": ["1", 0], "prompt_embeds": ["2", 0], "latents": ["2", 2]},
        },
    }
    with pytest.raises(ValueError):
        run_workflow(workflow, host(tmp_path))
    for node in (SAVE, LOAD):
        with pytest.raises(ValueError):
            node.run(host(tmp_path), **node.values({"folder": folder, "model": MODEL, "prompt_embeds": prompt()}))


def test_model_ref_unknown_home_folder_raises_value_error(capsys: pytest.CaptureFixture):
    for model_id in ("~nouser/model", "~nouser"):
        with raises_message(ValueError, "checkpoint.model_id_not_found"):
            ModelRef(spec_name=MODEL.spec_name, model_id=model_id).locate()


# --- what is overwritten ----------------------------------------------------------------------------------------------


def write_foreign(folder: Path, name: str) -> None:
    folder.mkdir()
    if name == stage_files.CONFIG:  # as transformers writes it
        (folder / name).write_text(json.dumps({"_from_model_config": True, "eos_token_id": 2}))
    else:
        save_file({"weight": torch.ones(3)}, folder / name, metadata={"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_save_stage_keeps_foreign_file(tmp_path: Path, name: str):
    write_foreign(tmp_path / "x", name)
    before = (tmp_path / "x" / name).read_bytes()
    folder = tmp_path / "x"
    for action in (
        lambda: SAVE.validate_constants(host(tmp_path).folders, {"folder": "x"}),
        lambda: SAVE.run(host(tmp_path), **SAVE.values({"folder": "x", "model": MODEL, "prompt_embeds": prompt()})),
        lambda: stage_files.save_embeddings(tmp_path / "x", prompt(), None, MODEL),
        lambda: stage_files.save_latents(tmp_path / "x", latents(), MODEL),
    ):
        with raises_message(ValueError, "stage_file.foreign_file", folder=folder, foreign=name):
            action()
    assert [path.name for path in (tmp_path / "x").iterdir()] == [name]
    assert (tmp_path / "x" / name).read_bytes() == before


@pytest.mark.parametrize("name", NAMES)
def test_cli_stage_commands_reject_foreign_file_before_computing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
):
    write_foreign(tmp_path / "x", name)
    for verb in ("encode", "denoise"):
        assert cli.main([verb, "--folder", str(tmp_path / "x"), "--model", "tiny/wan21"]) == 2
        assert f"has a {name} that this pack did not write" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.write_bytes(b"no tensors"), Path.touch])
def test_save_latents_keeps_path_that_is_no_stage_file(tmp_path: Path, name: str, make: Callable):
    make(tmp_path / name)
    with raises_message(ValueError, "stage_file.foreign_file", foreign=name):
        stage_files.save_latents(tmp_path, latents(), MODEL)


def test_save_stage_files_overwrites_own_files(tmp_path: Path):
    for _ in range(2):
        saved = prompt(), prompt(), latents()
        stage_files.save_embeddings(tmp_path, *saved[:2], MODEL)
        stage_files.save_latents(tmp_path, saved[2], MODEL)
        found = stage_files.load_embeddings(tmp_path, MODEL)
        assert all(torch.equal(one[0][0], other[0][0]) for one, other in zip(found, saved[:2], strict=True))
        assert torch.equal(stage_files.load_latents(tmp_path, MODEL)["samples"], saved[2]["samples"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)


def test_save_latents_unusable_folder_raises_value_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with raises_message(ValueError, "stage_file.folder_unusable", strerror="Not a directory"):
        stage_files.save_latents(tmp_path / "file" / "x", latents(), MODEL)


# --- what is in them --------------------------------------------------------------------------------------------------


def test_save_embeddings_accepts_shared_tensor_on_both_inputs(tmp_path: Path):
    """As CONDITIONING, and as views of one tensor."""
    both = prompt()
    stage_files.save_embeddings(tmp_path, both, both, MODEL)
    found = stage_files.load_embeddings(tmp_path, MODEL)
    assert all(torch.equal(one[0][0], both[0][0]) for one in found)
    rows = torch.rand(2, 4, 6)
    views = [[[rows[index : index + 1].transpose(1, 2), {"length": 3}]] for index in range(2)]
    stage_files.save_embeddings(tmp_path, *views, MODEL)
    found = stage_files.load_embeddings(tmp_path, MODEL)
    assert all(torch.equal(one[0][0], view[0][0]) for one, view in zip(found, views, strict=True))


@pytest.mark.parametrize("value", [True, 3, 0.5, "text", torch.ones(2)], ids=str)
def test_save_embeddings_unknown_conditioning_raises_and_writes_nothing(tmp_path: Path, value: Any):
    with raises_message(ValueError, "condition.options_unsupported", name="input.prompt_embeds", unknown="other"):
        stage_files.save_embeddings(tmp_path / "x", prompt(other=value), None, MODEL)
    assert not (tmp_path / "x").exists()


def write(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    for name in NAMES[:2]:
        save_file(tensors, folder / name, metadata=metadata)


def test_load_embeddings_ignores_foreign_metadata(tmp_path: Path):
    tensors = {"prompt_embeds": torch.rand(1, 4, 6)}
    write(tmp_path, tensors, {"format": "pt", "dtype_info": "{}", "prompt_embeds.length": "3", "seed": "true"})
    found, negative = stage_files.load_embeddings(tmp_path, MODEL)
    assert torch.equal(found[0][0], tensors["prompt_embeds"]) and negative is None
    assert found[0][1] == {"tpu_family": "Wan21", "length": 3}


@pytest.mark.parametrize("value", ["True", "abc", "", "1.5", "9" * 5000])
@pytest.mark.parametrize("key", ["prompt_embeds.length", "negative_prompt_embeds.length", "condition.height"])
def test_load_stage_file_non_integer_metadata_raises_stage_file_error(tmp_path: Path, key: str, value: str):
    write(tmp_path, {"prompt_embeds": torch.rand(1, 4, 6)}, {key: value})
    for load in (stage_files.load_embeddings, stage_files.load_condition):
        with raises_message(stage_files.StageFileError, "stage_file.damaged", error=re.compile(f"its {key} is ")):
            load(tmp_path, MODEL)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1, 2]", "holds a JSON list; it must be an object. Fix or delete it."),
        ('"text"', "holds a JSON str; it must be an object. Fix or delete it."),
        ("null", "holds a JSON NoneType; it must be an object. Fix or delete it."),
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"model_name": ["wan2.1-t2v-14b"]}', "model_name is ['wan2.1-t2v-14b']; it must be text."),
        ('{"model_id": 3}', "model_id is 3; it must be text."),
        ('{"model_name": "nobody"}', "there is no model 'nobody'"),
        ('{"model_name": "wan2.1-t2v-14b", "model_id": "tiny/wan21", "prompt": 5}', "prompt is 5; it must be text."),
        (
            '{"model_name": "wan2.1-t2v-14b", "model_id": "tiny/wan21", "height": {}}',
            "height is {}; it must be a whole",
        ),
        ('{"model_name": "wan2.1-t2v-14b", "model_id": "tiny/wan21", "fps": null}', "fps is None; it must be"),
        ('{"model_name": "wan2.1-t2v-14b", "model_id": "~nouser"}', "model_id is ~nouser; there is no such folder"),
    ],
)
def test_cli_stage_commands_invalid_config_print_error(
    tmp_path: Path, content: str, sentence: str, capsys: pytest.CaptureFixture
):
    (tmp_path / stage_files.CONFIG).write_text(content)
    for verb in ("encode", "denoise", "decode"):
        assert cli.main([verb, "--folder", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert sentence in said and "Traceback" not in said


def test_read_config_invalid_utf8_raises_stage_file_error(tmp_path: Path):
    (tmp_path / stage_files.CONFIG).write_bytes(b"\xff\xfe{}")
    with raises_message(stage_files.StageFileError, "stage_file.not_json"):
        stage_files.read_config(tmp_path)


SPEC = lookup_spec(MODEL.spec_name)
TEXT = {"prompt_embeds": torch.rand(1, 512, 60), "negative_prompt_embeds": torch.rand(1, 512, 60)}
LENGTH = {"prompt_embeds.text_length": "3", "prompt_embeds.length": "3"}


def use(folder: Path, model: ModelRef = MODEL) -> None:
    """All that is read of a folder before the first program runs."""
    spec = model.spec
    embeds = stage_files.load_embeddings(folder, model)
    condition, samples = stage_files.load_condition(folder, model), stage_files.load_latents(folder, model)
    conditioning.build_denoiser_inputs(plan_of(spec.name), *embeds, condition)
    conditioning.get_latent_samples(spec, samples)


@functools.cache
def plan_of(name: str) -> DenoisingPlan:
    """Nothing of it is in a folder."""
    spec = lookup_spec(name)
    configs = {part.name: part.tiny for part in spec.components}
    return DenoisingPlan.create(spec, spec.settings(), configs, spec.recipe.scheduler)


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, {}),
        ({"latents": torch.rand(1, 16, 2, 8, 8)}, {}),
        ({**TEXT, "latents": torch.tensor(1.0)}, {}),
        ({**TEXT, "latents": torch.rand(1, 16, 2, 8)}, {}),
        ({**TEXT, "prompt_embeds": torch.rand(3)}, {}),
        ({**TEXT, "prompt_embeds.text_length": torch.ones(5)}, {}),
        ({**TEXT, "prompt_embeds.mask": torch.ones(5)}, {}),
        (TEXT, {"prompt_embeds.text_length": "-1"}),
        (TEXT, {"prompt_embeds.text_length": str(10**30)}),
        (TEXT, {"prompt_embeds.tpu_family": "5"}),
        (TEXT, {"prompt_embeds.": "5"}),
    ],
)
def test_load_stage_file_wrong_contents_raise_value_error(tmp_path: Path, tensors: dict, metadata: dict):
    write(tmp_path, tensors, {**LENGTH, **metadata})
    with pytest.raises(ValueError) as error:
        use(tmp_path)
    assert len(str(error.value).split()) > 5


@pytest.mark.parametrize(
    "condition",
    [{}, {"condition.condition": torch.rand(3)}, {"condition.other": torch.rand(1, 20, 2, 8, 8)}],
    ids=["none", "shape", "name"],
)
@pytest.mark.parametrize("name", ["wan2.2-i2v-a14b", "hunyuanvideo1.5-i2v-720p", "flux2-dev"])
def test_load_condition_wrong_contents_raise_value_error(tmp_path: Path, name: str, condition: dict):
    spec = lookup_spec(name)
    config = spec.component(spec.denoiser.experts[0]).tiny
    first, *others = spec.text_encoders
    embeds = {"prompt_embeds": torch.rand(1, first.max_length, config[first.width_key])}
    for text in others:
        embeds[f"prompt_embeds.{text.name}"] = torch.rand(1, text.max_length, config[text.width_key])
    embeds |= {name.replace("prompt", "negative_prompt", 1): x.clone() for name, x in embeds.items()}
    latent_shape = spec.geometry.latent_shape(spec.settings())
    write(tmp_path, {**embeds, **condition, "latents": torch.zeros(latent_shape)})
    if not condition and not spec.needs_condition:
        return use(tmp_path, ModelRef(spec_name=name, model_id=spec.miniature.random_id))
    key = "condition.of_another_size" if condition else "condition.not_connected"
    if condition and name == "flux2-dev":
        key = "condition.references_shape_wrong"
    with raises_message(ValueError, key, title=spec.title):
        use(tmp_path, ModelRef(spec_name=name, model_id=spec.miniature.random_id))


def headers() -> dict[str, bytes]:
    """Files that are damaged at one place."""
    whole = save({**TEXT, "latents": torch.rand(1, 16, 2, 8, 8)}, metadata=LENGTH)
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])

    def with_header(content: bytes) -> bytes:
        return len(content).to_bytes(8, "little") + content + whole[8 + size :]

    def changed(**values: Any) -> bytes:
        return with_header(json.dumps({**header, **values}).encode())

    one = header["prompt_embeds"]
    return {
        "empty": b"", "short": whole[:5], "cut": whole[: size // 2], "cut late": whole[:-10],
        "long header": (2**63).to_bytes(8, "little") + whole[8:], "no JSON": with_header(b"{" * 50),
        "list": with_header(b"[1, 2]"), "deep": with_header(b"[" * 100_000), "no UTF-8": with_header(b'{"\xff": 1}'),
        "type": changed(prompt_embeds={**one, "dtype": "F3"}),
        "half a byte": changed(prompt_embeds={**one, "dtype": "F4"}),
        "negative": changed(prompt_embeds={**one, "shape": [-1, 2]}),
        "shape": changed(prompt_embeds={**one, "shape": [1, 2, 3]}),
        "offsets": changed(prompt_embeds={**one, "data_offsets": [0, 2**62]}),
        "overlap": changed(negative_prompt_embeds=one),
        "metadata": changed(__metadata__={"prompt_embeds.length": 3}), "metadata list": changed(__metadata__=[1]),
    }  # fmt: skip


@pytest.mark.parametrize("damage", headers())
def test_load_stage_file_damaged_header_raises_stage_file_error(tmp_path: Path, damage: str):
    for name in NAMES[:2]:
        (tmp_path / name).write_bytes(headers()[damage])
    for load in (stage_files.load_embeddings, stage_files.load_condition, stage_files.load_latents):
        with raises_message(
            stage_files.StageFileError, "stage_file.damaged", again=re.compile(r"^delete it and run `comfyui-tpu")
        ):
            load(tmp_path, MODEL)
    with raises_message(stage_files.StageFileError, "stage_file.foreign_file"):
        stage_files.save_latents(tmp_path, latents(), MODEL)


def test_load_stage_file_random_byte_changes_raise_only_value_error(tmp_path: Path):
    draw, refused = np.random.default_rng(0), 0
    whole = save({"prompt_embeds": torch.rand(1, 4, 6), "latents": torch.rand(1, 16, 1, 2, 2)}, metadata=LENGTH)
    for _ in range(300):
        content = bytearray(whole)
        for place in draw.integers(0, 330, draw.integers(1, 4)):
            content[place] = draw.integers(0, 256)
        for name in NAMES[:2]:
            (tmp_path / name).write_bytes(content)
        try:
            use(tmp_path)
        except ValueError as error:
            assert len(str(error).split()) > 5
            refused += 1
    assert refused > 100


def test_pack_embeddings_keeps_order_of_references():
    """Which decides where each is among the model's references; safetensors has tensors in any order."""
    pictures = {f"reference_{index}": torch.full((1, 2, 3, 4), float(index)) for index in range(12)}
    condition = ImageCondition(tpu_family="Flux2", height=48, width=64, num_frames=1, tensors=pictures)
    packed = stage_values.pack_embeddings(
        [[torch.zeros(1, 4, 6), {"tpu_family": "Flux2", "length": 3}]], None, condition
    )
    *_, found = stage_values.unpack_embeddings(packed, "Flux2")
    assert found is not None and list(found["tensors"]) == list(pictures)
    joined = api.join_references([found])["tensors"]
    assert [float(joined[name].max()) for name in pictures] == list(range(12))
