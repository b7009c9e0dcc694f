"""Measure the cost of the monitor for a running workflow: paired runs with and without polling clients.

Run: python benchmarks/host/monitor.py [--pairs 80] [--clients 10] [--steps 100], on an otherwise idle machine. It
starts its own ComfyUI server with the tiny Wan 2.1 on eight simulated chips. Runs and clients share the cores, so the
cost is higher than on a TPU machine.
"""

import argparse
import contextlib
import http.client
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from comfyui_tpu.tests.support.comfyui_server import Server, prepare, tiny_workflow

# How often an open tab asks, at its default setting.
INTERVAL_S = 1.0
TARGET = 1.02
# Over how long the idle server's load is measured.
IDLE_S = 20.0
RESAMPLINGS = 10_000


class Clients:
    """Polls `GET /tpu/stats` from `count` threads, out of step with each other as people's tabs are.

    Each keeps its connection, as a browser does: the clients share the server's cores here, nowhere else.
    """

    def __init__(self, server: Server, count: int) -> None:
        self.latencies_s: list[float] = []
        self._port = server.port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._poll, daemon=True) for _ in range(count)]

    def _poll(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(connection):
            self._stop.wait(random.random() * INTERVAL_S)
            while not self._stop.is_set():
                begun = time.perf_counter()
                connection.request("GET", "/tpu/stats")
                connection.getresponse().read()
                self.latencies_s.append(time.perf_counter() - begun)
                self._stop.wait(INTERVAL_S)

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def run_s(server: Server, steps: int) -> float:
    """Seconds of one run by the server's own clock. Every run has a seed of its own: ComfyUI caches equal ones."""
    seed = random.randrange(2**31)
    entry = server.run(tiny_workflow("benchmark", num_inference_steps=steps, seed=seed))
    moments = {name: data["timestamp"] for name, data in entry["status"]["messages"] if "timestamp" in data}
    return (moments["execution_success"] - moments["execution_start"]) / 1000


def cpu_share(server: Server, clients: int, span_s: float) -> float:
    """Share of one core that the idle server uses; steadier than run times where other programs compete."""
    assert server.process  # it was started
    process = psutil.Process(server.process.pid)
    with Clients(server, clients):
        time.sleep(5 * INTERVAL_S)  # what the last run left to do
        before = sum(process.cpu_times()[:2])
        time.sleep(span_s)
        return (sum(process.cpu_times()[:2]) - before) / span_s


def measure(server: Server, num_pairs: int, clients: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of a run with clients and of its twin without; which comes first alternates."""
    run_s(server, steps)  # compiles
    pairs, latencies_s = [], []
    for index in range(num_pairs):
        seconds = {}
        for is_polled in (index % 2 == 0, index % 2 != 0):
            with Clients(server, clients if is_polled else 0) as polling:
                seconds[is_polled] = run_s(server, steps)
            latencies_s += polling.latencies_s
        pairs.append((seconds[True], seconds[False]))
        print(f"pair {index + 1}: {seconds[True]:.2f} s with {clients} clients, {seconds[False]:.2f} s without, "
              f"ratio {seconds[True] / seconds[False]:.4f}", flush=True)  # fmt: skip
    before, polled, after = (100 * cpu_share(server, count, IDLE_S) for count in (0, clients, 0))
    print(f"the idle server uses {polled:.2f} % of one core with {clients} clients, "
          f"{before:.2f} % before and {after:.2f} % after")  # fmt: skip
    latencies_ms = [1000 * one for one in sorted(latencies_s)]
    print(f"{len(latencies_ms)} answers: median {statistics.median(latencies_ms):.1f} ms, "
          f"99 % within {latencies_ms[int(len(latencies_ms) * 0.99)]:.1f} ms")  # fmt: skip
    return pairs


def report(pairs: Sequence[tuple[float, float]]) -> float:
    """Prints what the pairs say together, and gives the median of their ratios."""
    ratios, (polled, alone) = [a / b for a, b in pairs], map(sum, zip(*pairs, strict=True))
    median = statistics.median(ratios)
    resampled = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLINGS))
    low, high = (resampled[int(len(resampled) * share)] for share in (0.025, 0.975))
    print(f"all runs together {polled / alone:.4f}, {polled:.0f} s of them polled")
    print(f"ratio with/without: median {median:.4f} (95 % of resamplings {low:.4f} to {high:.4f}), "
          f"{min(ratios):.4f} to {max(ratios):.4f}, target below {TARGET}")  # fmt: skip
    return median


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when the median ratio misses the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        server = prepare(Path(folder), environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
        server.start()
        try:
            pairs = measure(server, options.pairs, options.clients, options.steps)
        finally:
            server.stop()
    return 0 if report(pairs) < TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
