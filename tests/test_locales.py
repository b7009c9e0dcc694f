"""The page's words in other languages: complete, up to date, and with nothing in them that the page would take for
its own syntax.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.model import CLIP_TYPES
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tools import core_examples, locales

WEB = locales.ROOT / "web"
TRANSLATIONS = sorted(locales.TRANSLATIONS.glob("*.json"))
NOTES = sorted((WEB / "notes").glob("*.json"))
# What stays as it is: names of files, options, commands and models.
NOT_A_WORD = re.compile(r"[a-z_.]*/[\w./-]+|`[^`]+`|\bHOST:PORT\b")


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [found for each in value.values() for found in strings(each)]
    return [value]


def test_locale_files_equal_output_of_tool():
    """`python tools/locales.py` after a change of words; it names a sentence that has no translation yet."""
    wanted = locales.files()
    assert wanted == {path: path.read_text() for path in locales.FOLDER.rglob("*.json")}
    chinese = json.loads(wanted[locales.FOLDER / "zh" / "nodeDefs.json"])
    assert set(chinese) > set(DECLARATIONS)


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.stem)
def test_clip_loader_tooltip_lists_supported_types(path: Path):
    nodes = json.loads((locales.FOLDER / path.stem / "nodeDefs.json").read_text())
    for name in ("TPUCLIPLoader", "TPUDualCLIPLoader"):
        words = re.findall(r"\b[a-z0-9_]+\b", nodes[name]["inputs"]["type"]["tooltip"])
        assert words == list(CLIP_TYPES), name


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.stem)
def test_translation_sentences_exist_in_nodes(path: Path):
    said = {text for text in strings(locales.nodes(str))}
    said |= {part for text in said for part in text.rpartition(": ")[2].removesuffix(".").split(locales.LIST)}
    for sentence in json.loads(path.read_text())["sentences"]:
        pattern = "(.+?)".join(map(re.escape, sentence.split(locales.HOLE)))
        assert any(re.fullmatch(pattern, text) for text in said), sentence


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.stem)
def test_translations_keep_placeholders_and_code(path: Path):
    for sentence, translated in json.loads(path.read_text())["sentences"].items():
        assert sentence.count(locales.HOLE) == translated.count(locales.HOLE), sentence
        assert sorted(NOT_A_WORD.findall(sentence)) == sorted(NOT_A_WORD.findall(translated)), sentence


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_template_notes_are_translated_and_keep_code(path: Path):
    """`python tools/workflows.py` after a change; it leaves a line as it is that has no translation yet."""
    lines, known = note_lines(), json.loads(path.read_text())
    assert set(known) <= lines
    # Left as they are: the title of a template, a row of numbers.
    english = {line for line in lines - set(known) if re.search(r"[a-z] [a-z]", line)}
    assert english <= {f"**{page.stem}**" for page in examples.PAGES} | {note[0] for note in core_notes()}
    labels = json.loads((locales.TRANSLATIONS / path.name).read_text())["sentences"]
    for line, translated in known.items():
        for typed in re.findall(r'"[^"]+"|`[^`]+`', line):
            label = labels.get(typed.strip("`"))
            assert typed in translated or (label and f"“{label}”" in translated), (line, typed)


def core_notes() -> list[list[str]]:
    """The lines of this pack's notes in ComfyUI's templates, which start with the title."""
    paths = list(core_examples.FOLDER.glob("*.json"))
    notes = (json.loads(path.read_text("utf-8"))["nodes"][0] for path in paths)
    return [note["widgets_values"][0].split("\n") for note in notes if note["title"] == core_examples.NOTE["title"]]


def note_lines() -> set[str]:
    """And the notes' titles."""
    nodes = (node for path in examples.PAGES + examples.PIPELINES for node in json.loads(path.read_text())["nodes"])
    notes = [node for node in nodes if node["type"] == "MarkdownNote"]
    found = {line for note in notes for line in note["widgets_values"][0].split("\n")}
    return found | {note["title"] for note in notes} | {line for note in core_notes() for line in note}


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.stem)
def test_note_translations_exist_in_templates(path: Path):
    shown = (re.findall(r"\(([^)]*)\)", line) for line in note_lines())
    said = note_lines() | {part for brackets in shown for inside in brackets for part in inside.split(", ")}
    for sentence in json.loads(path.read_text())["notes"]:
        pattern = "(.+?)".join(map(re.escape, sentence.split(locales.HOLE)))
        assert any(re.fullmatch(pattern, text) for text in said), sentence


