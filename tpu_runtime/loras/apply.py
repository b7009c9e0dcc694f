"""Application of a model's LoRAs: their merged changes to a network, and the report on a new one."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..cache.store import signature
from ..checkpoints import weight_loader
from ..checkpoints.model_ref import Expert, Lora, ModelRef
from ..messages import compose, compose_list
from ..programs.upstream_network import Network
from ..programs.weights import shared_network
from ..progress import Progress
from . import adapter
from .adapter import Adapter
from .change import LoraError
from .merge import LoraMerge

log = logging.getLogger(__name__)

# Names in a message for the page; the log has all.
NAMES_IN_TEXT = 8


def hash_variant(loras: Sequence[Lora]) -> str:
    """Return a digest of the files and strengths of LoRAs, "" without any."""
    return signature([(adapter.identify_source(lora.source), lora.strength) for lora in loras]) if loras else ""


def hash_loras(loras: Sequence[Lora]) -> str:
    """Return a digest that is equal on hosts with the same files."""
    return signature([(adapter.hash_content(lora.source), lora.strength) for lora in loras]) if loras else "no LoRA"


def make_merge(loras: Sequence[Lora], network: Network, check: Callable[[str], None] = lambda what: None) -> LoraMerge:
    """Return the merge of LoRAs into a network. `check` is called before the chips merge the named weight."""
    return LoraMerge([(adapter.read_adapter(lora.source, network), lora) for lora in loras], network, check)


def sum_vector_deltas(loras: Sequence[Lora], network: Network, progress: Progress) -> dict[str, torch.Tensor]:
    """Return the sums of LoRA differences of one-dimensional weights, `[size]` float32, by name in a checkpoint.

    loras, network, progress: the changes, the network that they change, and where to report.
    """
    with contextlib.ExitStack() as stack:
        return make_merge(loras, network).vectors(weight_loader.TensorReader(stack, progress.check_cancelled))


def add_lora(model: ModelRef, lora: Lora, progress: Progress) -> tuple[ModelRef, str]:
    """Return the model with one more LoRA, and a report on the file's changes.

    lora, progress: the one to add, and where to report.
    Raises `LoraError` if nothing in the file matches, or if the model does not have the expert.
    """
    spec = model.spec
    if lora.expert != Expert.BOTH and len(spec.denoiser.experts) == 1:
        raise LoraError(
            compose("lora.expert_of_one_denoiser", title=spec.title, expert=lora.expert, lora_experts=Expert.BOTH)
        )
    # Experts have the same architecture: one network represents all, under the name of each.
    first = spec.component(spec.denoiser.experts[0])
    with torch.inference_mode(False):  # ComfyUI calls nodes in inference mode
        network = shared_network(first, model.resolve(progress).configs[first.name])
    chosen = [
        name
        for name in spec.denoiser.experts
        if replace(model, loras=(replace(lora, strength=1.0),)).select_loras(name)
    ]
    adapters = [
        adapter.read_adapter(lora.source, replace(network, component=spec.component(name)), progress.check_cancelled)
        for name in chosen
    ]
    combined = next((candidate for candidate in adapters if candidate.changes), adapters[0])
    unused = sorted(set(adapters[0].unused).intersection(*(candidate.unused for candidate in adapters)))
    combined = replace(combined, unused=tuple(unused))
    if not combined.changes:
        raise LoraError(_nothing_fits(combined, model, network))
    name = combined.path.name
    text = compose(
        "lora.applied", name=name, strength=f"{lora.strength:g}", count=len(combined.changes), title=spec.title,
    )  # fmt: skip
    if combined.unused:
        log.warning("%s: not applied to %s: %s", combined.path, spec.title, ", ".join(combined.unused))
        why = f" ({combined.incompatible})" if combined.incompatible else ""
        count = len(combined.unused)
        left_out = compose("lora.not_applied", count=count, why=why, names=_some(combined.unused))
        text = compose_list([text, left_out], "space")
    progress.text(text)
    return replace(model, loras=(*model.loras, lora)), text


def _nothing_fits(found: Adapter, model: ModelRef, network: Network) -> str:
    """Return the message with the file's names and the expected ones."""
    title = model.spec.title
    if found.incompatible:
        return compose(
            "lora.of_another_size", path=found.path, model_id=model.model_id, incompatible=found.incompatible,
            title=title,
        )  # fmt: skip
    matrices = (weight.sources[0] for weight in network.weights.values() if weight.stacked and len(weight.shape) > 2)
    weight_name = next(name for name in matrices if name.endswith(".weight"))
    theirs = [name.replace("*", "0") for name in network.component.original_keys if "*" in name]
    expected = " or ".join([weight_name.removesuffix(".weight"), *theirs[:1]])
    return compose(
        "lora.changes_nothing", path=found.path, title=title, unused=_some(found.unused), family=model.spec.family,
        expected=expected,
    )  # fmt: skip


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_IN_TEXT} more" if len(names) > NAMES_IN_TEXT else ""
    return ", ".join(names[:NAMES_IN_TEXT]) + more
