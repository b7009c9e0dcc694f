"""Compiling ahead: every way to ask for it finds the sizes that the run itself would have. Nothing is compiled here."""

import ast
import io
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs.graph import list_generations
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext, run_workflow
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import engine as engines
from comfyui_tpu.tpu_runtime.model_spec import MagCache, ModelSpec, Settings, StepCache
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec
from comfyui_tpu.tpu_runtime.programs import executables
from comfyui_tpu.tpu_runtime.programs.program import Program

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# ComfyUI's own nodes compile in their first run: their sizes are those of a latent that comes from any node.
CORE = sorted(EXAMPLES.glob("core/*.json"))
FILES = sorted(set(EXAMPLES.rglob("*.json")) - set(CORE))
# Pipelines of a network that another has too.
ALIKE = ("flux2_turbo", "hunyuan15_t2v_720p", "qwen_image_2512", "wan21_1.3b", "wan22_i2v_4step", "wan22_t2v_4step")
SIBLINGS = [path for path in examples.PIPELINES if path.stem in ALIKE]
HUNYUAN = lookup_spec("hunyuanvideo1.5-t2v-720p")
# Only the example of Wan 2.2 has its size in another node than the sampler, where it is 0.
SIZE = ("height", "width", "num_frames")
WAN22 = examples.page("wan22_i2v_720p")

Asked = list[tuple[ModelRef, Settings]]


