"""Rows of guidance: decides which of core's conditionings share one call of the network."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers, merge_nested_dicts
from comfy.samplers import cond_equal_size

from ....tpu_runtime.models.common import core_inputs

if TYPE_CHECKING:
    from comfy.conds import CONDRegular
    from comfy.model_base import BaseModel

Made = TypeVar("Made")

# Key of this pack's own wrappers of a MODEL.
KEY = "comfyui_tpu"
# Inputs that all rows of guidance share, like the sample.
_SHARED = frozenset(("c_concat", "denoise_mask"))
# Wrappers that see the rows of a call: with them, number and order of the rows must be core's.
_SEEING = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)


# One of core's conditionings; `model_options` or `transformer_options`.
Cond: TypeAlias = Mapping[str, Any]
Options: TypeAlias = Mapping[str, Any]


class GuidanceBatch:
    """Replace core's `_calc_cond_batch` for conditionings of whole samples, one per row of guidance, at strength 1.

    Core multiplies each result by ones and divides it by their sum, which changes no bit and keeps a CPU core of the
    host busy for longer than a step. Here inputs that stay from step to step, such as joined texts, are joined once. A
    sample that all rows share goes to the network as one row.

    The base model's `tpu_texts` has the number of tokens to which conditionings are padded, by core's names, so that
    those of different lengths share a call; `core_inputs.LENGTHS` has their numbers of valid tokens. All other calls
    are core's.

    It is a wrapper that replaces core's function after all other wrappers, whatever its position among them.
    """

    def __init__(self, check_controls: Callable[[Sequence[Sequence[Cond] | None]], None]) -> None:
        self._check_controls = check_controls  # raises for ControlNets that are not of a supported denoiser
        self._joined: dict[str, tuple[tuple[object, ...], Any]] = {}

    def __call__(self, execute: WrapperExecutor, *args: object, **named: object) -> list[torch.Tensor]:
        calculate = partial(self._calculate, execute.original)
        return WrapperExecutor.new_executor(calculate, execute.wrappers, execute.idx + 1).execute(*args, **named)

    def _calculate(
        self,
        core: Callable[..., list[torch.Tensor]],
        model: "BaseModel",
        conds: Sequence[Sequence[Cond] | None],
        x_in: torch.Tensor,
        timestep: torch.Tensor,
        model_options: Options,
    ) -> list[torch.Tensor]:
        patcher, sample, options = model.current_patcher, x_in, model_options
        if not hasattr(model, "tpu_texts"):
            return core(model, conds, sample, timestep, options)  # a guider's second model, which is core's
        self._check_controls(conds)  # before a ControlNet reads its image
        if any(get_all_wrappers(kind, options, is_model_options=True) for kind in _SEEING):
            return core(model, conds, sample, timestep, options)
        if _is_changed(options):
            self._joined.clear()  # nodes may have written into the conditionings
        chosen = self._chosen(conds, timestep, options)
        rows = [
            {name: value.process_cond(batch_size=len(sample), area=None) for name, value in cond["model_conds"].items()}
            for _, cond in chosen
        ]
        texts = self._pad_texts(rows, model.tpu_texts)
        if not rows or texts is None or not all(cond_equal_size(rows[0], row) for row in rows[1:]):
            return core(model, conds, sample, timestep, options)
        patcher.prepare_state(timestep, options)
        merged = patcher.apply_hooks(hooks=None)
        merged = merge_nested_dicts(merged, options.get("transformer_options", {}), copy_dict1=False)
        merged |= {
            "cond_or_uncond": [index for index, _ in chosen],
            "uuids": [cond["uuid"] for _, cond in chosen],
            "sigmas": timestep,
            core_inputs.LENGTHS: {name: lengths for name, (_, lengths) in texts.items()},
        }
        number = len(rows)
        if len(sample) == 1 and self._share(rows):
            shared = {name: rows[0][name].cond for name in _SHARED & rows[0].keys()}
            batch = (sample, timestep)
        else:
            shared = {}
            batch = (torch.cat([sample] * number), torch.cat([timestep] * number))
        inputs = {name: self._join(name, [row[name] for row in rows]) for name in rows[0] if name not in shared}
        inputs |= shared | {name: padded for name, (padded, _) in texts.items()}
        predicted = model.apply_model(*batch, **inputs, transformer_options=merged)
        results = [torch.zeros(()) if cond else torch.zeros_like(sample) for cond in conds]
        for (index, _), result in zip(chosen, predicted.chunk(number), strict=True):
            results[index] = result
        return results

    def _chosen(
        self, conds: Sequence[Sequence[Cond] | None], timestep: torch.Tensor, options: Options
    ) -> list[tuple[int, Cond]]:
        """Return the active conditioning of each row of guidance, or nothing if a row is not plain.

        The last row comes first, as in core.
        """
        if any(options.get(name) for name in ("multigpu_clones", "model_function_wrapper")):
            return []
        chosen = []
        for index, row in reversed(list(enumerate(conds))):
            now = [cond for cond in row or () if _is_now(cond, timestep)]
            if row and (len(now) != 1 or not _is_plain(now[0])):
                return []
            chosen += [(index, cond) for cond in now]
        return chosen

    def _share(self, rows: Sequence[Mapping[str, "CONDRegular"]]) -> bool:
        """Return whether all rows have the same further channels and mask."""

        def compare(tensors: tuple[torch.Tensor, ...]) -> bool:
            return all(torch.equal(tensors[0], other) for other in tensors[1:])

        return all(
            self._once(f"shared {name}", tuple(row[name].cond for row in rows), compare)
            for name in _SHARED & rows[0].keys()
        )

    def _pad_texts(
        self, rows: Sequence[dict[str, "CONDRegular"]], texts: Mapping[str, int]
    ) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]] | None:
        """Return the texts of all rows, padded and joined, and their lengths.

        Both and their masks are removed from `rows`.

        texts: number of tokens to pad to, by core's name.
        Returns None if a text is too long, or its mask leaves out tokens before the end.
        """
        if not texts:
            return {}
        masks = tuple(getattr(row.pop("attention_mask", None), "cond", None) for row in rows)
        padded = {}
        for name, most in texts.items():
            parts = tuple(getattr(row.pop(name, None), "cond", None) for row in rows)
            if all(part is None for part in parts):
                continue
            ends = masks if name == "c_crossattn" else (None,) * len(rows)
            padded[name] = self._once(f"padded {name}", (*parts, *ends), lambda tensors, most=most: _pad(tensors, most))
        # Core's network requires this number, which ours ignores.
        for row in rows:
            row |= {name: rows[0][name] for name in ("num_tokens",) if name in row and name in rows[0]}
        return None if None in padded.values() else padded

    def _join(self, name: str, parts: "list[CONDRegular]") -> object:
        tensors = tuple(part.cond for part in parts)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return parts[0].concat(parts[1:])
        return self._once(name, tensors, lambda _: parts[0].concat(parts[1:]))

    def _once(self, name: str, parts: tuple[Any, ...], make: Callable[[tuple[Any, ...]], Made]) -> Made:
        """Return the result of `make` for these objects, cached while they are the same."""
        cached = self._joined.get(name)
        if cached is None or list(map(id, cached[0])) != list(map(id, parts)):
            joined = make(parts)
            self._joined[name] = (parts, joined)
            return joined
        return cached[1]


def _pad(tensors: tuple[torch.Tensor | None, ...], most: int) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Pad texts to `[rows, most, width]`; return them and their lengths, or None if they do not fit.

    tensors: the texts `[rows, tokens, width]`, some of them None, then as many masks `[rows, tokens]` or None.
    """
    texts, masks = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    like = next(text for text in texts if text is not None)
    padded, lengths = [], []
    for text, mask in zip(texts, masks, strict=True):
        text = like[:, :0] if text is None else text
        if text.shape[1] > most or text.shape[2] != like.shape[2] or len(text) != len(like):
            return None
        counts = [text.shape[1]] * len(text) if mask is None else core_inputs.valid_lengths(mask)
        if counts is None:
            return None
        padded.append(torch.nn.functional.pad(text, (0, 0, 0, most - text.shape[1])))
        lengths += counts
    return torch.cat(padded), tuple(lengths)


def _is_changed(options: Options) -> bool:
    """Return whether functions of other packs run between steps."""
    inner = options.get("transformer_options", {})
    wrappers = (key for kind in inner.get("wrappers", {}).values() for key in kind)
    core = {"transformer_options", "to_load_options"}
    return (
        bool(options.keys() - core) or any(key != KEY for key in wrappers) or any(inner.get("callbacks", {}).values())
    )


def _is_now(cond: Cond, timestep: torch.Tensor) -> bool:
    start, end = cond.get("timestep_start"), cond.get("timestep_end")
    return not (start is not None and timestep[0] > start) and not (end is not None and timestep[0] < end)


def _is_plain(cond: Cond) -> bool:
    others = ("area", "mask", "hooks", "control", "gligen")
    return cond.get("strength", 1.0) == 1.0 and "default" not in cond and all(cond.get(name) is None for name in others)
