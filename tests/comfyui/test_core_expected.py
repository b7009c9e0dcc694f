"""What a workflow of ComfyUI's own samplers is understood to ask for, before it runs."""

from collections.abc import Mapping
from typing import Any

import pytest
from comfyui_tpu.nodes.graphs import core_samplers

Nodes = dict[str, dict[str, Any]]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def workflow(**changed: Mapping[str, Any]) -> Nodes:
    """A video by KSampler, with a LoRA and a shift; `changed` nodes are in place of those of their names, or beside."""
    nodes = {
        "unet": node("TPUUNETLoader", unet_name="wan.safetensors"),
        "lora": node("LoraLoaderModelOnly", model=["unet", 0]),
        "shift": node("ModelSamplingSD3", model=["lora", 0], shift=5.0),
        "clip": node("TPUCLIPLoader", clip_name="umt5.safetensors", type="wan"),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a cat"),
        "negative": node("CLIPTextEncode", clip=["clip", 0], text=""),
        "latent": node("EmptyHunyuanLatentVideo", width=64, height=["number", 0], length=9, batch_size=1),
        "number": node("PrimitiveInt", value=48),
        "sampler": node(
            "KSampler", model=["shift", 0], positive=["positive", 0], negative=["negative", 0],
            latent_image=["latent", 0], cfg=4.0,
        ),
        "vae": node("TPUVAELoader", vae_name="vae.safetensors"),
        "frames": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
    }  # fmt: skip
    return {**nodes, **changed}  # type: ignore[dict-item]


def sampler(kind: str = "KSampler", **more: Any) -> dict[str, Any]:
    return node(kind, **{**workflow()["sampler"]["inputs"], **more})


def test_a_sampler_is_understood_through_what_changes_no_shape():
    (found,) = core_samplers.find_sampler_calls(workflow())
    assert (found.model.kind, found.model.values["unet_name"]) == ("TPUUNETLoader", "wan.safetensors")
    assert (found.width, found.height, found.num_frames, found.batch, found.branches) == (64, 48, 9, 1, 2)
    assert [one.values["vae_name"] for one in found.decoders] == ["vae.safetensors"] and not found.pictures
    (encoder,) = core_samplers.find_text_encoders(workflow())
    assert encoder.values["clip_name"] == "umt5.safetensors"


@pytest.mark.parametrize("cfg, branches", [(1.0, 1), (1.5, 2)])
def test_without_guidance_one_prompt_runs(cfg: float, branches: int):
    (found,) = core_samplers.find_sampler_calls(workflow(sampler=sampler(cfg=cfg)))
    assert found.branches == branches


@pytest.mark.parametrize(("guider", "branches"), [("DualCFGGuider", 3), ("CFGGuider", 2), ("BasicGuider", 1)])
def test_a_guider_says_how_many_prompts_run(guider: str, branches: int):
    given = {
        "BasicGuider": {"conditioning": ["positive", 0]},
        "CFGGuider": {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 4.0},
        "DualCFGGuider": {
            "cond1": ["positive", 0], "cond2": ["positive", 0], "negative": ["negative", 0], "cfg_conds": 4.0,
            "cfg_cond2_negative": 2.0,
        },
    }[guider]  # fmt: skip
    made = node("SamplerCustomAdvanced", guider=["guider", 0], latent_image=["latent", 0])
    (found,) = core_samplers.find_sampler_calls(workflow(sampler=made, guider=node(guider, model=["unet", 0], **given)))
    assert found.branches == branches and len(found.decoders) == 1


def test_windows_say_for_how_many_frames_the_network_is_asked():
    windows = node("WanContextWindowsManual", model=["lora", 0], context_length=5)
    (found,) = core_samplers.find_sampler_calls(workflow(shift=windows))
    assert (found.num_frames, found.window, found.model.kind) == (9, 5, "TPUUNETLoader")
    (found,) = core_samplers.find_sampler_calls(
        workflow(shift={**windows, "inputs": {**windows["inputs"], "context_length": 81}})
    )
    assert found.window == 9


def test_two_samplers_of_two_denoisers_are_two():
    second = sampler("KSamplerAdvanced", model=["low", 0], latent_image=["latent", 0])
    found = core_samplers.find_sampler_calls(
        workflow(second=second, low=node("TPUUNETLoader", unet_name="low.safetensors"))
    )
    assert [one.model.values["unet_name"] for one in found] == ["wan.safetensors", "low.safetensors"]


def test_a_picture_of_a_video_is_known_by_its_node():
    made = node(
        "WanImageToVideo", positive=["positive", 0], negative=["negative", 0], width=64, height=48, length=9,
        batch_size=1, start_image=["image", 0], clip_vision_output=["seen", 0],
    )  # fmt: skip
    own = sampler(positive=["latent", 0], negative=["latent", 1], latent_image=["latent", 2])
    (found,) = core_samplers.find_sampler_calls(workflow(latent=made, sampler=own))
    assert found.pictures == {"start_image", "clip_vision_output"} and found.num_frames == 9


@pytest.mark.parametrize(
    "changed",
    [
        {"shift": node("SomeOtherPatch", model=["unet", 0])},
        {"positive": node("ReferenceLatent", conditioning=["negative", 0], latent=["latent", 0])},
        {"latent": node("EmptyHunyuanLatentVideo", width=["image", 0], height=48, length=9)},
        {"latent": node("VAEEncode", pixels=["image", 0], vae=["vae", 0])},
        {"latent": node("EmptyHunyuanLatentVideo", width="64", height=None, length=9)},
        {"sampler": node("KSampler")},
        {"sampler": sampler(cfg=["number", 1], model=["nowhere", 0])},
        {"sampler": sampler(model=["sampler", 0])},
        {"sampler": {"class_type": None}},
        {"lora": node("LoraLoaderModelOnly", model=["shift", 0])},
        {"sampler": node("SamplerCustomAdvanced", guider=["guider", 0]), "guider": node("DualCFGGuider")},
        {"sampler": node("SamplerCustomAdvanced", guider=["guider", 0]), "guider": node("DualModelGuider")},
    ],
)
def test_what_is_not_understood_is_left_out(changed: Mapping[str, Any]):
    # Behind a node that is not known, that node is where the model comes from, and no loader of ours.
    assert all(one.model.kind != "TPUUNETLoader" for one in core_samplers.find_sampler_calls(workflow(**changed)))