@pytest.fixture
def requested_generations(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The generations that are to be compiled for, in place of compiling."""
    found: Asked = []

    def warmup(model: ModelRef, settings: Settings, *, progress: Any) -> int:
        found.append((model, settings))
        return 0

    monkeypatch.setattr(api, "warm_up", warmup)
    monkeypatch.setattr(ModelRef, "check", lambda model: None)
    return found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """The programs that an engine of its own would compile."""
    found: list[Program] = []

    def obtain(program: Program) -> tuple[executables.Executable, bool]:
        found.append(program)
        return executables.Executable(program=program, compiled=None), True

    fresh = engines.Engine(jax.devices())
    monkeypatch.setattr(api, "get_engine", lambda progress: fresh)
    monkeypatch.setattr(executables, "compile_or_load", obtain)
    yield found


def name(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def workflow_of(path: Path, **changes: Any) -> dict[str, Any]:
    """The workflow in API format, with each node's input of these names changed."""
    workflow = to_api(json.loads(path.read_text()), HEADLESS_NODES)
    for node in workflow.values():
        own = {key for key, value in node["inputs"].items() if value or key not in SIZE}
        node["inputs"] |= {key: value for key, value in changes.items() if key in own}
    return workflow


def widgets_of(path: Path) -> dict[str, Any]:
    """What the nodes of a file say together; size and frames stand in one node or, equal, in two."""
    inputs = [node["inputs"] for node in workflow_of(path).values()]
    given = {key: value for values in inputs for key, value in values.items() if value or key not in SIZE}
    return {key: value for key, value in given.items() if not isinstance(value, list)}


@pytest.mark.parametrize("is_tiny", [False, True], ids=["real", "tiny"])
@pytest.mark.parametrize("path", FILES, ids=name)
def test_warmup_example_uses_sizes_of_workflow(path: Path, is_tiny: bool, requested_generations: Asked):
    assert cli.main(["warmup", str(path), *(["--tiny"] if is_tiny else [])]) == 0
    ((model, settings),) = requested_generations
    widgets = widgets_of(path)
    if is_tiny:
        widgets |= {"model_id": model.spec.miniature.id, **model.spec.miniature.inputs}
    expected = {"shift": widgets.get("flow_shift"), **{key: widgets[key] for key in widgets if key != "step_cache"}}
    sigmas = tuple(float(sigma) for sigma in widgets.get("sigmas", "").split(",") if sigma)
    expected |= {"sigmas": sigmas, "guidance_scale_2": widgets.get("guidance_scale_2") or None}
    found = {field.name: getattr(settings, field.name) for field in fields(Settings)}
    compared = [key for key in found if key in expected and expected[key] is not None]
    assert {"height", "width", "num_inference_steps", "guidance_scale", "seed"} <= set(compared)
    assert {key: found[key] for key in compared} == {key: expected[key] for key in compared}
    assert (model.model_id, settings.step_cache) == (widgets["model_id"], None)


@pytest.mark.parametrize("command", ["warmup", "run"])
@pytest.mark.parametrize("path", CORE, ids=name)
def test_warmup_and_run_refuse_workflow_of_core_nodes(
    path: Path, command: str, requested_generations: Asked, capsys: pytest.CaptureFixture
):
    assert cli.main([command, str(path)]) == 2
    assert ", which does not run without ComfyUI: queue this workflow there. Known here: " in capsys.readouterr().err
    assert not requested_generations


@pytest.mark.slow
@pytest.mark.parametrize("path", slower(examples.PIPELINES, *SIBLINGS), ids=name)
def test_warmup_tiny_builds_programs_at_tiny_sizes(path: Path, programs: list[Program]):
    """The whole way through the engine and the tiny checkpoint, but for the compiler."""
    assert cli.main(["warmup", str(path), "--tiny"]) == 0
    ((model, settings),) = generations_of_tiny(path)
    spec = model.spec
    parts = {name for program in programs for name in program.components}
    assert parts == {component.name for component in spec.components if component.name in parts | {spec.vae.component}}
    assert {spec.denoiser.experts[0], spec.vae.component, *(text.component for text in spec.text_encoders)} <= parts
    (step,) = (program for program in programs if program.name == "denoise_step")
    assert step.args.state[0].shape == spec.geometry.latent_shape(settings)
    assert step.args.state[0].shape[-2:] == (80 // spec.geometry.stride_hw, 112 // spec.geometry.stride_hw)


def generations_of_tiny(path: Path) -> Asked:
    workflow = workflow_of(path)
    make_tiny(workflow)
    return list_generations(workflow, Folders(), HEADLESS_NODES)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_warmup_model_uses_tiny_or_given_sizes(spec: ModelSpec, requested_generations: Asked):
    assert cli.main(["warmup", "--model", spec.name]) == 0
    assert cli.main(["warmup", "--model", spec.name, "--tiny"]) == 0
    assert cli.main(["warmup", "--model", spec.name, "--tiny", "--height", "96", "--guidance-scale", "1"]) == 0
    shown = spec.settings()
    assert requested_generations[0] == (ModelRef(spec_name=spec.name, model_id=spec.published.hub_id), shown)
    assert requested_generations[1][0].model_id == spec.miniature.id
    sizes = [(settings.height, settings.width, settings.num_frames) for _, settings in requested_generations[1:]]
    num_frames = spec.miniature.inputs.get("num_frames", shown.num_frames)
    height, width = (spec.miniature.inputs[name] for name in ("height", "width"))
    assert sizes == [(height, width, num_frames), (96, width, num_frames)]
    assert requested_generations[2][1].guidance_scale == 1.0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_warmup_node_uses_given_sizes(spec: ModelSpec, requested_generations: Asked):
    node, model = HEADLESS_NODES["TPUWarmup"], ModelRef(spec_name=spec.name, model_id=spec.miniature.id)
    sizes = {"height": 96, "width": 0, "num_frames": 17, "num_inference_steps": 3, "guidance_scale": 0.0}
    (report,) = node.run(TerminalContext(Folders(), stream=io.StringIO()), **node.values({"model": model, **sizes}))
    shown = spec.settings()
    num_frames = shown.num_frames if spec.is_image else 17
    assert requested_generations[0][1] == spec.settings(height=96, num_frames=num_frames, num_inference_steps=3)
    assert report.startswith(f"{spec.title}, {shown.width}x96")


def test_warmup_node_uses_quality_of_loader(requested_generations: Asked):
    node, spec = HEADLESS_NODES["TPUWarmup"], lookup_spec("wan2.1-t2v-14b")
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, quality="int8")
    node.run(TerminalContext(Folders(), stream=io.StringIO()), **node.values({"model": model}))
    assert [settings.quality for _, settings in requested_generations] == ["int8"]


def test_warmup_node_without_model_uses_samplers_of_workflow(
    requested_generations: Asked, monkeypatch: pytest.MonkeyPatch
):
    """One with a step cache and another solver, one whose model is on another machine."""
    model_id, address = lookup_spec("wan2.1-t2v-14b").published.hub_id, "10.0.0.7:8190"
    euler = "FlowMatchEulerDiscreteScheduler"
    workflow = workflow_of(examples.page("wan21_t2v_720p"), step_cache=True, scheduler=euler)
    (sampler,) = (node for node in workflow.values() if node["class_type"].endswith("TPUSampler"))
    monkeypatch.setenv("COMFYUI_TPU_REMOTES", address)
    workflow["away"] = {**sampler, "inputs": sampler["inputs"] | {"model": ["remote", 0], "step_cache": False}}
    remote = {"address": address, "model_id": model_id, "family": "Wan21"}
    workflow |= {"remote": {"class_type": "TPURemote", "inputs": remote}}
    wanted = list_generations(workflow, Folders(), HEADLESS_NODES)
    workflow = {key: node for key, node in workflow.items() if not HEADLESS_NODES[node["class_type"]].is_output}
    workflow |= {"warmup": {"class_type": "TPUWarmup", "inputs": {}}}
    ((report,),) = run_workflow(workflow, TerminalContext(Folders(), stream=io.StringIO())).values()
    assert requested_generations == wanted and len(requested_generations) == 2
    found = [
        (model.address, settings.step_cache is not None, settings.scheduler)
        for model, settings in requested_generations
    ]
    assert found == [("", True, euler), (address, False, euler)]
    assert [line.split(",")[0] for line in report.splitlines()] == [
        model.spec.title for model, _ in requested_generations
    ]


def test_warmup_applies_step_cache_options(tmp_path: Path, requested_generations: Asked):
    """From a workflow's widgets, and from the options of the command."""
    path = tmp_path / "cached.json"
    path.write_text(json.dumps(workflow_of(examples.page("hunyuan15_t2v_720p"), step_cache=True, cache_end=40)))
    assert cli.main(["warmup", str(path)]) == 0
    options = ["--step-cache", "--cache-start", "3", "--cache-interval", "2"]
    assert cli.main(["warmup", "--model", HUNYUAN.name, *options]) == 0
    assert cli.main(["warmup", "--model", HUNYUAN.name, "--cache-start", "3"]) == 0
    assert cli.main(["warmup", "--model", "wan2.1-t2v-14b", "--step-cache", "--cache-threshold", "0.1"]) == 0
    assert [settings.step_cache for _, settings in requested_generations] == [
        StepCache(start=11, end=40, interval=4),
        StepCache(start=3, end=45, interval=2),
        None,
        MagCache(threshold=0.1),
    ]


def test_warmup_accepts_scheduler_options(requested_generations: Asked):
    name, options = "cogvideox1.5-5b", ["--scheduler", "CogVideoXDPMScheduler", "--use-dynamic-cfg"]
    assert cli.main(["warmup", "--model", name]) == 0
    assert cli.main(["warmup", "--model", name, *options]) == 0
    found = [(settings.scheduler, settings.use_dynamic_cfg) for _, settings in requested_generations]
    assert found == [("checkpoint", False), ("CogVideoXDPMScheduler", True)]


def test_warmup_step_cache_builds_both_step_programs(programs: list[Program]):
    options = ["--step-cache", "--cache-start", "1", "--cache-end", "4", "--num-inference-steps", "5"]
    assert cli.main(["warmup", "--model", HUNYUAN.name, "--tiny", *options]) == 0
    names = [program.name for program in programs]
    assert (names.count("denoise_step"), names.count("denoise_step.from_features")) == (1, 1)


def test_warmup_mag_cache_builds_both_step_programs(programs: list[Program]):
    assert cli.main(["warmup", "--model", "wan2.1-t2v-14b", "--tiny", "--step-cache", "--num-frames", "5"]) == 0
    names = [program.name for program in programs]
    assert (names.count("denoise_step"), names.count("denoise_step.from_features")) == (1, 1)


def test_warmup_takes_size_from_linked_image_encoder_or_refuses(
    requested_generations: Asked, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """Its size is followed through nodes that pass it on, and cannot be known from a folder of stage files."""
    workflow = workflow_of(WAN22, height=480, width=832)
    workflow["20"] = {"class_type": "TPUFreeMemory", "inputs": {"anything": ["3", 0]}}
    workflow["4"]["inputs"]["condition"] = ["20", 0]
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(workflow))
    assert cli.main(["warmup", str(path)]) == 0
    assert (
        requested_generations[0][1].height,
        requested_generations[0][1].width,
        requested_generations[0][1].num_frames,
    ) == (480, 832, 81)
    workflow["20"] = {"class_type": "TPULoadStage", "inputs": {"folder": "stages", "model": ["21", 0]}}
    workflow["4"]["inputs"]["condition"] = ["20", 3]
    path.write_text(json.dumps(workflow))
    assert cli.main(["warmup", str(path)]) == 2
    assert capsys.readouterr().err.endswith(
        "comfyui-tpu: Wan22I2VTPUSampler (node 4): the node linked to condition has no height before it runs. "
        "Name model and size yourself: `comfyui-tpu warmup --model NAME --height ... --width ... --num-frames ...`.\n"
    )


def test_warmup_uses_model_connected_to_pipeline(
    requested_generations: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "ComfyUI" / "models" / "vae").mkdir(parents=True)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "ComfyUI"))
    workflow = workflow_of(EXAMPLES / "pipeline" / "wan21_t2v_720p.json")
    workflow["20"] = {"class_type": "TPUModelLoader", "inputs": {"model_id": "tiny/wan21", "family": "Wan21"}}
    workflow["1"]["inputs"]["model"] = ["20", 0]
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(workflow))
    assert cli.main(["warmup", str(path)]) == 0
    folders = (str(tmp_path / "ComfyUI" / "models" / "vae"),)
    assert requested_generations[0][0] == ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21", folders=folders)


