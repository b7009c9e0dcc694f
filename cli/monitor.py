"""The monitor in a terminal: shows `GET /tpu/stats` of a running server as tables.

Without a server on this machine it shows the chips as the bus reports them, and their memory as the process that holds
them reports it. It starts nothing itself.
"""

import argparse
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..tpu_runtime.model_spec import STAGES
from ..tpu_runtime.monitor import snapshot
from ..tpu_runtime.monitor.host_stats import Sampler, Stats
from ..tpu_runtime.units import GB, MIB, format_load_rate, format_size

DEFAULT_URL = "http://127.0.0.1:8188"
TIMEOUT_S = 5
NO_CHIPS = "this machine has no TPU whose chips could be shown, and "
MIN_INTERVAL_S = 0.5
# With more chips than this, one line for all and the fullest few are shown.
MAX_CHIPS = 32
NUM_FULLEST = 8
UNKNOWN = "–"
# Memory that programs reserve in addition to arrays, if the runtime reports it.
RESERVED = ("hbm_reserved", "hbm_reserved_peak")
TITLES: dict[str, str] = dict(zip(STAGES, ("text encoder", "image encoder", "denoiser", "VAE decoder"), strict=True))


class NoStatistics(RuntimeError):
    """No statistics from that address; the message has the remedy."""


class NoServer(NoStatistics):
    """No server listens at that address."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    verb.add_argument("--url", default=DEFAULT_URL, help=f"the server; default: {DEFAULT_URL}")
    verb.add_argument("--once", action="store_true", help="print the numbers once and exit")
    verb.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="refresh interval; default: 1")


def run(options: argparse.Namespace, console: Console | None = None, sampler: Sampler | None = None) -> int:
    """Show the statistics until Ctrl-C, through restarts of the server.

    options: of the command. console, sampler: None for the real ones.
    Raises `NoStatistics` if the server never answered and this machine has no chips to show.
    """
    if options.interval < MIN_INTERVAL_S:
        raise ValueError(f"--interval is {options.interval:g}; it must be at least {MIN_INTERVAL_S} s.")
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
    """Return the statistics of this machine's chips; None if it has none, or `url` is another machine's."""
    if not _is_here(url):
        return None
    stats = sampler.complete(snapshot.take_snapshot())
    # The memory of this process is not of interest.
    return {**stats, "host": {**stats["host"], "process_ram": None}} if stats["chips"] else None


def _is_here(url: str) -> bool:
    return urllib.parse.urlsplit(_with_scheme(url)).hostname in ("127.0.0.1", "localhost", "::1")


def _with_scheme(url: str) -> str:
    return url if url.startswith(("http://", "https://")) else f"http://{url}"


def fetch(url: str) -> Stats:
    """Return the server's statistics. Raises `NoStatistics` if it has none."""
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


# --- tables ----------------------------------------------------------------------------------------------------------


def render(stats: Stats, note: str = "") -> RenderableType:
    """Return all of `stats` as tables; missing values are shown as unknown."""
    blocks = [
        _running(stats.get("running")),
        *_background(_list(stats, "behind")),
        *_chips(_list(stats, "chips")),
        _residents(_list(stats, "resident")),
        *_last_run(stats.get("last_run")),
        _host(stats),
        *(_text(line, style="yellow") for line in (note, *(stats.get("notes") or ())) if line),
    ]
    return Panel(Group(*blocks), title="TPU", subtitle=_text(stats.get("message") or ""), title_align="left")


def _text(value: object, style: str = "") -> Text:
    """Return a server's text without control characters that a terminal would obey, and without markup."""
    return Text("".join(char if char.isprintable() else "?" for char in str(value)), style=style)


def _list(stats: Stats, name: str) -> list[Stats]:
    return [entry for entry in stats.get(name) or () if isinstance(entry, dict)]


def _table(*columns: str) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _running(running: object) -> RenderableType:
    if not isinstance(running, dict):
        return Text("nothing is running", style="dim")
    model = f"  {running.get('model') or ''}  {format_seconds(running.get('elapsed_s'))}"
    head = _text(_stage(running), "bold") + _text(model)
    done, total = _number(running.get("done")) or 0, _number(running.get("total")) or 0
    if running.get("compiling") or not total:
        return Group(head, _text(running.get("text") or ""))
    per_unit, unit = _number(running.get("seconds_per_unit")), running.get("unit") or "part"
    pace = f"{unit} {done:g} of {total:g}" if unit != "MiB" else format_usage(done * MIB, total * MIB)
    if per_unit is not None:
        speed = f"{MIB / GB / per_unit:.2f} GB/s" if unit == "MiB" and per_unit else f"{format_seconds(per_unit)} each"
        pace += f", {speed}, {format_seconds(per_unit * max(0, total - done))} left"
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(ProgressBar(total=total, completed=min(done, total), width=24), _text(pace))
    return Group(head, grid)


