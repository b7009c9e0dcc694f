"""The declarations: what they offer, how they check, what they hand to the runtime."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes import DECLARATIONS, cogvideox
from comfyui_tpu.nodes.declare import Expansion, Folders, Input, Link, Node, Ref
from comfyui_tpu.nodes.graphs.graph import plan_generations
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.wan21 import DECODER, PIPELINE, SAMPLER, SPEC, TEXT_ENCODER
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import stage_files
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.progress import SilentProgress


class Host(SilentProgress):
    folders = Folders(models=("/models/diffusers",))


@dataclasses.dataclass
class Recorder:
    """Stands for the runtime: remembers each call's arguments and gives back its name."""

    calls: dict[str, tuple] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, progress: Any = None, condition: Any = None, latents: Any = None) -> Any:
            self.calls[name] = (*arguments, latents) if latents else arguments
            return ("positive", "negative") if name == "encode_prompt" else name

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(ModelRef, "check", lambda model: recorder.check(model))
    for name in ("encode_prompt", "denoise", "decode"):
        monkeypatch.setattr(api, name, getattr(recorder, name))
    yield recorder


def conditioning(family: str | None = "Wan21") -> list:
    return [["a tensor", {"tpu_family": family} if family else {}]]


def changed_conditioning(**values: Any) -> list:
    """What a core node makes of an encoder's output."""
    ((tensor, info),) = conditioning()
    return [[tensor, {**info, **values}]]


def all_inputs() -> list:
    return [
        pytest.param(node, declared, id=f"{node.id}.{declared.name}")
        for node in DECLARATIONS.values()
        for declared in node.inputs
    ]


@pytest.mark.parametrize(("node", "declared"), all_inputs())
def test_node_input_has_tooltip_and_valid_default(node: Any, declared: Input):
    assert declared.tooltip.endswith(".")
    if declared.is_widget:
        assert declared.parse(declared.default) == declared.default


@pytest.mark.parametrize("node", DECLARATIONS.values(), ids=lambda node: node.id)
def test_node_required_widgets_come_first(node: Any):
    """The page lists required widgets first: with another order saved values would land in the wrong widgets."""
    widgets = [declared.optional for declared in node.inputs if declared.is_widget]
    assert widgets == sorted(widgets)


@pytest.mark.parametrize(
    ("node", "widgets", "outputs"),
    [
        (TEXT_ENCODER, "prompt negative_prompt model_id precision", "prompt_embeds negative_prompt_embeds"),
        (
            SAMPLER,
            "height width num_frames num_inference_steps guidance_scale seed model_id flow_shift precision scheduler "
            "sigmas guidance_scale_2 high_noise_steps start_step end_step add_noise return_with_leftover_noise quality "
            "step_cache cache_threshold",
            "latents num_frames",
        ),
        (DECODER, "model_id fps precision", "frames fps"),
        (
            PIPELINE,
            "prompt negative_prompt height width num_frames num_inference_steps guidance_scale seed model_id fps "
            "flow_shift precision scheduler sigmas guidance_scale_2 high_noise_steps quality step_cache "
            "cache_threshold",
            "frames fps video",
        ),
    ],
    ids=lambda value: getattr(value, "id", ""),
)
def test_node_widgets_and_outputs_keep_order(node: Any, widgets: str, outputs: str):
    """Saved workflows hold values by position."""
    assert [declared.name for declared in node.inputs if declared.is_widget] == widgets.split()
    assert [output.name for output in node.outputs] == outputs.split()


def test_pipeline_node_fills_every_stage_input():
    assert isinstance(PIPELINE, Expansion)
    own = {declared.name for declared in PIPELINE.inputs}
    names = [stage.name for stage in PIPELINE.stages]
    used = set()
    for index, stage in enumerate(PIPELINE.stages):
        declared = HEADLESS_NODES[stage.node_id]
        assert {i.name for i in declared.inputs if not i.optional} <= set(stage.inputs)
        for value in stage.inputs.values():
            assert isinstance(value, Ref | Link)
            if isinstance(value, Ref):
                used.add(value.input)
            else:
                source = names.index(value.stage)
                assert source < index and value.output < len(HEADLESS_NODES[PIPELINE.stages[source].node_id].outputs)
    assert used == own


