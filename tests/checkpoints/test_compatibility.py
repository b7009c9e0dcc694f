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
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
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


def check(name: str, folder: Path, index: Mapping[str, Any] = {}, **changes: Mapping[str, Any]) -> None:
    """Check the real model with changes to its index and its configs."""
    spec = lookup_spec(name)
    write(spec, folder, {**PUBLISHED[name][0], **index}, changes)
    ModelRef(spec_name=name, model_id=str(folder)).check()


@pytest.mark.parametrize(
    ("name", "index"), [pytest.param(name, index, id=name) for name, found in PUBLISHED.items() for index in found]
)
def test_index_problem_published_pipeline_is_none(name: str, index: dict[str, Any]):
    assert compatibility.index_problem(lookup_spec(name), "owner/model", index) is None


def test_model_check_published_configs_fail_only_at_weights(tmp_path: Path):
    for spec in SPECS:
        with raises_message(ValueError, "checkpoint.no_weights_or_index", present="none"):
            check(spec.name, tmp_path / spec.name)


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
    with raises_message(
        ValueError,
        "compatibility.component_unknown",
        title=spec.title,
        model_id=tmp_path,
        unknown=found,
        hub_id=spec.published.hub_id,
    ):
        check(name, tmp_path, index)


@pytest.mark.parametrize(
    ("name", "index", "missing"),
    [
        (WAN22, {"transformer_2": [None, None], "boundary_ratio": None}, "transformer_2 and boundary_ratio"),
        (HUNYUAN_I2V, {"image_encoder": [None, None]}, "image_encoder"),
    ],
)
def test_model_check_missing_index_entry_raises_value_error(tmp_path: Path, name: str, index: dict, missing: str):
    spec = lookup_spec(name)
    with raises_message(
        ValueError,
        "compatibility.component_missing",
        title=spec.title,
        model_id=tmp_path,
        missing=missing,
        hub_id=spec.published.hub_id,
    ):
        check(name, tmp_path, index)


@pytest.mark.parametrize(
    ("name", "changes", "key", "value", "folder"),
    [
        (HUNYUAN, {"transformer": {"in_channels": 17}}, "in_channels", "17", "transformer"),
        (HUNYUAN, {"transformer": {"use_meanflow": True}}, "use_meanflow", "true", "transformer"),
        (HUNYUAN, {"text_encoder": {"num_hidden_layers": 2}}, "num_hidden_layers", "2", "text_encoder"),
        (HUNYUAN, {"vae": {"spatial_compression_ratio": 8}}, "spatial_compression_ratio", "8", "vae"),
        (HUNYUAN_I2V, {"image_encoder": {"image_size": 224}}, "image_size", "224", "image_encoder"),
        (FLUX2, {"transformer": {"mlp_ratio": 2.5}}, "mlp_ratio", "2.5", "transformer"),
        (FLUX2, {"transformer": {"in_channels": 64}}, "in_channels", "64", "transformer"),
        (
            FLUX2,
            {"text_encoder": {"text_config": {"num_hidden_layers": 20}}},
            "text_config.num_hidden_layers",
            "20",
            "text_encoder",
        ),
        (FLUX2, {"vae": {"block_out_channels": [128, 256, 512]}}, "block_out_channels", "[128, 256, 512]", "vae"),
        (COGVIDEOX, {"transformer": {"patch_size_t": None}}, "patch_size_t", "null", "transformer"),
        (COGVIDEOX, {"vae": {"latent_channels": 32}}, "latent_channels", "32", "vae"),
        (WAN21, {"transformer": {"in_channels": 36}}, "in_channels", "36", "transformer"),
        (WAN21, {"transformer": {"patch_size": [1, 4, 4]}}, "patch_size", "[1, 4, 4]", "transformer"),
        (WAN21, {"transformer": {"image_dim": 1280}}, "image_dim", "1280", "transformer"),
        (WAN21, {"vae": {"z_dim": 48}}, "z_dim", "48", "vae"),
        (WAN21, {"text_encoder": {"feed_forward_proj": "relu"}}, "feed_forward_proj", '"relu"', "text_encoder"),
        (WAN22, {"transformer": {"in_channels": 16}}, "in_channels", "16", "transformer"),
        (WAN22, {"transformer_2": {"in_channels": 16}}, "in_channels", "16", "transformer_2"),
    ],
    ids=str,
)
def test_model_check_unsupported_config_value_raises_value_error(
    tmp_path: Path, name: str, changes: dict, key: str, value: str, folder: str
):
    spec = lookup_spec(name)
    with raises_message(
        ValueError,
        "compatibility.config_unsupported",
        title=spec.title,
        key=key,
        state=Expected("compatibility.has_value", value=value),
        folder=folder,
        model_id=tmp_path,
        hub_id=spec.published.hub_id,
    ):
        check(name, tmp_path, **changes)


