"""What trains and scores miniatures, and measures what is faster on them, for the tests of what they show."""

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="package")
def score() -> ModuleType:
    """`tools/score_miniature.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import score_miniature

        return score_miniature


@pytest.fixture(scope="package")
def quality(score: ModuleType) -> ModuleType:
    """`benchmarks/quality.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import quality

        return quality
