"""Core's handle of a MODEL, the rows of guidance, and what core's nodes hang onto a MODEL: LoRAs, which are merged on
the chips, and what cannot work there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import comfy.hooks
import comfy.lora
import comfy.model_patcher
import torch
from comfy.patcher_extension import WrappersMP, get_all_wrappers, merge_nested_dicts
from comfy.samplers import cond_equal_size
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import HeldTensors, Lora

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
# Where a network finds, in `transformer_options`, how many tokens of padded texts count, by core's names of them.
LENGTHS = "tpu_lengths"
# What all rows of guidance share like the sample, and wrappers that may count on as many rows as conditionings.
_SHARED = frozenset(("c_concat", "denoise_mask"))
_COUNTING = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)

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
_CONTROL = _INSIDE.format(
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
        raise ValueError(_CONTROL)


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
    wrapped = [name for name in patcher.weight_wrapper_patches if name.startswith("diffusion_model")]
    compiled = patcher.get_wrappers(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    if "bypass_lora" in patcher.injections:
        raise ValueError(_BYPASS)
    if own or wrapped or compiled or patcher.injections:
        raise ValueError(_OBJECTS)


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


class CorePatcher(Later, comfy.model_patcher.ModelPatcher):
    """Core's handle of the model, which moves no weights: those on the chips are the engine's."""

    def fill(self, network: Any) -> None:
        """With the network that it is of."""
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

    def load(self, *args: object, **kwargs: object) -> None:
        self.model.current_weight_patches_uuid = self.patches_uuid

    def partially_load(self, *args: object, **kwargs: object) -> int:
        self.unpatch_model(None, unpatch_weights=False)
        self.patch_model(None, load_weights=False)
        return 0

    def partially_unload(self, *args: object, **kwargs: object) -> int:
        return 0

    def unpatch_model(self, device_to: object = None, unpatch_weights: bool = True) -> None:
        super().unpatch_model(None, unpatch_weights=False)

    def model_patches_to(self, device: object) -> None:
        pass

    def pre_run(self) -> None:
        """Before the first step: what cannot work is refused here."""
        check_patcher(self)
        super().pre_run()

    def patch_hooks(self, hooks: object) -> None:
        if hooks is not None:
            raise ValueError(HOOKS)

    def register_all_hook_patches(self, hooks: Any, *args: Any, **kwargs: Any) -> None:
        if hooks is not None and hooks.get_type(comfy.hooks.EnumHookType.Weight):
            raise ValueError(HOOKS)
        super().register_all_hook_patches(hooks, *args, **kwargs)


# --- the rows of guidance ---------------------------------------------------------------------------------------------


class PlainBatch:
    """Core's `_calc_cond_batch` for conditionings of whole samples, one for each row of guidance, at strength 1.

    There each result is multiplied by ones and divided by their sum, which changes no bit and takes a core of the host
    longer than a step should. What stays from step to step, such as the texts side by side, is joined once. A sample
    that all rows share goes to the network as one row. `texts` are conditionings of tokens, by core's names, with the
    number to which they are padded, so that those of different lengths share a call: `LENGTHS` says how many count.
    Anything else is core's.
    """

    def __init__(self, texts: Mapping[str, int] | None = None) -> None:
        self._texts = texts or {}
        self._joined: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def __call__(
        self,
        execute: Callable[..., list[torch.Tensor]],
        model: Any,
        conds: Sequence[Sequence[Mapping[str, Any]] | None],
        sample: torch.Tensor,
        timestep: torch.Tensor,
        options: dict[str, Any],
    ) -> list[torch.Tensor]:
        if any(cond.get("control") is not None for each in conds for cond in each or ()):
            raise ValueError(_CONTROL)  # before it looks at its picture
        chosen = self._chosen(conds, timestep, options)
        rows = [
            {name: value.process_cond(batch_size=len(sample), area=None) for name, value in each["model_conds"].items()}
            for _, each in chosen
        ]
        texts = self._padded(rows)
        if not rows or texts is None or not all(cond_equal_size(rows[0], row) for row in rows[1:]):
            return execute(model, conds, sample, timestep, options)
        patcher = model.current_patcher
        patcher.prepare_state(timestep, options)
        own = patcher.apply_hooks(hooks=None)
        own = merge_nested_dicts(own, options.get("transformer_options", {}), copy_dict1=False)
        own |= {
            "cond_or_uncond": [index for index, _ in chosen],
            "uuids": [each["uuid"] for _, each in chosen],
            "sigmas": timestep,
            LENGTHS: {name: lengths for name, (_, lengths) in texts.items()},
        }
        number = len(rows)
        if len(sample) == 1 and self._share(rows) and not any(get_all_wrappers(kind, own) for kind in _COUNTING):
            shared = {name: rows[0][name].cond for name in _SHARED & rows[0].keys()}
            asked = (sample, timestep)
        else:
            shared = {}
            asked = (torch.cat([sample] * number), torch.cat([timestep] * number))
        inputs = {name: self._join(name, [row[name] for row in rows]) for name in rows[0] if name not in shared}
        inputs |= shared | {name: padded for name, (padded, _) in texts.items()}
        found = model.apply_model(*asked, **inputs, transformer_options=own)
        results = [torch.zeros(()) if cond else torch.zeros_like(sample) for cond in conds]
        for (index, _), result in zip(chosen, found.chunk(number), strict=True):
            results[index] = result
        return results

    def _chosen(
        self, conds: Sequence[Sequence[Mapping[str, Any]] | None], timestep: torch.Tensor, options: Mapping[str, Any]
    ) -> list[tuple[int, Mapping[str, Any]]]:
        """The one that each row of guidance has now, last row first as in core; none where that is not so plain."""
        if any(options.get(name) for name in ("multigpu_clones", "model_function_wrapper")):
            return []
        found = []
        for index, each in reversed(list(enumerate(conds))):
            now = [cond for cond in each or () if _is_now(cond, timestep)]
            if each and (len(now) != 1 or not _is_plain(now[0])):
                return []
            found += [(index, cond) for cond in now]
        return found

    def _share(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether rows have the same beside the sample's channels, and of its mask."""

        def compare(tensors: tuple[torch.Tensor, ...]) -> bool:
            return all(torch.equal(tensors[0], other) for other in tensors[1:])

        return all(
            self._once(f"shared {name}", tuple(row[name].cond for row in rows), compare)
            for name in _SHARED & rows[0].keys()
        )

    def _padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]] | None:
        """Texts of all rows, padded side by side, and their lengths; None where one is too long or leaves out tokens.
        They, and what says how long they are, leave `rows`.
        """
        if not self._texts:
            return {}
        masks = tuple(getattr(row.pop("attention_mask", None), "cond", None) for row in rows)
        found = {}
        for name, most in self._texts.items():
            parts = tuple(getattr(row.pop(name, None), "cond", None) for row in rows)
            if all(part is None for part in parts):
                continue
            ends = masks if name == "c_crossattn" else (None,) * len(rows)
            found[name] = self._once(f"padded {name}", (*parts, *ends), lambda given, most=most: _pad(given, most))
        # Core's network wants to be told a number, which ours does not look at.
        for row in rows:
            row |= {name: rows[0][name] for name in ("num_tokens",) if name in row and name in rows[0]}
        return None if None in found.values() else found

    def _join(self, name: str, parts: list[Any]) -> Any:
        tensors = tuple(part.cond for part in parts)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return parts[0].concat(parts[1:])
        return self._once(name, tensors, lambda _: parts[0].concat(parts[1:]))

    def _once(self, name: str, given: tuple[Any, ...], make: Callable[[tuple[Any, ...]], Any]) -> Any:
        """What `make` makes of these objects, which it made before if they are the same."""
        before, made = self._joined.get(name, (None, None))
        if before is None or list(map(id, before)) != list(map(id, given)):
            made = make(given)
            self._joined[name] = (given, made)
        return made


