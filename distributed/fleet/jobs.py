"""The jobs of a batch: a workflow, and a file whose lines set some of its inputs.

A job's id is a digest of its content: the workflow with these inputs, and the content of images, LoRAs and models. So
the same job has the same id in every run and on every machine, and a changed prompt is another job.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...nodes import lora
from ...nodes.declare import Declaration, Folders, Node
from ...nodes.graphs.graph import WITHOUT_EFFECT_ON_PROGRAMS, GraphNode, Table, Workflow, expand, is_link, node_label
from ...nodes.headless.core_nodes import find_image
from ...nodes.headless.overrides import set_input
from ...nodes.headless.runner import HEADLESS_NODES, execution_order
from ...nodes.headless.workflow import validate_workflow
from ...nodes.model import join_model_id
from ...tpu_runtime.checkpoints import content_hash
from ...tpu_runtime.files import parse_json
from ...tpu_runtime.progress import Progress
from .messages import ContentHash, JobRequest
from .queue import Job, JobKey

# The widgets that determine a job's weights.
_OF_WEIGHTS = frozenset({"precision", "quality", "family", "strength", "expert"})
# The widgets that compiled programs do not depend on, in addition to `WITHOUT_EFFECT_ON_PROGRAMS`.
_CONTENT = frozenset({"prompt", "negative_prompt", "image", "filename_prefix"})
MAX_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True)
class StagedJob:
    """A job's workflow, with its images named by content."""

    workflow: Workflow
    files: Mapping[str, Path]  # images on this machine, by name
    marks: tuple[ContentHash, ...]  # of its models and LoRAs

    @property
    def id(self) -> str:
        nodes = {name: [node["class_type"], node["inputs"]] for name, node in self.workflow.items()}
        marks = sorted((mark.kind, mark.name, mark.content) for mark in self.marks)
        text = json.dumps([nodes, marks], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


class JobTemplate:
    """The common part of all jobs: the workflow in API format, and the folders of its files."""

    def __init__(self, workflow: Workflow, folders: Folders, progress: Progress, table: Table = HEADLESS_NODES) -> None:
        self.folders = folders
        self._workflow = workflow
        self._table = table
        self._checked: set[tuple[Any, ...]] = set()
        # Files are read once, however many jobs use them.
        self._hash = functools.cache(lambda kind, name: hash_content(kind, name, folders, progress))
        self._picture = functools.cache(lambda name: _picture(folders, name))
        if not validate_workflow(workflow, table):
            execution_order(expand(workflow, table), table)  # raises if the workflow has no output

    def job(self, line: int, text: str) -> Job:
        """Return the job of a line, checked. Raises ValueError with its problems.

        line: its number. text: its JSON.
        """
        prepared = self.prepare(text)
        return Job(id=prepared.id, line=line, text=text, group=self._group(prepared))

    def request(self, job: Job, out: str, token: str) -> JobRequest:
        """Return a job as it is sent to a worker, with its images. Raises ValueError if these have changed since.

        out, token: location and token of the batch.
        """
        prepared = self.prepare(job.text)
        files = {name: path.read_bytes() for name, path in prepared.files.items()}
        for name, image in files.items():
            if not name.startswith(_digest(image)):
                raise ValueError(f"{prepared.files[name]} has changed since the batch began. Start the batch again.")
        return JobRequest(
            job=job.id, line=job.line, workflow=prepared.workflow, folders=self.folders, files=files,
            marks=prepared.marks, out=out, token=token,
        )  # fmt: skip

    def prepare(self, text: str) -> StagedJob:
        """Return a line's workflow, checked as `run_workflow` would; checks that lines share run once."""
        workflow = {name: {**node, "inputs": dict(node["inputs"])} for name, node in self._workflow.items()}
        for target, value in _settings(text).items():
            set_input(workflow, target, value)
        if problems := validate_workflow(workflow, self._table):
            raise ValueError(" ".join(problems))
        files: dict[str, Path] = {}
        marks: dict[ContentHash, None] = {}
        for node_id, node in workflow.items():
            declaration, inputs = self._table[node["class_type"]], node["inputs"]
            for declared in declaration.inputs:
                if declared.is_widget and declared.name in inputs and not is_link(inputs[declared.name]):
                    inputs[declared.name] = declared.parse(inputs[declared.name])
            self._check(node_id, node, declaration)
            files |= self._take_pictures(declaration, inputs)
            marks |= dict.fromkeys(self._iterate_hashes(declaration, inputs))
            node.pop("_meta", None)
        return StagedJob(workflow=workflow, files=files, marks=tuple(marks))

    def _check(self, node_id: str, node: GraphNode, declaration: Declaration) -> None:
        """Run `Declaration.check`, which may read a checkpoint's headers, once per choice of a model."""
        widgets = {name: value for name, value in node["inputs"].items() if not is_link(value)}
        if declaration.id == "TPULoadStage" and not Path(str(widgets.get("folder", ""))).is_absolute():
            raise ValueError(
                f"{node_label(node_id, node)}: in a batch, folder must be an absolute path, such as /data/stages."
            )
        linked = tuple(name for name in declaration.validated_links if name in node["inputs"] and name not in widgets)
        chosen = tuple(widgets.get(name) for name in (*declaration.checks, *declaration.also_validated_inputs))
        key = (declaration.id, linked, chosen)
        if key not in self._checked:
            declaration.validate_constants(self.folders, widgets, set(node["inputs"]) - set(widgets))
            self._checked.add(key)

    def _take_pictures(self, declaration: Declaration, inputs: dict[str, Any]) -> dict[str, Path]:
        """Rename images in `inputs` by content, and return their paths."""
        files = {}
        for declared in declaration.inputs:
            value = inputs.get(declared.name)
            if declared.companion == "upload" and isinstance(value, str):
                name, path = self._picture(value)
                inputs[declared.name], files[name] = name, path
        return files

    def _iterate_hashes(self, declaration: Declaration, inputs: Mapping[str, Any]) -> Iterator[ContentHash]:
        """Yield the content of a node's files: its model, unless one is connected, and its LoRA."""
        for declared in declaration.inputs:
            value = inputs.get(declared.name, declared.default)
            if declared.name == "model_id" and "address" in inputs:
                yield ContentHash(kind="remote model", name=str(value), content="")  # known only on the other machine
            elif declared.name == "model_id" and not is_link(value) and not is_link(inputs.get("model")):
                yield self._hash("model", join_model_id({"model_id": value, **inputs}))
            elif declared.files == "loras" and not is_link(value):
                yield self._hash("LoRA", str(value))
        if isinstance(declaration, Node) and declaration.fingerprint is not None and declaration.id != lora.LOADER.id:
            widgets = {i.name: inputs[i.name] for i in declaration.inputs if i.is_widget and i.name in inputs}
            state = repr(declaration.fingerprint(self.folders, **widgets))
            yield ContentHash(kind="files", name=json.dumps(widgets, sort_keys=True), content=state)

    def _group(self, prepared: StagedJob) -> JobKey:
        """Return the group of a job: its weights and programs, as far as widgets determine them."""
        marks = sorted((mark.kind, mark.name) for mark in prepared.marks)
        model: list[Any] = [marks]
        size: list[Any] = []
        for name, node in sorted(prepared.workflow.items()):
            for key, value in sorted(node["inputs"].items()):
                if key not in _CONTENT and key not in WITHOUT_EFFECT_ON_PROGRAMS and not is_link(value):
                    (model if key in _OF_WEIGHTS else size).append((name, key, value))
        return JobKey(_digest(repr(model).encode()), _digest(repr(size).encode()))


def hash_content(kind: str, name: str, folders: Folders, progress: Progress) -> ContentHash:
    """Return the mark of a model or LoRA on this machine. Raises ValueError if it does not exist.

    kind: "model" or "LoRA". name: as in the workflow. folders: of this machine. progress: of reading its files.
    """
    if kind == "LoRA":
        digest = content_hash.hash_file(lora.find_lora(folders, lora_name=name))
    else:
        digest = content_hash.hash_model(name, folders.models, progress)
    return ContentHash(kind=kind, name=name, content=digest)


def _picture(folders: Folders, name: str) -> tuple[str, Path]:
    """Return an image's name by content, and its path. Raises ValueError if it does not exist."""
    path = find_image(folders, name)
    if not path.is_file():
        raise ValueError(f"There is no image {path}.")
    return f"{_digest(path.read_bytes())}{path.suffix}", path


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = parse_json(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error}).") from None
    if not isinstance(settings, dict):
        raise ValueError(f'it is a JSON {type(settings).__name__}; it must be an object such as {{"2.seed": 7}}.')
    return settings


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def read_jobs(recipe: JobTemplate, lines: Iterable[str], what: str) -> list[Job]:
    """Return the jobs of a file's `lines`, without duplicates. Raises ValueError with a list of problems.

    recipe: of all jobs. what: the file's name.
    """
    jobs: dict[str, Job] = {}
    problems = []
    for number, text in enumerate(lines, start=1):
        if not (text := text.strip()):
            continue
        try:
            job = recipe.job(number, text)
            jobs.setdefault(job.id, job)
        except ValueError as error:
            problems.append(f"{what}, line {number}: {error}")
            if len(problems) == MAX_PROBLEMS:
                break
    if problems:
        raise ValueError("\n".join(problems))
    if not jobs:
        raise ValueError(f'{what} has no jobs; each line must be a JSON object such as {{"2.seed": 7}}.')
    return list(jobs.values())