def test_text_encoder_passes_prompts_and_model_to_runtime(runtime: Recorder):
    values = TEXT_ENCODER.values({"prompt": "a cat", "negative_prompt": "a dog", "model_id": "here"})
    assert TEXT_ENCODER.run(Host(), **values) == ("positive", "negative")
    model = ModelRef(spec_name=SPEC.name, model_id="here", precision="auto", folders=("/models/diffusers",))
    assert runtime.calls == {"check": (model,), "encode_prompt": (model, "a cat", "a dog")}


def sampler_values(**given: Any) -> dict[str, Any]:
    numbers = {"height": 80, "width": 112, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 4, "seed": 7}
    return SAMPLER.values({"prompt_embeds": conditioning(), **numbers, "flow_shift": 3, **given})


def test_sampler_passes_settings_to_runtime(runtime: Recorder):
    assert SAMPLER.run(Host(), **sampler_values()) == ("denoise", 5)
    model, settings, positive, negative = runtime.calls["denoise"]
    expected = {"height": 80, "width": 112, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 4.0, "seed": 7}
    assert settings == Settings(**expected, shift=3.0)
    assert (positive, negative, model.model_id) == (conditioning(), None, SPEC.published.hub_id)


def test_cogvideox_scheduler_inputs_are_advanced_and_reach_settings(runtime: Recorder):
    """Older workflows end before it, and run with the checkpoint's own; pictures, parts of the steps and what may be
    given away for time came after.
    """
    for node, newer in ((cogvideox.SAMPLER, 9), (cogvideox.PIPELINE, 5)):
        last = node.inputs[-2 - newer : -newer]
        assert [(i.name, i.default, i.optional, i.advanced) for i in last] == [
            ("scheduler", "checkpoint", True, True), ("use_dynamic_cfg", False, True, True),
        ]  # fmt: skip
    given = {i.name: i.default for i in cogvideox.SAMPLER.inputs[:-11] if i.is_widget}
    given["prompt_embeds"] = conditioning("CogVideoX")
    chosen = {"scheduler": "CogVideoXDPMScheduler", "use_dynamic_cfg": True}
    for more in ({}, chosen):
        cogvideox.SAMPLER.run(Host(), **cogvideox.SAMPLER.values({**given, **more}))
        assert runtime.calls["denoise"][1] == cogvideox.SPEC.settings(**more)
    assert cogvideox.SPEC.settings(**chosen).scheduler == "CogVideoXDPMScheduler"
    with raises_message(
        ValueError,
        "settings.input",
        title="CogVideoX 1.5 5B",
        name="input.scheduler",
        problem=Expected("settings.not_an_option", value="'DDIM'", options=re.compile(r"^checkpoint, CogV")),
    ):
        cogvideox.SAMPLER.validate_constants(Host.folders, {"scheduler": "DDIM"})


FEW_STEPS = {
    "sigmas": "1, 0.75, 0.5, 0.25", "scheduler": "FlowMatchEulerDiscreteScheduler", "guidance_scale_2": 3.0,
    "high_noise_steps": 2, "start_step": 2, "end_step": 3, "add_noise": False, "return_with_leftover_noise": True,
}  # fmt: skip


def test_sampler_passes_few_step_settings_to_runtime(runtime: Recorder):
    latents = {"samples": "z"}
    SAMPLER.run(Host(), **sampler_values(**FEW_STEPS, latents=latents))
    settings = runtime.calls["denoise"][1]
    expected = {**FEW_STEPS, "sigmas": (1.0, 0.75, 0.5, 0.25), "num_inference_steps": 4}
    assert {name: getattr(settings, name) for name in expected} == expected
    assert runtime.calls["denoise"][-1] is latents
    with raises_message(
        ValueError,
        "settings.input",
        title="Wan 2.1 T2V 14B",
        name="sigmas",
        problem=Expected("settings.not_decreasing", value="'1, 1'"),
    ):
        SAMPLER.validate_constants(Host.folders, {"sigmas": "1, 1"})


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_sampler_inputs_are_known_by_every_model_of_family(spec: ModelSpec):
    """It would be left aside in silence; only models with several experts know those of the second."""
    node = DECLARATIONS[f"{spec.family}TPUSampler"]
    known = {*spec.inputs, *(() if len(spec.denoiser.experts) > 1 else ("guidance_scale_2", "high_noise_steps"))}
    assert {name for name in FEW_STEPS if name in {i.name for i in node.inputs}} <= known


