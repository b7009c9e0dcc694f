"""Every message of the server equals its golden text: a new wording shows as a difference of `tests/golden/` alone."""

import json
import re
import shutil

import pytest
from comfyui_tpu.tools import golden


@pytest.mark.parametrize("language", golden.LANGUAGES)
def test_messages_equal_golden_file(language: str):
    if language != "en" and shutil.which("node") is None:
        pytest.skip("needs node")
    expected = json.loads((golden.FOLDER / f"messages_{language}.json").read_text("utf-8"))
    found = golden.render(language)
    changed = {key: text for key, text in found.items() if expected.get(key) != text}
    assert changed == {} and expected.keys() == found.keys(), "after a change of wording run: python tools/golden.py"


@pytest.mark.parametrize("language", golden.LANGUAGES)
def test_golden_messages_have_no_unfilled_hole(language: str):
    expected: dict[str, str] = json.loads((golden.FOLDER / f"messages_{language}.json").read_text("utf-8"))
    assert [key for key, text in expected.items() if re.search(r"\{\w+\}", text)] == []
