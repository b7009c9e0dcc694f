"""Core's handle of a MODEL, and what core's nodes hang onto a MODEL: LoRAs, which are merged on the chips, and what
cannot work there.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import comfy.hooks
import comfy.model_patcher
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

from ...tpu_runtime.pipeline import HeldTensors, Lora
from .weights import sources

CPU = torch.device("cpu")
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
    "LoRAs that hang on a conditioning or change between steps (hooks) would be merged again at each step on the TPU, "
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
# Nodes whose functions around guidance call the network again with such patches: these show only then.
_GUIDING = frozenset(
    (
        "PerturbedAttentionGuidance", "SelfAttentionGuidance", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple",
        "SkipLayerGuidanceSD3",
    )
)  # fmt: skip
CONTROL = _INSIDE.format(
    what="a ControlNet", node="Apply ControlNet", advice="Disconnect it, or load the model with ComfyUI's own loader."
)
_OBJECTS = _INSIDE.format(
    what="another network or part of it",
    node="TorchCompileModel and other nodes that replace modules",
    advice="Remove that node; the network is compiled already.",
)
_BYPASS = _INSIDE.format(
    what="a LoRA beside the weights",
    node="LoraLoaderBypass, LoraLoaderBypassModelOnly",
    advice="Use LoraLoaderModelOnly with the same file and strength: it is merged into the weights.",
)


def check(options: Mapping[str, Any], control: Any) -> None:
    """Raises ValueError with a sentence for what would have to run inside the network."""
    for name, (what, node, advice) in _OPTIONS.items():
        if options.get(name):
            kinds = ", ".join(map(str, options[name])) if isinstance(options[name], Mapping) else name
            raise ValueError(_INSIDE.format(what=what, node=f"{kinds}: {node}", advice=advice))
    if control is not None:
        raise ValueError(CONTROL)


def check_patcher(patcher: Any) -> None:
    """`check`, of all that hangs on a MODEL before its first step."""
    check(patcher.model_options.get("transformer_options", {}), None)
    for functions in patcher.model_options.values():
        for function in functions if isinstance(functions, list) else [functions]:
            node = getattr(function, "__qualname__", "").partition(".")[0]
            if node in _GUIDING:
                what, _, advice = _OPTIONS["patches_replace"]
                raise ValueError(_INSIDE.format(what=what, node=node, advice=advice))
    own = [name for name in patcher.object_patches if name.startswith("diffusion_model")]
    own += [name for name, part in patcher.model.diffusion_model.named_modules() if "forward" in vars(part)]
    wrapped = [name for name in patcher.weight_wrapper_patches if name.startswith("diffusion_model")]
    compiled = patcher.get_wrappers(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    check_injections(patcher)
    if own or wrapped or compiled:
        raise ValueError(_OBJECTS)


def check_injections(patcher: Any) -> None:
    """Raises ValueError for what would replace modules when the model is loaded."""
    if "bypass_lora" in patcher.injections:
        raise ValueError(_BYPASS)
    if patcher.injections:
        raise ValueError(_OBJECTS)


def own_attributes(network: Any) -> frozenset[str]:
    """What a network's object has beside its class."""
    return frozenset(vars(network))


def check_network(network: Any, before: frozenset[str]) -> None:
    """Raises ValueError where a node has put functions in place of the network's: none of them would run."""
    for name in vars(network).keys() - before:
        if callable(getattr(type(network), name, None)):
            raise ValueError(_INSIDE.format(what="another part of the network", node=name, advice=_WITHOUT))


# --- what moves core's models -----------------------------------------------------------------------------------------


class Later:
    """One of core's objects that is made when it is first asked for something: what nobody uses costs nothing."""

    @classmethod
    def later(cls, make: Callable[[Any], None]) -> Self:
        found = cls.__new__(cls)
        vars(found)["_make"] = make
        return found

    @property
    def is_made(self) -> bool:
        return "_make" not in vars(self)

    def make_now(self) -> None:
        make = vars(self).pop("_make", None)
        try:
            if make is not None:
                make(self)
        except BaseException:
            vars(self)["_make"] = make  # it is asked again, and says it again
            raise

    def __getattr__(self, name: str) -> Any:
        if self.is_made or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        self.make_now()
        return getattr(self, name)


