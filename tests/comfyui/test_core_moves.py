"""What `nodes/comfyui/core_*.py` take for granted of ComfyUI's source: this fails when it moves, and names what did."""

import ast
import functools
import re
from pathlib import Path

import pytest
from comfyui_tpu.tests.support.comfyui_server import COMFYUI, needs_comfyui

pytestmark = needs_comfyui

# File, class (empty for a function of the module), function, parameters that are passed by name or in this order.
FUNCTIONS = (
    ("comfy/model_detection.py", "", "model_config_from_unet",
     "state_dict unet_key_prefix use_base_if_no_match metadata"),
    ("comfy/model_detection.py", "", "convert_diffusers_mmdit", "state_dict output_prefix"),
    ("comfy/supported_models_base.py", "BASE", "set_inference_dtype", "self dtype manual_cast_dtype"),
    ("comfy/supported_models_base.py", "BASE", "get_model", "self state_dict prefix device"),
    ("comfy/model_base.py", "BaseModel", "apply_model", "self x t c_concat c_crossattn control transformer_options"),
    ("comfy/model_patcher.py", "ModelPatcher", "__init__", "self model load_device offload_device size"),
    ("comfy/model_patcher.py", "ModelPatcher", "model_size", "self"),
    ("comfy/model_patcher.py", "ModelPatcher", "loaded_size", "self"),
    ("comfy/model_patcher.py", "ModelPatcher", "get_free_memory", "self device"),
    ("comfy/model_patcher.py", "ModelPatcher", "load", "self device_to"),
    ("comfy/model_patcher.py", "ModelPatcher", "partially_load", "self device_to extra_memory force_patch_weights"),
    ("comfy/model_patcher.py", "ModelPatcher", "partially_unload", "self device_to memory_to_free"),
    ("comfy/model_patcher.py", "ModelPatcher", "patch_model", "self device_to lowvram_model_memory load_weights"),
    ("comfy/model_patcher.py", "ModelPatcher", "unpatch_model", "self device_to unpatch_weights"),
    ("comfy/model_patcher.py", "ModelPatcher", "model_patches_to", "self device"),
    ("comfy/model_patcher.py", "ModelPatcher", "pre_run", "self"),
    ("comfy/model_patcher.py", "ModelPatcher", "prepare_state", "self timestep model_options"),
    ("comfy/model_patcher.py", "ModelPatcher", "apply_hooks", "self hooks"),
    ("comfy/model_patcher.py", "ModelPatcher", "patch_hooks", "self hooks"),
    ("comfy/model_patcher.py", "ModelPatcher", "register_all_hook_patches", "self hooks"),
    ("comfy/model_patcher.py", "ModelPatcher", "get_wrappers", "self wrapper_type key"),
    ("comfy/model_patcher.py", "ModelPatcher", "add_wrapper_with_key", "self wrapper_type key wrapper"),
    ("comfy/samplers.py", "", "_calc_cond_batch", "model conds x_in timestep model_options"),
    ("comfy/samplers.py", "", "cond_equal_size", "c1 c2"),
    ("comfy/patcher_extension.py", "", "merge_nested_dicts", "dict1 dict2 copy_dict1"),
    ("comfy/conds.py", "CONDRegular", "process_cond", "self batch_size"),
    ("comfy/conds.py", "CONDRegular", "concat", "self others"),
    ("comfy/ldm/common_dit.py", "", "pad_to_patch_size", "img patch_size"),
    ("comfy/lora.py", "", "calculate_weight", "patches weight key intermediate_dtype"),
    ("comfy/sd.py", "CLIP", "__init__", "self target embedding_directory no_init tokenizer_data parameters state_dict "
     "model_options disable_dynamic"),
    ("comfy/sd.py", "VAE", "__init__", "self sd device config dtype"),
    ("comfy/sd.py", "VAE", "decode_tiled", "self samples"),
    ("comfy/sd.py", "VAE", "encode_tiled", "self pixel_samples"),
    ("comfy/sd1_clip.py", "SDClipModel", "process_tokens", "self tokens device"),
    ("comfy/text_encoders/qwen_vl.py", "", "process_qwen2vl_images", "images"),
    ("comfy/clip_vision.py", "ClipVisionModel", "encode_image", "self image crop"),
    ("comfy/clip_model.py", "", "clip_preprocess", "image size mean std crop"),
    ("comfy/controlnet.py", "ControlNet", "get_control", "self x_noisy t cond batched_number transformer_options"),
    ("comfy/controlnet.py", "ControlBase", "get_models", "self"),
    ("comfy_extras/nodes_model_patch.py", "ZImageControlPatch", "encode_latent_cond",
     "self control_image inpaint_image"),
    ("comfy_extras/nodes_model_patch.py", "DiffSynthCnetPatch", "encode_latent_cond", "self image"),
    # What core asks of outputs that nobody uses: it must make none of them.
    ("comfy/model_patcher.py", "ModelPatcher", "model_patches_models", "self"),
    ("comfy/model_patcher.py", "ModelPatcher", "get_nested_additional_models", "self"),
    ("comfy/model_patcher.py", "PromptModelTracker", "add", "self outputs"),
    # What networks are told: each parameter has a meaning here, and a new one would be left out.
    ("comfy/ldm/wan/model.py", "WanModel", "_forward",
     "self x timestep context clip_fea time_dim_concat transformer_options"),
    ("comfy/ldm/flux/model.py", "Flux", "_forward",
     "self x timestep context y guidance ref_latents control transformer_options"),
    ("comfy/ldm/hunyuan_video/model.py", "HunyuanVideo", "_forward",
     "self x timestep context y txt_byt5 clip_fea guidance attention_mask guiding_frame_index ref_latent "
     "disable_time_r control transformer_options"),
    ("comfy/ldm/cogvideo/model.py", "CogVideoXTransformer3DModel", "_forward",
     "self x timestep context ofs transformer_options"),
)  # fmt: skip
# Networks are called by `_forward` of the object, so that one put there is.
CALLED = ("comfy/ldm/wan/model.py", "comfy/ldm/flux/model.py", "comfy/ldm/hunyuan_video/model.py",
          "comfy/ldm/cogvideo/model.py")  # fmt: skip