def test_decoder_returns_fps_as_float(runtime: Recorder):
    values = DECODER.values({"latents": {"samples": "z"}, "fps": 16.0})
    frames, fps = DECODER.run(Host(), **values)
    assert (frames, fps, type(fps)) == ("decode", 16.0, float)
    assert runtime.calls["decode"][1] == {"samples": "z"}


def test_sampler_connected_model_overrides_model_id(runtime: Recorder):
    model = ModelRef(spec_name=SPEC.name, model_id="connected", precision="float32")
    SAMPLER.run(Host(), **sampler_values(model=model, model_id="other"))
    assert runtime.calls["denoise"][0] == model


@pytest.mark.parametrize(
    ("of_loader", "of_sampler", "wanted"),
    [("exact", "exact", "exact"), ("int8", "exact", "int8"), ("exact", "int8", "int8"), ("int8", "int8", "int8")],
)
def test_sampler_quality_defaults_to_quality_of_loader(of_loader: str, of_sampler: str, wanted: str, runtime: Recorder):
    loader, given = (
        HEADLESS_NODES["TPUModelLoader"],
        {"model_id": "tiny/wan21", "family": "Wan21", "quality": of_loader},
    )
    assert isinstance(loader, Node)
    graph: Any = {
        "1": {"class_type": loader.id, "inputs": given},
        "2": {"class_type": SAMPLER.id, "inputs": {"model": ["1", 0], "quality": of_sampler}},
    }
    (model, *_) = loader.run(Host(), **loader.values(given))
    SAMPLER.run(Host(), **sampler_values(model=model, quality=of_sampler))
    assert runtime.calls["denoise"][1].quality == wanted
    # What is compiled ahead is what will run.
    (ahead,) = plan_generations(graph, Folders(), HEADLESS_NODES)
    assert ahead.settings is not None and ahead.settings.quality == wanted


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"num_frames": 80},
            refused_input(
                "num_frames",
                "settings.breaks_rule",
                title=SPEC.title,
                value=80,
                rule=Expected(
                    "settings.grid", multiple_of=4, plus=1, rule=Expected("settings.between", low=1, high=241)
                ),
                nearest=[77, 81],
            ),
        ),
        (
            {"height": 721},
            refused_input(
                "height",
                "settings.breaks_rule",
                title=SPEC.title,
                value=721,
                rule=Expected(
                    "settings.multiple", multiple_of=16, rule=Expected("settings.between", low=64, high=1920)
                ),
                nearest=[720, 736],
            ),
        ),
        (
            {"num_inference_steps": -1},
            refused_input(
                "num_inference_steps",
                "settings.breaks_rule",
                title=SPEC.title,
                value=-1,
                rule=Expected("settings.between", low=1, high=100),
                nearest=[1],
            ),
        ),
        (
            {"seed": "x"},
            refused_input("seed", "settings.not_whole_number", title=SPEC.title, value="'x'", low=0, high=2**64 - 1),
        ),
        (
            {"guidance_scale": float("nan")},
            refused_input("guidance_scale", "settings.outside", title=SPEC.title, value="nan", low=0.0, high=20.0),
        ),
        (
            {"precision": "int8"},
            Expected(
                "settings.choice_unknown",
                variable="input.precision",
                choice="'int8'",
                choices="auto, bfloat16, mixed, float32",
            ),
        ),
        ({"model_id": 3}, Expected("node.value_type_wrong", name="input.model_id", value=3, value_names="text")),
        (
            {"prompt_embeds": None},
            Expected("node.input_missing", title="Wan 2.1 TPU Sampler", name="input.prompt_embeds"),
        ),
    ],
)
def test_sampler_invalid_value_raises_value_error_before_run(runtime: Recorder, given: dict, expected: Expected):
    with raises_message(ValueError, expected):
        SAMPLER.run(Host(), **sampler_values(**given))
    assert runtime.calls == {}


def test_sampler_rejects_embeddings_of_other_family(runtime: Recorder):
    with raises_message(
        ValueError,
        "condition.of_another_text_encoder",
        title="Wan 2.1 T2V 14B",
        name="input.negative_prompt_embeds",
        source_family="Flux2",
        family="Wan21",
    ):
        SAMPLER.run(Host(), **sampler_values(negative_prompt_embeds=conditioning("Flux2")))
    assert "denoise" not in runtime.calls


