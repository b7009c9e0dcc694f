"""What hosts compare before they start: every source file that a program may come from, by name and content."""

from pathlib import Path

import pytest
from comfyui_tpu.tpu_runtime.hosts import terms

SOURCE = "the pack's source"
FILES = ("attention/a.py", "sharding/b.py", "tpu_runtime/c.py", "tpu_runtime/deep/deeper/d.py")


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack whose files hold their names."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(terms, "_ROOT", tmp_path)
    return tmp_path


def source() -> str:
    return terms.terms()[SOURCE]


@pytest.mark.parametrize("name", FILES)
def test_hosts_whose_source_differs_in_one_file_refuse_each_other(pack: Path, name: str):
    mine = terms.terms()
    (pack / name).write_text("another")
    assert (theirs := terms.terms())[SOURCE] != mine[SOURCE]
    assert terms.difference(mine, theirs) == f"{SOURCE}: {theirs[SOURCE]} there, {mine[SOURCE]} here"
    (pack / name).write_text(name)
    assert terms.terms() == mine


@pytest.mark.parametrize("name", FILES)
def test_a_file_more_less_or_of_another_name_is_another_source(pack: Path, name: str):
    found = [source()]
    (pack / name).rename((pack / name).with_name("z.py"))
    found.append(source())
    (pack / name).with_name("z.py").unlink()
    found.append(source())
    (pack / name).write_text(name)
    (pack / name).with_name("z.py").touch()
    found.append(source())
    assert len(set(found)) == 4


def test_where_the_pack_lies_and_what_is_no_source_make_no_difference(pack: Path, tmp_path_factory, monkeypatch):
    mine = source()
    for name in ("nodes/n.py", "tests/t.py", "tpu_runtime/notes.md", "tpu_runtime/__pycache__/c.cpython-311.pyc"):
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        (pack / name).write_text("other")
    assert source() == mine
    elsewhere = pack.rename(tmp_path_factory.mktemp("elsewhere") / "pack")
    monkeypatch.setattr(terms, "_ROOT", elsewhere)
    assert source() == mine


def test_the_sources_are_this_packs():
    """Folders that are not there would be the same on all hosts."""
    for folder in terms._SOURCES:
        assert list((terms._ROOT / folder).glob("*.py")), folder
