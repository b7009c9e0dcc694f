"""Several hosts on one machine: a process that leads (`hosts_driver`) and followers, each kept running by
`comfyui-tpu follow`, with simulated chips.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from .patience import PATIENCE_S, until

ENDS_S = 60  # no failure may take longer to be told
# XLA divides a product among as many threads as the CPU has or the process has chips, and the order of a sum follows.
_THREADS = {"PJRT_NPROC": str(max(8, os.cpu_count() or 1))}
_FOLLOW = "import sys; from comfyui_tpu.cli.main import command; sys.exit(command())"
_DRIVER = "comfyui_tpu.tests.support.hosts_driver"


def flags(chips: int) -> str:
    own = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return " ".join([f"--xla_force_host_platform_device_count={chips}", *own])


def follow_command(port: int, process: int, count: int) -> list[str]:
    where = ["--coordinator", f"127.0.0.1:{port}", "--process", str(process), "--of", str(count)]
    return [sys.executable, "-c", _FOLLOW, "follow", *where]


_PORTS = itertools.count(10_000 + os.getpid() % 200 * 100, 2)


def free_port() -> int:
    """A port that is free with the one after it, and that neither another worker of the tests takes nor a connection of
    anybody: those that Linux chooses begin at 32768.
    """
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError


class Lead:
    """A process that takes requests and says what happens."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.heard: list[dict[str, Any]] = []
        self.log = folder / "leader.log"
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log.open("a"), text=True, cwd=folder,
        )  # fmt: skip
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.put(json.loads(line))

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def next(self, *names: str, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next thing said that has one of these names; fails where it takes too long."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                one = self.said.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {names} within {within_s} s; {self.heard[-8:]}\n{self.tail()}") from None
            self.heard.append(one)
            if set(names) & set(one):
                return one
            assert "ended" not in one, one

    def ask(self, **request: Any) -> dict[str, Any]:
        """What a request ended in."""
        self.send(**request)
        return self.next("ended")

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def texts(self) -> list[str]:
        return [one["text"] for one in self.heard if "text" in one and "ended" not in one]


class Hosts:
    """`count` hosts with `chips` each, that use `cache`. Followers are not started yet."""

    def __init__(self, folder: Path, cache: Path, count: int, chips: int) -> None:
        self.folder, self.count, self.port = folder, count, free_port()
        self.environment = {"COMFYUI_TPU_CACHE": str(cache), "XLA_FLAGS": flags(chips), **_THREADS}
        self.followers: dict[int, subprocess.Popen] = {}
        self.lead = Lead([*self._follow(0), "--", sys.executable, "-m", _DRIVER], folder, self.environment)

    def _follow(self, process: int) -> list[str]:
        return follow_command(self.port, process, self.count)

    def follow(self, process: int, **environment: str) -> None:
        """Starts a follower."""
        with self.log(process).open("a") as log:
            self.followers[process] = subprocess.Popen(
                self._follow(process), env={**os.environ, **self.environment, **environment}, stderr=log, stdout=log
            )

    def log(self, process: int) -> Path:
        return self.folder / f"follower{process}.log"

    def at_work(self, process: int) -> psutil.Process:
        """The process that does a follower's part, below the one that keeps it running."""
        found = until(lambda: psutil.Process(self.followers[process].pid).children())
        return found[0]

    def end(self) -> None:
        processes = [self.lead.process, *self.followers.values()]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    child.send_signal(signal.SIGCONT)
            process.wait(timeout=PATIENCE_S)


@contextlib.contextmanager
def running(folder: Path, cache: Path, count: int, chips: int, *, late: bool = False) -> Iterator[Hosts]:
    hosts = Hosts(folder, cache, count, chips)
    try:
        for process in range(1, count):
            if not late:
                hosts.follow(process)
        yield hosts
    finally:
        hosts.end()


@contextlib.contextmanager
def alone(folder: Path, cache: Path, chips: int) -> Iterator[Lead]:
    """One process with as many chips, that sums over them as several processes do: the order of a sum is part of it."""
    alone = {"COMFYUI_TPU_TEST_ALONE": str(free_port())}
    environment = {"COMFYUI_TPU_CACHE": str(cache), "XLA_FLAGS": flags(chips), **alone, **_THREADS}
    lead = Lead([sys.executable, "-m", _DRIVER], folder, environment)
    try:
        yield lead
    finally:
        lead.process.terminate()
        lead.process.wait(timeout=PATIENCE_S)