class CorePatcher(Later, sources.Reading, comfy.model_patcher.ModelPatcher):
    """Core's handle of the model, which moves no weights: those on the chips are the engine's."""

    def fill(self, network: Any) -> None:
        """With the network that it is of."""
        sources.install()
        network.train = functools.partial(_only_evaluated, network)
        comfy.model_patcher.ModelPatcher.__init__(self, network, load_device=CPU, offload_device=CPU, size=1)

    def __del__(self) -> None:
        if self.is_made:
            super().__del__()

    # Core asks every output of a node, used or not, for these.

    def model_patches_models(self) -> list[Any]:
        return super().model_patches_models() if self.is_made else []

    def get_nested_additional_models(self) -> list[Any]:
        return super().get_nested_additional_models() if self.is_made else []

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
        """Before the first step: what cannot work is refused here."""
        check_patcher(self)
        super().pre_run()

    def inject_model(self) -> None:
        """Refuse before a module is replaced: core would leave it so, and the next run without that node would fail."""
        check_injections(self)
        super().inject_model()

    def deepclone_multigpu(self, *args: object, **kwargs: object) -> None:
        raise ValueError(
            "A node such as Select Model Device or MultiGPU CFG Split wants this network on another device. It runs on "
            "the chips of the TPU, all of them. Remove that node, or choose its device default."
        )

    def patch_hooks(self, hooks: Any) -> None:
        if hooks is not None and hooks.get_type(comfy.hooks.EnumHookType.Weight):
            raise ValueError(HOOKS)
        self.current_hooks = hooks

    def register_all_hook_patches(self, hooks: Any, *args: Any, **kwargs: Any) -> None:
        if hooks is not None and hooks.get_type(comfy.hooks.EnumHookType.Weight):
            raise ValueError(HOOKS)
        super().register_all_hook_patches(hooks, *args, **kwargs)


def _only_evaluated(network: Any, mode: bool = True) -> Any:
    """In place of `train`."""
    if mode:
        raise ValueError(
            "A node such as Train LoRA wants to train this network. On the TPU it runs compiled, without gradients. "
            "Load the model with ComfyUI's own loader for that node."
        )
    return network


# --- LoRAs ------------------------------------------------------------------------------------------------------------


def loras(patcher: Any) -> tuple[Lora, ...]:
    """The patches of weights that hang on a MODEL as LoRAs, of which the engine merges what it does not know yet."""
    if not patcher.patches:
        return ()
    found = getattr(patcher.model, "tpu_loras", None)
    if found is None or found[0] != patcher.patches_uuid:
        found = patcher.model.tpu_loras = (patcher.patches_uuid, _converted(patcher))
    return found[1]


def _converted(patcher: Any) -> tuple[Lora, ...]:
    # A loader adds one patch to each weight, of one strength: what has the same number and strength is one file's.
    files: dict[tuple[int, float], dict[str, torch.Tensor]] = defaultdict(dict)
    for key, hung in patcher.patches.items():
        patches = sources.merged_by_core(patcher.model, key, hung)
        found = [_tensors(key, patch) for patch in patches]
        if None in found:
            # All else is computed as core does, on the host, and is one difference.
            files[-1, 1.0] |= difference(key.removeprefix(_PREFIX), key, patches, patcher.model.tpu_source)
            continue
        for number, (strength, tensors) in enumerate(one for one in found if one is not None):
            files[number, strength] |= tensors
    titles = {number: f"LoRA {number + 1} of the MODEL" if number >= 0 else "what nodes change" for number, _ in files}
    return tuple(
        Lora(
            path=titles[number],
            strength=strength,
            held=HeldTensors(
                title=titles[number], digest=f"{patcher.patches_uuid}/{number}/{strength}", tensors=tensors
            ),
        )
        for (number, strength), tensors in sorted(files.items(), key=lambda file: file[0])
    )


def _tensors(key: str, patch: tuple[Any, ...]) -> tuple[float, dict[str, torch.Tensor]] | None:
    """The strength of a patch, and its tensors as a LoRA file has them; None of one that no file has."""
    strength, value, kept, offset, function = patch
    kind = getattr(value, "name", None)
    if kept != 1.0 or offset is not None or function is not None or kind not in _PARTS:
        return None
    parts = dict(zip(_PARTS[kind], value.weights, strict=False))
    if any(parts.get(part) is not None for part in _ONLY_CORES):
        return None
    module = key.removeprefix(_PREFIX).removesuffix(".weight")
    return strength, {f"{module}.{part}": _tensor(x) for part, x in parts.items() if x is not None}


def difference(name: str, key: str, patches: Any, source: sources.CoreWeights) -> dict[str, torch.Tensor]:
    """What the patches of core's weight `key` add to our weight `name`, as a LoRA file has it; computed when read."""
    base = source.stored(key)
    if base is None:
        raise ValueError(
            f"A node changes {key}, which is in none of the files of this model. Those have {len(source.tensors)} "
            "weights under ComfyUI's names. Leave the node out, or use the model's file in ComfyUI's own names."
        )
    return dict(_difference(name, sources.difference(key, patches, base)))


def _difference(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    module, _, leaf = name.rpartition(".")
    endings = {"weight": f"{module}.diff", "bias": f"{module}.diff_b", "modulation": f"{module}.modulation.diff"}
    yield endings.get(leaf, f"{name}.diff"), value


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