@pytest.mark.parametrize("path", sorted(locales.files()), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_locale_files_contain_no_vue_i18n_syntax(path: Path):
    """vue-i18n reads `{name}`, `@:key` and `one | many` in a message."""
    for text in strings(json.loads(locales.files()[path])):
        assert text.strip() and not re.search(r"[{}@|]", text), text


def said_in(source: str) -> list[str]:
    """The English of every say`...` in a JavaScript file, with {} for what is filled in."""
    found = []
    for match in re.finditer(r"\bsay`", source):
        at, text = match.end(), ""
        while source[at] != "`":
            if source.startswith("${", at):
                at, depth, text = at + 2, 1, text + locales.HOLE
                while depth:
                    depth += {"{": 1, "}": -1}.get(source[at], 0)
                    at += 1
            else:
                at, text = at + 1, text + source[at]
        found.append(text)
    return found


@pytest.mark.parametrize("path", sorted(WEB.glob("monitor/*.json")), ids=lambda path: path.stem)
def test_monitor_translations_match_texts_of_scripts(path: Path):
    words = json.loads(path.read_text())
    scripts = [*WEB.glob("*.js"), *WEB.glob("monitor/*.mjs")]
    said = {text for script in scripts if script.stem != "words" for text in said_in(script.read_text())}
    assert said == set(words)
    assert all(text.count(locales.HOLE) == words[text].count(locales.HOLE) for text in words)
    assert f'new Set(["{path.stem}"])' in (WEB / "monitor" / "i18n.mjs").read_text()


def test_command_and_setting_translations_match_scripts():
    """The English stands in the code; all that `locales/` has of each language is of what there is."""
    commands, settings, options = set(), set(), set()
    for source in (path.read_text() for path in WEB.glob("*.js")):
        for name, value in re.findall(r'^const (\w+) = "([^"]+)";$', source, re.MULTILINE):
            source = source.replace(f"${{{name}}}", value).replace(f"id: {name},", f'id: "{value}",')
            options |= {value} if name.startswith(("BADGE_", "OFFER_")) and "CLASS" not in name else set()
        commands |= set(re.findall(r'(?:id: |\[)["`](comfyui-tpu[\w.-]+)["`], (?:label: )?"', source))
        settings |= set(re.findall(r'id: "(TPU\.[\w.]+)"', source))
    assert len(commands) > 7 and len(settings) == 3 and len(options) == 6
    for folder in (locales.FOLDER / path.stem for path in TRANSLATIONS):
        said = json.loads((folder / "commands.json").read_text())
        assert {name: list(words) for name, words in said.items()} == {
            name.replace(".", "_"): ["label"] for name in commands
        }
        said = json.loads((folder / "settings.json").read_text())
        assert set(said) == {name.replace(".", "_") for name in settings}
        assert {option for words in said.values() for option in words.get("options", {})} == options


CHINESE_HELP = sorted(WEB.glob("docs/*/*.md"))


def test_help_pages_exist_for_every_node_and_language():
    """The page asks for `docs/NODE/LANGUAGE.md`, and then for `docs/NODE.md`."""
    nodes = {path.stem for path in WEB.glob("docs/*.md")}
    # Also the loaders of ComfyUI's files, which are declared with ComfyUI alone. `TPUCollect` is in no menu.
    for path in TRANSLATIONS:
        translated = json.loads((locales.FOLDER / path.stem / "nodeDefs.json").read_text("utf-8"))
        assert nodes == {*DECLARATIONS, *translated} - {"TPUCollect"}
    assert set(CHINESE_HELP) == {
        WEB / "docs" / node / path.name.replace("json", "md") for node in nodes for path in TRANSLATIONS
    }


@pytest.mark.parametrize("path", CHINESE_HELP, ids=lambda path: path.parent.name)
def test_chinese_help_page_matches_english_page(path: Path):
    """The same names in code and the same numbers, as far as can be compared, and the page's own words for the node."""
    node, said = path.parent.name, path.read_text()
    english = (WEB / "docs" / f"{node}.md").read_text()
    assert set(re.findall("`[^`]+`", said)) == set(re.findall("`[^`]+`", english))
    numbers = [sorted(set(re.findall(r"\d+(?:\.\d+)?", text))) for text in (said, english)]
    assert numbers[0] == numbers[1]
    marks = [re.findall(r"^(?:#|- )|\n\n", re.sub(r"\n+(?=- )", "\n", text), re.MULTILINE) for text in (said, english)]
    assert marks[0] == marks[1]
    words = json.loads((locales.FOLDER / path.stem / "nodeDefs.json").read_text())
    assert said.startswith(f"# {words[node]['display_name']}\n")
    labels = {name: each["name"] for one in words.values() for name, each in one.get("inputs", {}).items()}
    for label, name in re.findall(r"“([^”]+)”（`(\w+)`", said):
        assert labels[name] == label


def test_locale_table_missing_translation_raises_key_error():
    with pytest.raises(KeyError, match="What is new"):
        locales.Table({"What is old.": "旧的。"})("What is new.")
    assert locales.Table({"of {} and {}": "{} 与 {}"})("of a and b") == "a 与 b"
