"""What ComfyUI's nodes ask of a MODEL, CLIP, VAE and CLIP_VISION, by its sources: names of attributes, with where."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

KINDS = {"MODEL": "Model", "CLIP": "Clip", "VAE": "Vae", "CLIP_VISION": "ClipVision"}


def asked(comfyui: Path) -> dict[str, dict[str, str]]:
    """Chains of attributes by kind, such as `first_stage_model.decode`, each with the first class that asks for it."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in (comfyui / "nodes.py", *sorted((comfyui / "comfy_extras").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                for kind, chain in _of_class(node):
                    found[kind].setdefault(chain, f"{path.name}: {node.name}")
    return found


def _of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for name, kind in _inputs(node).items():
        for function in (one for one in node.body if isinstance(one, ast.FunctionDef)):
            names = {name}
            for one in ast.walk(function):
                # What is copied of it is of its kind.
                if isinstance(one, ast.Assign) and _chain(one.value, names) in ("", "clone"):
                    names |= {target.id for target in one.targets if isinstance(target, ast.Name)}
            for one in ast.walk(function):
                if isinstance(one, ast.Attribute) and (chain := _chain(one, names)):
                    yield kind, chain


def _inputs(node: ast.ClassDef) -> dict[str, str]:
    """Names of a node's inputs of these kinds, in either form of a declaration."""
    found = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Dict):
            for key, value in zip(one.keys, one.values, strict=True):
                first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else None
                if isinstance(key, ast.Constant) and isinstance(first, ast.Constant) and first.value in KINDS:
                    found[key.value] = first.value
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "Input":
            owner = one.func.value
            kind = next((k for k, v in KINDS.items() if isinstance(owner, ast.Attribute) and owner.attr == v), None)
            if kind and one.args and isinstance(one.args[0], ast.Constant):
                found[one.args[0].value] = kind
    return found


def _chain(node: ast.AST, names: set[str]) -> str | None:
    """The attributes after one of these names up to a call, with dots; None of something else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        else:
            node, parts = node.func, []  # what a call gives is not of the object
    return ".".join(parts) if isinstance(node, ast.Name) and node.id in names else None


# What ours does of what is asked: as core, or a sentence. Before a name goes here, look at the node that asks for it.
WORKS: dict[str, str] = {
    "CLIP": """
        add_patches apply_hooks_to_conds clip_layer clone decode encode_from_tokens encode_from_tokens_scheduled
        get_key_patches load_model patcher patcher.forced_hooks patcher.model_state_dict
        patcher.register_all_hook_patches set_tokenizer_option state_dict_for_saving tokenize use_clip_schedule
    """,
    "CLIP_VISION": "encode_image",
    "MODEL": """
        add_callback add_object_patch add_patches add_wrapper add_wrapper_with_key clone
        disable_model_cfg1_optimization get_attachment get_key_patches get_model_object load_device model
        model.diffusion_model model.get_dtype model.get_dtype_inference model.latent_format
        model.latent_format.latent_channels model.model_config model.model_config.unet_config model.modules
        model.process_latent_out model.requires_grad_ model_dtype model_options model_options.get
        model_options.setdefault model_state_dict set_model_attn1_output_patch set_model_attn1_patch
        set_model_attn1_replace set_model_attn2_patch set_model_compute_dtype set_model_denoise_mask_function
        set_model_double_block_patch set_model_input_block_patch set_model_input_block_patch_after_skip
        set_model_noise_refiner_patch set_model_optimized_attention set_model_output_block_patch set_model_patch
        set_model_post_input_patch set_model_rope_options set_model_sampler_calc_cond_batch_function
        set_model_sampler_cfg_function set_model_sampler_post_cfg_function set_model_sampler_pre_cfg_function
    """,
    "VAE": """
        decode decode_tiled device downscale_index_formula downscale_ratio encode encode_tiled first_stage_model get_sd
        latent_channels patcher patcher.add_patches patcher.clone patcher.model prepare_decode
        spacial_compression_decode spacial_compression_encode temporal_compression_decode vae_dtype
    """,
}
# `generate` is there, and says it when it is called.
REFUSED: dict[str, str] = {
    "CLIP": "generate",
    "CLIP_VISION": "load_device model naf patcher",
    "VAE": """
        first_stage_model.per_channel_statistics first_stage_model.per_channel_statistics.normalize
        first_stage_model.per_channel_statistics.un_normalize first_stage_model.resolution
        first_stage_model.resolution.item
    """,
}
# Core's own objects of the models that run here have none of these either, or the name is another object's.
ABSENT: dict[str, str] = {
    "CLIP": "patcher.forced_hooks.set_keyframes_on_hooks",
    "MODEL": """
        extra_conds inner_model inner_model.model_sampling inner_model.model_sampling.sigma_min
        inner_model.model_sampling.timestep model.diffusion_model.heatmap_head model.diffusion_model.in_channels
        model.diffusion_model.q_token_length negative_conditioning positive_conditioning
    """,
    "VAE": "_select_base_device",
}


def resolve(owner: object, chain: str) -> object:
    for name in chain.split("."):
        owner = getattr(owner, name)
    return owner
