"""What a workflow of ComfyUI's own samplers is understood to ask for, before it runs."""

from collections.abc import Mapping
from typing import Any

import pytest
from comfyui_tpu.nodes.graphs import core_calls
from comfyui_tpu.nodes.graphs.core_calls import Prediction
from comfyui_tpu.nodes.graphs.known import Conditioning, ImageSize, LatentSize, LoaderOutput, Outputs
from comfyui_tpu.nodes.graphs.sampling_rules import SamplerCall

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


class Facts:
    """Every image is a landscape, every model has 8 pixels per latent but FLUX.2's."""

    def image_size(self, name: str) -> ImageSize | None:
        return ImageSize(width=1328, height=1000) if name.startswith("a ") else None

    def stride(self, loaded: LoaderOutput) -> int | None:
        return 16 if "flux2" in str(loaded.values) else 8


def predict_calls(finished: Mapping[str, Outputs] | None = None, **changed: Mapping[str, Any]) -> Prediction:
    return core_calls.predict(workflow(**changed), Facts(), finished)


def predict_sampling(finished: Mapping[str, Outputs] | None = None, **changed: Mapping[str, Any]) -> SamplerCall:
    (found,) = predict_calls(finished, **changed).samplings
    return found


def size(latent: LatentSize, stride: int = 8) -> tuple[int, ...]:
    return (latent.batch, latent.num_frames, *latent.size(stride))


def test_predict_follows_sampler_inputs_through_lora_and_shift():
    found = predict_sampling()
    assert (found.model.kind, found.model.values["unet_name"]) == ("TPUUNETLoader", "wan.safetensors")
    assert size(found.latent) == (1, 9, 6, 8) and found.conditionings == (Conditioning(), Conditioning())
    assert [one.vae.values["vae_name"] for one in predict_calls().decodings] == ["vae.safetensors"]
    assert {one.clip.values["clip_name"] for one in predict_calls().encodings} == {"umt5.safetensors"}


@pytest.mark.parametrize("cfg, rows", [(1.0, 1), (1.5, 2), (1, 1)])
def test_predict_conditioning_count_depends_on_cfg(cfg: float, rows: int):
    assert len(predict_sampling(sampler=sampler(cfg=cfg)).conditionings) == rows


@pytest.mark.parametrize(("guider", "rows"), [("DualCFGGuider", 3), ("CFGGuider", 2), ("BasicGuider", 1)])
def test_predict_conditioning_count_depends_on_guider(guider: str, rows: int):
    given = {
        "BasicGuider": {"conditioning": ["positive", 0]},
        "CFGGuider": {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 4.0},
        "DualCFGGuider": {
            "cond1": ["positive", 0], "cond2": ["positive", 0], "negative": ["negative", 0], "cfg_conds": 4.0,
            "cfg_cond2_negative": 2.0,
        },
    }[guider]  # fmt: skip
    made = node("SamplerCustomAdvanced", guider=["guider", 0], latent_image=["latent", 0])
    changed = {"sampler": made, "guider": node(guider, model=["unet", 0], **given)}
    assert len(predict_sampling(**changed).conditionings) == rows and len(predict_calls(**changed).decodings) == 1


def test_predict_context_windows_set_model_window():
    windows = node("WanContextWindowsManual", model=["lora", 0], context_length=5)
    assert (predict_sampling(shift=windows).model.window, predict_sampling(shift=windows).model.kind) == (
        5,
        "TPUUNETLoader",
    )


def test_predict_two_samplers_returns_both_models():
    second = sampler("KSamplerAdvanced", model=["low", 0], latent_image=["sampler", 0])
    found = predict_calls(second=second, low=node("TPUUNETLoader", unet_name="low.safetensors")).samplings
    assert [one.model.values["unet_name"] for one in found] == ["wan.safetensors", "low.safetensors"]
    assert size(found[1].latent) == size(found[0].latent)


def test_predict_orders_samplings_by_execution():
    nodes = {"second": sampler(latent_image=["sampler", 0]), **workflow()}
    assert [one.node_id for one in core_calls.predict(nodes).samplings] == ["sampler", "second"]


def test_predict_image_to_video_node_sets_conditioning_images():
    made = node(
        "WanImageToVideo", positive=["positive", 0], negative=["negative", 0], width=64, height=48, length=9,
        batch_size=1, start_image=["image", 0], clip_vision_output=["seen", 0],
    )  # fmt: skip
    own = sampler(positive=["latent", 0], negative=["latent", 1], latent_image=["latent", 2])
    found = predict_sampling(latent=made, sampler=own)
    assert found.conditionings == 2 * (Conditioning(pictures=frozenset({"start_image", "clip_vision_output"})),)
    assert found.latent.num_frames == 9
    # The node encodes a whole video, grey but for its first frame.
    made["inputs"]["vae"] = ["vae", 0]
    assert [one.images for one in predict_calls(latent=made, sampler=own).images] == [
        ImageSize(height=48, width=64, batch=9)
    ]


