"""Core's handle of a MODEL, and the changes that core's nodes make to a MODEL.

LoRAs are merged on the chips; changes that cannot work there are refused.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import comfy.hooks
import comfy.model_patcher
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

from ...tpu_runtime.checkpoints.model_ref import InMemoryLora, Lora
from ...tpu_runtime.messages import compose
from .core_control_nets import ControlCall
from .weights import sources

CPU = torch.device("cpu")
# Names in LoRA files of the tensors that core keeps in tuples, by core's name of the kind.
_PARTS = {
    "lora": ("lora_up.weight", "lora_down.weight", "alpha", "lora_mid.weight", "dora_scale", "reshape_weight"),
    "loha": ("hada_w1_a", "hada_w1_b", "alpha", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "dora_scale"),
    "lokr": (
        "lokr_w1", "lokr_w2", "alpha", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "dora_scale",
    ),
}  # fmt: skip
# Tensors that our own merge does not support.
_ONLY_CORES = ("lora_mid.weight", "reshape_weight", "hada_t1", "hada_t2", "lokr_t2")
_PREFIX = "diffusion_model."

HOOKS_REFUSAL = compose("comfyui.hooks_unsupported")
_cannot_work = functools.partial(compose, "comfyui.cannot_work_compiled")
_WITHOUT = compose("comfyui.remove_node_or_use_own_loader")
# Entries of `transformer_options` that cannot work: a name, the nodes that set them, and a remedy.
_OPTIONS = {
    "patches": (
        compose("comfyui.a_patch_of_blocks"),
        "NAGuidance, UNet attention patches, HyperTile, TomePatchModel, FreeU and similar nodes",
        _WITHOUT,
    ),
    "patches_replace": (
        compose("comfyui.a_replacement_of_blocks"),
        "SkipLayerGuidanceDiT, PerturbedAttentionGuidance, SelfAttentionGuidance, block replacements and similar nodes",
        compose("comfyui.remove_node_outer_guidance_works"),
    ),
    "optimized_attention_override": (compose("comfyui.another_attention"), "an attention override", _WITHOUT),
    "rope_options": (compose("comfyui.another_rotary_embedding"), "ScaleROPE", _WITHOUT),
}
# Nodes whose guidance functions call the network with such patches, which are visible only at that call.
_GUIDING = frozenset(
    (
        "PerturbedAttentionGuidance", "SelfAttentionGuidance", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple",
        "SkipLayerGuidanceSD3",
    )
)  # fmt: skip
CONTROL_REFUSAL = _cannot_work(
    what=compose("comfyui.a_controlnet"),
    node="Apply ControlNet",
    advice=compose("comfyui.disconnect_or_use_own_loader"),
)
_OBJECTS = _cannot_work(
    what=compose("comfyui.another_network"),
    node="TorchCompileModel and other nodes that replace modules",
    advice=compose("comfyui.remove_node_already_compiled"),
)
_BYPASS = _cannot_work(
    what=compose("comfyui.lora_outside_weights"),
    node="LoraLoaderBypass, LoraLoaderBypassModelOnly",
    advice=compose("comfyui.use_lora_loader"),
)


def check_options(options: Mapping[str, Any], control: object, patches_run: bool) -> None:
    """Raise ValueError for patches that would have to run inside the network.

    options: core's `transformer_options`. control: a ControlNet, or None.
    patches_run: whether all patches are of control networks.
    """
    for name, (what, node, advice) in _OPTIONS.items():
        if options.get(name) and not (name == "patches" and patches_run):
            kinds = ", ".join(map(str, options[name])) if isinstance(options[name], Mapping) else name
            raise ValueError(_cannot_work(what=what, node=f"{kinds}: {node}", advice=advice))
    if control is not None and not isinstance(control, ControlCall):
        raise ValueError(CONTROL_REFUSAL)


def check_patcher(patcher: comfy.model_patcher.ModelPatcher) -> None:
    """Run `check` on every patch of a MODEL before its first step."""
    options = patcher.model_options.get("transformer_options", {})
    check_options(options, None, patcher.model.tpu_patches(options.get("patches") or {}) is not None)
    for functions in patcher.model_options.values():
        for function in functions if isinstance(functions, list) else [functions]:
            node = getattr(function, "__qualname__", "").partition(".")[0]
            if node in _GUIDING:
                what, _, advice = _OPTIONS["patches_replace"]
                raise ValueError(_cannot_work(what=what, node=node, advice=advice))
    replaced = [name for name in patcher.object_patches if name.startswith("diffusion_model")]
    replaced += [name for name, part in patcher.model.diffusion_model.named_modules() if "forward" in vars(part)]
    wrapped = [name for name in patcher.weight_wrapper_patches if name.startswith("diffusion_model")]
    compiled = patcher.get_wrappers(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    check_injections(patcher)
    if replaced or wrapped or compiled:
        raise ValueError(_OBJECTS)


def check_injections(patcher: comfy.model_patcher.ModelPatcher) -> None:
    """Raise ValueError for injections, which would replace modules when the model is loaded."""
    if "bypass_lora" in patcher.injections:
        raise ValueError(_BYPASS)
    if patcher.injections:
        raise ValueError(_OBJECTS)


def instance_attributes(network: torch.nn.Module) -> frozenset[str]:
    """Return the attributes of a network's object that its class does not have."""
    return frozenset(vars(network))


