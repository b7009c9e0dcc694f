"""What is said of a checkpoint that a spec cannot run: by name, key and value, before any weight is read."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import jax
import pytest
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import compatibility
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, resolve_variant
from comfyui_tpu.tpu_runtime.model_spec import Component, ConfigRequirement, ModelSpec
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network
from comfyui_tpu.tpu_runtime.progress import SilentProgress

WAN21, WAN22, FLUX2, COGVIDEOX = "wan2.1-t2v-14b", "wan2.2-i2v-a14b", "flux2-dev", "cogvideox1.5-5b"
TI2V = "wan2.2-ti2v-5b"
HUNYUAN, HUNYUAN_I2V = "hunyuanvideo1.5-t2v-720p", "hunyuanvideo1.5-i2v-720p"
COGVIDEOX_I2V = "cogvideox1.5-5b-i2v"
_WAN = {
    "_diffusers_version": "0.35.0.dev0",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
_HUNYUAN = {
    "_diffusers_version": "0.36.0.dev0",
    "guider": ["diffusers", "ClassifierFreeGuidance"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "tokenizer_2": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", "HunyuanVideo15Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo15"],
}
_KLEIN = {
    "_class_name": "Flux2KleinPipeline",
    "_diffusers_version": "0.37.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}
# As they are published, by the spec that runs them. Which entries an index has depends on the diffusers that wrote it.
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    WAN21: [
        {"_class_name": "WanPipeline", **_WAN},
        {"_class_name": "WanPipeline", **_WAN, "transformer_2": [None, None], "boundary_ratio": None},
        {"_class_name": "WanPipeline", **_WAN, "transformer_2": [None, None], "expand_timesteps": False},
    ],
    "wan2.1-t2v-1.3b": [{"_class_name": "WanPipeline", **_WAN}],
    "wan2.2-t2v-a14b": [
        {
            "_class_name": "WanPipeline",
            **_WAN,
            "boundary_ratio": 0.875,
            "expand_timesteps": False,
            "transformer_2": ["diffusers", "WanTransformer3DModel"],
        }
    ],
    **{
        name: [
            {
                "_class_name": "WanImageToVideoPipeline",
                **_WAN,
                "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
                "image_processor": ["transformers", "CLIPImageProcessor"],
            }
        ]
        for name in ("wan2.1-i2v-14b-480p", "wan2.1-i2v-14b-720p", "wan2.1-flf2v-14b-720p")
    },
    WAN22: [
        {
            "_class_name": "WanImageToVideoPipeline",
            **_WAN,
            "boundary_ratio": 0.9,
            "expand_timesteps": False,
            "image_encoder": [None, None],
            "image_processor": [None, None],
            "transformer_2": ["diffusers", "WanTransformer3DModel"],
        }
    ],
    TI2V: [
        {
            "_class_name": "WanPipeline",
            **_WAN,
            "boundary_ratio": None,
            "expand_timesteps": True,
            "transformer_2": [None, None],
        }
    ],
    HUNYUAN: [{"_class_name": "HunyuanVideo15Pipeline", **_HUNYUAN}],
    HUNYUAN_I2V: [
        {
            "_class_name": "HunyuanVideo15ImageToVideoPipeline",
            **_HUNYUAN,
            "feature_extractor": ["transformers", "SiglipImageProcessor"],
            "image_encoder": ["transformers", "SiglipVisionModel"],
        }
    ],
    FLUX2: [
        {
            "_class_name": "Flux2Pipeline",
            "_diffusers_version": "0.36.0.dev0",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Mistral3ForConditionalGeneration"],
            "tokenizer": ["transformers", "PixtralProcessor"],
            "transformer": ["diffusers", "Flux2Transformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLFlux2"],
        }
    ],
    **{f"flux2-klein-{size}": [{**_KLEIN, "is_distilled": True}] for size in ("4b", "9b")},
    **{f"flux2-klein-base-{size}": [{**_KLEIN, "is_distilled": False}, _KLEIN] for size in ("4b", "9b")},
    **{
        name: [
            {
                "_class_name": "ZImagePipeline",
                "_diffusers_version": "0.36.0.dev0",
                "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
                "text_encoder": ["transformers", "Qwen3Model"],
                "tokenizer": ["transformers", "Qwen2Tokenizer"],
                "transformer": ["diffusers", "ZImageTransformer2DModel"],
                "vae": ["diffusers", "AutoencoderKL"],
            }
        ]
        for name in ("z-image-turbo", "z-image")
    },
    "qwen-image-2512": [
        {
            "_class_name": "QwenImagePipeline",
            "_diffusers_version": "0.36.0.dev0",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
            "transformer": ["diffusers", "QwenImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLQwenImage"],
        }
    ],
    "qwen-image-edit-2511": [
        {
            "_class_name": "QwenImageEditPlusPipeline",
            "_diffusers_version": "0.36.0.dev0",
            "processor": ["transformers", "Qwen2VLProcessor"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
            "transformer": ["diffusers", "QwenImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLQwenImage"],
        }
    ],
    COGVIDEOX: [
        {
            "_class_name": "CogVideoXPipeline",
            "_diffusers_version": "0.32.0.dev0",
            "scheduler": ["diffusers", "CogVideoXDDIMScheduler"],
            "text_encoder": ["transformers", "T5EncoderModel"],
            "tokenizer": ["transformers", "T5Tokenizer"],
            "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLCogVideoX"],
        }
    ],
}
PUBLISHED[COGVIDEOX_I2V] = [{**PUBLISHED[COGVIDEOX][0], "_class_name": "CogVideoXImageToVideoPipeline"}]
PUBLISHED |= {f"hunyuanvideo1.5-t2v-{kind}": PUBLISHED[HUNYUAN] for kind in ("480p", "480p-distilled")}
for kind in ("480p", "480p-distilled", "720p-distilled", "480p-step-distilled"):
    PUBLISHED[f"hunyuanvideo1.5-i2v-{kind}"] = PUBLISHED[HUNYUAN_I2V]


def write(spec: ModelSpec, folder: Path, index: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> None:
    """A checkpoint's index and the configs of the real model with changes by folder; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    configs: dict[str, dict[str, Any]] = {}
    for component in spec.components:
        _, published = PUBLISHED[spec.name][0].get(component.folder) or ("", component.class_name)
        is_part = component.config_part and published != component.class_name
        name = published if is_part else component.class_name
        named = {"_class_name": name} if component.library == "diffusers" else {"architectures": [name]}
        own = {component.config_part: component.config} if is_part else component.config
        configs.setdefault(component.folder, {}).update({**named, **own, **changes.get(component.folder, {})})
    for name, config in configs.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, default=dict))


