"""Write `locales/`, the texts of nodes, settings and commands in the languages of ComfyUI's page.

    python tools/locales.py

The English texts are those of the nodes' declarations, which the page has from ComfyUI; `locales/en` only has the names
that it shows instead of an input's own. `tools/translations/` has the translation of each sentence, and further entries
for texts that JavaScript or ComfyUI's own loaders declare.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Declaration, Input, Output, with_display_names

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "locales"
TRANSLATIONS = ROOT / "tools" / "translations"
Translate = Callable[[str], str]
# A part of a sentence that is not translated, such as the list of tiny models.
HOLE = "{}"
LIST = "; "


class Table:
    """Translations by English sentence.

    A sentence with holes matches all sentences that differ only there. Items of a list in a hole are looked up too.
    """

    def __init__(self, sentences: Mapping[str, str]) -> None:
        self._sentences = sentences
        self._patterns = {
            re.compile("(.+?)".join(map(re.escape, sentence.split(HOLE)))): translated
            for sentence, translated in sentences.items()
            if HOLE in sentence
        }

    def __call__(self, sentence: str) -> str:
        """Return the translation of `sentence`. Raises KeyError without one."""
        if sentence in self._sentences:
            return self._sentences[sentence]
        for pattern, translated in self._patterns.items():
            if found := pattern.fullmatch(sentence):
                return translated.format(*map(self._list, found.groups()))
        raise KeyError(sentence)

    def _list(self, given: str) -> str:
        try:
            return LIST.join(map(self, given.split(LIST))) if "(" in given else given
        except KeyError:
            return given


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files() -> dict[Path, str]:
    """Return the content of each file below `locales/`. Raises KeyError with a sentence that has no translation."""
    found = {FOLDER / "en" / "nodeDefs.json": _text(display_names())}
    for source in sorted(TRANSLATIONS.glob("*.json")):
        own = json.loads(source.read_text())
        documents = {"nodeDefs.json": nodes(Table(own["sentences"])) | own["nodes"], **own["files"]}
        for name, document in documents.items():
            found[FOLDER / source.stem / name] = _text(document)
    return found


def display_names() -> dict[str, Any]:
    """Return the names of inputs and outputs that differ from the declared ones: the page has no other source."""
    found: dict[str, Any] = {}
    for declaration in DECLARATIONS.values():
        slots = {"inputs": {i.name: i for i in declaration.inputs}, "outputs": dict(enumerate(declaration.outputs))}
        for kind, declared in slots.items():
            if names := {str(key): {"name": one.label} for key, one in declared.items() if one.label != one.name}:
                found.setdefault(declaration.id, {})[kind] = names
    return found


def _text(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def nodes(translate: Translate) -> dict[str, Any]:
    return {declaration.id: _node(declaration, translate) for declaration in DECLARATIONS.values()}


def _node(declaration: Declaration, translate: Translate) -> dict[str, Any]:
    return {
        "display_name": translate(declaration.title),
        "description": translate(declaration.description),
        "inputs": {declared.name: _shown(declared, translate) for declared in declaration.inputs},
        "outputs": {str(index): _shown(output, translate) for index, output in enumerate(declaration.outputs)},
    }


def _shown(declared: Input | Output, translate: Translate) -> dict[str, str]:
    return {"name": translate(declared.label), "tooltip": translate(with_display_names(declared.tooltip))}


if __name__ == "__main__":
    main()
