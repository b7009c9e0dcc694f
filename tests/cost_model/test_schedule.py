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


START_S = 4e-6  # a round number of this file's


def timing_of(text: str, start_s: float = START_S) -> step_time.Timing:
    machine = step_time.TimingTarget(chip=TARGET.chip, devices=chips.compile_devices(TARGET), start_s=start_s)
    return step_time.predict_timing(hlo.parse_module(text), machine)


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
def test_predict_timing_matmul_is_bounded_by_chip_peak(given: dict, estimate: int, cycles: float):
    assert timing_of(PRODUCT.format(**given, estimate=estimate)).xla == pytest.approx(cycles)


@pytest.mark.parametrize(("pair", "times"), [("0,1", 2), ("1,0", 1), ("2,3", 1)])
def test_predict_timing_transfers_on_one_link_are_serialised(pair: str, times: int):
    chip = TARGET.chip
    waiting = times * (START_S + 2 * 1048576 / (chip.link_gb_s * 1e9)) * chip.clock_hz
    assert timing_of(PERMUTES.format(pair=pair)).waiting == pytest.approx(waiting)


# Each waits for the one before, as a ring's turns do.
DEPENDENT = """HloModule three, is_scheduled=true

ENTRY %main (x: {array}) -> {array} {{
  %x = {array}{{0}} parameter(0)
  %one = {array}{{0}} {kind}(%x), channel_id=1, {groups}
  %two = {array}{{0}} {kind}(%one), channel_id=2, {groups}
  ROOT %three = {array}{{0}} {kind}(%two), channel_id=3, {groups}
}}
"""
SQUARES = "replica_groups={{0,1,2,3},{4,5,6,7}}"
NEXT = "source_target_pairs={{0,1},{1,0}}"


@pytest.mark.parametrize(
    ("kind", "groups", "share", "starts"),
    [
        ("all-to-all", SQUARES, 2 / 4, 3),
        ("collective-permute", NEXT, 1, 3),
        ("all-reduce", SQUARES, 2 * 3 / 4 / 2, 3),
        ("collective-permute", "source_target_pairs={{3,3}}", 0, 0),  # to itself: nothing starts
        ("all-reduce", "replica_groups={{0},{1}}", 0, 0),
    ],
)
@pytest.mark.parametrize("size", [18432, 2**20])
def test_predict_timing_collective_costs_start_and_bytes(kind: str, groups: str, share: float, starts: int, size: int):
    """Three of 1 MiB take 3 x (4 us + 1 MiB x share / 90 GB/s); of 18 KiB nearly nothing but the starts."""
    chip = TARGET.chip
    found = timing_of(DEPENDENT.format(array=f"u8[{size}]", kind=kind, groups=groups))
    by_hand = 3 * share * size / 90e9 + starts * START_S
    assert found.waiting / chip.clock_hz == pytest.approx(by_hand)
    assert sum(each.seconds for each in found.collectives) == pytest.approx(by_hand)
    assert timing_of(DEPENDENT.format(array=f"u8[{size}]", kind=kind, groups=groups), 0.0).waiting == pytest.approx(
        3 * share * size / 90e9 * chip.clock_hz
    )


BESIDE = """HloModule four, is_scheduled=true

%sum (a: f32[1024]) -> f32[1024] {{
  %a = f32[1024]{{0}} parameter(0)
  ROOT %b = f32[1024]{{0}} add(%a, %a)
}}

ENTRY %main (x: u8[90000], y: f32[1024]) -> u8[90000] {{
  %x = u8[90000]{{0}} parameter(0)
  %y = f32[1024]{{0}} parameter(1)
  %one = u8[90000]{{0}} collective-permute-start(%x), channel_id=1, source_target_pairs={{{{0,1}}}}
  %z = f32[1024]{{0}} fusion(%y), kind=kLoop, calls=%sum, backend_config={{"estimated_cycles":"{cycles}"}}
  ROOT %first = u8[90000]{{0}} collective-permute-done(%one)
}}
"""


@pytest.mark.parametrize(("beside_us", "exposed_us"), [(0, 5), (2, 3), (4.5, 0.5), (6, 0)])
def test_predict_timing_computation_overlaps_transfer_start(beside_us: float, exposed_us: float):
    """90 kB take 1 us on a link of 90 GB/s, after 4 us of starting."""
    found = timing_of(BESIDE.format(cycles=round(beside_us * 1750)))
    assert found.waiting == pytest.approx(exposed_us * 1750, rel=1e-3)
    (collective,) = found.collectives
    assert collective.seconds == pytest.approx(5e-6) and collective.overlapped == (exposed_us == 0)


def test_predict_timing_counts_start_between_devices_of_one_chip():
    target = chips.topology("tpu7x:2x2x1")
    machine = step_time.TimingTarget(chip=target.chip, devices=chips.compile_devices(target), start_s=START_S)
    text = DEPENDENT.format(array="u8[1048576]", kind="collective-permute", groups=NEXT)
    assert step_time.predict_timing(hlo.parse_module(text), machine).waiting == pytest.approx(
        3 * START_S * target.chip.clock_hz
    )