def _pad(given: tuple[torch.Tensor | None, ...], most: int) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Texts `[rows, tokens, width]`, some missing, and as many masks, to `[rows, most, width]` and their lengths."""
    texts, masks = given[: len(given) // 2], given[len(given) // 2 :]
    like = next(text for text in texts if text is not None)
    found, lengths = [], []
    for text, mask in zip(texts, masks, strict=True):
        text = like[:, :0] if text is None else text
        if text.shape[1] > most or text.shape[2] != like.shape[2] or len(text) != len(like):
            return None
        counts = [text.shape[1]] * len(text) if mask is None else ends(mask)
        if counts is None:
            return None
        found.append(torch.nn.functional.pad(text, (0, 0, 0, most - text.shape[1])))
        lengths += counts
    return torch.cat(found), tuple(lengths)


def ends(mask: torch.Tensor) -> list[int] | None:
    """How many tokens of each row count; None where some count that stand behind others that do not."""
    lengths = mask.sum(dim=1).int()
    is_plain = torch.equal(mask.bool(), torch.arange(mask.shape[1])[None] < lengths[:, None])
    return lengths.tolist() if is_plain else None


def _is_now(cond: Mapping[str, Any], timestep: torch.Tensor) -> bool:
    start, end = cond.get("timestep_start"), cond.get("timestep_end")
    return not (start is not None and timestep[0] > start) and not (end is not None and timestep[0] < end)


def _is_plain(cond: Mapping[str, Any]) -> bool:
    others = ("area", "mask", "hooks", "control", "gligen")
    return cond.get("strength", 1.0) == 1.0 and "default" not in cond and all(cond.get(name) is None for name in others)


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
