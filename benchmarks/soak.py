"""Run hundreds of prompts under load, and check that each ends well and leaves nothing behind.

Run: python benchmarks/soak.py [--prompts 300] [--seed 0] [--faults]. Two clients alternate all families on eight
simulated chips with memory for one of them. Prompts are cancelled at any moment, and models are unloaded from three
places at once. It runs in a real ComfyUI server or, without one (COMFYUI_PATH), in this process. Prints one line whose
numbers must be zero, and exits with 1 otherwise. `--seed` repeats the same prompts, cancels and unloads.

With `--faults` every tenth prompt meets a fault, in turn: a full disk, a damaged cache, a cancel, replaced or truncated
weights, an untrusted file, text or tokenizer (`tests/support/faults.py`). All others must return the frames and write
the pixels from before the first fault. Meanwhile another process requests the page ten times a second, and that of an
idle server: answers that are slow in both are due to the machine. It mounts small disks, as root or by `unshare -rm`.
"""

import argparse
import ctypes
import gc
import io
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from comfyui_tpu.tests.support.comfyui_server import COMFYUI, FLAGS, PACK, prepare

# As for the servers of tests, and before JAX is imported, which only a soak in this process does.
for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": FLAGS,
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}.items():
    os.environ.setdefault(_name, _value)

from comfyui_tpu.tests.support.citizen import BUDGET_MIB, CITIZEN_PACK, EXAMPLES, PICTURE, Listener, workflow  # noqa: E402
from comfyui_tpu.tests.support.faults import FAULTS, Ended, Site, run  # noqa: E402

MIB = 2**20
CLIENTS = 2
# Different pictures of a family; each must come out the same every time.
SEEDS = 3
# Of the prompts: how many are cancelled, and during how many three places unload.
CANCELS, UNLOADS = 0.2, 0.15
# After so many prompts everything is unloaded and measured.
ROUND = 5
# So much may the host's memory grow over half of a soak, unloaded and swept: fragments, and ComfyUI's history.
NOISE_MIB = 32
# Of so many prompts one meets a fault; the page answers within so many milliseconds all the time.
FAULT_EVERY, ANSWER_MS = 10, 250


# --- what happens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt and what happens meanwhile. Moments count in times that a prompt of its family takes alone."""

    family: str
    seed: int
    cancel_at: float | None
    unload_at: float | None
    fault: str | None = None


def plan_faults(count: int, seed: int, every: int = FAULT_EVERY) -> list[Prompt]:
    """The prompts of a soak of which one of so many meets a fault, in turn; nothing happens to the others."""
    dice, kinds = random.Random(seed), itertools.cycle(FAULTS)
    prompts = [replace(one, cancel_at=None, unload_at=None) for one in plan(count, seed)]
    for start in range(0, count - every + 1, every):
        place = start + dice.randrange(every)
        prompts[place] = replace(prompts[place], fault=next(kinds))
    return prompts


