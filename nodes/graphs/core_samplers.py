"""Predicts the calls of ComfyUI's own samplers in a workflow, as far as they are known before it runs.

Unknown nodes may change shapes: a sampler that depends on one is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..declare import Value, Values
from .graph import GraphNode, Workflow, is_link

# Nodes that pass a model on without changing shapes.
_MODELS = frozenset(
    "LoraLoaderModelOnly ModelSamplingSD3 ModelSamplingAuraFlow ModelSamplingFlux RescaleCFG CFGZeroStar CFGNorm APG "
    "TCFG EasyCache LazyCache DifferentialDiffusion WanContextWindowsManual".split()
)
# For each guider, its conditioning inputs, and its scales; at scale 1 only the first conditioning is evaluated.
_GUIDERS = {
    "BasicGuider": (("conditioning",), ()),
    "CFGGuider": (("positive", "negative"), ("cfg",)),
    "DualCFGGuider": (("cond1", "cond2", "negative"), ("cfg_conds", "cfg_cond2_negative")),
}
# Nodes that put encoded text into a conditioning, with the input that leads to the text.
_TEXTS = {"CLIPTextEncode": "clip", "FluxGuidance": "conditioning", "ConditioningZeroOut": "conditioning"}
# Image-to-video nodes: inputs and outputs are both conditionings, the third output is an empty latent.
_PICTURES = frozenset("WanImageToVideo WanFirstLastFrameToVideo HunyuanVideo15ImageToVideo".split())
_LATENTS = _PICTURES | frozenset(
    "EmptyLatentImage EmptySD3LatentImage EmptyFlux2LatentImage EmptyHunyuanLatentVideo EmptyHunyuanVideo15Latent "
    "Wan22ImageToVideoLatent".split()
)
_SAMPLERS = frozenset(("KSampler", "KSamplerAdvanced", "SamplerCustom"))
_DECODERS = frozenset(("VAEDecode", "VAEDecodeTiled"))


@dataclass(frozen=True, kw_only=True)
class LoaderOutput:
    """An output of a loader."""

    kind: str  # the node's type
    values: Values  # its inputs, by name
    output: int  # index of the output


@dataclass(frozen=True, kw_only=True)
class SamplerCall:
    """The calls of one sampler."""

    model: LoaderOutput
    width: int  # pixels
    height: int  # pixels
    num_frames: int
    window: int  # frames that the network gets at once
    batch: int
    branches: int  # conditionings per step
    decoders: tuple[LoaderOutput, ...]  # the VAEs that decode its result
    pictures: frozenset[str] = frozenset()  # images that a node adds to the conditionings, by its input's name


def find_sampler_calls(workflow: Workflow) -> list[SamplerCall]:
    """Return the samplings of a workflow that are fully understood, in its order."""
    return [sampling for node_id in workflow if (sampling := _sampling(workflow, node_id)) is not None]


def find_text_encoders(workflow: Workflow) -> list[LoaderOutput]:
    """Return the loaders of text encoders that encode prompts."""
    sources = [_source(workflow, node, "clip") for node in workflow.values() if node.get("class_type") in _TEXTS]
    return list({id(source.values): source for source in sources if source is not None}.values())


def _sampling(workflow: Workflow, node_id: str) -> SamplerCall | None:
    try:
        return _understood(workflow, node_id)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # not understood: its nodes raise the error when they run


def _understood(workflow: Workflow, node_id: str) -> SamplerCall | None:
    node = workflow[node_id]
    guider = node
    if node["class_type"] == "SamplerCustomAdvanced":
        guider = _follow_link(workflow, node, "guider")
    elif node["class_type"] not in _SAMPLERS:
        return None
    model = _source(workflow, guider, "model")
    latent = _follow_link(workflow, node, "latent_image")
    if model is None or latent["class_type"] not in _LATENTS:
        return None
    names, scales = _GUIDERS["CFGGuider" if guider is node else guider["class_type"]]
    if any(_number(workflow, guider, scale) == 1.0 for scale in scales):
        if len(scales) > 1:
            return None  # the guider's style decides which of three are left out
        names = names[:1]
    extras = {tuple(sorted(_extras(workflow, guider, name))) for name in names}
    if len(extras) != 1:
        return None
    inputs = latent["inputs"]
    frames = int(_number(workflow, latent, "length")) if "length" in inputs else 1
    windows = [node for _, node in _chain(workflow, guider, "model") if node["class_type"] == "WanContextWindowsManual"]
    return SamplerCall(
        model=model,
        width=int(_number(workflow, latent, "width")),
        height=int(_number(workflow, latent, "height")),
        num_frames=frames,
        window=min([frames, *(int(_number(workflow, node, "context_length")) for node in windows)]),
        batch=int(_number(workflow, latent, "batch_size")) if "batch_size" in inputs else 1,
        branches=len(names),
        decoders=tuple(_decoders(workflow, node_id)),
        pictures=frozenset(extras.pop()),
    )


def _follow_link(workflow: Workflow, node: GraphNode, name: str) -> GraphNode:
    """Return the node that an input is linked to; KeyError if the input is a value."""
    link = node["inputs"][name]
    return workflow[link[0] if is_link(link) else ""]


def _number(workflow: Workflow, node: GraphNode, name: str) -> float:
    """Return an input's number, also from a primitive node; ValueError if it is known only at run time."""
    value = node["inputs"][name]
    if is_link(value):
        holder = workflow[value[0]]
        value = holder["inputs"]["value"] if holder["class_type"].startswith("Primitive") else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is known only when it runs")
    return value


def _source(workflow: Workflow, node: GraphNode, name: str) -> LoaderOutput | None:
    """Return the loader of an input, through nodes that pass on their input."""
    for link, origin in _chain(workflow, node, name):
        if origin["class_type"] not in _MODELS:
            return LoaderOutput(kind=origin["class_type"], values=origin["inputs"], output=link[1])
    return None


def _chain(workflow: Workflow, node: GraphNode, name: str) -> Iterator[tuple[list[Value], GraphNode]]:
    """Yield links and nodes that lead to an input, up to the first node that does not just pass on its input."""
    for _ in workflow:
        link = node["inputs"].get(name)
        if not is_link(link):
            return
        node = workflow[link[0]]
        yield link, node
        if node["class_type"] not in _MODELS:
            return
        name = "model"


def _extras(workflow: Workflow, node: GraphNode, name: str) -> Iterator[str]:
    """Yield the image inputs that nodes add to a conditioning; ValueError for unknown nodes."""
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
            images = ("start_image", "end_image", "clip_vision_output")
            yield from (image for image in images if is_link(node["inputs"].get(image)))
        else:
            raise ValueError(f"{kind} is not known")


def _decoders(workflow: Workflow, sampler: str) -> Iterator[LoaderOutput]:
    for node in workflow.values():
        inputs = node.get("inputs", {})
        samples = inputs.get("samples")
        if node.get("class_type") in _DECODERS and is_link(samples) and samples[0] == sampler:
            decoder = _source(workflow, node, "vae")
            if decoder is not None:
                yield decoder
