"""The jobs of a batch: a workflow, and for each line of a file the inputs that it sets.

A job is known by what it holds: the workflow after setting, the content of pictures, of LoRAs and of models. So the
same job has the same name in every call, on every machine, and a changed prompt is another job.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..nodes import lora
from ..nodes.declare import Declaration, Folders, Node
from ..nodes.graphs.graph import PROGRAMLESS, Table, Workflow, expand, is_link, node_label
from ..nodes.headless.changes import set_input
from ..nodes.headless.core_nodes import find_image
from ..nodes.headless.runner import HEADLESS, execution_order
from ..nodes.headless.workflow import validate_workflow
from ..nodes.model import chosen_id
from ..tpu_runtime.pipeline import Progress, content, parse_json
from .messages import Mark, Request
from .queue import Group, Job

# Which weights a job runs, as far as widgets say it.
_OF_WEIGHTS = frozenset({"precision", "quality", "family", "strength", "expert"})
# What compiled programs do not depend on, beside numbers.
_CONTENT = frozenset({"prompt", "negative_prompt", "image", "filename_prefix"})
MOST_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job's workflow with its pictures by content; `files` says where these lie here."""

    workflow: Workflow
    files: Mapping[str, Path]
    marks: tuple[Mark, ...]

    @property
    def id(self) -> str:
        nodes = {name: [node["class_type"], node["inputs"]] for name, node in self.workflow.items()}
        marks = sorted((mark.kind, mark.name, mark.content) for mark in self.marks)
        text = json.dumps([nodes, marks], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


class JobTemplate:
    """What all jobs have in common: the workflow in API format, and where its files lie."""

    def __init__(self, workflow: Workflow, folders: Folders, progress: Progress, table: Table = HEADLESS) -> None:
        self.folders = folders
        self._workflow = workflow
        self._table = table
        self._checked: set[tuple[Any, ...]] = set()
        # Read once, however many jobs use them.
        self._mark = functools.cache(lambda kind, name: mark(kind, name, folders, progress))
        self._picture = functools.cache(lambda name: _picture(folders, name))
        if not validate_workflow(workflow, table):
            execution_order(expand(workflow, table), table)  # complains where nothing would come of it

    def job(self, line: int, text: str) -> Job:
        """The job of one line, checked; ValueError says what is wrong with it."""
        prepared = self.prepared(text)
        return Job(id=prepared.id, line=line, text=text, group=self._group(prepared))

    def request(self, job: Job, out: str, token: str) -> Request:
        """A job as its worker gets it, with its pictures; ValueError where these have changed since."""
        prepared = self.prepared(job.text)
        files = {name: path.read_bytes() for name, path in prepared.files.items()}
        for name, read in files.items():
            if not name.startswith(_digest(read)):
                raise ValueError(f"{prepared.files[name]} has changed since the batch began. Start the batch again.")
        return Request(
            job=job.id, line=job.line, workflow=prepared.workflow, folders=self.folders, files=files,
            marks=prepared.marks, out=out, token=token,
        )  # fmt: skip

    def prepared(self, text: str) -> Prepared:
        """A line's workflow, checked as `run_workflow` would; nothing that all lines share is checked twice."""
        workflow = {name: {**node, "inputs": dict(node["inputs"])} for name, node in self._workflow.items()}
        for target, value in _settings(text).items():
            set_input(workflow, target, value)
        if problems := validate_workflow(workflow, self._table):
            raise ValueError(" ".join(problems))
        files: dict[str, Path] = {}
        marks: dict[Mark, None] = {}
        for node_id, node in workflow.items():
            declaration, inputs = self._table[node["class_type"]], node["inputs"]
            for declared in declaration.inputs:
                if declared.is_widget and declared.name in inputs and not is_link(inputs[declared.name]):
                    inputs[declared.name] = declared.parse(inputs[declared.name])
            self._check(node_id, node, declaration)
            files |= self._take_pictures(declaration, inputs)
            marks |= dict.fromkeys(self._marks_of(declaration, inputs))
            node.pop("_meta", None)
        return Prepared(workflow=workflow, files=files, marks=tuple(marks))

    def _check(self, node_id: str, node: Mapping[str, Any], declaration: Declaration) -> None:
        """`Declaration.check`, which may read a checkpoint's headers: once for each choice of a model."""
        given = {name: value for name, value in node["inputs"].items() if not is_link(value)}
        if declaration.id == "TPULoadStage" and not Path(str(given.get("folder", ""))).is_absolute():
            raise ValueError(
                f"{node_label(node_id, node)}: in a batch folder must be a whole path, such as /data/stages."
            )
        linked = tuple(name for name in declaration.checked_links if name in node["inputs"] and name not in given)
        chosen = tuple(given.get(name) for name in (*declaration.checks, *declaration.checked_too))
        key = (declaration.id, linked, chosen)
        if key not in self._checked:
            declaration.check_constants(self.folders, given, set(node["inputs"]) - set(given))
            self._checked.add(key)

    def _take_pictures(self, declaration: Declaration, inputs: dict[str, Any]) -> dict[str, Path]:
        """Names pictures by what they hold, and says where they are."""
        found = {}
        for declared in declaration.inputs:
            given = inputs.get(declared.name)
            if declared.companion == "upload" and isinstance(given, str):
                name, path = self._picture(given)
                inputs[declared.name], found[name] = name, path
        return found

    def _marks_of(self, declaration: Declaration, inputs: Mapping[str, Any]) -> Iterator[Mark]:
        """What the files that a node names hold: a model's, unless a connected one takes its place, and a LoRA's."""
        for declared in declaration.inputs:
            given = inputs.get(declared.name, declared.default)
            if declared.name == "model_id" and "address" in inputs:
                yield Mark(kind="remote model", name=str(given), content="")  # known there alone
            elif declared.name == "model_id" and not is_link(given) and not is_link(inputs.get("model")):
                yield self._mark("model", chosen_id({"model_id": given, **inputs}))
            elif declared.files == "loras" and not is_link(given):
                yield self._mark("LoRA", str(given))
        if isinstance(declaration, Node) and declaration.fingerprint is not None and declaration.id != lora.LOADER.id:
            widgets = {i.name: inputs[i.name] for i in declaration.inputs if i.is_widget and i.name in inputs}
            state = repr(declaration.fingerprint(self.folders, **widgets))
            yield Mark(kind="files", name=json.dumps(widgets, sort_keys=True), content=state)

    def _group(self, prepared: Prepared) -> Group:
        """Which weights a job runs, and which programs, as far as widgets say it."""
        marks = sorted((mark.kind, mark.name) for mark in prepared.marks)
        model: list[Any] = [marks]
        size: list[Any] = []
        for name, node in sorted(prepared.workflow.items()):
            for key, value in sorted(node["inputs"].items()):
                if key not in _CONTENT and key not in PROGRAMLESS and not is_link(value):
                    part = model if key in _OF_WEIGHTS else size
                    part.append((name, key, value))
        return Group(_digest(repr(model).encode()), _digest(repr(size).encode()))


def mark(kind: str, name: str, folders: Folders, progress: Progress) -> Mark:
    """The mark of a model or a LoRA as this machine has it; ValueError where it has none."""
    if kind == "LoRA":
        found = content.of_file(lora.find(folders, lora_name=name))
    else:
        found = content.of_model(name, folders.models, progress)
    return Mark(kind=kind, name=name, content=found)


def _picture(folders: Folders, name: str) -> tuple[str, Path]:
    """A picture's name by what it holds, and where it is; ValueError where there is none."""
    path = find_image(folders, name)
    if not path.is_file():
        raise ValueError(f"There is no image {path}.")
    return f"{_digest(path.read_bytes())}{path.suffix}", path


def _settings(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise ValueError(f'it is a JSON {type(found).__name__}; it must be an object such as {{"2.seed": 7}}.')
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def read_jobs(recipe: JobTemplate, lines: Iterable[str], what: str) -> list[Job]:
    """The jobs of a file's lines, each once. ValueError lists what is wrong; nothing has run then."""
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
            if len(problems) == MOST_PROBLEMS:
                break
    if problems:
        raise ValueError("\n".join(problems))
    if not jobs:
        raise ValueError(f'{what} has no jobs; each line must be a JSON object such as {{"2.seed": 7}}.')
    return list(jobs.values())
