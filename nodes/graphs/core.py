"""A workflow of ComfyUI's own samplers: what each will ask for, as far as it can be known before it runs.

Nodes that are not known here may change shapes: a sampler behind one is left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .graph import Workflow, is_link

# Nodes that pass a model on and change no shape, and those that put a prompt's states into a conditioning.
_MODELS = frozenset(
    "LoraLoaderModelOnly ModelSamplingSD3 ModelSamplingAuraFlow ModelSamplingFlux RescaleCFG CFGZeroStar CFGNorm APG "
    "TCFG EasyCache LazyCache DifferentialDiffusion WanContextWindowsManual".split()
)
# What guiders call the conditionings of a step, and the scales without which the later ones do not run.
_GUIDERS = {
    "BasicGuider": (("conditioning",), ()),
    "CFGGuider": (("positive", "negative"), ("cfg",)),
    "DualCFGGuider": (("cond1", "cond2", "negative"), ("cfg_conds", "cfg_cond2_negative")),
}
_TEXTS = {"CLIPTextEncode": "clip", "FluxGuidance": "conditioning", "ConditioningZeroOut": "conditioning"}
# Nodes that take both conditionings and give them again, before an empty latent: those of picture to video.
_PICTURES = frozenset("WanImageToVideo WanFirstLastFrameToVideo HunyuanVideo15ImageToVideo".split())
_LATENTS = _PICTURES | frozenset(
    "EmptyLatentImage EmptySD3LatentImage EmptyFlux2LatentImage EmptyHunyuanLatentVideo EmptyHunyuanVideo15Latent "
    "Wan22ImageToVideoLatent".split()
)
_SAMPLERS = frozenset(("KSampler", "KSamplerAdvanced", "SamplerCustom"))
_DECODERS = frozenset(("VAEDecode", "VAEDecodeTiled"))


@dataclass(frozen=True, kw_only=True)
class Source:
    """An output of a loader: the node's type and its values, and which output."""

    kind: str
    values: Mapping[str, Any]
    output: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What one sampler asks of a model: so many conditionings a step, for a batch of this size, and for no more frames
    at once than a `window` has. `decoders` are the VAEs that decode what it gives; `pictures` are what a node adds to
    the conditionings, by the names of its inputs.
    """

    model: Source
    width: int
    height: int
    num_frames: int
    window: int
    batch: int
    branches: int
    decoders: tuple[Source, ...]
    pictures: frozenset[str] = frozenset()


def samplings(workflow: Workflow) -> list[Sampling]:
    """The samplings of a workflow that are understood whole, in its order."""
    return [found for node_id in workflow if (found := _sampling(workflow, node_id)) is not None]


def encoders(workflow: Workflow) -> list[Source]:
    """The loaders of text encoders whose prompts are encoded."""
    found = [_source(workflow, node, "clip") for node in workflow.values() if node.get("class_type") in _TEXTS]
    return list({id(one.values): one for one in found if one is not None}.values())


def _sampling(workflow: Workflow, node_id: str) -> Sampling | None:
    try:
        return _understood(workflow, node_id)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # not understood: its nodes say what is wrong when they run


def _understood(workflow: Workflow, node_id: str) -> Sampling | None:
    node = workflow[node_id]
    guider = node
    if node["class_type"] == "SamplerCustomAdvanced":
        guider = _linked(workflow, node, "guider")
    elif node["class_type"] not in _SAMPLERS:
        return None
    model = _source(workflow, guider, "model")
    latent = _linked(workflow, node, "latent_image")
    if model is None or latent["class_type"] not in _LATENTS:
        return None
    names, scales = _GUIDERS["CFGGuider" if guider is node else guider["class_type"]]
    if any(_number(workflow, guider, scale) == 1.0 for scale in scales):
        if len(scales) > 1:
            return None  # which of three are left out depends on the guider's style
        names = names[:1]
    beside = {tuple(sorted(_beside(workflow, guider, name))) for name in names}
    if len(beside) != 1:
        return None
    inputs = latent["inputs"]
    frames = int(_number(workflow, latent, "length")) if "length" in inputs else 1
    windows = [each for _, each in _chain(workflow, guider, "model") if each["class_type"] == "WanContextWindowsManual"]
    return Sampling(
        model=model,
        width=int(_number(workflow, latent, "width")),
        height=int(_number(workflow, latent, "height")),
        num_frames=frames,
        window=min([frames, *(int(_number(workflow, node, "context_length")) for node in windows)]),
        batch=int(_number(workflow, latent, "batch_size")) if "batch_size" in inputs else 1,
        branches=len(names),
        decoders=tuple(_decoders(workflow, node_id)),
        pictures=frozenset(beside.pop()),
    )


def _linked(workflow: Workflow, node: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The node that an input is linked to; KeyError where it is a value."""
    link = node["inputs"][name]
    return workflow[link[0] if is_link(link) else ""]


def _number(workflow: Workflow, node: Mapping[str, Any], name: str) -> float:
    """An input's number, also of a node that holds one; ValueError where it is known only when it runs."""
    value = node["inputs"][name]
    if is_link(value):
        holder = workflow[value[0]]
        value = holder["inputs"]["value"] if holder["class_type"].startswith("Primitive") else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is known when it runs")
    return value


def _source(workflow: Workflow, node: Mapping[str, Any], name: str) -> Source | None:
    """The loader behind an input, through nodes that pass on what they get."""
    for link, found in _chain(workflow, node, name):
        if found["class_type"] not in _MODELS:
            return Source(kind=found["class_type"], values=found["inputs"], output=link[1])
    return None


def _chain(workflow: Workflow, node: Mapping[str, Any], name: str) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Links and nodes behind an input, one after another, up to one that does more than pass on what it gets."""
    for _ in workflow:
        link = node["inputs"].get(name)
        if not is_link(link):
            return
        node = workflow[link[0]]
        yield link, node
        if node["class_type"] not in _MODELS:
            return
        name = "model"


def _beside(workflow: Workflow, node: Mapping[str, Any], name: str) -> Iterator[str]:
    """What nodes add to a conditioning beside a prompt's states; ValueError for nodes that are not known."""
    for _ in workflow:
        link = node["inputs"][name]
        node = workflow[link[0]]
        kind = node["class_type"]
        if kind in _TEXTS:
            name = _TEXTS[kind]
            if name == "clip":
                return
        elif kind in _PICTURES:
            name = ("positive", "negative")[link[1]]
            given = ("start_image", "end_image", "clip_vision_output")
            yield from (one for one in given if is_link(node["inputs"].get(one)))
        else:
            raise ValueError(f"{kind} is not known")


def _decoders(workflow: Workflow, sampler: str) -> Iterator[Source]:
    for node in workflow.values():
        inputs = node.get("inputs", {})
        samples = inputs.get("samples")
        if node.get("class_type") in _DECODERS and is_link(samples) and samples[0] == sampler:
            found = _source(workflow, node, "vae")
            if found is not None:
                yield found