def test_sampler_accepts_core_conditioning(runtime: Recorder):
    SAMPLER.run(Host(), **sampler_values(prompt_embeds=conditioning(None)))
    assert "denoise" in runtime.calls


COMBINED, OPTIONS = "condition.combined_prompts_unsupported", "condition.options_unsupported"


@pytest.mark.parametrize(
    ("given", "key", "parameters"),
    [
        ([], COMBINED, {"count": 0}),
        (conditioning() * 2, COMBINED, {"count": 2, "family": "Wan21"}),
        ("text", "condition.not_conditioning", {"family": "Wan21"}),
        ([["a tensor"]], "condition.not_conditioning", {"family": "Wan21"}),
        (changed_conditioning(mask="a mask", mask_strength=1.0), OPTIONS, {"unknown": "mask, mask_strength"}),
        (changed_conditioning(start_percent=0.0, end_percent=0.5), OPTIONS, {"unknown": "start_percent, end_percent"}),
        (changed_conditioning(area=(8, 8, 0, 0), strength=0.5), OPTIONS, {"unknown": "area, strength"}),
        (changed_conditioning(strength=True), OPTIONS, {"unknown": "strength"}),
        (changed_conditioning(guidance=3.5), OPTIONS, {"unknown": "guidance"}),
        (changed_conditioning(reference_latents=["a tensor"]), OPTIONS, {"unknown": "reference_latents"}),
    ],
)
@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds"])
def test_sampler_rejects_conditioning_with_unsupported_options(
    runtime: Recorder, name: str, given: Any, key: str, parameters: dict[str, object]
):
    with raises_message(ValueError, key, title="Wan 2.1 T2V 14B", name=f"input.{name}", **parameters):
        SAMPLER.run(Host(), **sampler_values(**{name: given}))
    assert "denoise" not in runtime.calls


@pytest.mark.parametrize(
    ("given", "key"), [(conditioning(None) * 2, COMBINED), (changed_conditioning(mask="a mask"), OPTIONS)]
)
def test_save_embeddings_rejects_unsupported_conditioning(tmp_path: Path, given: Any, key: str):
    model = ModelRef(spec_name=SPEC.name, model_id="tiny/wan21")
    with raises_message(ValueError, key):
        stage_files.save_embeddings(tmp_path / "new", given, None, model)
    assert not (tmp_path / "new").exists()


def test_sampler_accepts_extra_keys_of_core_encoders(runtime: Recorder):
    SAMPLER.run(Host(), **sampler_values(prompt_embeds=changed_conditioning(pooled_output="a tensor", control=None)))
    assert "denoise" in runtime.calls


def test_sampler_rejects_model_of_other_family(runtime: Recorder):
    with raises_message(ValueError, "node.model_of_another_family", spec_name="flux2-dev", name="wan2.1-t2v-14b"):
        SAMPLER.run(Host(), **sampler_values(model=ModelRef(spec_name="flux2-dev", model_id="x")))
    assert runtime.calls == {}


def test_sampler_validate_constants_checks_only_known_values(runtime: Recorder):
    """Links are absent at queue time; the model is looked at, and no weight is."""
    SAMPLER.validate_constants(Host.folders, {"height": 720})
    assert runtime.calls == {}
    SAMPLER.validate_constants(Host.folders, {"height": 720, "model_id": "tiny/wan21"})
    assert set(runtime.calls) == {"check"}
    with raises_message(
        ValueError, "settings.input", name="input.height", problem=Expected("settings.breaks_rule", value=721)
    ):
        SAMPLER.validate_constants(Host.folders, {"height": 721})


def test_model_loader_returns_model_ref(runtime: Recorder):
    loader = DECLARATIONS["TPUModelLoader"]
    (model,) = loader.run(
        Host(), **loader.values({"model_id": "tiny/wan21", "family": "Wan21", "precision": "float32"})
    )
    assert model == ModelRef(
        spec_name=SPEC.name, model_id="tiny/wan21", precision="float32", folders=("/models/diffusers",)
    )
    assert runtime.calls == {"check": (model,)}