def test_predict_first_last_frame_node_sets_two_clip_vision_outputs():
    made = node(
        "WanFirstLastFrameToVideo", positive=["positive", 0], negative=["negative", 0], vae=["vae", 0], width=64,
        height=48, length=9, batch_size=1, clip_vision_start_image=["a", 0], clip_vision_end_image=["b", 0],
    )  # fmt: skip
    own = sampler(positive=["latent", 0], negative=["latent", 1], latent_image=["latent", 2])
    found = predict_sampling(latent=made, sampler=own)
    assert found.conditionings[0].pictures == {"clip_vision_output", "second_clip_vision_output"}


SWITCH = {"turbo": node("PrimitiveBoolean", value=True)}


@pytest.mark.parametrize("turbo", [True, False])
def test_predict_switch_passes_chosen_model_number_and_size(turbo: bool):
    """Of models, numbers and prompts, as in the templates with a fast mode; the other branch may be unknown."""
    unknown = ["nothing", 0]
    found = predict_sampling(
        turbo=node("PrimitiveBoolean", value=turbo),
        shift=node("ComfySwitchNode", switch=["turbo", 0], on_true=["lora", 0], on_false=["unet", 0]),
        cfg=node("ComfySwitchNode", switch=["turbo", 0], on_true=["one", 0], on_false=["four", 0]),
        one=node("PrimitiveFloat", value=1), four=node("PrimitiveFloat", value=4),
        side=node("ComfySwitchNode", switch=turbo, **{f"on_{turbo}".lower(): 80, f"on_{not turbo}".lower(): unknown}),
        latent=node("EmptySD3LatentImage", width=["side", 0], height=48, batch_size=2),
        sampler=sampler(cfg=["cfg", 0]),
    )  # fmt: skip
    assert found.model.values["unet_name"] == "wan.safetensors"
    assert len(found.conditionings) == (1 if turbo else 2) and size(found.latent) == (2, 1, 6, 10)


def test_predict_switch_runs_only_chosen_branch():
    low = {"second": sampler(latent_image=["sampler", 0])}
    frames = node("VAEDecode", samples=["chosen", 0], vae=["vae", 0])
    chosen = node("ComfySwitchNode", switch=["turbo", 0], on_true=["sampler", 0], on_false=["second", 0])
    found = predict_calls(**SWITCH, **low, chosen=chosen, frames=frames)
    assert [one.node_id for one in found.samplings] == ["sampler"] and len(found.decodings) == 1
    # While the choice is not known, neither does; with it, the one.
    asked = node("SomeQuestion")
    assert not predict_calls(**low, turbo=asked, chosen=chosen, frames=frames).samplings
    found = predict_calls({"turbo": (False,)}, **low, turbo=asked, chosen=chosen, frames=frames)
    assert [one.node_id for one in found.samplings] == ["sampler", "second"]


def edit(**changed: Mapping[str, Any]) -> Nodes:
    """An edit of two images, of which one also gives the size."""
    texts = {
        name: node(
            "TextEncodeQwenImageEditPlus", clip=["clip", 0], vae=["vae", 0], prompt="", image1=["scaled", 0],
            image2=["image", 0],
        )
        for name in ("positive", "negative")
    }  # fmt: skip
    nodes = {
        "image": node("LoadImage", image="a landscape.png"),
        "scaled": node("FluxKontextImageScale", image=["image", 0]),
        "latent": node("VAEEncode", pixels=["scaled", 0], vae=["vae", 0]),
        **texts,
    }
    return workflow(**{**nodes, **changed})


def test_predict_edit_workflow_uses_scaled_image_sizes():
    # 1328 x 1000 becomes 1184 x 880, and 1024 x 1024 pixels in multiples of 8: 1184 x 888, 1184 x 888.
    (found,) = core_calls.predict(edit(), Facts()).samplings
    assert found.latent.size(8) == (110, 148) and found.latent.images == 1
    references = [latent.size(8) for latent in found.conditionings[0].references]
    assert references == [(110, 148), (111, 148)] and found.conditionings[0] == found.conditionings[1]
    pixels = {(one.images.width, one.images.height) for one in core_calls.predict(edit(), Facts()).images}
    assert pixels == {(1184, 880), (1184, 888)}
    assert not core_calls.predict(edit(), Facts()).encodings  # a prompt with images is another call


