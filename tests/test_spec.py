"""What a model's description says of sizes, guidance and experts, and what its makers call its modules."""

import json
import pickle
import re
from dataclasses import fields, replace

import pytest
from comfyui_tpu.kernels.number_formats import EXACT, FORMATS
from comfyui_tpu.sharding.rules import Rule
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Expert
from comfyui_tpu.tpu_runtime.model_spec import (
    CHECKPOINT,
    STEP_INPUTS,
    Component,
    DenoiserSpec,
    EnumInput,
    ImageConditioning,
    LatentGeometry,
    Quality,
    RowSlice,
    Settings,
    StepCache,
    require_length,
    split_guidance_first,
    split_rows,
    swap_halves,
)
from comfyui_tpu.tpu_runtime.models import lookup_spec

WAN = lookup_spec("wan2.1-t2v-14b")
WAN22 = lookup_spec("wan2.2-i2v-a14b")
FLUX = lookup_spec("flux2-dev")
VIDEO = LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=(2, 2, 2))
SETTINGS = Settings(height=64, width=96, num_frames=9, num_inference_steps=6, guidance_scale=5.0)


def test_split_rows_and_swap_halves_return_row_slices():
    assert split_rows("q", "k", "v") == (RowSlice("q", (0,), 3), RowSlice("k", (1,), 3), RowSlice("v", (2,), 3))
    assert swap_halves("norm") == (RowSlice("norm", (1, 0), 2),)


def test_require_length_accepts_only_tuples_of_length():
    assert require_length(2)((1, 2)) and not require_length(2)((1, 2, 3)) and not require_length(2)([1, 2])


def test_component_tiny_config_overrides_config_and_is_read_only():
    given = {"layers": 40, "heads": 40}
    one = Component(name="a", library="diffusers", class_name="A", config=given, tiny={"layers": 2}, rules=())
    assert dict(one.tiny) == {"layers": 2, "heads": 40} and dict(one.config) == given and one.folder == "a"
    assert replace(one, folder="b").folder == "b"
    deep = replace(one, rules=(Rule("b", ()),)).derive(config={"layers": 50}, rules=(Rule("a", ()),))
    assert dict(deep.config) == {"layers": 50, "heads": 40} and dict(deep.tiny) == dict(one.tiny)
    assert [rule.pattern for rule in deep.rules] == ["a", "b"]
    given["layers"] = 1
    assert one.config["layers"] == 40
    for mapping in (one.config, one.tiny, one.aliases, one.needs, one.original_keys):
        with pytest.raises(TypeError):
            mapping["layers"] = 1  # type: ignore[index]


def test_latent_geometry_computes_frames_shapes_and_tokens():
    assert [VIDEO.latent_frames(count) for count in (1, 4, 5, 8, 9, 13)] == [2, 2, 2, 2, 4, 4]
    assert VIDEO.latent_shape(SETTINGS) == (1, 16, 4, 8, 12)
    count = VIDEO.num_tokens((1, 16, 4, 8, 12))
    assert count == 2 * 4 * 6 and isinstance(count, int)
    with pytest.raises(ValueError):
        VIDEO.num_tokens((1, 16, 8, 12))
    picture = LatentGeometry(channels=128, stride_t=0, stride_hw=16, patch_thw=(9, 1, 2))
    assert picture.latent_shape(SETTINGS) == (1, 128, 4, 6) and picture.num_tokens((1, 128, 4, 6)) == 12


def test_recipe_defaults_are_empty():
    assert WAN.recipe.solver_arguments({}, (1,), 4, None) == {} and WAN.pictures.condition_shapes((1,)) == {}
    assert WAN.recipe.advice(SETTINGS) is None


def test_recipe_noise_has_latent_shape_in_float32():
    import torch

    noise = WAN.recipe.noise((1, 16, 3, 8, 12), torch.Generator().manual_seed(0))
    assert torch.equal(noise, torch.randn((1, 16, 3, 8, 12), generator=torch.Generator().manual_seed(0)))
    assert noise.dtype == torch.float32


@pytest.mark.parametrize(
    ("chips", "branches", "shape"), [(8, 2, (2, 4)), (8, 1, (1, 8)), (3, 2, (1, 3)), (1, 2, (1, 1)), (2, 2, (2, 1))]
)
def test_split_guidance_first_splits_branches_on_even_chip_count(chips: int, branches: int, shape: tuple[int, int]):
    assert split_guidance_first(chips, branches) == MeshShape(dp=shape[0], sp=shape[1])


def test_branches_is_one_for_guidance_of_one_or_less():
    assert [WAN.branches(scale) for scale in (0.5, 1.0, 1.01, 5.0)] == [1, 1, 2, 2]
    assert FLUX.branches(5.0) == 1


def test_settings_use_model_defaults_for_missing_values():
    found = WAN.settings(height=None, num_frames=5, nothing_of_it="x")
    assert (found.height, found.num_frames, found.seed) == (WAN.inputs["height"].default, 5, WAN.inputs["seed"].default)
    assert found.shift == WAN.inputs["flow_shift"].default and found.step_cache is None
    assert found.guidance_scale_2 is None and found.sigmas == ()
    assert WAN.settings(flow_shift=7.0).shift == 7.0
    assert WAN22.settings(guidance_scale_2=2.0).guidance_scale_2 == 2.0
    assert WAN22.settings(guidance_scale_2=0.0).guidance_scale_2 is None