def _background(programs: Sequence[Stats]) -> Iterator[RenderableType]:
    """Yield the programs that compile in the background, and those that wait."""
    lines = [
        f"{entry.get('title')} {'waits' if entry.get('elapsed_s') is None else format_seconds(entry['elapsed_s'])}"
        for entry in programs
    ]
    if lines:
        yield Text("compiling in the background  ", style="dim") + _text(", ".join(lines))


def _stage(entry: Stats) -> str:
    name = str(entry.get("stage"))
    return TITLES.get(name, name)


def _chips(chips: Sequence[Stats]) -> Iterator[RenderableType]:
    if not chips:
        return
    known = [chip for chip in chips if _number(chip.get("hbm_used")) is not None]
    used = sum(chip["hbm_used"] for chip in known) if known else None
    limit = sum(_number(chip.get("hbm_limit")) or 0 for chip in chips) or None
    yield Text(
        f"\nmemory {format_usage(used, limit)} on {len(chips)} chip{'s' if len(chips) != 1 else ''}", style="bold"
    )
    shown = list(chips)
    if len(chips) > MAX_CHIPS:
        shown = sorted(known, key=lambda chip: -chip["hbm_used"])[:NUM_FULLEST]
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
            format_usage(chip.get("hbm_used"), chip.get("hbm_limit")),
            format_bytes(chip.get("hbm_peak")),
            *(format_bytes(chip.get(name)) for name in RESERVED if has_reserved),
            format_percent(chip.get("tensorcore_utilization")),
            format_percent(chip.get("duty_cycle")),
        )
    yield table


def _residents(residents: Sequence[Stats]) -> RenderableType:
    if not residents:
        return Text("\nnothing is loaded", style="dim")
    table = _table("\nloaded", "a chip", "last used")
    for resident in residents:
        name = _text(f"{resident.get('component')} of {resident.get('model')}")
        table.add_row(name, format_bytes(resident.get("bytes_per_chip")), _ago(_number(resident.get("last_used"))))
    return table


def _last_run(run: object) -> Iterator[RenderableType]:
    if not isinstance(run, dict):
        return
    stages = [stage for stage in run.get("stages") or () if isinstance(stage, dict)]
    parts = [f"{_stage(stage)} {format_seconds(stage.get('seconds'))}" for stage in stages]
    if speed := _number(run.get("steps_per_second")):
        parts.append(f"{format_seconds(1 / speed)} a step")
    if run.get("peak_hbm") is not None:
        parts.append(f"peak {format_bytes(run['peak_hbm'])} a chip")
    if (size_bytes := _number(run.get("loaded_bytes"))) and (loading_s := _number(run.get("loading_s"))):
        parts.append(format_load_rate(size_bytes, loading_s))
    yield Text("\nlast run  ", style="dim") + _text(f"{run.get('model')}: {', '.join(parts)}")


def _host(stats: Stats) -> RenderableType:
    host = reported if isinstance(reported := stats.get("host"), dict) else {}
    ram = format_usage(host.get("ram_used"), host.get("ram_total"))
    line = f"CPU {format_percent(host.get('cpu_percent'))}, RAM {ram}"
    if host.get("process_ram") is not None:
        line += f", of it ComfyUI {format_bytes(host['process_ram'])}"
    caches = [f"{cache.get('name')} {format_bytes(cache.get('bytes'))}" for cache in _list(stats, "caches")]
    return Text.assemble(("\nhost  ", "dim"), line, ("\ncaches  ", "dim"), _text(", ".join(caches) or UNKNOWN))


def _ago(then: float | None) -> str:
    if then is None:
        return UNKNOWN
    past_s = time.time() - then
    return "just now" if past_s < 5 else f"{format_seconds(float(round(past_s)))} ago"


# --- numbers ----------------------------------------------------------------------------------------------------------


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if 0 <= value < float("inf") else None


def format_bytes(value: object) -> str:
    number = _number(value)
    return UNKNOWN if number is None else format_size(number)


def format_usage(used: object, limit: object) -> str:
    """Return `used` of `limit` bytes as text, in one unit if it suits both; `used` alone if the limit is unknown."""
    if not _number(limit):
        return format_bytes(used)
    number, _, unit = format_bytes(used).partition(" ")
    return f"{number if format_bytes(limit).endswith(f' {unit}') else format_bytes(used)} of {format_bytes(limit)}"


def format_percent(value: object) -> str:
    number = _number(value)
    return UNKNOWN if number is None else f"{number:.0f} %"


def format_seconds(value: object) -> str:
    number = _number(value)
    if number is None:
        return UNKNOWN
    if number < 59.95:
        return f"{number:.{3 if number < 0.0995 else 1}f} s"
    minutes, rest = divmod(round(number), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
