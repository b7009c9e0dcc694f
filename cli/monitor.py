"""The monitor in a terminal: what `GET /tpu/stats` of a running server says, as tables. Starts nothing itself.

Where no server runs on this machine: what its bus says of the chips, and the process that holds them of their memory.
"""

import argparse
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..tpu_runtime.pipeline import GB, MIB, STAGES, Sampler, Stats, loaded, readable, snapshot

DEFAULT_URL = "http://127.0.0.1:8188"
TIMEOUT_S = 5
NO_CHIPS = "this machine has no TPU whose chips could be shown, and "
FASTEST_S = 0.5
# More chips than this are shown as one line for all and the fullest few.
MOST_CHIPS = 32
FULLEST = 8
UNKNOWN = "–"
# What programs have beside arrays, as far as the runtime says it.
RESERVED = ("hbm_reserved", "hbm_reserved_peak")
TITLES: dict[str, str] = dict(zip(STAGES, ("text encoder", "image encoder", "denoiser", "VAE decoder"), strict=True))


class NoStatistics(RuntimeError):
    """No statistics from that address; the message says what to do."""


class NoServer(NoStatistics):
    """Nothing listens there."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--url", default=DEFAULT_URL, help=f"the server; default: {DEFAULT_URL}")
    verb.add_argument("--once", action="store_true", help="print the numbers once and end")
    verb.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks; default: 1"
    )


def run(options: argparse.Namespace, console: Console | None = None, sampler: Sampler | None = None) -> int:
    """Shows the statistics until Ctrl-C, through restarts of the server; raises `NoStatistics` if it never answered and
    this machine has no chips to show instead."""
    if options.interval < FASTEST_S:
        raise ValueError(f"--interval is {options.interval:g}; it must be at least {FASTEST_S} s.")
    console, sampler = console or Console(), sampler or Sampler()
    try:
        stats, note = fetch(options.url), ""
    except NoServer as reason:
        stats, note = _without_server(options.url, sampler), str(reason)
        if stats is None:
            raise NoServer(f"{NO_CHIPS if _is_here(options.url) else ''}{reason}") from None
    if options.once:
        console.print(render(stats, note))
        return 0
    has_answered = not note
    with Live(render(stats, note), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(options.interval)
            try:
                stats, note, has_answered = fetch(options.url), "", True
            except NoStatistics as reason:
                note = "The server is not reachable, trying again. These numbers are old."
                if not has_answered and (chips := _without_server(options.url, sampler)):
                    stats, note = chips, str(reason)
            live.update(render(stats, note), refresh=True)


def _without_server(url: str, sampler: Sampler) -> Stats | None:
    """What can be said of this machine's chips; None if it has none, or `url` is another machine's."""
    if not _is_here(url):
        return None
    stats = sampler.complete(snapshot.stats())
    # This process is not the one whose memory is of interest.
    return {**stats, "host": {**stats["host"], "process_ram": None}} if stats["chips"] else None


def _is_here(url: str) -> bool:
    return urllib.parse.urlsplit(_with_scheme(url)).hostname in ("127.0.0.1", "localhost", "::1")


def _with_scheme(url: str) -> str:
    return url if url.startswith(("http://", "https://")) else f"http://{url}"


def fetch(url: str) -> Stats:
    """The server's statistics. Raises `NoStatistics` when there are none."""
    url = _with_scheme(url)
    address = f"{url.rstrip('/')}/tpu/stats"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            stats = json.load(answer)
    except urllib.error.HTTPError as refusal:
        missing = "ComfyUI-TPU is not loaded there: look for IMPORT FAILED in the server's log."
        reason = missing if refusal.code == 404 else "Look into the server's log."
        raise NoStatistics(f"{address} answers {refusal.code}. {reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise NoServer(
            f"no server answers at {url} ({reason}). Start ComfyUI, or give its address: "
            f"comfyui-tpu monitor --url {DEFAULT_URL}"
        ) from None
    except ValueError:
        raise NoStatistics(f"{address} does not answer with JSON; is it a ComfyUI server?") from None
    if not isinstance(stats, dict):
        raise NoStatistics(f"{address} answers with {type(stats).__name__} instead of an object.")
    return stats


# --- what is shown ----------------------------------------------------------------------------------------------------


def render(stats: Stats, note: str = "") -> RenderableType:
    """All of `stats`; whatever is missing there is shown as not known."""
    blocks = [
        _running(stats.get("running")),
        *_behind(_list(stats, "behind")),
        *_chips(_list(stats, "chips")),
        _residents(_list(stats, "resident")),
        *_last_run(stats.get("last_run")),
        _host(stats),
        *(_text(line, style="yellow") for line in (note, *(stats.get("notes") or ())) if line),
    ]
    return Panel(Group(*blocks), title="TPU", subtitle=_text(stats.get("message") or ""), title_align="left")


def _text(value: Any, style: str = "") -> Text:
    """What the server says, without the control characters that a terminal would obey; never as rich's markup."""
    return Text("".join(one if one.isprintable() else "?" for one in str(value)), style=style)


def _list(stats: Stats, name: str) -> list[Stats]:
    return [one for one in stats.get(name) or () if isinstance(one, dict)]


