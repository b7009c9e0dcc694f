"""Other makers' pipelines of Wan's own network: SkyReels V2 against `diffusers.SkyReelsV2Pipeline`, and FastWan."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.models.wan import test_wan21
from comfyui_tpu.tests.models.wan.test_wan21 import NEGATIVE, SHORT
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

WAN, TI2V = spec_for_family("Wan21"), lookup_spec("wan2.2-ti2v-5b")
SETTINGS = replace(test_wan21.ODD, num_inference_steps=2, guidance_scale=6.0, shift=8.0)
# Skywork/SkyReels-V2-T2V-14B-540P-Diffusers: what its configs say that Wan's do not.
SKYREELS = {"_class_name": "SkyReelsV2Transformer3DModel", "inject_sample_info": False, "num_frame_per_block": 1}


def update_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def copy_as_pipeline(folder: Path, spec: ModelSpec, pipeline: str, **transformer: Any) -> Path:
    """The tiny checkpoint as another pipeline's."""
    shutil.copytree(tiny.ensure_random(spec), folder)
    update_json(folder / "model_index.json", _class_name=pipeline)
    if transformer:
        update_json(folder / "model_index.json", transformer=["diffusers", transformer["_class_name"]])
        update_json(folder / "transformer" / "config.json", **transformer)
    return folder


@pytest.fixture
def skyreels(tmp_path: Path) -> Path:
    return copy_as_pipeline(tmp_path / "skyreels", WAN, "SkyReelsV2Pipeline", **SKYREELS)


def test_skyreels_latents_and_frames_match_diffusers(skyreels: Path, compare: Callable):
    pipe = parity.upstream("SkyReelsV2Pipeline", skyreels, tokenizer=umt5_tokenizer(skyreels))
    assert type(pipe.transformer).__name__ == SKYREELS["_class_name"]
    pipe.scheduler = solver_table.build_scheduler({**WAN.recipe.scheduler, "flow_shift": SETTINGS.shift})
    expected = parity.generate(pipe, SETTINGS, prompt=SHORT, negative_prompt=NEGATIVE, num_frames=SETTINGS.num_frames)
    model, runner = choose_model(WAN, str(skyreels), precision="float32"), engine(3)
    assert model.spec is WAN
    latents = runner.denoise(
        model, SETTINGS, *runner.encode(model, SHORT, NEGATIVE, SilentProgress()), SilentProgress()
    )
    compare("latents", test_wan21.normalised(latents["samples"]), expected.latents)
    compare("frames", runner.decode(model, latents, SilentProgress()).numpy(), expected.frames)


@pytest.mark.parametrize(
    ("key", "value", "supported"), [("inject_sample_info", True, "false"), ("num_frame_per_block", 5, "1")]
)
def test_skyreels_diffusion_forcing_config_raises_value_error(skyreels: Path, key: str, value: object, supported: str):
    update_json(skyreels / "transformer" / "config.json", **{key: value})
    state = Expected("compatibility.has_value", value=json.dumps(value))
    with raises_message(ValueError, "compatibility.config_unsupported", key=key, state=state, need=supported):
        choose_model(WAN, str(skyreels)).check()


def test_skyreels_diffusion_forcing_pipeline_raises_value_error(tmp_path: Path):
    folder = copy_as_pipeline(tmp_path / "model", WAN, "SkyReelsV2DiffusionForcingPipeline", **SKYREELS)
    with raises_message(
        ValueError,
        "compatibility.pipeline_of_another_node",
        class_name="SkyReelsV2DiffusionForcingPipeline",
        pipeline_classes=re.compile(r"^WanPipeline or "),
    ):
        choose_model(WAN, str(folder)).check()


@pytest.mark.parametrize("spec", [WAN, TI2V], ids=lambda spec: spec.name)
def test_choose_model_accepts_fastwan_pipeline(spec: ModelSpec, tmp_path: Path):
    folder = copy_as_pipeline(tmp_path / "model", spec, "WanDMDPipeline")
    model = choose_model(spec, str(folder))
    model.check()
    assert model.spec is spec


def test_denoise_unknown_block_weight_raises_checkpoint_error(tmp_path: Path):
    """FastWan trained with sparse attention has a gate in each block; without it, it is another network."""
    folder = copy_as_pipeline(tmp_path / "model", WAN, "WanDMDPipeline")
    path = sorted((folder / "transformer").glob("*.safetensors"))[0]
    weights = load_file(path)
    denoise = functools.partial(
        engine(1).denoise, choose_model(WAN, str(folder), precision="float32"), replace(SETTINGS, guidance_scale=1.0)
    )
    embeds = engine(1).encode(parity.tiny_model(WAN), SHORT, "", SilentProgress())
    save_file({**weights, "blocks.0.to_gate_compress.weight": torch.zeros(4, 4)}, path)
    with raises_message(
        CheckpointError,
        "checkpoint.weight_unexpected",
        more="blocks.0.to_gate_compress.weight",
        class_name="WanTransformer3DModel",
    ):
        denoise(*embeds, SilentProgress())
