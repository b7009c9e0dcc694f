"""Search the attention kernel's tiles by compiling them, and write `kernels/attention_tiles.json`.

For each call of `attention.py` every candidate is compiled alone. The one with the fewest cycles wins; within half a
percent of it, the shortest code wins, which loads and compiles sooner. On a TPU the measured time decides, in a column
called measured.

Run: python benchmarks/tune_attention.py [--topology v6e:2x4] [--call WORD ...]. It takes about half a minute per
candidate.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comfyui_tpu.tpu_runtime.cost_model import chips
from kernel_cost import Call, Found, cost, measured_s

import attention

FILE = Path(__file__).parents[1] / "kernels" / "attention_tiles.json"
CLOSE = 1.005
LARGE = 1536  # keys; fewer are a text


def candidates(call: Call) -> Iterator[dict[str, Any]]:
    """Tiles worth a compile, by what bounds them: see `docs/attention.md`."""
    if call.head_dim == 64:
        for block_q, step, unroll, columns in (
            (1024, 256, 16, 512), (1024, 256, 8, 512), (1024, 512, 8, 512), (512, 256, 16, 512),
        ):  # fmt: skip
            yield {"block_q": block_q, "step": step, "unroll": unroll, "columns": columns, "heads": 2}
    elif call.kv_rows <= LARGE:
        for heads in (4, 2, 1):
            for block_q in (1024, 2048):
                if call.heads % heads == 0:
                    yield {"block_q": block_q, "step": 512, "unroll": 2, "heads": heads}
    else:
        for block_q, step, unroll in (
            (2048, 1024, 4), (2048, 1024, 2), (2304, 1024, 2), (1024, 1024, 2), (2048, 512, 4), (1024, 512, 4),
        ):  # fmt: skip
            yield {"block_q": block_q, "step": step, "unroll": unroll}


def best(found: Sequence[tuple[dict[str, Any], Found, float | None]]) -> dict[str, Any] | None:
    """The quickest, or the shortest code among those close to it; None if none compiled."""
    worked = [each for each in found if not each[1].error]

    def time(each: tuple[dict[str, Any], Found, float | None]) -> float:
        return each[1].mcycles if each[2] is None else each[2]

    least = min(map(time, worked), default=0.0)
    close = [each for each in worked if time(each) <= CLOSE * least]
    return min(close, key=lambda each: each[1].bundles)[0] if close else None


def tune(call: Call, kind: str) -> dict[str, Any] | None:
    """The entry of the table for a call; None where nothing compiled."""
    found = []
    for chosen in candidates(call):
        tried = replace(call, form=chosen)
        outcome = cost(tried)
        measured = None if outcome.error else measured_s(tried)
        found.append((chosen, outcome, measured))
        said = outcome.error or f"{outcome.mcycles:.2f} Mcycles, {outcome.bundles} bundles, {outcome.cpu_s:.0f} s"
        _say(f"{call.title}: {chosen}: {said}" + (f", measured {measured:.5f} s" if measured else ""))
    chosen = best(found)
    if chosen is None:
        return None
    return {
        "device_kind": kind,
        "head_dim": call.head_dim,
        "kv_rows": call.kv_rows + call.text_rows,
        "libtpu": importlib.metadata.version("libtpu"),
        "tiles": chosen,
    }


def write(entries: Sequence[dict[str, Any]], file: Path = FILE) -> None:
    """Adds entries to the table, in place of those of the same chip, head size and number of keys."""

    def key(entry: dict[str, Any]) -> tuple:
        return entry["device_kind"], entry["head_dim"], entry["kv_rows"]

    known = {key(entry): entry for entry in [*read(file), *entries]}
    lines = ",\n".join(f"  {json.dumps(known[each])}" for each in sorted(known))
    file.write_text(f"[\n{lines}\n]\n")


def read(file: Path = FILE) -> list[dict[str, Any]]:
    """The table as it stands."""
    return json.loads(file.read_text()) if file.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--call", action="append", help="only calls with this word; repeatable")
    options = parser.parse_args(arguments)
    kind = chips.topology(options.topology).chip.device_kind
    for call in attention.calls(options.topology):
        wanted = not options.call or any(word.lower() in call.title.lower() for word in options.call)
        if wanted and (entry := tune(call, kind)) is not None:
            write([entry])
            _say(f"{call.title}: {entry['tiles']}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
