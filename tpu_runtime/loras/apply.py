"""A model's LoRAs together: what they change in a network, and what a user is told of one that is added."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..cache.store import signature
from ..checkpoints import load
from ..checkpoints.model_ref import LORA_EXPERTS, Lora, ModelRef
from ..programs.modules import Network
from ..programs.weights import described
from ..progress import Progress
from . import adapter
from .adapter import Adapter
from .change import LoraError
from .merge import Merge

log = logging.getLogger(__name__)

# How many names a sentence for the page has; the log has all.
NAMES_IN_TEXT = 8


def variant(loras: Sequence[Lora]) -> str:
    """What tells weights with these LoRAs from others: their files and strengths; empty without any."""
    return signature([(adapter.identity(lora.source), lora.strength) for lora in loras]) if loras else ""


def content(loras: Sequence[Lora]) -> str:
    """What tells the files from others of the same names on another host."""
    return signature([(adapter.content(lora.source), lora.strength) for lora in loras]) if loras else "no LoRA"


def changes(loras: Sequence[Lora], network: Network, check: Callable[[str], None] = lambda what: None) -> Merge:
    """`check` is called before the chips merge what it names."""
    return Merge([(adapter.read(lora.source, network), lora) for lora in loras], network, check)


def vectors(loras: Sequence[Lora], network: Network, progress: Progress) -> dict[str, torch.Tensor]:
    """What LoRAs add to weights of one dimension, norms among them: float32, by the weight's name in a checkpoint."""
    with contextlib.ExitStack() as stack:
        return changes(loras, network).vectors(load.Reader(stack, progress.check_cancelled))


def add(model: ModelRef, lora: Lora, progress: Progress) -> tuple[ModelRef, str]:
    """The model with one more LoRA, and what of it applies as text.

    Raises `LoraError` where nothing of the file does, or where the model has no such expert.
    """
    spec = model.spec
    if lora.expert != LORA_EXPERTS[0] and len(spec.denoiser.experts) == 1:
        raise LoraError(
            f"{spec.title}: expert is {lora.expert}, but this model has only one denoiser. Choose {LORA_EXPERTS[0]}."
        )
    # Experts are alike: one network stands for all, under the name of each.
    first = spec.component(spec.denoiser.experts[0])
    with torch.inference_mode(False):  # which ComfyUI calls nodes in
        network = described(first, model.resolve(progress).configs[first.name])
    chosen = [
        name for name in spec.denoiser.experts if replace(model, loras=(replace(lora, strength=1.0),)).loras_of(name)
    ]
    each = [
        adapter.read(lora.source, replace(network, component=spec.component(name)), progress.check_cancelled)
        for name in chosen
    ]
    found = next((one for one in each if one.changes), each[0])
    unused = sorted(set(each[0].unused).intersection(*(one.unused for one in each)))
    found = replace(found, unused=tuple(unused))
    if not found.changes:
        raise LoraError(_nothing_fits(found, model, network))
    name = found.path.name
    text = f"{name}, strength {lora.strength:g}: changes {len(found.changes)} weights of {spec.title}."
    if found.unused:
        log.warning("%s: not applied to %s: %s", found.path, spec.title, ", ".join(found.unused))
        why = f" ({found.misfit})" if found.misfit else ""
        text += f" Not applied, {len(found.unused)} tensors{why}: {_some(found.unused)}."
    progress.text(text)
    return replace(model, loras=(*model.loras, lora)), text


def _nothing_fits(found: Adapter, model: ModelRef, network: Network) -> str:
    """Which names came, and which would do."""
    title = model.spec.title
    if found.misfit:
        return (
            f"The LoRA {found.path} is for a model of another size than {model.model_id}: {found.misfit}. Choose one "
            f"made for {title}."
        )
    matrices = (weight.sources[0] for weight in network.weights.values() if weight.stacked and len(weight.shape) > 2)
    own = next(name for name in matrices if name.endswith(".weight"))
    theirs = [name.replace("*", "0") for name in network.component.makers_names if "*" in name]
    expected = " or ".join([own.removesuffix(".weight"), *theirs[:1]])
    return (
        f"The LoRA {found.path} changes nothing of {title}. It has {_some(found.unused)}; expected are names of the "
        f"family {model.spec.family} such as {expected}. Choose one made for {title}."
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_IN_TEXT} more" if len(names) > NAMES_IN_TEXT else ""
    return ", ".join(names[:NAMES_IN_TEXT]) + more