def check_network(network: torch.nn.Module, before: frozenset[str]) -> None:
    """Raise ValueError if a node has replaced functions of the network: they would not run.

    before: attributes of the network's object before nodes saw it.
    """
    for name in vars(network).keys() - before:
        if callable(getattr(type(network), name, None)):
            raise ValueError(_cannot_work(what=compose("comfyui.another_part_of_network"), node=name, advice=_WITHOUT))


# --- what moves core's models -----------------------------------------------------------------------------------------


class LazyProxy:
    """One of core's objects that is created on first use, so that unused outputs cost nothing."""

    @classmethod
    def later(cls, make: Callable[[Self], None]) -> Self:
        """Return an object that `make` initializes on first use."""
        proxy = cls.__new__(cls)
        vars(proxy)["_make"] = make
        return proxy

    @property
    def is_resolved(self) -> bool:
        """Return whether the object is initialized."""
        return "_make" not in vars(self)

    def resolve(self) -> None:
        """Initialize the object, unless it is."""
        make = vars(self).pop("_make", None)
        try:
            if make is not None:
                make(self)
        except BaseException:
            vars(self)["_make"] = make  # the next use tries again, and raises again
            raise

    def __getattr__(self, name: str) -> Any:
        if self.is_resolved or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        self.resolve()
        return getattr(self, name)


