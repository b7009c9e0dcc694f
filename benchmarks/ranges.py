"""Estimate the time of a generation on real chips: a range for each recorded prediction, with its derivation.

`predict.py` writes the table into `docs/performance.md`. The lower end is the prediction. The upper end uses the worst
published or assumed numbers for everything that a prediction idealizes or omits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
# From the start of a process to the first step: imports and tracing, opening the chips, and weights from a
# disk of 2 or 0.5 GB/s, all assumed. Programs are on the disk.
BEFORE_S = (10.0, 25.0)
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


def start_range(record: Record) -> Range:
    """Return the seconds from the start of a process to the first step, with compiled programs on the disk."""
    sizes = [record["weights_bytes"] / rate for rate in DISK_BYTES_S]
    return Range(low=BEFORE_S[0] + OPENING_S[0] + sizes[0], high=BEFORE_S[1] + OPENING_S[1] + sizes[1])


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
    return (
        f"Each range starts with the prediction. Its end makes three assumptions: kernels run at {kernels[1]} of their "
        f"ceiling instead of the predicted {kernels[0]}, XLA's operations run like linear layers at {linear[1]} of the "
        f"peak instead of {linear[0]}, and each exposed transfer starts in {1e6 * SLOW_START_S:.0f} microseconds "
        f"instead of {1e6 * interconnect.START_S:.0f}. The three columns after the step show the effect of each. The "
        f"host adds {gaps[0]:.2f} to {gaps[1]:.2f} ms between two steps (measured on a host without chips) and the "
        "transfer of frames: at best those of the last call over all chips' PCIe links, at worst all of them over one "
        f"link of {PCIE_BYTES_S / GB:.0f} GB/s (assumed). The first step of a new process also needs imports and "
        f"tracing ({BEFORE_S[0]:.0f} to {BEFORE_S[1]:.0f} s) and opening the chips ({OPENING_S[0]:.0f} to "
        f"{OPENING_S[1]:.0f} s), both assumed, and weights from a disk of {disk[0]:.0f} to {disk[1]:.1f} GB/s; "
        "compiled programs are on the disk."
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
        str(start_range(record)),
    )
