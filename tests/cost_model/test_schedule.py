"""Schedules written by hand: what a walk through them counts. Nothing is compiled."""

import pytest
from comfyui_tpu.tpu_runtime.cost_model import chips, hlo, step_time

TARGET = chips.topology("v6e:2x4")

PRODUCT = """HloModule one, is_scheduled=true

%fused (a: bf16[{a}], b: {kind}[{b}]) -> bf16[{out}] {{
  %a = bf16[{a}]{{1,0}} parameter(0)
  %b = {kind}[{b}]{{1,0}} parameter(1)
  ROOT %product = bf16[{out}]{{1,0}} convolution(%a, %b), {how}
}}

ENTRY %main (x: bf16[{a}], y: {kind}[{b}]) -> bf16[{out}] {{
  %x = bf16[{a}]{{1,0}} parameter(0)
  %y = {kind}[{b}]{{1,0}} parameter(1)
  ROOT %z = bf16[{out}]{{1,0}} fusion(%x, %y), calls=%fused, backend_config={{"estimated_cycles":"{estimate}"}}
}}
"""
PLAIN = {"a": "1024,2048", "b": "2048,512", "out": "1024,512", "how": "dim_labels=bf_io->bf", "kind": "bf16"}
# Four products of 64 x 512 and 512 x 32 as XLA writes them: of the window's 4 x 4 places 4 are values of the input.
BATCH = {
    "a": "4,64,512", "b": "4,512,32", "out": "4,64,32", "kind": "bf16",
    "how": "window={size=4 stride=3 pad=3_3 lhs_dilate=4 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
}  # fmt: skip

PERMUTES = """HloModule two, is_scheduled=true

ENTRY %main (x: bf16[1048576]) -> bf16[1048576] {{
  %x = bf16[1048576]{{0}} parameter(0)
  %one = bf16[1048576]{{0}} collective-permute-start(%x), channel_id=1, source_target_pairs={{{{0,1}}}}
  %two = bf16[1048576]{{0}} collective-permute-start(%x), channel_id=2, source_target_pairs={{{{{pair}}}}}
  %first = bf16[1048576]{{0}} collective-permute-done(%one)
  ROOT %second = bf16[1048576]{{0}} collective-permute-done(%two)
}}
"""


def timing_of(text: str) -> step_time.Timing:
    machine = step_time.Machine(chip=TARGET.chip, devices=chips.compile_devices(TARGET))
    return step_time.timing(hlo.parse(text), machine)


@pytest.mark.parametrize(
    ("given", "estimate", "cycles"),
    [
        (PLAIN, 100, 2 * 1024 * 2048 * 512 / TARGET.chip.flop_per_cycle),
        (PLAIN, 10**6, 10**6),
        (PLAIN | {"kind": "s8"}, 100, 100),  # whose peak is another
        (BATCH, 1, 4 * 2 * 64 * 512 * 32 / TARGET.chip.flop_per_cycle),
    ],
    ids=["too low an estimate", "a high one", "of bytes", "a batch"],
)
def test_a_product_is_never_quicker_than_the_chips_peak(given: dict, estimate: int, cycles: float):
    assert timing_of(PRODUCT.format(**given, estimate=estimate)).xla == pytest.approx(cycles)


@pytest.mark.parametrize(("pair", "times"), [("0,1", 2), ("1,0", 1), ("2,3", 1)])
def test_transfers_wait_for_each_other_only_on_the_same_link(pair: str, times: int):
    chip = TARGET.chip
    waiting = times * 2 * 1048576 / (chip.link_gb_s * 1e9) * chip.clock_hz
    assert timing_of(PERMUTES.format(pair=pair)).waiting == pytest.approx(waiting)