class CorePatcher(LazyProxy, sources.FileWeightsMixin, comfy.model_patcher.ModelPatcher):
    """Core's handle of the model. It moves no weights: those on the chips belong to the engine."""

    def fill(self, network: Any) -> None:
        """Initialize the handle with its network."""
        sources.install_saving()
        network.train = functools.partial(_refuse_training, network)
        comfy.model_patcher.ModelPatcher.__init__(self, network, load_device=CPU, offload_device=CPU, size=1)

    def __del__(self) -> None:
        if self.is_resolved:
            super().__del__()

    # Core calls these on every output of a node, used or not.

    def model_patches_models(self) -> list[object]:
        return super().model_patches_models() if self.is_resolved else []

    def get_nested_additional_models(self) -> list[object]:
        return super().get_nested_additional_models() if self.is_resolved else []

    def model_size(self) -> int:
        return 1

    def loaded_size(self) -> int:
        return 1

    def get_free_memory(self, device: torch.device) -> int:
        return 1 << 60  # both rows of guidance in one call

    def load(
        self,
        device_to: object = None,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def partially_load(self, device_to: object = None, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        is_loaded = self.model.current_weight_patches_uuid == self.patches_uuid and not force_patch_weights
        self.unpatch_model(None, unpatch_weights=False)
        self.patch_model(None, load_weights=False)
        if not is_loaded:
            self.load(device_to, extra_memory, force_patch_weights, full_load=True)
        return 0

    def partially_unload(self, *args: object, **kwargs: object) -> int:
        return 0

    def unpatch_model(self, device_to: object = None, unpatch_weights: bool = True) -> None:
        super().unpatch_model(None, unpatch_weights=False)
        if unpatch_weights:
            self.model.current_weight_patches_uuid = None

    def model_patches_to(self, device: object) -> None:
        pass

    def pre_run(self) -> None:
        """Refuse changes that cannot work, before the first step."""
        check_patcher(self)
        super().pre_run()

    def inject_model(self) -> None:
        """Refuse before a module is replaced: core would leave it so, and the next run without that node would fail."""
        check_injections(self)
        super().inject_model()

    def deepclone_multigpu(self, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(compose("comfyui.device_fixed"))

    def patch_hooks(self, hooks: comfy.hooks.HookGroup | None) -> None:
        if hooks is not None and hooks.get_type(comfy.hooks.EnumHookType.Weight):
            raise ValueError(HOOKS_REFUSAL)
        self.current_hooks = hooks

    def register_all_hook_patches(self, hooks: comfy.hooks.HookGroup | None, *args: object, **kwargs: object) -> None:
        if hooks is not None and hooks.get_type(comfy.hooks.EnumHookType.Weight):
            raise ValueError(HOOKS_REFUSAL)
        super().register_all_hook_patches(hooks, *args, **kwargs)


def _refuse_training(network: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    """Raise ValueError where core's `train` would switch to training."""
    if mode:
        raise ValueError(compose("comfyui.training_unsupported"))
    return network


# --- LoRAs ------------------------------------------------------------------------------------------------------------


def convert_loras(patcher: comfy.model_patcher.ModelPatcher) -> tuple[Lora, ...]:
    """Return the weight patches of a MODEL as LoRAs; the engine merges those that it has not merged yet."""
    if not patcher.patches:
        return ()
    cached = getattr(patcher.model, "tpu_loras", None)
    if cached is None or cached[0] != patcher.patches_uuid:
        cached = patcher.model.tpu_loras = (patcher.patches_uuid, _convert(patcher))
    return cached[1]


def _convert(patcher: comfy.model_patcher.ModelPatcher) -> tuple[Lora, ...]:
    # A loader adds one patch of one strength to each weight, so patches of equal number and strength are one file's.
    files: dict[tuple[int, float], dict[str, torch.Tensor]] = defaultdict(dict)
    for key, added in patcher.patches.items():
        patches = sources.select_applied_patches(patcher.model, key, added)
        converted = [_tensors(key, patch) for patch in patches]
        if None in converted:
            # Other patches are computed on the host, as core does, into one difference.
            files[-1, 1.0] |= lora_difference(key.removeprefix(_PREFIX), key, patches, patcher.model.tpu_source)
            continue
        for number, (strength, tensors) in enumerate(entry for entry in converted if entry is not None):
            files[number, strength] |= tensors
    titles = {number: f"LoRA {number + 1} of the MODEL" if number >= 0 else "what nodes change" for number, _ in files}
    return tuple(
        Lora(
            path=titles[number],
            strength=strength,
            held=InMemoryLora(
                title=titles[number], digest=f"{patcher.patches_uuid}/{number}/{strength}", tensors=tensors
            ),
        )
        for (number, strength), tensors in sorted(files.items(), key=lambda file: file[0])
    )


def _tensors(key: str, patch: Sequence[Any]) -> tuple[float, dict[str, torch.Tensor]] | None:
    """Return a patch's strength, and its tensors by their names in a LoRA file; None if files have no such patch."""
    strength, value, model_strength, offset, function = patch
    kind = getattr(value, "name", None)
    if model_strength != 1.0 or offset is not None or function is not None or kind not in _PARTS:
        return None
    parts = dict(zip(_PARTS[kind], value.weights, strict=False))
    if any(parts.get(part) is not None for part in _ONLY_CORES):
        return None
    module = key.removeprefix(_PREFIX).removesuffix(".weight")
    return strength, {f"{module}.{part}": _tensor(x) for part, x in parts.items() if x is not None}


def lora_difference(
    name: str, key: str, patches: Sequence[Any], source: sources.CoreWeights
) -> dict[str, torch.Tensor]:
    """Return the change of our weight by core's patches, as tensors of a LoRA file that are computed when read.

    name, key: our name and core's name of the weight.
    patches: core's. source: the weights before.
    Raises ValueError for a weight that none of the model's files has.
    """
    base = source.stored(key)
    if base is None:
        raise ValueError(compose("comfyui.changed_weight_not_in_file", key=key, count=len(source.tensors)))
    return dict(_difference(name, sources.patch_difference(key, list(patches), base)))


def _difference(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    module, _, leaf = name.rpartition(".")
    endings = {"weight": f"{module}.diff", "bias": f"{module}.diff_b", "modulation": f"{module}.modulation.diff"}
    yield endings.get(leaf, f"{name}.diff"), value


def _tensor(value: torch.Tensor | float) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
