"""Run users' files and graphs end to end, and compare each result with an oracle.

Results are images of a real ComfyUI server through its API, and results of `comfyui-tpu run`. The tiny networks have
sizes that ComfyUI's own torch code supports, so one server produces both results: with its own loaders and with this
pack's. If the oracle is another program (peft, transformers), it writes the weights to a plain file. Prints a row for
each case: the largest relative L2 error of the images, or the error that refuses the file, with the way, the oracle and
whether it holds. Needs ComfyUI (COMFYUI_PATH, else ~/ComfyUI).

    python benchmarks/comfyui/files_and_graphs.py --sheet sheet.png --table table.md [--only 2 5]
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from brought import files, graphs  # noqa: E402
from brought.bench import Bench, Row  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", type=int, default=[], help="numbers of cases")
    parser.add_argument("--sheet", type=Path, help="where images go, each beside the oracle's")
    parser.add_argument("--cache", type=Path, help="the pack's cache, kept for the next run; otherwise a new one")
    parser.add_argument("--table", type=Path, help="where the table goes")
    options = parser.parse_args()
    cases = {**graphs.CASES, **files.CASES}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Bench.started(Path(folder), options.cache) as bench:
        for number in sorted(cases):
            if options.only and number not in options.only:
                continue
            for row in _rows(number, cases[number], bench):
                rows.append(row)
                print(row.line(), flush=True)
                if options.table:
                    options.table.write_text(table(rows), "utf-8")
    if options.sheet:
        draw(rows, options.sheet)
    failed = [row for row in rows if not row.holds]
    print(f"{len(rows)} cases, {len(failed)} do not hold")
    raise SystemExit(bool(failed))


def _rows(number: int, cases: Callable[[Bench], Iterator[Row]], bench: Bench) -> Iterator[Row]:
    try:
        yield from cases(bench)
    except Exception as error:
        yield Row(number, cases.__name__, "", "", sentence=f"{type(error).__name__}: {str(error)[:600]}")


def table(rows: list[Row]) -> str:
    head = "| number | case | way | oracle | largest relative difference, or the sentence | holds |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(row.line() for row in rows)]) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """Last frames of each case, the oracle's below ours, with number and case."""
    from PIL import Image, ImageDraw

    shown = [row for row in rows if row.images]
    width, height, columns = 150, 250, 8
    lines = -(-len(shown) // columns)
    sheet = Image.new("RGB", (columns * width, max(lines, 1) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for place, row in enumerate(shown):
        left, top = place % columns * width, place // columns * height
        pen.text((left + 4, top + 2), f"{row.number}: {row.case[:24]}\n{row.case[24:48]}\n{row.error:.0e}", "black")
        for number, image in enumerate(row.images):
            picture = Image.fromarray((255 * image[-1].clamp(0, 1)).byte().numpy())
            picture.thumbnail((width - 8, 96))
            sheet.paste(picture, (left + 4, top + 44 + 100 * number))
    sheet.save(path)


if __name__ == "__main__":
    main()
