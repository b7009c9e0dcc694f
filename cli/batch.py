"""The command batch: runs a workflow once for each line of a file, on this machine or on a fleet."""

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..distributed.fleet.driver import BatchNumbers, Driver, View
from ..distributed.fleet.jobs import JobTemplate, read_jobs
from ..distributed.fleet.local import LocalWorker
from ..distributed.fleet.messages import Workers
from ..distributed.fleet.store import DONE, FAILED, JOURNAL, RESULTS, BatchStore
from ..nodes.declare import Folders
from ..nodes.headless.runner import TerminalContext
from .common_arguments import add_workflow, load_workflow, workflow_folders

# Workers that are listed; further ones are counted.
MAX_WORKERS = 24
_EVERY_S = 0.5


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_workflow(verb)
    verb.add_argument(
        "--set-from", type=Path, required=True, metavar="FILE.jsonl",
        help='one job per line: the inputs that it sets, such as {"1.prompt": "a cat", "2.seed": 7}',
    )  # fmt: skip
    verb.add_argument(
        "--out", required=True, metavar="DIR",
        help="folder or fsspec address (gs://bucket/folder) of results and state; a second call resumes",
    )  # fmt: skip
    verb.add_argument(
        "--ray", metavar="ADDRESS", help="a Ray cluster instead of this machine: auto, HOST:6379 or ray://HOST:10001"
    )
    verb.add_argument(
        "--attempts", type=int, default=3, metavar="N", help="set a job aside after N failures; default: 3"
    )
    verb.add_argument("--retry-failed", action="store_true", help="retry the jobs that were set aside")


def run(options: argparse.Namespace) -> int:
    """Run the command; return 0 when all jobs are done, 1 when jobs were set aside."""
    if options.attempts < 1:
        raise ValueError(f"--attempts is {options.attempts}; it must be at least 1.")
    # Each job's output nodes write into a folder of that job; this one is a placeholder.
    folders = workflow_folders(options, Path(options.out) / RESULTS / "of-a-job")
    recipe = JobTemplate(load_workflow(options), folders, TerminalContext(Folders()))
    try:
        # Lines end only at newlines: `splitlines` would also split within JSON strings. Some editors write a byte
        # order mark first.
        lines = options.set_from.read_text("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"the file {options.set_from} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{options.set_from} cannot be read as UTF-8 text ({error}).") from None
    jobs = read_jobs(recipe, lines, str(options.set_from))
    store = BatchStore(options.out)
    with store.open_as_driver():
        if options.retry_failed:
            for job in store.jobs[FAILED] & {job.id for job in jobs}:
                store.forget(job)
        view = TerminalView(Console())
        view.line(f"{len(jobs)} jobs, results in {store.location}")
        workers = None
        try:
            workers = _workers(options, store)
            ended = Driver(recipe, jobs, store, workers, options.attempts, view).run()
        except KeyboardInterrupt:
            view.line(f"stopped: {len(store.jobs[DONE])} jobs are done. The same command resumes here.")
            raise
        finally:
            view.close()
            if workers is not None:
                workers.close()
    print(format_summary(ended, store))
    return 1 if ended.failed else 0


def _workers(options: argparse.Namespace, store: BatchStore) -> Workers:
    if options.ray:
        from ..distributed.fleet.cluster import RayWorkers

        return RayWorkers(options.ray)
    logs = store.root / "logs" if store.root else Path(tempfile.mkdtemp(prefix="comfyui-tpu-logs-"))
    return LocalWorker(logs)


def format_summary(ended: BatchNumbers, store: BatchStore) -> str:
    """Return a sentence about the numbers of a batch."""
    text = f"{ended.done} of {ended.total} jobs are done"
    if ended.before:
        text += f", {ended.before} of them decided by earlier calls"
    if ended.failed:
        text += (
            f"; {ended.failed} are set aside, with their errors in {store.location}/failed: --retry-failed tries "
            "them again"
        )
    return f"{text}. A line for each is in {store.location}/{JOURNAL}."


class TerminalView(View):
    """A view in the terminal: a table that is overwritten, and a line for each event. Elsewhere only the lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = 0.0
        if self._live:
            self._live.start()

    def line(self, text: str) -> None:
        """Print a line for an event."""
        self._console.print(Text(text), soft_wrap=True)

    def show(self, numbers: BatchNumbers) -> None:
        """Redraw the table, at most twice a second."""
        if self._live and time.monotonic() > self._shown + _EVERY_S:
            self._shown = time.monotonic()
            self._live.update(render(numbers), refresh=True)

    def close(self) -> None:
        """Remove the table."""
        if self._live:
            self._live.stop()


def render(progress: BatchNumbers) -> RenderableType:
    """Return the numbers of a batch, and the state of each worker, as a table."""
    running = [worker for worker in progress.workers.values() if worker.job is not None]
    numbers = [f"{progress.done} done", f"{len(running)} running", f"{progress.waiting} waiting"]
    if progress.failed:
        numbers.append(f"{progress.failed} set aside")
    if progress.per_hour:
        hours = (progress.waiting + len(running)) / progress.per_hour
        numbers.append(f"{progress.per_hour:.0f} an hour, {hours * 60:.0f} min to go")
    decided = progress.done + progress.failed
    head = Table.grid()
    head.add_row(ProgressBar(total=progress.total, completed=decided, width=60))
    head.add_row(Text(", ".join(numbers)))
    parts: list[RenderableType] = [head]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "line", "for", "does"):
        table.add_column(name)
    for name, doing in list(progress.workers.items())[:MAX_WORKERS]:
        if doing.job is None:
            table.add_row(name, "", "", "waits" if doing.is_here else "is started again")
        else:
            elapsed = f"{time.monotonic() - doing.since:.0f} s"
            table.add_row(name, str(doing.job.line), elapsed, Text(str(doing.status)))
    parts.append(table)
    if (more := len(progress.workers) - MAX_WORKERS) > 0:
        parts.append(Text(f"and {more} more workers"))
    return Group(*parts)
