"""The rows of guidance: which of core's conditionings share one call of the network."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers, merge_nested_dicts
from comfy.samplers import cond_equal_size

# Under which this pack's own wrappers hang on a MODEL.
KEY = "comfyui_tpu"
# Where a network finds, in `transformer_options`, how many tokens of padded texts count, by core's names of them.
LENGTHS = "tpu_lengths"
# What all rows of guidance share like the sample.
_SHARED = frozenset(("c_concat", "denoise_mask"))
# Wrappers that see the rows of a call: how many there are, and in which order, is core's.
_SEEING = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)


class PlainBatch:
    """Core's `_calc_cond_batch` for conditionings of whole samples, one for each row of guidance, at strength 1.

    There each result is multiplied by ones and divided by their sum, which changes no bit and takes a core of the host
    longer than a step should. What stays from step to step, such as the texts side by side, is joined once. A sample
    that all rows share goes to the network as one row. The base model's `tpu_texts` are conditionings of tokens, by
    core's names, with the number to which they are padded, so that those of different lengths share a call: `LENGTHS`
    says how many count. Anything else is core's.

    It is a wrapper that takes the place of core's function behind all other wrappers, wherever it stands among them.
    """

    def __init__(self, refusal_of_controls: str) -> None:
        self._refusal_of_controls = refusal_of_controls
        self._joined: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def __call__(self, execute: WrapperExecutor, *args: Any, **named: Any) -> list[torch.Tensor]:
        own = partial(self._calculate, execute.original)
        return WrapperExecutor.new_executor(own, execute.wrappers, execute.idx + 1).execute(*args, **named)

    def _calculate(
        self,
        core: Callable[..., list[torch.Tensor]],
        model: Any,
        conds: Sequence[Sequence[Mapping[str, Any]] | None],
        x_in: torch.Tensor,
        timestep: torch.Tensor,
        model_options: dict[str, Any],
    ) -> list[torch.Tensor]:
        patcher, sample, options = model.current_patcher, x_in, model_options
        if not hasattr(model, "tpu_texts"):
            return core(model, conds, sample, timestep, options)  # a guider's other model, of core's own
        if any(cond.get("control") is not None for each in conds for cond in each or ()):
            raise ValueError(self._refusal_of_controls)  # before it looks at its picture
        if any(get_all_wrappers(kind, options, is_model_options=True) for kind in _SEEING):
            return core(model, conds, sample, timestep, options)
        if _is_changed(options):
            self._joined.clear()  # nodes may write into the conditionings that they are given
        chosen = self._chosen(conds, timestep, options)
        rows = [
            {name: value.process_cond(batch_size=len(sample), area=None) for name, value in each["model_conds"].items()}
            for _, each in chosen
        ]
        texts = self._padded(rows, model.tpu_texts)
        if not rows or texts is None or not all(cond_equal_size(rows[0], row) for row in rows[1:]):
            return core(model, conds, sample, timestep, options)
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
        if len(sample) == 1 and self._share(rows):
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

    def _padded(
        self, rows: Sequence[dict[str, Any]], texts: Mapping[str, int]
    ) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]] | None:
        """Texts of all rows, padded side by side, and their lengths; None where one is too long or leaves out tokens.
        They, and what says how long they are, leave `rows`.
        """
        if not texts:
            return {}
        masks = tuple(getattr(row.pop("attention_mask", None), "cond", None) for row in rows)
        found = {}
        for name, most in texts.items():
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


def _is_changed(options: Mapping[str, Any]) -> bool:
    """Whether functions of others run between steps."""
    hung = options.get("transformer_options", {})
    wrappers = (each for kind in hung.get("wrappers", {}).values() for each in kind)
    own = {"transformer_options", "to_load_options"}
    return bool(options.keys() - own) or any(key != KEY for key in wrappers) or any(hung.get("callbacks", {}).values())


def _is_now(cond: Mapping[str, Any], timestep: torch.Tensor) -> bool:
    start, end = cond.get("timestep_start"), cond.get("timestep_end")
    return not (start is not None and timestep[0] > start) and not (end is not None and timestep[0] < end)


def _is_plain(cond: Mapping[str, Any]) -> bool:
    others = ("area", "mask", "hooks", "control", "gligen")
    return cond.get("strength", 1.0) == 1.0 and "default" not in cond and all(cond.get(name) is None for name in others)
