"""What the server tells the page beside its numbers: what ran for a result, and what an update brings."""

from pathlib import Path
from typing import Any

from comfyui_tpu.nodes.comfyui import about
from comfyui_tpu.nodes.graphs.provenance import KEY, ProvenanceLog

STAGES = ["encode", "denoise", "decode"]


def note(stage: str, seconds: float = 1.0) -> dict[str, Any]:
    return {"stage": stage, "seconds": seconds}


def test_provenance_log_stores_notes_by_node_inputs():
    """Of a pipeline's stages each is noted under the node; another seed is another result, 5.0 is the page's 5."""
    records = ProvenanceLog(frozenset({"Wan21TPUPipeline"}))

    def prompt(seed: int, shift: float) -> dict[str, Any]:
        inputs = {"seed": seed, "flow_shift": shift, "model": ["2", 0]}
        return {"1": {"class_type": "Wan21TPUPipeline", "inputs": inputs}, "2": {"class_type": "X", "inputs": {}}}

    workflow: dict[str, Any] = {"extra": {KEY: "of another file"}}
    records.begin(prompt(1, 5), workflow)
    assert workflow == {"extra": {}}
    for stage in STAGES:
        records.add(prompt(1, 5.0), workflow, f"1.0.0.{stage}", [note(stage)])
    assert workflow["extra"] == {KEY: {"1": [note(stage) for stage in STAGES]}}
    for asked, found in ((prompt(1, 5), workflow["extra"]), (prompt(2, 5), {}), ({"1": None}, {}), (None, {})):
        records.begin(asked, other := {})
        assert other == {"extra": found}
    records.add(prompt(1, 5), workflow, "1.0.0.encode", [note("encode", 2.0)])
    assert workflow["extra"][KEY]["1"] == [note("denoise"), note("decode"), note("encode", 2.0)]
    for hostile in (None, [], {"extra": []}, {"extra": None}):
        records.begin(prompt(1, 5), hostile)
        records.add(prompt(1, 5), hostile, "1", [note("decode")])
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    nested = {"1": {"class_type": "Wan21TPUPipeline", "inputs": {"x": deep}}}
    records.begin(nested, other := {})
    records.add(nested, other, "1", [note("decode")])
    assert other == {"extra": {}}


def test_read_changes_returns_short_entries(tmp_path: Path):
    found = about.read_changes()
    assert 100 < len(found) <= about.MAX_CHANGES and all(0 < len(entry) <= about.MAX_CHANGE_LENGTH for entry in found)
    assert not any("`" in entry or "\n" in entry for entry in found)
    (file := tmp_path / "CHANGELOG.md").write_bytes(b"# X\n\n- one\n  `two`\n- three\n\n### Y\n- \xff" + b"z" * 2000)
    assert (
        about.read_changes(file)[:2] == ["one two", "three"]
        and len(about.read_changes(file)[2]) == about.MAX_CHANGE_LENGTH
    )
    assert about.read_changes(tmp_path / "none.md") == []