def plan(count: int, seed: int) -> list[Prompt]:
    """The prompts of a soak; families take turns."""
    dice = random.Random(seed)
    families = itertools.cycle(EXAMPLES)
    return [
        Prompt(
            family=next(families),
            seed=dice.randrange(SEEDS),
            cancel_at=dice.uniform(0, 2) if dice.random() < CANCELS else None,
            unload_at=dice.uniform(0, 2) if dice.random() < UNLOADS else None,
        )
        for _ in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Left:
    """Bytes that are in use when everything is unloaded."""

    on_devices: int
    on_host: int  # of the process alone
    of_files: int = 0  # pages of mapped files, which the kernel gives up and reads again as it likes


# --- where it happens -------------------------------------------------------------------------------------------------


class Place(Protocol):
    """Where prompts run, one at a time, of clients who do not wait for each other."""

    @property
    def unloads(self) -> Sequence[Callable[[], object]]: ...

    def run(self, client: int, graph: dict) -> Ended: ...

    def meet(self, client: int, prompt: Prompt, graph: dict, wanted: str, alone_s: float) -> str:
        """Runs a prompt that meets its fault, and says what is wrong with how it ended."""
        ...

    def cancel(self) -> None:
        """Cancels whatever runs now."""

    def settle(self) -> Left:
        """Unloads everything and looks at what is left."""
        ...

    def compilations(self) -> int:
        """Programs that XLA compiled so far."""
        ...


class InServer:
    """A ComfyUI server with the pack, and two pages that watch it."""

    def __init__(self, base: Path, cache: Path, stack: ExitStack) -> None:
        server = prepare(
            base,
            cache=cache,
            packs={"citizen": CITIZEN_PACK},
            environment={"COMFYUI_TPU_HBM_GIB": str(BUDGET_MIB / 1024)},
            # ComfyUI keeps no outputs: every prompt runs every stage.
            arguments=("--cache-none", "--preview-method", "auto"),
        )
        stack.callback(server.stop)
        server.start()
        self._server = self.server = server
        self._pages = [stack.enter_context(Listener(server)) for _ in range(CLIENTS)]
        self.unloads = (
            lambda: server.get("/citizen/unload"),
            lambda: server.get("/citizen/unload_here"),
            lambda: server.post("/tpu/free", None),
        )

    def run(self, client: int, graph: dict) -> Ended:
        return run(self._pages[client], self._server, graph)

    def meet(self, client: int, prompt: Prompt, graph: dict, wanted: str, alone_s: float) -> str:
        dice = random.Random(f"{prompt}")
        page, server = self._pages[client], self._server
        return FAULTS[prompt.fault or ""](
            Site(server=server, page=page, dice=dice, graph=graph, wanted=wanted, alone_s=alone_s)
        )

    def cancel(self) -> None:
        self._server.post("/interrupt", None)

    def settle(self) -> Left:
        self._server.get("/citizen/unload")
        chips = self._server.get("/citizen/stats")["chips"]
        self._server.get("/citizen/memory")  # gives back what it can
        return Left(on_devices=sum(chip["hbm_used"] for chip in chips), **read_memory(self._server.process.pid))

    def compilations(self) -> int:
        return self._server.get("/citizen/compilations")["backend"]


class Cancelled(Exception):
    pass


class InProcess:
    """The same nodes without ComfyUI."""

    def __init__(self, base: Path, cache: Path, stack: ExitStack) -> None:
        os.environ |= {"COMFYUI_TPU_CACHE": str(cache), "COMFYUI_TPU_HBM_GIB": str(BUDGET_MIB / 1024)}
        from comfyui_tpu.nodes.declare import Folders, Input, Node, by_id
        from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
        from comfyui_tpu.tpu_runtime import api
        from comfyui_tpu.tpu_runtime.cache import xla_cache
        from comfyui_tpu.tpu_runtime.monitor import snapshot

        image = Input(name="image", type="IMAGE", tooltip="Frames.")
        digester = Node(
            id="CitizenDigest", title="Digest", category="test", description="",
            inputs=(image,), run=_digest, is_output=True,
        )  # fmt: skip
        self._table = {**HEADLESS_NODES, **by_id([digester])}
        self._folders = Folders(input=PICTURE.parent)
        self._free, self._stats, self._counter = (
            api.free_memory,
            snapshot.take_snapshot,
            xla_cache.count_compilations(),
        )
        self._turn, self._is_cancelled = threading.Lock(), threading.Event()
        self.unloads = (self._free,) * 3

    def run(self, client: int, graph: dict) -> Ended:
        from comfyui_tpu.nodes.headless.runner import TerminalContext, run_workflow

        is_cancelled = self._is_cancelled

        class Host(TerminalContext):
            def check_cancelled(self) -> None:
                if is_cancelled.is_set():
                    raise Cancelled

        with self._turn:
            is_cancelled.clear()
            try:
                results = run_workflow(graph, Host(self._folders, stream=io.StringIO()), self._table)
            except Cancelled:
                return Ended(is_cancelled=True)
            except (RuntimeError, ValueError, OSError) as error:
                return Ended(error=f"{type(error).__name__}: {error}")
        return Ended(digest=results["digest"][0])

    def cancel(self) -> None:
        self._is_cancelled.set()

    def settle(self) -> Left:
        self._free()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        chips = self._stats()["chips"]
        return Left(on_devices=sum(chip["hbm_used"] for chip in chips), **read_memory(os.getpid()))

    def compilations(self) -> int:
        return self._counter.compiled


def _digest(host: Any, image: Any) -> tuple[str]:
    import hashlib

    return (hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest(),)


def read_memory(pid: int) -> dict[str, int]:
    """Return `Left`'s bytes of a process on the host, from its status in /proc."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anonymous, shared, mapped = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "RssFile"))
    return {"on_host": anonymous + shared, "of_files": mapped}


# --- the soak ---------------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """Runs prompts in a place and counts what is wrong."""

    place: Place
    alone_s: dict[str, float] = field(default_factory=dict)  # what a prompt of each family takes
    digests: dict[tuple[str, int], str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    cancelled: int = 0
    unloads: int = 0
    compiled: int = 0
    saves: bool = False  # whether prompts write their files too
    met: list[tuple[float, float, Prompt]] = field(default_factory=list)  # when each prompt was asked for, and ended

    def warm(self) -> None:
        """Every family twice, undisturbed: compiles what there is to compile, then takes the time."""
        self._warm(plan(2 * len(EXAMPLES), seed=0))

    def warm_all(self) -> None:
        """Every family with every seed, undisturbed: what all later prompts must give."""
        seeds = range(SEEDS)
        self._warm(
            [Prompt(family=one, seed=seed, cancel_at=None, unload_at=None) for seed in seeds for one in EXAMPLES]
        )

    def _warm(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            begun = time.monotonic()
            self._check(prompt, self.place.run(0, self._graph(prompt)))
            self.alone_s[prompt.family] = time.monotonic() - begun
        self.compiled = self.place.compilations()

    def _graph(self, prompt: Prompt) -> dict:
        return workflow(prompt.family, seed=prompt.seed, saves=self.saves)

    def run(self, prompts: Sequence[Prompt]) -> None:
        """In rounds: the clients take turns with the prompts of one, then everything is unloaded and measured."""
        with ThreadPoolExecutor(4 * CLIENTS) as pool:
            for start in range(0, len(prompts), ROUND):
                mine = prompts[start : start + ROUND]
                clients = [pool.submit(self._client, pool, number, mine[number::CLIENTS]) for number in range(CLIENTS)]
                for client in clients:
                    client.result()
                self.left.append(self.place.settle())

    def _client(self, pool: ThreadPoolExecutor, number: int, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            happening = []
            if prompt.cancel_at is not None:
                happening.append(pool.submit(self._later, prompt, prompt.cancel_at, self.place.cancel))
            if prompt.unload_at is not None:
                happening += [pool.submit(self._later, prompt, prompt.unload_at, one) for one in self.place.unloads]
                self.unloads += len(self.place.unloads)
            begun = time.time()
            if prompt.fault is None:
                self._check(prompt, self.place.run(number, self._graph(prompt)))
            else:
                self._meet(number, prompt)
            self.met.append((begun, time.time(), prompt))
            for one in happening:
                if error := one.exception():
                    self.failures.append(f"{prompt}: an unload or a cancel: {error!r}")

    def _meet(self, number: int, prompt: Prompt) -> None:
        wanted = self.digests[prompt.family, prompt.seed]
        if wrong := self.place.meet(number, prompt, self._graph(prompt), wanted, self.alone_s[prompt.family]):
            self.failures.append(f"{prompt}: {wrong}")

    def _later(self, prompt: Prompt, moment: float, action: Callable[[], object]) -> None:
        time.sleep(moment * self.alone_s[prompt.family])
        action()

    def _check(self, prompt: Prompt, ended: Ended) -> None:
        self.cancelled += ended.is_cancelled
        if ended.error:
            self.failures.append(f"{prompt}: {ended.error}")
        elif not ended.is_cancelled:
            expected = self.digests.setdefault((prompt.family, prompt.seed), ended.digest)
            if ended.digest != expected:
                self.failures.append(f"{prompt}: its frames differ from those of an earlier run")

    @property
    def grown_mib(self) -> float:
        """By how much the host's memory grew in the second half: the median slope between its measurements."""
        return self.slope_mib * ROUND * (len(self._late) - 1)

    @property
    def slope_mib(self) -> float:
        """MiB a prompt, in the second half."""
        late = [left.on_host / MIB for left in self._late]
        pairs = itertools.combinations(enumerate(late), 2)
        slopes = [(later - earlier) / (j - i) for (i, earlier), (j, later) in pairs]
        return statistics.median(slopes) / ROUND if slopes else 0.0

    @property
    def _late(self) -> list[Left]:
        return self.left[len(self.left) // 2 :]

    def verdict(self) -> dict[str, int]:
        """What must be zero."""
        return {
            "failures": len(self.failures),
            "MiB grown on the host": round(self.grown_mib) if self.grown_mib > NOISE_MIB else 0,
            "live device bytes after unloading": max(left.on_devices for left in self.left),
            "recompiles": self.place.compilations() - self.compiled,
        }


class Watch:
    """Another process that asks a server's page all the time, and that of an idle one beside it."""

    def __init__(self, place: InServer, base: Path, stack: ExitStack) -> None:
        beside = prepare(base)
        stack.callback(beside.stop)
        beside.start()
        self._urls = [place.server.url, beside.url]
        self._process = subprocess.Popen(
            [sys.executable, str(PACK / "benchmarks/host/answers.py"), *self._urls],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(self._process.kill)

    def ends(self) -> "Answers":
        said, _ = self._process.communicate()
        mine, beside = ([one for one in json.loads(said) if one["url"] == url] for url in self._urls)
        return Answers(mine=mine, beside=beside)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What `benchmarks/host/answers.py` found of the server, and of the idle one `beside` it."""

    mine: list[dict[str, Any]]
    beside: list[dict[str, Any]]

    @property
    def late(self) -> list[tuple[float, float]]:
        """Moments and seconds of answers of the server that were late, or did not come."""
        return [(at, taken) for one in self.mine for at, taken in one["slow"] if taken * 1000 > ANSWER_MS]

    def report(self, met: Sequence[tuple[float, float, Prompt]]) -> str:
        lines = []
        for name, found in (("the server", self.mine), ("the idle server", self.beside)):
            lines += [
                f"{name}, GET {one['path']}: {one['answers']} answers, {one['failed']} failed, "
                f"median {one['median_ms']} ms, p99 {one['p99_ms']} ms, worst {one['worst_ms']} ms, "
                f"{sum(taken * 1000 > ANSWER_MS for _, taken in one['slow'])} over {ANSWER_MS} ms"
                for one in found
            ]
        for at, taken in sorted(self.late, key=lambda one: -one[1])[:8]:
            during = [
                prompt.fault or prompt.family for begun, ended, prompt in met if begun <= at + taken and at <= ended
            ]
            lines.append(
                f"  {taken:.3f} s at {time.strftime('%H:%M:%S', time.gmtime(at))}, during: {', '.join(during)}"
            )
        return "\n".join(lines)


def soak_faults(options: argparse.Namespace, base: Path, cache: Path) -> int:
    """The soak with faults; prints what it found, and returns 1 where a number is not zero."""
    begun = time.monotonic()
    with ExitStack() as stack:
        place = InServer(base / "server", cache, stack)
        soak = Soak(place, saves=True)
        soak.warm_all()
        watch = Watch(place, base / "beside", stack)
        soak.run(plan_faults(options.prompts, options.seed, options.every))
        answers, log = watch.ends(), place.server.log.read_text(errors="replace")
        verdict = soak.verdict() | {
            f"answers over {ANSWER_MS} ms": len(answers.late) + sum(one["failed"] for one in answers.mine)
        }
    recompiles = verdict.pop("recompiles")
    print("\n".join(soak.failures), file=sys.stderr)
    if soak.failures:
        print(log[-20_000:], file=sys.stderr)
    late, mapped = [round(left.on_host / MIB) for left in soak.left], [round(left.of_files / MIB) for left in soak.left]
    print(answers.report(soak.met))
    print(f"The server after each round of {ROUND}, unloaded, MiB: {late}; {soak.slope_mib:+.2f} MiB a prompt")
    print(f"Pages of files in its memory, MiB: {mapped}")
    faults = sum(one.fault is not None for *_, one in soak.met)
    print(
        f"{options.prompts} prompts of {len(EXAMPLES)} families, {CLIENTS} clients, {faults} met one of {len(FAULTS)} "
        f"faults, {recompiles} recompiles, seed {options.seed}, {time.monotonic() - begun:.0f} s: "
        f"{', '.join(f'{value} {name}' for name, value in verdict.items())} "
        f"({soak.grown_mib:+.1f} MiB measured over half of it; up to {NOISE_MIB} are noise)"
    )
    return 1 if any(verdict.values()) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Many prompts, cancels and unloads at once; all numbers must be zero.")
    parser.add_argument("--prompts", type=int, default=300, metavar="N", help="at least 20 (300)")
    parser.add_argument("--seed", type=int, default=0, help="which prompts, cancels and unloads (0)")
    parser.add_argument("--in-process", action="store_true", help="without ComfyUI, as where there is none")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="a cache that is kept (default: a new one)")
    parser.add_argument("--faults", action="store_true", help="some prompts meet a fault; the page is watched")
    parser.add_argument("--every", type=int, default=FAULT_EVERY, metavar="N", help="the N-th prompt meets one (10)")
    options = parser.parse_args(arguments)
    if options.prompts < 2 * ROUND:
        parser.error(f"--prompts is {options.prompts}; it must be at least {2 * ROUND}.")
    kind: Callable[[Path, Path, ExitStack], Any] = (
        InProcess if options.in_process or not (COMFYUI / "main.py").is_file() else InServer
    )
    begun = time.monotonic()
    if options.faults:
        with tempfile.TemporaryDirectory(prefix="soak-") as base:
            cache = options.cache or Path(base, "cache")
            return soak_faults(options, Path(base), cache)
    with tempfile.TemporaryDirectory(prefix="soak-") as base, ExitStack() as stack:
        place: Any = kind(Path(base), options.cache or Path(base, "cache"), stack)
        soak = Soak(place)
        soak.warm()
        soak.run(plan(options.prompts, options.seed))
        verdict = soak.verdict()
    for failure in soak.failures:
        print(failure, file=sys.stderr)
    print(
        f"{options.prompts} prompts of {len(EXAMPLES)} families, {CLIENTS} clients, {soak.cancelled} cancelled, "
        f"{soak.unloads} unloads, seed {options.seed}, {'a ComfyUI server' if kind is InServer else 'in process'}, "
        f"{time.monotonic() - begun:.0f} s: {', '.join(f'{value} {name}' for name, value in verdict.items())} "
        f"({soak.grown_mib:+.1f} MiB measured over half of it; up to {NOISE_MIB} are noise)"
    )
    return 1 if any(verdict.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
