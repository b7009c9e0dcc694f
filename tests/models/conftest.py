"""The parity tests of all families, also with the attention kernel in interpret mode."""

import pytest
from comfyui_tpu.tests.models import parity


@pytest.fixture(autouse=True)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--attention pallas` denoisers are built with the kernel."""
    if request.config.getoption("attention") == "pallas":
        parity.use_kernel(monkeypatch)