def check_error(name: str, folder: Path, index: Mapping[str, Any] = {}, **changes: Mapping[str, Any]) -> str:
    """What a check says of the real model with changes to its index and its configs."""
    spec = lookup_spec(name)
    write(spec, folder, {**PUBLISHED[name][0], **index}, changes)
    with pytest.raises(ValueError) as error:
        ModelRef(spec_name=name, model_id=str(folder)).check()
    return str(error.value).replace(str(folder), "FOLDER")


@pytest.mark.parametrize(
    ("name", "index"), [pytest.param(name, index, id=name) for name, found in PUBLISHED.items() for index in found]
)
def test_index_problem_published_pipeline_is_none(name: str, index: dict[str, Any]):
    assert compatibility.index_problem(lookup_spec(name), "owner/model", index) is None


def test_model_check_published_configs_fail_only_at_weights(tmp_path: Path):
    for spec in SPECS:
        assert check_error(spec.name, tmp_path / spec.name).endswith(
            "expected one .safetensors file or an index, found none."
        )


@pytest.mark.parametrize(
    ("name", "index", "found"),
    [
        pytest.param(
            WAN21,
            {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875},
            "transformer_2 (WanTransformer3DModel) and boundary_ratio 0.875",
            id="wan2.2-t2v-a14b",
        ),
        pytest.param(
            WAN21,
            {"transformer_2": [None, None], "boundary_ratio": None, "expand_timesteps": True},
            "expand_timesteps true",
            id="wan2.2-ti2v-5b",
        ),
        pytest.param(
            WAN22,
            {
                "boundary_ratio": None,
                "transformer_2": [None, None],
                "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
                "image_processor": ["transformers", "CLIPImageProcessor"],
            },
            "image_encoder (CLIPVisionModelWithProjection)",
            id="wan2.1-i2v-14b",
        ),
        pytest.param(FLUX2, {"guider": ["diffusers", "AutoGuidance"]}, "guider (AutoGuidance)", id="a guider"),
    ],
)
def test_model_check_unknown_index_entry_raises_value_error(tmp_path: Path, name: str, index: dict, found: str):
    """Its first expert alone, or a picture half looked at, would be another model."""
    spec = lookup_spec(name)
    assert check_error(name, tmp_path, index) == (
        f"{spec.title}: the model_index.json of FOLDER has {found}, which is not supported for this model; without it "
        f"the result would be wrong. Use another, such as {spec.published.hub_id}."
    )


