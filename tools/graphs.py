"""What an example is, and its graphs in API format: one of stages, and one of the family's pipeline node."""

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
    """A file of `repo`, one of Comfy-Org's on the Hub, for one expert or both."""

    name: str
    repo: str
    expert: str = "both"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A workflow.

    `widgets` are what is not the model's default; `predicted` are keys of the records in `predicted.json`: a model's
    name, or a recipe of `benchmarks/recipes.py`. `tips` are for the note. What it makes is saved as `prefix`, else as
    `name`. One that `looks` gets a picture as a reference. ComfyUI shows the `title` alone, the name of the page's
    file. One that `is_miniature` runs the model's built-in one.
    """

    name: str
    title: str
    model: str
    does: str
    predicted: Sequence[str]
    tips: Sequence[str]
    widgets: Mapping[str, Any] = field(default_factory=dict)
    loras: Sequence[LoraFile] = ()
    prompt: str = ""
    prefix: str = ""
    looks: bool = False
    is_miniature: bool = False

    @property
    def spec(self) -> ModelSpec:
        return lookup_spec(self.model)

    @property
    def has_picture(self) -> bool:
        return self.spec.needs_condition or self.looks

    @property
    def values(self) -> dict[str, Any]:
        """Every widget's value by name, of whatever node it is."""
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
    """A workflow in API format, how it stands on the page, in `columns` from top to bottom, and the files its nodes
    need, by node id. Those that are `raised` stand above their columns, one in each.
    """

    workflow: Workflow
    columns: Sequence[Sequence[str]]
    files: Mapping[str, Sequence[Mapping[str, str]]]
    raised: Sequence[str] = ()


class _Builder:
    """Nodes are numbered as they are added: stages as they run, then what names the model."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self.workflow: Workflow = {}
        self.files: dict[str, list[dict[str, str]]] = {}

    def add(self, kind: str, title: str, **inputs: Any) -> str:
        node_id = str(len(self.workflow) + 1)
        self.workflow[node_id] = {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
        return node_id

    def stage(self, suffix: str, title: str, **links: Any) -> str:
        """A node of the family, with the example's values in its widgets."""
        kind = self._example.spec.family + suffix
        declaration, values = DECLARATIONS[kind], self._example.values
        known = {declared.name for declared in declaration.inputs}
        inputs = {name: link for name, link in links.items() if name in known}
        for declared in declaration.inputs:
            # A size of 0 is the encoded picture's.
            is_own = declared.default == 0 and declared.name in ("height", "width", "num_frames")
            if declared.is_widget and declared.name in values and not is_own:
                inputs[declared.name] = values[declared.name]
        return self.add(kind, title, **inputs)

    def model(self) -> list[str]:
        """The loader and, one after the other, what adds the LoRAs."""
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
        """Of the stages' last node, or of the pipeline."""
        prefix = self._example.prefix or self._example.name
        if self._example.spec.is_image:
            return self.add("SaveImage", "Save Image", images=[source, output], filename_prefix=prefix)
        options = {"filename_prefix": prefix, "format": "auto", "codec": "auto"}
        return self.add("SaveVideo", "Save Video", video=[source, output], **options)


def stages(example: Example) -> Graph:
    """A node for every stage, and one that names the model for all of them."""
    build = _Builder(example)
    picture = [build.add("LoadImage", "Picture", image=EXAMPLE_IMAGE)] if example.has_picture else []
    # Where a picture is a reference, the prompt may be about it.
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
    """One node for all stages. It names its model itself, unless LoRAs are added to it."""
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
    """A picture that two stages look at is encoded above what the loader's links pass."""
    return [*picture, *image] if example.looks else []


def api(workflow: Workflow) -> Workflow:
    """What a person would write: without what is folded or at its default, and with `model_id` in one place."""
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
