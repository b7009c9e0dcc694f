"""Run ComfyUI's official templates of the supported families in a ComfyUI, and compare each with ComfyUI's torch.

Each template is opened with ComfyUI's own loaders, and with this pack's as the page's command swaps them. Tiny files of
the right family are under the names that it loads; its sizes, frames and steps are made small in both. All latents and
images are compared. Prints a row for each template: its uses in the index, the verdict, and the largest relative L2
error. A template in the table is not run again. Needs a real ComfyUI (COMFYUI_PATH, else ~/ComfyUI) and the package
comfyui-workflow-templates; nodes of ComfyUI that need kornia or spandrel find them in --site.

    python benchmarks/comfyui/templates.py --table table.md [--templates FOLDER] [--only NAME ...] [--site FOLDER]
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch  # noqa: E402
from brought.bench import BOUND, ORACLE  # noqa: E402
from comfyui_tpu.nodes.graphs.graph import Workflow  # noqa: E402
from comfyui_tpu.tests.files import single_files  # noqa: E402
from comfyui_tpu.tests.support import comfyui_server  # noqa: E402
from comfyui_tpu.tools import official_templates  # noqa: E402
from comfyui_tpu.tools.official_templates import Template, list_denoisers  # noqa: E402
from official import prompts, small_core_source  # noqa: E402
from official.tiny_files import TinyFiles, describe_sizes, list_files  # noqa: E402
from template_pages import read_prompt  # noqa: E402

LONG = 60  # nodes of a prompt
FLOAT32 = ("--fp32-unet", "--fp32-vae", "--fp32-text-enc")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one template gave."""

    template: str
    uses: int
    verdict: str  # "equal", "differs", "refused", "newer node", "not run" or "failed"
    reason: str = ""
    error: float | None = None

    def line(self) -> str:
        error = "" if self.error is None else f"{self.error:.1e}"
        verdict = f"{self.verdict}: {self.reason}" if self.reason else self.verdict
        return f"| {self.template} | {self.uses} | {verdict.replace('|', '/')} | {error} |"


HEAD = "| template | uses | verdict | largest relative difference |\n|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, default=None, help="folder of index.json; default: of the package")
    parser.add_argument("--table", type=Path, required=True, help="JSON of the results; its templates are not run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these in this order, also again")
    parser.add_argument("--cache", type=Path, help="the pack's cache, kept for the next run; otherwise a new one")
    parser.add_argument("--site", type=Path, default=None, help="folder with packages that ComfyUI needs")
    options = parser.parse_args()
    folder = options.templates or official_templates.find_folder()
    rows = read_table(options.table)
    found = {template.name: template for template in official_templates.list_templates(folder)}
    chosen = [found[name] for name in options.only or found.keys() - rows.keys()]
    with tempfile.TemporaryDirectory() as made, started(Path(made), chosen, options) as bench:
        for row in bench.rows(chosen, keeps_order=bool(options.only)):
            rows[row.template] = row
            print(row.line(), flush=True)
            ordered = sorted(rows.values(), key=lambda row: (-row.uses, row.template))
            said = [{name: value for name, value in vars(row).items() if value not in ("", None)} for row in ordered]
            table = {"package": official_templates.find_version(folder), "templates": said}
            options.table.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    print("\n".join([HEAD, *(row.line() for row in sorted(rows.values(), key=lambda row: (-row.uses, row.template)))]))


def read_table(path: Path) -> dict[str, Row]:
    """Return the rows of a table by template."""
    rows = json.loads(path.read_text("utf-8"))["templates"] if path.is_file() else []
    return {row["template"]: Row(**row) for row in rows}


@contextmanager
def started(folder: Path, chosen: Sequence[Template], options: argparse.Namespace) -> "Iterator[Bench]":
    """Start a server with the packs that make ComfyUI small, which runs until the end."""
    base, made = folder / "comfyui", folder / "made"
    made.mkdir(parents=True)
    (base / "output").mkdir(parents=True)
    files = {file for template in chosen for file in list_files(template.document)}
    (base / "sizes.json").write_text(describe_sizes(files), "utf-8")
    narrow = Path(single_files.__file__).with_name("narrow.py").read_text()
    path = os.pathsep.join(map(str, [base / "stubs", *([options.site] if options.site else [])]))
    server = comfyui_server.prepare(
        base, cache=options.cache, packs={"oracle": ORACLE, "narrow": narrow, "small": small_core_source()},
        environment={**comfyui_server.TWO_CHIPS, "PYTHONPATH": path}, arguments=FLOAT32,
    )  # fmt: skip
    tiny_files = TinyFiles(base, made)
    server.start()
    try:
        yield Bench(server, tiny_files)
    finally:
        server.stop()


