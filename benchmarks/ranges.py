"""Estimate the time of a generation on real chips: a range for each recorded prediction, with its derivation.

`predict.py` writes the table into `docs/performance.md`. The lower end is the prediction. The upper end uses the worst
published or assumed numbers for everything that a prediction idealizes or omits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyui_tpu.tpu_runtime.cost_model import interconnect
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.programs import weights
from comfyui_tpu.tpu_runtime.units import GB

Record = Mapping[str, Any]

# Shares of their ceiling that attention kernels reach: as predicted on v6e (1.465 of 1.507), and as published for a
# kernel of this kind (MaxDiffusion on TPU7x, 692 of 769 TF/s).
KERNELS = (0.97, 0.90)
# Shares of the peak that linear layers of a Wan step reach: as predicted on v6e, and as a published port ran them.
LINEAR = (0.83, 0.66)
# The upper end of what the start of a collective may take; predictions count `interconnect.START_S`.
SLOW_START_S = 10e-6
# Between two steps, measured on the host with a clock in the chips' place (docs/LOG.md, 2026-11-25).
GAP_S = (0.14e-3, 0.36e-3)
# One chip's PCIe link, an assumption; frames leave all chips at once, or one chip alone.
PCIE_BYTES_S = 10 * GB
# The host's part of 81 frames at 1280x720, measured on two idle cores (docs/LOG.md, 2026-11-28).
HOST_S_PER_BYTE = 0.47 / (81 * 720 * 1280 * 3 * 4)
# From the start of a process to the first step: imports and tracing as `cold_start.py --record` measured them, and
# assumptions for opening the chips and for a disk of 2 or 0.5 GB/s. Programs are on the disk. At best weights are read
# from the opening on; at worst the host's memory takes none ahead, and one part begins after the other.
COLD_START = json.loads((Path(__file__).parent / "cold_start.json").read_text())
OPENING_S = (10.0, 20.0)
DISK_BYTES_S = (2 * GB, 0.5 * GB)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Seconds from `low` to `high`."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(low=self.low + other.low, high=self.high + other.high)

    def __mul__(self, times: float) -> "Range":
        return Range(low=self.low * times, high=self.high * times)

    def __str__(self) -> str:
        return f"{_number(self.low)} to {_number(self.high)}"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def program_range(program: Record, clock_hz: float) -> Range:
    """Return the range of one run of a program."""
    kernels, xla = program["kernel_cycles"] / clock_hz, program["xla_cycles"] / clock_hz
    predicted = program["predicted_s"]
    waited = sum(each["times"] for each in program["collectives"] if not each["overlapped"])
    return Range(
        low=predicted,
        high=predicted
        + kernels * (KERNELS[0] / KERNELS[1] - 1)
        + xla * (LINEAR[0] / LINEAR[1] - 1)
        + waited * (SLOW_START_S - interconnect.START_S),
    )


def host_range(record: Record) -> Range:
    """Return what the host adds to one generation: gaps between steps, and frames that leave the chips."""
    settings = record["settings"]
    frame_bytes = settings["height"] * settings["width"] * 3 * 4
    frames_bytes = settings["num_frames"] * frame_bytes
    steps = sum(program["runs"] for program in record["programs"] if program["name"].startswith("denoise"))
    calls = max(program["runs"] for program in record["programs"] if program["name"].startswith("vae_decoder"))
    # All but the last call's frames come back while the next call computes.
    last = frames_bytes / calls * (1 / (PCIE_BYTES_S * record["chips"]) + HOST_S_PER_BYTE)
    alone = frames_bytes * (1 / PCIE_BYTES_S + HOST_S_PER_BYTE)
    return Range(low=steps * GAP_S[0] + last, high=steps * GAP_S[1] + alone)


def generation_range(record: Record) -> Range:
    """Return the range of one generation, with what the host adds; weights are there, and programs are compiled."""
    clock_hz = record["chip"]["clock_ghz"] * 1e9
    parts = [program_range(program, clock_hz) * program["runs"] for program in record["programs"]]
    return sum(parts, host_range(record))


def start_range(record: Record, parts: Mapping[str, float]) -> Range:
    """Return the seconds from the start of a process to the first step, with compiled programs on the disk.

    parts: of the model, from `cold_start.json`.
    """
    fast, slow = (record["weights_bytes"] / rate for rate in DISK_BYTES_S)
    return Range(
        low=parts["imports_before"] + max(OPENING_S[0] + parts["tracing"], fast),
        high=sum(parts.values()) + OPENING_S[1] + slow,
    )


def weights_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a model's weights as they are used, in bfloat16 but for what stays in float32."""
    total = 0
    for component in spec.components:
        network = weights.private_network(component, component.config)
        for name, weight in network.weights.items():
            size = weights.weight_dtype(network, name, "bfloat16").itemsize
            for length in weight.shape:
                size *= length
            total += size
    return total


