"""The project is written in the field's language: a short list of phrases that a reader would have to translate."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "attention",
    "cli",
    "diagnostics",
    "distributed",
    "installer",
    "kernels",
    "nodes",
    "sharding",
    "tpu_runtime",
)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for folder in ("docs", "web/docs") for path in ROOT.glob(f"{folder}/*.md")),
)
LOG = "docs/LOG.md"  # a record of experiments, written once

# A phrase, and what to write instead. A line that must contain one is in ALLOWED.
PHRASES = {
    # Clauses without a noun: "the program that runs", "the tensors of the file".
    r"\b(what|who|whatever|whoever) (is|are|was|were|has|have|does|do|comes?|came|gives?|gave|takes?|took|runs?|ran) "
    r"|\b(what|who|whatever|whoever) (fits?|holds?|held|belongs?|follows?|others?) ": "name the thing",
    r"\b(is|are|was|were) none\b": "there is no ..., it has no ...",
    r", for (it|they|he|she) ": "because",
    r"(?:^|[.:;] )(Of|From|Behind|Beside|Under) (the|a|an|each|all) \w+ (the|a|an|is|are|was|only|no|it|they) ": (
        "subject first"
    ),
    # Machines have no will: a chip does not support, a program needs, a page shows.
    r"\b(machine|kernel|program|chip|model|node|host|process|layer|tensor|file|page|tab)s? "
    r"(does not take|do not take|takes no|speaks?|tells?|knows?|knew|wants?|learns?) ": "say what it does",
    r"\b(stands?|stood) (beside|behind|there|for itself)\b": "is next to, follows, is",
    r"\b(is|are) worth\b": "scale, factor, number",
    r"\b(is|are|was|were) gone\b": "is missing, was deleted, ended",
    r"\bin (the )?place of\b": "instead of",
    r"\b(lest|thereby|hitherto|by and by|as well as may be)\b": "plain words",
    r"\b(the house|the door|doors)\b": "the project, the API",
    r"\bmakers?'?\b": "upstream, authors",
}
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in PHRASES))
# (file, words of the line) -> why it stays.
ALLOWED: dict[tuple[str, str], str] = {}


def offences(name: str) -> list[str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [
        f"{name}:{number}: {match[0].strip()!r} in: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if (match := PATTERN.search(line)) and not any(file == name and words in line for file, words in ALLOWED)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_code_contains_no_listed_phrase(package: str):
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))
    assert files and not [line for name in files for line in offences(name)]


@pytest.mark.parametrize("page", [page for page in PAGES if page != LOG])
def test_docs_page_contains_no_listed_phrase(page: str):
    assert not offences(page)


def test_phrase_patterns_match_each_phrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    text = [
        "what runs there", "there are none", "it waits, for it is busy", "Of the weights only some", "a chip knows it",
        "it stands beside it", "it is worth 2", "the file is gone", "in place of it", "lest it fails", "the doors",
        "its makers",
    ]  # fmt: skip
    (tmp_path / "page.md").write_text("\n".join(text), "utf-8")
    assert len(offences("page.md")) == len(text) == len(PHRASES)


def test_allowed_phrases_occur_in_files():
    assert not [entry for entry in ALLOWED if entry[1] not in (ROOT / entry[0]).read_text("utf-8")]