@pytest.mark.parametrize(
    ("name", "index", "missing"),
    [
        (WAN22, {"transformer_2": [None, None], "boundary_ratio": None}, "transformer_2 and boundary_ratio"),
        (HUNYUAN_I2V, {"image_encoder": [None, None]}, "image_encoder"),
    ],
)
def test_model_check_missing_index_entry_raises_value_error(tmp_path: Path, name: str, index: dict, missing: str):
    spec = lookup_spec(name)
    assert check_error(name, tmp_path, index) == (
        f"{spec.title}: the model_index.json of FOLDER has no {missing}, which this model needs. Use one that has "
        f"it, such as {spec.published.hub_id}."
    )


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (HUNYUAN, {"transformer": {"in_channels": 17}}, "in_channels is 17 in transformer/config.json"),
        (HUNYUAN, {"transformer": {"use_meanflow": True}}, "use_meanflow is true in transformer/config.json"),
        (HUNYUAN, {"text_encoder": {"num_hidden_layers": 2}}, "num_hidden_layers is 2 in text_encoder/config.json"),
        (HUNYUAN, {"vae": {"spatial_compression_ratio": 8}}, "spatial_compression_ratio is 8 in vae/config.json"),
        (HUNYUAN_I2V, {"image_encoder": {"image_size": 224}}, "image_size is 224 in image_encoder/config.json"),
        (FLUX2, {"transformer": {"mlp_ratio": 2.5}}, "mlp_ratio is 2.5 in transformer/config.json"),
        (FLUX2, {"transformer": {"in_channels": 64}}, "in_channels is 64 in transformer/config.json"),
        (
            FLUX2,
            {"text_encoder": {"text_config": {"num_hidden_layers": 20}}},
            "text_config.num_hidden_layers is 20 in text_encoder/config.json",
        ),
        (FLUX2, {"vae": {"block_out_channels": [128, 256, 512]}}, "block_out_channels is [128, 256, 512] in vae/"),
        (COGVIDEOX, {"transformer": {"patch_size_t": None}}, "patch_size_t is null in transformer/config.json"),
        (COGVIDEOX, {"vae": {"latent_channels": 32}}, "latent_channels is 32 in vae/config.json"),
        (WAN21, {"transformer": {"in_channels": 36}}, "in_channels is 36 in transformer/config.json"),
        (WAN21, {"transformer": {"patch_size": [1, 4, 4]}}, "patch_size is [1, 4, 4] in transformer/config.json"),
        (WAN21, {"transformer": {"image_dim": 1280}}, "image_dim is 1280 in transformer/config.json"),
        (WAN21, {"vae": {"z_dim": 48}}, "z_dim is 48 in vae/config.json"),
        (WAN21, {"text_encoder": {"feed_forward_proj": "relu"}}, 'feed_forward_proj is "relu" in text_encoder/'),
        (WAN22, {"transformer": {"in_channels": 16}}, "in_channels is 16 in transformer/config.json"),
        (WAN22, {"transformer_2": {"in_channels": 16}}, "in_channels is 16 in transformer_2/config.json"),
    ],
    ids=str,
)
def test_model_check_unsupported_config_value_raises_value_error(
    tmp_path: Path, name: str, changes: dict, sentence: str
):
    spec = lookup_spec(name)
    found = check_error(name, tmp_path, **changes)
    assert found.startswith(f"{spec.title}: {sentence}")
    assert " of FOLDER; supported is " in found
    assert found.endswith(f". Use a checkpoint such as {spec.published.hub_id}.")