def table(records: Sequence[Record]) -> str:
    """Return the derivation and a table in Markdown, one row a record."""
    head = (
        "model",
        "s per step",
        "kernels",
        "XLA's operations",
        "transfers waited for",
        "host",
        "s in total",
        "s to the first step",
    )
    lines = [head, ("---",) * len(head), *map(_row, records)]
    return "\n\n".join([_derivation(), "\n".join("| " + " | ".join(line) + " |" for line in lines)])


def _derivation() -> str:
    kernels, linear = ([f"{100 * share:.0f} %" for share in shares] for shares in (KERNELS, LINEAR))
    gaps, disk = ([1e3 * gap for gap in GAP_S], [rate / GB for rate in DISK_BYTES_S])
    before = [pick(sum(parts.values()) for parts in COLD_START.values()) for pick in (min, max)]
    return (
        f"Each range begins with the prediction. Its end assumes that kernels run at {kernels[1]} of their ceiling "
        f"where {kernels[0]} are predicted, that XLA's operations run as linear layers at {linear[1]} of the peak "
        f"where {linear[0]} are predicted, and that each transfer that is waited for starts in "
        f"{1e6 * SLOW_START_S:.0f} microseconds, not in {1e6 * interconnect.START_S:.0f}. The three columns after the "
        f"step give the part of each. The host adds {gaps[0]:.2f} to {gaps[1]:.2f} ms between two steps "
        "(measured on a host without chips) and the frames: at best those of the last call over all chips' PCIe "
        f"links, at worst all of them over one link of {PCIE_BYTES_S / GB:.0f} GB/s (assumed). To the first step of a "
        f"new process: imports and tracing {before[0]:.0f} to {before[1]:.0f} s (measured on a host without chips), "
        f"opening the chips {OPENING_S[0]:.0f} to {OPENING_S[1]:.0f} s and weights from a disk of {disk[0]:.0f} to "
        f"{disk[1]:.1f} GB/s (both assumed); compiled programs are on the disk. At best weights are read while the "
        "chips are opened; at worst each part begins when the one before has ended."
    )


def _row(record: Record) -> tuple[str, ...]:
    clock_hz = record["chip"]["clock_ghz"] * 1e9
    step = next(program for program in record["programs"] if program["name"].startswith("denoise"))
    waited = sum(each["times"] for each in step["collectives"] if not each["overlapped"])
    added = (
        step["kernel_cycles"] / clock_hz * (KERNELS[0] / KERNELS[1] - 1),
        step["xla_cycles"] / clock_hz * (LINEAR[0] / LINEAR[1] - 1),
        waited * (SLOW_START_S - interconnect.START_S),
    )
    return (
        record["title"],
        str(program_range(step, clock_hz)),
        *(f"+{seconds:.3f}" for seconds in added),
        str(host_range(record)),
        str(generation_range(record)),
        str(start_range(record, COLD_START[record["model"]])),
    )
