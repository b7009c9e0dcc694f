"""What nodes of core hang onto a MODEL: LoRAs, which are merged on the chips, and what cannot work there."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.lora
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import HeldTensors, Lora

# The parts of the tuples in which core keeps a file's tensors, by its name for the kind, as LoRA files call them.
_PARTS = {
    "lora": ("lora_up.weight", "lora_down.weight", "alpha", "lora_mid.weight", "dora_scale", "reshape_weight"),
    "loha": ("hada_w1_a", "hada_w1_b", "alpha", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "dora_scale"),
    "lokr": (
        "lokr_w1", "lokr_w2", "alpha", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "dora_scale",
    ),
}  # fmt: skip
# Of these our own merge knows nothing.
_ONLY_CORES = ("lora_mid.weight", "reshape_weight", "hada_t1", "hada_t2", "lokr_t2")
_PREFIX = "diffusion_model."

HOOKS = (
    "LoRAs that hang on a conditioning or change between steps (hooks) would be merged anew at each step on the TPU, "
    "and are not supported. Use a LoRA loader on the MODEL."
)
_INSIDE = "This MODEL runs compiled on the TPU, and {what} cannot work there ({node}). {advice}"
_WITHOUT = "Remove that node, or load the model with ComfyUI's own loader."
# What nodes put into `transformer_options`, the nodes that do, and what to do instead.
_OPTIONS = {
    "patches": (
        "what changes attention or blocks inside",
        "NAGuidance, UNet attention patches, HyperTile, TomePatchModel, FreeU, ModelPatchLoader's and alike",
        _WITHOUT,
    ),
    "patches_replace": (
        "what takes the place of attention or a block",
        "SkipLayerGuidanceDiT, PerturbedAttentionGuidance, SelfAttentionGuidance, block replacements and alike",
        "Remove that node; CFGZeroStar, APG and other guidance outside the network work.",
    ),
    "optimized_attention_override": ("another attention", "an attention override", _WITHOUT),
    "rope_options": ("another rotary embedding", "ScaleROPE", _WITHOUT),
}
_CONTROL = _INSIDE.format(
    what="a ControlNet", node="Apply ControlNet", advice="Disconnect it, or load the model with ComfyUI's own loader."
)
_OBJECTS = _INSIDE.format(
    what="another network or part of it",
    node="TorchCompileModel and other nodes that replace modules",
    advice="Remove that node; the network is compiled already.",
)


def check(options: Mapping[str, Any], control: Any) -> None:
    """Raises ValueError with a sentence for what would have to run inside the network."""
    for name, (what, node, advice) in _OPTIONS.items():
        if options.get(name):
            kinds = ", ".join(map(str, options[name])) if isinstance(options[name], Mapping) else name
            raise ValueError(_INSIDE.format(what=what, node=f"{kinds}: {node}", advice=advice))
    if control is not None:
        raise ValueError(_CONTROL)


def check_patcher(patcher: Any) -> None:
    """`check`, of all that hangs on a MODEL before its first step."""
    check(patcher.model_options.get("transformer_options", {}), None)
    own = [name for name in patcher.object_patches if name.startswith("diffusion_model")]
    wrapped = [name for name in patcher.weight_wrapper_patches if name.startswith("diffusion_model")]
    compiled = patcher.get_wrappers(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    if own or wrapped or compiled or patcher.injections:
        raise ValueError(_OBJECTS)


# --- LoRAs ------------------------------------------------------------------------------------------------------------


def loras(patcher: Any, held: Any) -> tuple[Lora, ...]:
    """The patches of weights that hang on a MODEL as LoRAs, of which the engine merges what it does not know yet."""
    if not patcher.patches:
        return ()
    found = getattr(patcher.model, "tpu_loras", None)
    if found is None or found[0] != patcher.patches_uuid:
        found = patcher.model.tpu_loras = (patcher.patches_uuid, _converted(patcher, held))
    return found[1]


def _converted(patcher: Any, held: Any) -> tuple[Lora, ...]:
    # A loader adds one patch to each weight, of one strength: what has the same number and strength is one file's.
    files: dict[tuple[int, float], dict[str, torch.Tensor]] = defaultdict(dict)
    for key, patches in patcher.patches.items():
        for number, patch in enumerate(patches):
            strength, tensors = _tensors(key, patch, held)
            files[number, strength] |= tensors
    return tuple(
        Lora(
            path=f"LoRA {number + 1} of the MODEL",
            strength=strength,
            held=HeldTensors(
                title=f"LoRA {number + 1} of the MODEL",
                digest=f"{patcher.patches_uuid}/{number}/{strength}",
                tensors=tensors,
            ),
        )
        for (number, strength), tensors in sorted(files.items(), key=lambda file: file[0])
    )


def _tensors(key: str, patch: tuple[Any, ...], held: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The strength of a patch, and its tensors as a LoRA file has them."""
    strength, value, kept, offset, function = patch
    name = key.removeprefix(_PREFIX)
    kind = getattr(value, "name", None)
    if kept == 1.0 and offset is None and function is None and kind in _PARTS:
        parts = dict(zip(_PARTS[kind], value.weights, strict=False))
        if all(parts.get(part) is None for part in _ONLY_CORES):
            module = name.removesuffix(".weight")
            return strength, {f"{module}.{part}": _tensor(x) for part, x in parts.items() if x is not None}
    # All else is computed as core does, on the host, and is one difference.
    base = pipeline.held_tensor(held, name)
    if base is None:
        raise ValueError(f"{held.path} has no {name}, which a LoRA changes. Leave the LoRA out.")
    base = base.float()
    changed = comfy.lora.calculate_weight([patch], base.clone(), key, intermediate_dtype=torch.float32)
    return 1.0, dict(_difference(name, changed - base))


def _difference(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    module, _, leaf = name.rpartition(".")
    endings = {"weight": f"{module}.diff", "bias": f"{module}.diff_b", "modulation": f"{module}.modulation.diff"}
    yield endings.get(leaf, f"{name}.diff"), value


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