def test_config_problem_names_missing_required_key(tmp_path: Path):
    """CogVideoX 1.0's config may not know the key at all."""
    spec = lookup_spec(COGVIDEOX)
    config = {key: value for key, value in spec.component("transformer").config.items() if key != "patch_size_t"}
    config["_class_name"] = "CogVideoXTransformer3DModel"
    assert compatibility.config_problem(spec, spec.component("transformer"), "owner/model", config) == (
        "CogVideoX 1.5 5B: patch_size_t is missing in transformer/config.json of owner/model; supported is 2. Use a "
        "checkpoint such as zai-org/CogVideoX1.5-5B."
    )


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            WAN21,
            {"text_encoder": {"d_model": 2048}},
            "text_dim is 4096 in transformer/config.json of FOLDER, but must be d_model of text_encoder, which is "
            "2048.",
        ),
        (
            FLUX2,
            {"transformer": {"joint_attention_dim": 7680}},
            "joint_attention_dim is 7680 in transformer/config.json of FOLDER, but must be 3 times "
            "text_config.hidden_size of text_encoder, which is 5120.",
        ),
        (
            HUNYUAN,
            {"transformer": {"text_embed_2_dim": 512}},
            "text_embed_2_dim is 512 in transformer/config.json of FOLDER, but must be d_model of text_encoder_2, "
            "which is 1472.",
        ),
        (
            HUNYUAN_I2V,
            {"image_encoder": {"hidden_size": 768}},
            "image_embed_dim is 1152 in transformer/config.json of FOLDER, but must be hidden_size of image_encoder, "
            "which is 768.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value else "",
)
def test_model_check_mismatched_components_raise_value_error(tmp_path: Path, name: str, changes: dict, sentence: str):
    title = lookup_spec(name).title
    assert check_error(name, tmp_path, **changes) == f"{title}: {sentence} Its components do not belong together."


@pytest.mark.parametrize("name", [WAN21, "wan2.1-t2v-1.3b", "wan2.2-t2v-a14b"])
def test_resolve_variant_tells_model_size_from_configs(tmp_path: Path, name: str):
    """Wan 2.1's two sizes have one index, and each would run as the other."""
    write(lookup_spec(name), tmp_path, PUBLISHED[name][0], {})
    assert resolve_variant(lookup_spec(WAN21), str(tmp_path)).name == name


def test_model_check_experts_that_differ_raise_value_error(tmp_path: Path):
    assert check_error(WAN22, tmp_path, transformer_2={"num_layers": 30}) == (
        "Wan 2.2 I2V A14B: num_layers is 30 in transformer_2 of FOLDER and 40 in transformer; the two must be "
        "equal. Choose two denoisers of one model."
    )


def test_encode_incompatible_config_raises_before_building(tmp_path: Path):
    """Without a check before, as from another pack's node: not a TypeError in a traced product."""
    spec = lookup_spec(HUNYUAN)
    write(spec, tmp_path, PUBLISHED[HUNYUAN][0], {"transformer": {"in_channels": 17}})
    model = ModelRef(spec_name=HUNYUAN, model_id=str(tmp_path), precision="float32")
    runner = Runner(jax.devices()[:1])
    with raises_message(
        ValueError,
        "compatibility.config_unsupported",
        key="in_channels",
        state=Expected("compatibility.has_value", value=17),
        folder="transformer",
        need=65,
    ):
        runner.encode(model, "a cat", "", SilentProgress())
    assert not any(runner.counts.values())


def component_params() -> list:
    return [
        pytest.param(spec, component, id=f"{spec.name}.{component.name}")
        for spec in SPECS
        for component in spec.components
    ]


@pytest.mark.parametrize(("spec", "component"), component_params())
def test_component_needs_exist_upstream_and_accept_defaults(spec: ModelSpec, component: Component):
    """A config that lacks a key means upstream's default: that must be one that is supported."""
    upstream = upstream_network.upstream_class(component)
    if component.library == "diffusers":
        # Another maker's class of the same network may have keys of its own.
        classes = [*(getattr(diffusers, name) for name in component.class_aliases), upstream]
        known = {name: p.default for one in classes for name, p in inspect.signature(one.__init__).parameters.items()}
    else:
        known = json.loads(upstream.config_class().to_json_string(use_diff=False))
    for key in component.needs:
        assert compatibility._value(known, key) is not compatibility._MISSING, f"{key} is not upstream's"
    required = [key for key, need in component.needs.items() if isinstance(need, ConfigRequirement) and need.required]
    defaults = {**known, **{key: component.config[key] for key in required}}
    for architecture in (defaults, component.config, component.tiny):
        config = {**architecture, "_class_name": component.class_name}
        assert compatibility.config_problem(spec, component, "it", config) is None
