"""The parity tests of all families, also with the attention kernel in interpret mode."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tpu_runtime.programs.program import DENOISE_STEP, Program

# By XLA's library also chains of elementwise operations, such as a softmax, which the suite's other options leave slow.
# It refuses some layouts, of text encoders and of int8, when they run, and leaves out what rounds to bfloat16 and back.
ELEMENTWISE = {
    "xla_cpu_experimental_ynn_fusion_type": ",".join(
        f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("DOT", "REDUCE", "ELTWISE", "INDIVIDUAL_DOT")
    )
}


@pytest.fixture(scope="package", autouse=True)
def quick() -> Iterator[None]:
    """The steps of denoisers in float32, most of what these tests run, take half of their time."""
    compile_alone = Program.compile

    def compile_quick(self: Program, *lowered: Any) -> Any:
        is_quick = self.name == DENOISE_STEP and self.precision == "float32"
        options = {**ELEMENTWISE, **self.compiler_options}
        return compile_alone(replace(self, compiler_options=options) if is_quick else self, *lowered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "compile", compile_quick)
        yield


@pytest.fixture(autouse=True)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--attention pallas` denoisers are built with the kernel."""
    if request.config.getoption("attention") == "pallas":
        parity.use_kernel(monkeypatch)