def test_predict_unknown_image_waits_until_loader_finishes():
    nodes = edit(image=node("SomeCamera"))
    first = core_calls.predict(nodes, Facts())
    assert not first.samplings and first.waiting == {"image"}
    (found,) = core_calls.predict(nodes, Facts(), {"image": (ImageSize(width=512, height=768),)}).samplings
    assert found.latent.size(8) == (1248 // 8, 832 // 8)  # by hand: the Kontext size nearest to 2:3


def test_predict_reference_latents_follow_conditionings():
    found = predict_sampling(
        image=node("LoadImage", image="a landscape.png"),
        scaled=node("ImageScaleToTotalPixels", image=["image", 0], megapixels=1.0, upscale_method="area"),
        encoded=node("VAEEncode", pixels=["scaled", 0], vae=["vae", 0]),
        vae=node("TPUVAELoader", vae_name="flux2-vae.safetensors"),
        given=node("ReferenceLatent", conditioning=["positive", 0], latent=["encoded", 0]),
        zero=node("ConditioningZeroOut", conditioning=["given", 0]),
        latent=node("EmptyFlux2LatentImage", width=1024, height=1008, batch_size=1),
        sampler=sampler(positive=["given", 0], negative=["zero", 0]),
    )
    # sqrt(1024 * 1024 / 1328 / 1000) = 0.88858: 1180 x 889 pixels, of which 1168 x 880 are encoded.
    assert [latent.size(16) for latent in found.conditionings[0].references] == [(55, 73)]
    assert found.conditionings[0] == found.conditionings[1] and found.latent.size(16) == (63, 64)


def test_predict_conditionings_keep_separate_reference_counts():
    found = predict_sampling(
        given=node("ReferenceLatent", conditioning=["positive", 0], latent=["latent", 0]),
        sampler=sampler(positive=["given", 0]),
    )
    assert [len(one.references) for one in found.conditionings] == [1, 0]


@pytest.mark.parametrize(
    "changed",
    [
        {"shift": node("SomeOtherPatch", model=["unet", 0])},
        {"positive": node("ConditioningCombine", conditioning_1=["negative", 0], conditioning_2=["negative", 0])},
        {"positive": node("ReferenceLatent", conditioning=["negative", 0], latent=["nowhere", 0])},
        {"latent": node("EmptyHunyuanLatentVideo", width=["image", 0], height=48, length=9)},
        {"latent": node("VAEEncode", pixels=["image", 0], vae=["vae", 0])},
        {"latent": node("EmptyHunyuanLatentVideo", width="64", height=None, length=9)},
        {"latent": node("EmptyHunyuanLatentVideo", width=64, height=48, length=10**9)},
        {"latent": node("EmptyHunyuanLatentVideo", width=True, height=48, length=9)},
        {"latent": node("EmptyHunyuanLatentVideo", width=float("inf"), height=float("nan"), length=9)},
        {"sampler": node("KSampler")},
        {"sampler": sampler(cfg=["number", 1], model=["nowhere", 0])},
        {"sampler": sampler(model=["sampler", 0])},
        {"sampler": sampler(latent_image=["sampler", 0])},
        {"sampler": {"class_type": None}},
        {"sampler": {"class_type": ["KSampler"], "inputs": ["model"]}},
        {"lora": node("LoraLoaderModelOnly", model=["shift", 0])},
        {"unet": node("TPUUNETLoader", unet_name=["somewhere", 0])},
        {"sampler": node("SamplerCustomAdvanced", guider=["guider", 0]), "guider": node("DualCFGGuider")},
        {"sampler": node("SamplerCustomAdvanced", guider=["guider", 0]), "guider": node("DualModelGuider")},
    ],
)
def test_predict_unsupported_graph_returns_no_samplings(changed: Mapping[str, Any]):
    assert not predict_calls(**changed).samplings


def test_predict_unknown_node_excludes_only_dependent_samplings():
    second = {
        "other": sampler(model=["patched", 0]), "patched": node("SomeOtherPatch", model=["unet", 0]),
        "seen": node("VAEDecode", samples=["other", 0], vae=["vae", 0]),
    }  # fmt: skip
    found = predict_calls(**second)
    assert [one.node_id for one in found.samplings] == ["sampler"] and found.waiting == {"patched"}
    # The size of the other's result is known all the same.
    assert {one.node_id for one in found.decodings} == {"frames", "seen"}