# The kinds of LoRA files whose tensors are taken over as they are.
ADAPTERS = ("lora", "loha", "lokr")


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((COMFYUI / path).read_text("utf-8"))


def find_function(path: str, owner: str, name: str) -> ast.FunctionDef:
    classes = [node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == owner]
    bodies = [one.body for one in classes] if owner else [tree(path).body]
    functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert functions, f"{path} has no {owner}.{name} any more"
    return functions[-1]


@pytest.mark.parametrize(("path", "owner", "name", "wanted"), FUNCTIONS, ids=lambda part: part.replace(" ", ","))
def test_core_function_keeps_location_and_arguments(path: str, owner: str, name: str, wanted: str):
    own = [argument.arg for argument in find_function(path, owner, name).args.args]
    is_network = name == "_forward"
    assert (own if is_network else own[: len(wanted.split())]) == wanted.split()


@pytest.mark.parametrize("path", CALLED)
def test_core_network_calls_forward_through_attribute(path: str):
    assert "self._forward,\n" in (COMFYUI / path).read_text("utf-8")


@pytest.mark.parametrize("kind", ADAPTERS)
def test_core_weight_adapter_keeps_name_and_weights_attribute(kind: str):
    source = (COMFYUI / "comfy" / "weight_adapter" / f"{kind}.py").read_text("utf-8")
    assert f'name = "{kind}"' in source and "self.weights = weights" in source


def test_core_internals_are_imported_only_in_known_files():
    """ComfyUI's models, patchers and samplers, beside the memory's patcher."""
    folder = Path(__file__).parents[2] / "nodes" / "comfyui"
    knows = re.compile(
        r"comfy\.(model_patcher|model_base|model_detection|samplers|lora|sd\b|sd1_clip|conds|controlnet|ldm|clip_vision"
        r"|text_encoders)"
    )
    files = {path.name for path in folder.rglob("*.py") if knows.search(path.read_text("utf-8"))}
    assert files == {
        "core_control_nets.py", "core_control_patches.py", "core_encoder.py", "core_model.py", "core_text_and_vae.py",
        "inputs.py", "memory.py", "model_patcher.py", "rows.py", "sources.py",
    }  # fmt: skip