class Bench:
    """A server and the tiny files in its folders."""

    def __init__(self, server: comfyui_server.Server, files: TinyFiles) -> None:
        self.server, self.files = server, files
        self.classes = prompts.class_table(server.get("/object_info"))
        self.version = server.get("/system_stats")["system"]["comfyui_version"]

    def rows(self, chosen: Sequence[Template], *, keeps_order: bool) -> Iterator[Row]:
        """Yield a row for each template: in this order, or one denoiser after the other and the longest last."""
        made = [(template, read_prompt(template.document, self.classes)) for template in chosen]
        if not keeps_order:
            made.sort(key=lambda pair: (len(pair[1]) > LONG, prompts.family_of(pair[1])))
        for template, theirs in made:
            began = time.monotonic()
            try:
                found = self._run(template, theirs)
            except Exception as error:
                found = dict[str, Any](verdict="failed", reason=f"{type(error).__name__}: {str(error)[:600]}")
            yield Row(template=template.name, uses=template.uses, **found)
            print(f"{template.name}: {time.monotonic() - began:.0f} s", flush=True)

    def _run(self, template: Template, theirs: Workflow) -> dict[str, Any]:
        """Return verdict, reason and error of a template, of which `theirs` is the prompt."""
        theirs, texts = prompts.replace_texts(theirs, self.classes)
        if missing := prompts.missing_nodes(theirs, self.classes):
            return {"verdict": "newer node", "reason": f"not in ComfyUI {self.version}: {', '.join(missing)}"}
        without = {file.name for file in list_files(template.document) if not self.files.write(file)}
        converted = self.server.post("/tpu/convert", {"workflow": template.document})
        ours, _ = prompts.replace_texts(read_prompt(converted["workflow"], self.classes), self.classes)
        results = []
        for kind, prompt in {"theirs": theirs, "ours": ours}.items():
            small, names = prompts.keep_results(prompts.make_small(prompt), f"{template.name}_{kind}")
            if said := self._said(small):
                if without and kind == "theirs":
                    return {"verdict": "not run", "reason": f"no tiny file stands for {', '.join(sorted(without))}"}
                return {"verdict": "refused" if kind == "ours" else "failed", "reason": said}
            results.append({node_id: self._read(name) for node_id, name in names.items()})
        assert results[0] and results[0].keys() == results[1].keys(), results[0].keys() ^ results[1].keys()
        reasons = [f"with a text in place of {', '.join(texts)}"] if texts else []
        errors = {node_id: compare(results[1][node_id], wanted) for node_id, wanted in results[0].items()}
        decoded = [node_id for node_id in errors if theirs[node_id]["class_type"] in prompts.DECODERS]
        if list_denoisers(template.document)[0].startswith("hunyuan"):
            images = max(errors.pop(node_id) for node_id in decoded)
            reasons.append(f"latents; the images differ by {images:.1e}, cause not known")
        error = max(errors.values())
        return {"verdict": "equal" if error < BOUND else "differs", "reason": " ".join(reasons), "error": error}

    def _said(self, prompt: Mapping[str, Any]) -> str:
        """Run a prompt; return why the server does not run it, or ""."""
        answer = self.server.queue(dict(prompt))
        if answer.get("node_errors") or "prompt_id" not in answer:
            errors = [error for one in answer.get("node_errors", {}).values() for error in one["errors"]]
            return "; ".join(f"{error['message']}: {error['details']}" for error in errors) or str(answer)
        entry = self.server.finish(answer["prompt_id"])
        messages = entry["status"]["messages"]
        return " ".join(said["exception_message"].strip() for kind, said in messages if kind == "execution_error")

    def _read(self, name: str) -> torch.Tensor:
        (path,) = (self.server.base / "output").glob(f"{name}.*.pt")
        found = torch.load(path)
        path.unlink()
        return found


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative L2 error."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert ours.isfinite().all() and theirs.std() > 1e-3
    return ((ours - theirs).norm() / theirs.norm()).item()


if __name__ == "__main__":
    main()
