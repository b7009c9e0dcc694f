"""Compare attention kernels on described chips: ours, JAX's stock splash kernel, and an ordinary online softmax.

Columns: bundles per thousand scores, Mcycles per call, share of the matrix units' limit, VMEM, code length and compile
time, for the attention calls of every family on one chip of its default mesh. The kernels run only on a TPU; the last
column is then measured.

Run: python benchmarks/attention.py [--topology v6e:2x4 ...] [--call WORD ...] [--forms] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from comfyui_tpu.tpu_runtime.cost_model import chips
from kernel_cost import Call, Found, cost, floor_mcycles, measured_s

TOPOLOGIES = ("v6e:2x4", "v5e:2x4", "v5p:2x2x1", "tpu7x:2x2x1")
HEAD = (
    "call", "kernel", "b/ks", "Mcycles", "of the floor", "rerun Mcycles", "VMEM MiB", "bundles", "compile s",
    "processor s", "measured ms",
)  # fmt: skip


def calls(topology: str) -> Iterator[Call]:
    """The calls of one chip at each family's defaults: guidance's branches on `dp`, tokens on `sp`; FLUX.2 on `tp`."""
    target = chips.topology(topology)
    # A kernel is compiled for one chip; which one of a slice does not matter.
    generation = target.chip.generation
    name = f"{generation}:1x1" if generation in ("v6e", "v5e") else target.name
    sp, tp = target.num_devices // 2, target.num_devices
    video = {"head_dim": 128, "topology": name}
    yield Call(title="Wan 720p, 81 frames", heads=40 // sp, q_rows=75600, kv_rows=75600, **video)
    yield Call(title="Wan, text", heads=40, q_rows=75600 // sp, kv_rows=512, **video)
    yield Call(
        title="HunyuanVideo 720p, 121 frames", heads=16 // sp, q_rows=111600, kv_rows=111600, text_rows=1256,
        bounded=True, **video,
    )  # fmt: skip
    yield Call(
        title="HunyuanVideo, text's queries", heads=16 // sp, q_rows=1256, kv_rows=111600, text_rows=1256,
        bounded=True, **video,
    )  # fmt: skip
    yield Call(
        title="CogVideoX 720p, 81 frames", heads=48 // sp, head_dim=64, q_rows=39600, kv_rows=39600, text_rows=226,
        bounded=True, topology=name,
    )  # fmt: skip
    yield Call(title="FLUX.2, joint", heads=48 // tp, q_rows=4096, kv_rows=4096, text_rows=512, bounded=True, **video)
    yield Call(title="FLUX.2, single", heads=48 // tp, q_rows=4608, kv_rows=4608, bounded=True, **video)


def rivals(call: Call, forms: bool) -> Iterator[tuple[str, Call]]:
    """Every kernel for a call; with `forms`, ours in each."""
    yield "ours", call
    if forms:
        for maximum in ("zero", "sampled", "online"):
            yield f"ours, {maximum}", replace(call, form={"maximum": maximum})
        yield "ours, keys in the grid", replace(call, form={"maximum": "online", "block_kv": 4096})
    yield "usual online", replace(call, kernel="online")
    yield "stock splash", replace(call, kernel="splash")


def row(call: Call, name: str, found: Found) -> tuple[str, ...]:
    if found.error:
        return (call.title, name, found.error, *[""] * (len(HEAD) - 3))
    seconds = measured_s(call)
    return (
        call.title,
        name,
        f"{1e9 * found.mcycles / call.scores:.3f}",
        f"{found.mcycles:.2f}",
        f"{100 * floor_mcycles(call) / found.mcycles:.0f} %",
        f"{found.rerun_mcycles:.2f}" if found.rerun_mcycles else "-",
        f"{found.vmem_mib:.0f}",
        str(found.bundles),
        f"{found.compile_s:.0f}",
        f"{found.cpu_s:.0f}",
        "-" if seconds is None else f"{1e3 * seconds:.2f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topology", action="append")
    parser.add_argument("--call", action="append", help="only calls with this word; repeatable")
    parser.add_argument("--kernel", action="append", help="only kernels with this word; repeatable")
    parser.add_argument("--forms", action="store_true", help="ours in each form")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    records = []
    for topology in options.topology or TOPOLOGIES:
        _say(f"\n{topology}, predicted by the compiler\n| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD))
        for call in calls(topology):
            for name, each in rivals(call, options.forms):
                if _wanted(call.title, options.call) and _wanted(name, options.kernel):
                    found = cost(each)
                    records.append({"topology": topology, "kernel": name, **asdict(call), **asdict(found)})
                    _say("| " + " | ".join(row(each, name, found)) + " |")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


def _wanted(title: str, words: Sequence[str] | None) -> bool:
    return not words or any(word.lower() in title.lower() for word in words)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
