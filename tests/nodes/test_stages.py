"""The three stages apart: as commands, also in another process, and as stage files between workflows."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext, run_workflow
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.nodes.test_headless import EXAMPLE, ROOT, node
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import media
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import stage_files


def command(*arguments: str) -> str:
    """The output of `comfyui-tpu` in a process of its own."""
    program = "import sys; from comfyui_tpu.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def frames(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24").tobytes() for frame in container.decode(video=0)]


def in_process(*arguments: str) -> None:
    """`comfyui-tpu` here: what it leaves on disk is asked, not what it starts from."""
    assert cli.main(list(arguments)) == 0


@pytest.mark.slow
def test_stage_commands_match_single_run_also_in_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The second stage reads what another process has written, and writes what another one reads."""
    numbers = {"num_frames": 5, "num_inference_steps": 2, "seed": 11, "flow_shift": 3.0}
    assignments = [part for name, value in numbers.items() for part in ("--set", f"Wan21TPUSampler.{name}={value}")]
    in_process("run", str(EXAMPLE), "--tiny", "--out", str(tmp_path), *assignments)
    *timed, compiled = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in timed] == [
        "TPU Model Loader",
        "Wan 2.1 TPU Text Encoder",
        "Wan 2.1 TPU Sampler",
        "Wan 2.1 TPU VAE Decoder",
        "Create Video",
        "Save Video",
        "total",
    ]
    assert re.fullmatch(r"XLA programs: \d+ compiled, \d+ from the cache", compiled)
    folder = str(tmp_path / "stages")
    in_process("encode", "--folder", folder, "--model", "tiny/wan21")
    options = [part for name, value in numbers.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command("denoise", "--folder", folder, *options)
    in_process("decode", "--folder", folder)
    assert frames(tmp_path / "wan21.mp4") == frames(tmp_path / "stages" / "output_video.mp4")
    assert len(frames(tmp_path / "wan21.mp4")) == 5


def folders(out: Path) -> TerminalContext:
    return TerminalContext(Folders(output=out), stream=io.StringIO())


def stage_workflow(**nodes: dict) -> dict:
    """The nodes, with a loader of the tiny model connected to each."""
    workflow = {"model": node("TPUModelLoader", model_id="tiny/wan21", family="Wan21")}
    for node_id, made in nodes.items():
        takes_model = any(declared.name == "model" for declared in HEADLESS_NODES[made["class_type"]].inputs)
        workflow[node_id] = node(
            made["class_type"], **made["inputs"], **({"model": ["model", 0]} if takes_model else {})
        )
    return workflow


def test_load_stage_empty_folder_error_names_missing_files(tmp_path: Path):
    workflow = stage_workflow(
        load=node("TPULoadStage", folder="stages"),
        decode=node("Wan21TPUVAEDecoder", latents=["load", 2]),
        show=node("PreviewImage", images=["decode", 0]),
    )
    with raises_message(
        ValueError,
        "node.no_stage_files",
        source=tmp_path / "stages",
        embeddings="stage1_embeddings.safetensors",
        latents="stage2_latents.safetensors",
    ):
        run_workflow(workflow, folders(tmp_path))


@pytest.mark.slow
def test_stage_files_continue_in_another_workflow(tmp_path: Path):
    numbers = {"height": 80, "width": 112, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 4.0, "seed": 3}
    saving = stage_workflow(
        encode=node("Wan21TextEncoder", prompt="a cat", negative_prompt="a dog"),
        save_text=node(
            "TPUSaveStage", folder="text", prompt_embeds=["encode", 0], negative_prompt_embeds=["encode", 1]
        ),
        sample=node("Wan21TPUSampler", prompt_embeds=["encode", 0], negative_prompt_embeds=["encode", 1], **numbers),
        save_all=node("TPUSaveStage", folder="all", prompt_embeds=["save_text", 0], latents=["sample", 0]),
    )
    saved = run_workflow(saving, folders(tmp_path))
    loading = stage_workflow(
        text=node("TPULoadStage", folder="text"),
        sample=node("Wan21TPUSampler", prompt_embeds=["text", 0], negative_prompt_embeds=["text", 1], **numbers),
        save=node("TPUSaveStage", folder="again", latents=["sample", 0]),
        all=node("TPULoadStage", folder="all"),
        decode=node("Wan21TPUVAEDecoder", latents=["all", 2]),
        show=node("PreviewImage", images=["decode", 0]),
    )
    again = run_workflow(loading, folders(tmp_path))
    assert (again["save"][2]["samples"] == saved["save_all"][2]["samples"]).all()
    assert len(list(tmp_path.glob("preview*.png"))) == 5
    settings = json.loads((tmp_path / "all" / "generation_config.json").read_text())
    assert settings["model_id"] == "tiny/wan21"


@pytest.mark.slow
def test_stage_commands_from_image_match_single_run(tmp_path: Path):
    """The encoded picture is in the stage files, with the size it was encoded for."""
    size = {"height": 64, "width": 96, "num_frames": 5}
    numbers = {"num_inference_steps": 2, "guidance_scale_2": 2.0, "seed": 11}
    given = {"Wan22I2VImageEncoder": {**size, "resize": "fit"}, "Wan22I2VTPUSampler": numbers}
    assignments = [
        part for name, values in given.items() for key, value in values.items()
        for part in ("--set", f"{name}.{key}={value}")
    ]  # fmt: skip
    in_process("run", str(examples.page("wan22_i2v_720p")), "--tiny", "--out", str(tmp_path), *assignments)
    folder = str(tmp_path / "stages")
    picture = str(ROOT / "examples" / "wan_i2v_shapes.png")
    model = ("--family", "Wan22I2V", "--model", "tiny/wan22i2v", "--image", picture, "--resize", "fit")
    in_process("encode", "--folder", folder, *model, *flags(size))
    in_process("denoise", "--folder", folder, *flags(numbers))
    in_process("decode", "--folder", folder)
    (video,) = tmp_path.glob("*.mp4")
    assert frames(video) == frames(tmp_path / "stages" / "output_video.mp4")
    assert len(frames(video)) == 5


@pytest.mark.recorded
def test_stage_commands_with_references_write_image(tmp_path: Path):
    """A model that makes one picture, and looks at two of different shapes."""
    sizes = {"a.png": (80, 64), "b.png": (64, 96)}
    for name, size in sizes.items():
        media.save_image(tmp_path / name, torch.rand(*size, 3))
    pictures = [part for name in sizes for part in ("--image", str(tmp_path / name))]
    in_process("encode", "--folder", str(tmp_path), "--family", "Flux2", "--model", "tiny/flux2", *pictures)
    condition = stage_files.load_condition(tmp_path, ModelRef(spec_name="flux2-dev", model_id="tiny/flux2"))
    shapes = [tuple(array.shape) for array in condition["tensors"].values()]
    assert shapes == [(1, 128, height // 16, width // 16) for height, width in sizes.values()]
    in_process("denoise", "--folder", str(tmp_path), "--num-inference-steps", "2")
    in_process("decode", "--folder", str(tmp_path))
    assert media.load_image(tmp_path / "output_image.png")[0].shape == (1, 80, 112, 3)


def test_stage_nodes_keep_encoded_image(tmp_path: Path):
    model = ModelRef(spec_name="wan2.2-i2v-a14b", model_id="tiny/wan22i2v")
    size = {"height": 64, "width": 96, "num_frames": 5}
    condition = {"tpu_family": "Wan22I2V", **size, "tensors": {"condition": torch.rand(1, 20, 2, 8, 12)}}
    given = {"folder": "here", "model": model, "negative_prompt_embeds": None, "latents": None}
    save, load = HEADLESS_NODES["TPUSaveStage"], HEADLESS_NODES["TPULoadStage"]
    with raises_message(ValueError, "node.save_condition_alone"):
        save.run(folders(tmp_path), **{**given, "latents": {}}, prompt_embeds=None, condition=condition)
    prompt = [[torch.rand(1, 4, 6), {"tpu_family": "Wan22I2V", "length": 3}]]
    assert save.run(folders(tmp_path), **given, prompt_embeds=prompt, condition=condition)[3] is condition
    *_, loaded = load.run(folders(tmp_path), folder="here", model=model)
    assert torch.equal(loaded["tensors"].pop("condition"), condition["tensors"].pop("condition"))
    assert loaded == condition


def flags(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["encode", "--family", "Wan22I2V"], "Wan 2.2 I2V A14B starts from one image, but none was given. Give"),
        (["encode", "--image", "a.png"], "Wan 2.1 T2V 14B uses no image. Leave --image out, or choose a model"),
        (
            ["encode", "--name", "wan2.1-flf2v-14b-720p", "--image", "a.png"],
            "Wan 2.1 FLF2V 14B 720P starts from one image and ends with another, but one was given. Give each",
        ),
        (
            ["encode", "--name", "wan2.2-ti2v-5b", "--image", "a.png", "--image", "b.png"],
            "Wan 2.2 TI2V 5B starts from one image, but 2 were given. Give",
        ),
        (["encode", "--family", "Wan22I2V", "--image", "nowhere.png"], "There is no image nowhere.png."),
        (
            ["encode", "--family", "Wan22I2V", "--image", "a.png", "--height", "81"],
            "Wan 2.2 I2V A14B: height is 81; it must be a multiple of 16 between",
        ),
    ],
)
def test_encode_command_unsuitable_image_or_size_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    verb, *rest = arguments
    assert cli.main([verb, "--folder", str(tmp_path / "stages"), *rest]) == 2
    assert capsys.readouterr().err.startswith(f"comfyui-tpu: {message}")
    assert not (tmp_path / "stages").exists()
