"""Writes `locales/`, from which ComfyUI's page takes words in the user's language: for each sentence of the nodes'
declarations, which are the English, what `tools/translations/` has for it, and its own entries for what is declared in
JavaScript or from ComfyUI's own loaders.

    python tools/locales.py
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
# Stands for what is not translated, such as the list of miniatures.
HOLE = "{}"
LIST = "; "


class Table:
    """Translations by English sentence.

    One with holes is for every sentence that differs in these alone. What a list there has may have its own.
    """

    def __init__(self, sentences: Mapping[str, str]) -> None:
        self._sentences = sentences
        self._patterns = {
            re.compile("(.+?)".join(map(re.escape, sentence.split(HOLE)))): translated
            for sentence, translated in sentences.items()
            if HOLE in sentence
        }

    def __call__(self, sentence: str) -> str:
        """Raises KeyError for what has no translation."""
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
    """What each file below `locales/` holds, as ComfyUI reads it. KeyError names a sentence without translation."""
    # In English too: the page has the words for sockets from here alone.
    found = {FOLDER / "en" / "nodeDefs.json": _text(nodes(str))}
    for source in sorted(TRANSLATIONS.glob("*.json")):
        own = json.loads(source.read_text())
        documents = {"nodeDefs.json": nodes(Table(own["sentences"])) | own["nodes"], **own["files"]}
        for name, document in documents.items():
            found[FOLDER / source.stem / name] = _text(document)
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