def test_warmup_refuses_quality_unsupported_by_model(
    requested_generations: Asked, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """A loader offers what any model has."""
    workflow = workflow_of(EXAMPLES / "pipeline" / "flux2_t2i.json")
    workflow["20"] = {"class_type": "TPUModelLoader",
                      "inputs": {"model_id": "tiny/flux2", "family": "Flux2", "quality": "int8+sparse"}}  # fmt: skip
    next(node for node in workflow.values() if node["class_type"] == "Flux2TPUPipeline")["inputs"]["model"] = ["20", 0]
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(workflow))
    assert cli.main(["warmup", str(path)]) == 2
    assert "quality is 'int8+sparse', which Wan, but not TI2V, and HunyuanVideo have" in capsys.readouterr().err
    assert requested_generations == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "warmup takes either a workflow file or --model NAME."),
        ([str(WAN22), "--height", "80"], "--height: a workflow has its own. Leave it out, or give --model"),
        (
            ["--model", "wan2.1-t2v-14b", "--cache-start", "3"],
            "Wan 2.1 T2V 14B: this model has no cache_start. Leave --",
        ),
        (["--model", "flux2-dev", "--num-frames", "5"], "FLUX.2 dev: this model has no num_frames. Leave --num-frames"),
        (["--model", "wan2.1-t2v-14b", "--height", "81"], "Wan 2.1 T2V 14B: height is 81; it must be a multiple of 16"),
    ],
)
def test_warmup_invalid_arguments_are_refused(
    arguments: list[str], message: str, requested_generations: Asked, capsys: pytest.CaptureFixture
):
    assert cli.main(["warmup", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"comfyui-tpu: {message}")
    assert requested_generations == []


def test_settings_are_constructed_only_in_model_module():
    """`ModelSpec.settings`: elsewhere a new widget would be forgotten."""
    files = [path for room in ("cli", "nodes", "tpu_runtime") for path in (ROOT / room).rglob("*.py")]
    calls = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
    makers = {path.name for path, node in calls if isinstance(node, ast.Call) and ast.unparse(node.func) == "Settings"}
    assert makers == {"model.py"}
