"""Fixtures of the checkpoints' tests."""

from collections.abc import Iterator

import pytest
from comfyui_tpu.tests.support import fake_hub
from comfyui_tpu.tests.support.fake_hub import FakeHub


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with fake_hub.serve() as found:
        yield found