def _table(*columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _running(running: Any) -> RenderableType:
    if not isinstance(running, dict):
        return Text("nothing is running", style="dim")
    said = f"  {running.get('model') or ''}  {seconds(running.get('elapsed_s'))}"
    head = _text(_stage(running), "bold") + _text(said)
    done, total = _number(running.get("done")) or 0, _number(running.get("total")) or 0
    if running.get("compiling") or not total:
        return Group(head, _text(running.get("text") or ""))
    each, unit = _number(running.get("seconds_per_unit")), running.get("unit") or "part"
    pace = f"{unit} {done:g} of {total:g}" if unit != "MiB" else bytes_of(done * MIB, total * MIB)
    if each is not None:
        speed = f"{MIB / GB / each:.2f} GB/s" if unit == "MiB" and each else f"{seconds(each)} each"
        pace += f", {speed}, {seconds(each * max(0, total - done))} left"
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(ProgressBar(total=total, completed=min(done, total), width=24), _text(pace))
    return Group(head, grid)


def _behind(programs: Sequence[Stats]) -> Iterator[RenderableType]:
    """What is compiled behind the running stage, and what waits for that."""
    said = [
        f"{one.get('title')} {'waits' if one.get('elapsed_s') is None else seconds(one['elapsed_s'])}"
        for one in programs
    ]
    if said:
        yield Text("compiling behind  ", style="dim") + _text(", ".join(said))


def _stage(of: Stats) -> str:
    name = str(of.get("stage"))
    return TITLES.get(name, name)


def _chips(chips: Sequence[Stats]) -> Iterator[RenderableType]:
    if not chips:
        return
    known = [chip for chip in chips if _number(chip.get("hbm_used")) is not None]
    used = sum(chip["hbm_used"] for chip in known) if known else None
    limit = sum(_number(chip.get("hbm_limit")) or 0 for chip in chips) or None
    yield Text(f"\nmemory {bytes_of(used, limit)} on {len(chips)} chip{'s' if len(chips) != 1 else ''}", style="bold")
    shown = list(chips)
    if len(chips) > MOST_CHIPS:
        shown = sorted(known, key=lambda chip: -chip["hbm_used"])[:FULLEST]
        yield Text(f"the {len(shown)} fullest:", style="dim")
    has_reserved = any(_number(chip.get(name)) is not None for chip in shown for name in RESERVED)
    reserved = ("reserved", "its peak") if has_reserved else ()
    table = _table("chip", "", "memory", "peak", *reserved, "TensorCore", "duty")
    largest = max((_number(chip.get("hbm_peak")) or _number(chip.get("hbm_used")) or 0 for chip in chips), default=0)
    for chip in shown:
        total = _number(chip.get("hbm_limit")) or largest * 1.25 or 1
        table.add_row(
            _text(f"{chip.get('index')} {chip.get('kind') or ''}"),
            ProgressBar(total=total, completed=_number(chip.get("hbm_used")) or 0, width=12),
            bytes_of(chip.get("hbm_used"), chip.get("hbm_limit")),
            size(chip.get("hbm_peak")),
            *(size(chip.get(name)) for name in RESERVED if has_reserved),
            percent(chip.get("tensorcore_utilization")),
            percent(chip.get("duty_cycle")),
        )
    yield table


def _residents(residents: Sequence[Stats]) -> RenderableType:
    if not residents:
        return Text("\nnothing is loaded", style="dim")
    table = _table("\nloaded", "a chip", "last used")
    for resident in residents:
        name = _text(f"{resident.get('component')} of {resident.get('model')}")
        table.add_row(name, size(resident.get("bytes_per_chip")), _ago(_number(resident.get("last_used"))))
    return table


def _last_run(run: Any) -> Iterator[RenderableType]:
    if not isinstance(run, dict):
        return
    stages = [stage for stage in run.get("stages") or () if isinstance(stage, dict)]
    parts = [f"{_stage(one)} {seconds(one.get('seconds'))}" for one in stages]
    if speed := _number(run.get("steps_per_second")):
        parts.append(f"{seconds(1 / speed)} a step")
    if run.get("peak_hbm") is not None:
        parts.append(f"peak {size(run['peak_hbm'])} a chip")
    if (size_bytes := _number(run.get("loaded_bytes"))) and (loading_s := _number(run.get("loading_s"))):
        parts.append(loaded(size_bytes, loading_s))
    yield Text("\nlast run  ", style="dim") + _text(f"{run.get('model')}: {', '.join(parts)}")


def _host(stats: Stats) -> RenderableType:
    host = found if isinstance(found := stats.get("host"), dict) else {}
    line = f"CPU {percent(host.get('cpu_percent'))}, RAM {bytes_of(host.get('ram_used'), host.get('ram_total'))}"
    if host.get("process_ram") is not None:
        line += f", of it ComfyUI {size(host['process_ram'])}"
    caches = [f"{one.get('name')} {size(one.get('bytes'))}" for one in _list(stats, "caches")]
    return Text.assemble(("\nhost  ", "dim"), line, ("\ncaches  ", "dim"), _text(", ".join(caches) or UNKNOWN))


def _ago(then: float | None) -> str:
    if then is None:
        return UNKNOWN
    past_s = time.time() - then
    return "just now" if past_s < 5 else f"{seconds(float(round(past_s)))} ago"


# --- numbers ----------------------------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value < float("inf") else None


def size(value: Any) -> str:
    number = _number(value)
    return UNKNOWN if number is None else readable(number)


def bytes_of(used: Any, limit: Any) -> str:
    """`used` alone where no limit is known; in one unit where that suits both."""
    if not _number(limit):
        return size(used)
    number, _, unit = size(used).partition(" ")
    return f"{number if size(limit).endswith(f' {unit}') else size(used)} of {size(limit)}"


def percent(value: Any) -> str:
    number = _number(value)
    return UNKNOWN if number is None else f"{number:.0f} %"


def seconds(value: Any) -> str:
    number = _number(value)
    if number is None:
        return UNKNOWN
    if number < 59.95:
        return f"{number:.{3 if number < 0.0995 else 1}f} s"
    minutes, rest = divmod(round(number), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
