"""Example workflows as data, and their graphs in API format: with a node per stage, and with the pipeline node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Input
from comfyui_tpu.nodes.graphs.graph import Workflow
from comfyui_tpu.nodes.graphs.tiny_models import EXAMPLE_IMAGE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models import lookup_spec

HUB = "https://huggingface.co/Comfy-Org/{}/resolve/main/split_files/loras/{}"


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA file in `repo`, a repository of Comfy-Org on the Hub."""

    name: str
    repo: str
    expert: str = "both"


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example workflow."""

    name: str
    title: str  # the name of the page's file, which ComfyUI shows
    model: str  # name of its spec
    does: str  # the task, for the note
    predicted: Sequence[str]  # keys in `predicted.json`: names of models, or recipes of `benchmarks/recipes.py`
    tips: Sequence[str]  # further lines of the note
    widgets: Mapping[str, Any] = field(default_factory=dict)  # values that differ from the model's defaults
    loras: Sequence[LoraFile] = ()
    prompt: str = ""  # "": the model's default
    prefix: str = ""  # of the saved file; "": `name`
    looks: bool = False  # whether an image is given as a reference
    is_miniature: bool = False  # whether it runs the built-in tiny model

    @property
    def spec(self) -> ModelSpec:
        return lookup_spec(self.model)

    @property
    def has_picture(self) -> bool:
        return self.spec.needs_condition or self.looks

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of all widgets by name, of all nodes."""
        spec = self.spec
        defaults = {name: limit.default for name, limit in spec.inputs.items()}
        texts = {**spec.texts, **({"prompt": self.prompt} if self.prompt else {})}
        found = {**defaults, **texts, "model_id": spec.published.hub_id, "resize": "crop"}
        if self.is_miniature:
            own = spec.miniature
            found |= {"model_id": own.id, **own.inputs, **tiny.find_trained_texts(spec, own.id)}
        return {**found, **self.widgets}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A workflow in API format, with the position of its nodes on the page."""

    workflow: Workflow
    columns: Sequence[Sequence[str]]  # node ids of each column, from top to bottom
    files: Mapping[str, Sequence[Mapping[str, str]]]  # files that a node needs, by node id
    raised: Sequence[str] = ()  # ids of nodes above their columns, at most one in each


class _Builder:
    """A workflow under construction. Nodes are numbered as they are added: the stages in order, then the loaders."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self.workflow: Workflow = {}
        self.files: dict[str, list[dict[str, str]]] = {}

    def add(self, kind: str, title: str, **inputs: Any) -> str:
        node_id = str(len(self.workflow) + 1)
        self.workflow[node_id] = {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
        return node_id

    def stage(self, suffix: str, title: str, **links: Any) -> str:
        """Add a node of the family with the example's values, and return its id."""
        kind = self._example.spec.family + suffix
        declaration, values = DECLARATIONS[kind], self._example.values
        known = {declared.name for declared in declaration.inputs}
        inputs = {name: link for name, link in links.items() if name in known}
        for declared in declaration.inputs:
            # A size of 0 means the size of the encoded image.
            is_own = declared.default == 0 and declared.name in ("height", "width", "num_frames")
            if declared.is_widget and declared.name in values and not is_own:
                inputs[declared.name] = values[declared.name]
        return self.add(kind, title, **inputs)

    def model(self) -> list[str]:
        """Add the loader and then a node for each LoRA. Returns their ids in order."""
        family, model_id = self._example.spec.family, self._example.values["model_id"]
        chain = [self.add("TPUModelLoader", "Model", model_id=model_id, family=family, precision="auto")]
        for lora in self._example.loras:
            title = "LoRA" if lora.expert == "both" else f"LoRA, {lora.expert} noise"
            chosen = {"lora_name": lora.name, "strength": 1.0, "expert": lora.expert}
            chain.append(self.add("TPULoraLoader", title, model=[chain[-1], 0], **chosen))
            url = HUB.format(lora.repo, lora.name)
            self.files[chain[-1]] = [{"name": lora.name, "url": url, "directory": "loras"}]
        return chain

    def save(self, source: str, output: int) -> str:
        """Add the node that saves the result of `source`, and return its id."""
        prefix = self._example.prefix or self._example.name
        if self._example.spec.is_image:
            return self.add("SaveImage", "Save Image", images=[source, output], filename_prefix=prefix)
        options = {"filename_prefix": prefix, "format": "auto", "codec": "auto"}
        return self.add("SaveVideo", "Save Video", video=[source, output], **options)


def stages(example: Example) -> Graph:
    """Return the graph with a node for every stage, and one loader for all of them."""
    build = _Builder(example)
    picture = [build.add("LoadImage", "Picture", image=EXAMPLE_IMAGE)] if example.has_picture else []
    # The prompt may refer to a reference image.
    text = "" if example.looks else build.stage("TextEncoder", "Prompt")
    image = [build.stage("ImageEncoder", "Image Encoder", image=[picture[0], 0])] if picture else []
    text = text or build.stage("TextEncoder", "Prompt", condition=[image[0], 0])
    embeds = {"prompt_embeds": [text, 0]}
    if example.spec.recipe.guidance == "cfg":
        embeds["negative_prompt_embeds"] = [text, 1]
    sampler = build.stage("TPUSampler", "Sampler", **embeds, **({"condition": [image[0], 0]} if image else {}))
    decoder = build.stage("TPUVAEDecoder", "Decoder", latents=[sampler, 0])
    video = []
    if not example.spec.is_image:
        video = [build.add("CreateVideo", "Create Video", images=[decoder, 0], fps=[decoder, 1])]
    saved = build.save(video[0] if video else decoder, 0)
    chain = build.model()
    for stage in (text, *image, sampler, decoder):
        inputs = build.workflow[stage]["inputs"]
        build.workflow[stage]["inputs"] = {"model": [chain[-1], 0], **inputs}
    encoders = [image, [text]] if example.looks else [[text, *image]]
    first = [*picture, chain[-1]] if example.looks else [chain[-1], *picture]
    columns = [*([one] for one in chain[:-1]), first, *encoders, [sampler], [decoder]]
    columns += [[*video, saved]]
    return Graph(workflow=build.workflow, columns=columns, files=build.files, raised=_raised(example, picture, image))


def pipeline(example: Example) -> Graph:
    """Return the graph with one node for all stages, and a loader only if it has LoRAs or reference images."""
    build = _Builder(example)
    picture = [build.add("LoadImage", "Picture", image=EXAMPLE_IMAGE)] if example.has_picture else []
    image = [build.stage("ImageEncoder", "Image Encoder", image=[picture[0], 0])] if example.looks else []
    given = {"condition": [image[0], 0]} if image else {"image": [picture[0], 0]} if picture else {}
    node = build.stage("TPUPipeline", "Pipeline", **given)
    saved = build.save(node, 0 if example.spec.is_image else 2)
    chain = build.model() if example.loras or example.looks else []
    for one in (*image, node) if chain else ():
        build.workflow[one]["inputs"]["model"] = [chain[-1], 0]
    first = [*picture, *chain[-1:]] if example.looks else [*chain[-1:], *picture]
    before = [*([one] for one in chain[:-1]), first]
    columns = [*filter(None, before), *([one] for one in image), [node], [saved]]
    return Graph(workflow=build.workflow, columns=columns, files=build.files, raised=_raised(example, picture, image))


def _raised(example: Example, picture: Sequence[str], image: Sequence[str]) -> list[str]:
    """Return the nodes that go above the loader's links: those of an image that two stages use."""
    return [*picture, *image] if example.looks else []


def api(workflow: Workflow) -> Workflow:
    """Return a workflow without advanced inputs at their defaults, and with `model_id` in one place."""
    return {node_id: {**node, "inputs": _written(node)} for node_id, node in workflow.items()}


def _written(node: Mapping[str, Any]) -> dict[str, Any]:
    declaration, inputs = DECLARATIONS.get(node["class_type"]), node["inputs"]
    optional = {declared.name: declared for declared in declaration.inputs if declared.optional} if declaration else {}
    return {
        name: value
        for name, value in inputs.items()
        if not (name == "model_id" and "model" in inputs)
        and (name not in optional or _says_something(optional[name], value))
    }


def _says_something(declared: Input, value: Any) -> bool:
    return value != declared.default or (bool(value) and not declared.advanced)
