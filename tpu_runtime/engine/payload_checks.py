"""ComfyUI's CONDITIONING as the denoisers take it: one prompt, for the whole picture and every step.

Core nodes write more into it: several prompts, areas, masks, ranges of steps, controls. What is not known here would be
left out of the picture in silence, so it is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from ..spec import ModelSpec

# Every text encoder of ComfyUI's own gives it; these models have no use for it.
_UNUSED = "pooled_output"


def entry(spec: ModelSpec, name: str, given: Any) -> tuple[Any, Mapping[str, Any]]:
    """The embeddings and what is said of them, of input `name`; raises `ValueError` for what `spec` cannot follow.

    ComfyUI's own CONDITIONING carries no family and may pass.
    """
    if not isinstance(given, list | tuple) or not all(map(_is_entry, given)):
        raise ValueError(f"{spec.title}: {name} is no CONDITIONING. Connect {spec.family}TextEncoder.")
    if len(given) != 1:
        raise ValueError(
            f"{spec.title}: {name} has {len(given)} entries; combined prompts are not supported. Connect one "
            f"{spec.family}TextEncoder and write all into its prompt."
        )
    ((embeddings, info),) = given
    family = info.get("tpu_family", spec.family)
    if family != spec.family:
        raise ValueError(
            f"{spec.title}: {name} comes from a {family} text encoder; it must come from {spec.family}TextEncoder."
        )
    if unknown := [key for key, value in info.items() if value is not None and key not in _known(spec)]:
        raise ValueError(
            f"{spec.title}: {name} carries {', '.join(map(str, unknown))}; areas, masks, strengths, ranges of steps "
            f"and controls are not supported. Connect {spec.family}TextEncoder without a node between that sets them."
        )
    return embeddings, info


def _is_entry(one: Any) -> bool:
    return isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[1], Mapping)


def _known(spec: ModelSpec) -> set[str]:
    names = [text.name for text in spec.text_encoders]
    return {"tpu_family", "length", _UNUSED, *names, *(f"{name}_length" for name in names)}