def test_settings_step_count_follows_sigmas():
    found = WAN.settings(sigmas="1, 0.5, 0.25", num_inference_steps=50)
    assert found.sigmas == (1.0, 0.5, 0.25) and found.num_inference_steps == 3


def test_settings_invalid_value_names_model_and_input():
    with raises_message(
        ValueError,
        "settings.input",
        title="Wan 2.1 T2V 14B",
        name="input.num_frames",
        problem=Expected(
            "settings.breaks_rule",
            value=80,
            rule=Expected("settings.grid", multiple_of=4, plus=1, rule=Expected("settings.between", low=1)),
            nearest=[77, 81],
        ),
    ):
        WAN.settings(num_frames=80)
    with raises_message(
        ValueError, "settings.no_step_left", title="Wan 2.1 T2V 14B", start_step=6, end_step=0, total=6
    ):
        WAN.settings(num_inference_steps=6, start_step=6)
    WAN.check_input("no such widget", object())


def test_check_settings_rejects_invalid_values():
    WAN.check_settings(SETTINGS)
    for wrong, expected in [
        ({"height": 81}, refused_input("height", "settings.breaks_rule", title=WAN.title, value=81)),
        ({"shift": -1.0}, refused_input("flow_shift", "settings.outside", title=WAN.title, value=-1.0)),
        ({"start_step": 6}, Expected("settings.no_step_left", title=WAN.title, start_step=6)),
        ({"sigmas": (2.0,)}, refused_input("sigmas", "settings.number_outside", title=WAN.title)),
    ]:
        with raises_message(ValueError, expected):
            WAN.check_settings(replace(SETTINGS, **wrong))


def test_check_settings_step_cache_requires_model_support():
    cached = replace(SETTINGS, step_cache=StepCache(start=1, end=5, interval=2))
    with raises_message(
        ValueError,
        "settings.step_cache_unsupported",
        title="Wan 2.1 T2V 14B",
        lacking=re.compile(r"^cache_start, cache_end"),
    ):
        WAN.check_settings(cached)
    caching = lookup_spec("hunyuanvideo1.5-t2v-720p")
    sizes = {name: caching.inputs[name].default for name in ("height", "width", "num_frames")}
    caching.check_settings(replace(cached, **sizes))
    with raises_message(
        ValueError, "settings.input", name="input.height", problem=Expected("settings.breaks_rule", value=81)
    ):
        caching.check_settings(replace(cached, **sizes | {"height": 81}))
    with raises_message(
        ValueError, "settings.input", name="input.cache_start", problem=Expected("settings.breaks_rule", value=-1)
    ):
        caching.check_settings(replace(cached, **sizes, step_cache=StepCache(start=-1, end=5, interval=2)))
    widgets = {"step_cache": True, "cache_start": 2, "cache_end": 4, "cache_interval": 2}
    assert caching.settings(**widgets).step_cache == StepCache(start=2, end=4, interval=2)


def test_spec_adds_scheduler_and_step_inputs():
    made = replace(
        WAN, inputs={"height": WAN.inputs["height"]}, recipe=replace(WAN.recipe, schedulers={"A": {}, "B": {}})
    )
    assert set(made.inputs) == {"height", "scheduler", *STEP_INPUTS}
    assert made.inputs["scheduler"] == EnumInput(options=(CHECKPOINT, "A", "B"))
    assert {name: made.inputs[name] for name in STEP_INPUTS} == STEP_INPUTS
    dense = replace(made, denoiser=replace(made.denoiser, tile=None))
    elsewhere = (("int8+sparse", "Wan, but not TI2V, and HunyuanVideo"),)
    assert dense.inputs == {**made.inputs, "quality": EnumInput(options=("exact", "int8"), elsewhere=elsewhere)}


def test_condition_shapes_resolve_named_dimensions():
    shapes = ImageConditioning(condition_shapes=lambda latent: {"condition": ("dim", *latent[2:]), "text": (2, "dim")})
    shaped = replace(WAN, pictures=shapes)
    assert shaped.condition_shapes({"dim": 7.0}, (1, 16, 3, 8, 12)) == {"condition": (7, 3, 8, 12), "text": (2, 7)}


def test_whole_numbers_requires_integer_input():
    assert WAN.whole_numbers("height") is WAN.inputs["height"]
    with pytest.raises(AssertionError):
        WAN.whole_numbers("guidance_scale")
    assert WAN.component("transformer").name == "transformer"


def test_quality_and_expert_members_serialize_as_strings():
    """Keys of caches and jobs are made by `repr`, records and messages by JSON."""
    for member in (*Quality, *Expert):
        plain = str(member.value)
        assert (repr(member), f"{member}", json.dumps(member)) == (repr(plain), plain, json.dumps(plain))
    assert [*map(str, Quality)] == ["exact", "int8", "int8+sparse"] and [*map(str, Expert)] == ["both", "high", "low"]


def test_quality_traits_name_known_formats_qualities_and_fields():
    known = {field.name for field in fields(DenoiserSpec)}
    for quality in Quality:
        assert quality.traits.number_format in {EXACT, *FORMATS}
        assert quality.traits.needs in {"", *known} and bool(quality.traits.needs) == bool(quality.traits.models)
        assert not Quality(quality.dense).is_sparse
    assert pickle.loads(pickle.dumps(Quality.SPARSE)) is Quality.SPARSE