def test_config_problem_names_missing_required_key(tmp_path: Path):
    """CogVideoX 1.0's config may not know the key at all."""
    spec = lookup_spec(COGVIDEOX)
    config = {key: value for key, value in spec.component("transformer").config.items() if key != "patch_size_t"}
    config["_class_name"] = "CogVideoXTransformer3DModel"
    assert_message(
        compatibility.config_problem(spec, spec.component("transformer"), "owner/model", config),
        "compatibility.config_unsupported",
        title="CogVideoX 1.5 5B",
        key="patch_size_t",
        state="compatibility.is_missing",
        folder="transformer",
        model_id="owner/model",
        need=2,
        hub_id="zai-org/CogVideoX1.5-5B",
    )


@pytest.mark.parametrize(
    ("name", "changes", "own", "other"),
    [
        (WAN21, {"text_encoder": {"d_model": 2048}}, ("text_dim", 4096), ("", "d_model", "text_encoder", 2048)),
        (
            FLUX2,
            {"transformer": {"joint_attention_dim": 7680}},
            ("joint_attention_dim", 7680),
            ("3 times ", "text_config.hidden_size", "text_encoder", 5120),
        ),
        (
            HUNYUAN,
            {"transformer": {"text_embed_2_dim": 512}},
            ("text_embed_2_dim", 512),
            ("", "d_model", "text_encoder_2", 1472),
        ),
        (
            HUNYUAN_I2V,
            {"image_encoder": {"hidden_size": 768}},
            ("image_embed_dim", 1152),
            ("", "hidden_size", "image_encoder", 768),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value else "",
)
def test_model_check_mismatched_components_raise_value_error(
    tmp_path: Path, name: str, changes: dict, own: tuple[str, int], other: tuple[str, str, str, int]
):
    parameters = {
        **dict(zip(("key", "value"), own, strict=True)),
        **dict(zip(("times", "other_key", "other_folder", "other_value"), other, strict=True)),
    }
    title, folder = lookup_spec(name).title, "transformer"
    with raises_message(
        ValueError, "compatibility.components_contradict", title=title, folder=folder, model_id=tmp_path, **parameters
    ):
        check(name, tmp_path, **changes)


@pytest.mark.parametrize("name", [WAN21, "wan2.1-t2v-1.3b", "wan2.2-t2v-a14b"])
def test_resolve_variant_tells_model_size_from_configs(tmp_path: Path, name: str):
    """Wan 2.1's two sizes have one index, and each would run as the other."""
    write(lookup_spec(name), tmp_path, PUBLISHED[name][0], {})
    assert resolve_variant(lookup_spec(WAN21), str(tmp_path)).name == name


def test_model_check_experts_that_differ_raise_value_error(tmp_path: Path):
    with raises_message(
        ValueError,
        "compatibility.configs_differ",
        title="Wan 2.2 I2V A14B",
        key="num_layers",
        value=30,
        name="transformer_2",
        model_id=tmp_path,
        first_value=40,
        first="transformer",
    ):
        check(WAN22, tmp_path, transformer_2={"num_layers": 30})


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
