"""Hostile peers for a minute, against `serve`, `follow` and a leader in the middle of a stage, at the same time: memory
stays, the stages end right to the bit, and every true member stays. Most of the minute is pauses.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from comfyui_tpu.distributed.fleet.serve import Server, StageService
from comfyui_tpu.distributed.multihost import distributed, handshake
from comfyui_tpu.distributed.multihost.coordinator import HostGroup
from comfyui_tpu.distributed.multihost.follower import Follower
from comfyui_tpu.distributed.multihost.leader import Leader
from comfyui_tpu.distributed.multihost.rank import HostRank
from comfyui_tpu.distributed.remote import client
from comfyui_tpu.distributed.rpc import auth
from comfyui_tpu.distributed.rpc.connection import HandshakeRejected
from comfyui_tpu.tests.distributed.rpc import hostile_peers
from comfyui_tpu.tests.support.host import Host
from comfyui_tpu.tests.support.hosts import free_port
from comfyui_tpu.tests.support.patience import PATIENCE_S, until

STEP_S, MOST_GROWTH = 0.25, 128 * 2**20  # of a process that does other things too; unbounded, it was 16 GiB


def turn(state: torch.Tensor, step: int) -> torch.Tensor:
    return torch.sin(3 * state + step)


def expected_state(steps: int) -> torch.Tensor:
    """What a stage of so many steps ends with where nobody disturbs it."""
    state = torch.linspace(0, 1, 4096)
    for step in range(steps):
        state = turn(state, step)
    return state


class Minute(StageService):
    """A stage that takes steps until it may end."""

    def __init__(self, may_end: threading.Event) -> None:
        super().__init__()
        self._may_end, self.steps = may_end, 0

    def run(self, verb: str, given: Any, asker: Any) -> torch.Tensor:
        state = expected_state(0)
        while not self._may_end.wait(STEP_S):
            asker.check_cancelled()
            state, self.steps = turn(state, self.steps), self.steps + 1
            asker.step(self.steps, 1000, "step")
        return state


class Slice:
    """A leader and its followers, in this process and without chips."""

    def __init__(self, count: int) -> None:
        address = auth.Address(host="127.0.0.1", port=free_port())
        self.places = [HostRank(process=process, count=count, address=address) for process in range(count)]
        self.ends: list[str] = []
        self.leader = Leader(self.places[0], lambda sentence, stuck: self.ends.append(sentence))
        self.followers = [Follower(place) for place in self.places[1:]]
        self.refusals = 0

    def follow(self, follower: Follower) -> None:
        """Until it is taken in: as `comfyui-tpu follow`, which is started again whenever it is refused."""
        while True:
            try:
                return follower.join()
            except HandshakeRejected:
                self.refusals += 1

    def start_followers(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.follow, args=(one,), daemon=True) for one in self.followers]
        for thread in threads:
            thread.start()
        return threads

    def join(self, threads: list[threading.Thread]) -> None:
        with self.leader.join(Host()):
            for thread in threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()

    def stage(self, may_end: threading.Event) -> tuple[int, list[torch.Tensor]]:
        """A stage of this leader and its one follower; its steps, and what both ended with."""
        follower, ended = self.followers[0], []

        def lead() -> None:
            state, step, goes_on = expected_state(0), 0, True
            while goes_on:
                assert self.leader.barrier("step", step)
                state = turn(self.leader.broadcast(state), step)
                step += 1
                goes_on = self.leader.broadcast(not may_end.wait(STEP_S))
            ended.append((step, state))

        def follow() -> None:
            state, step, goes_on = None, 0, True
            while goes_on:
                assert follower.barrier("step", step)
                state = turn(follower.broadcast(torch.zeros(0)), step)
                step += 1
                goes_on = follower.broadcast(True)
            ended.append((step, state))

        def attempt(host: HostGroup, work: Callable[[], None]) -> None:
            with host.attempt(lambda error: "failed"):
                work()

        following = threading.Thread(target=attempt, args=(follower, follow))
        following.start()
        with self.leader.stage("denoise", {}, Host()):
            attempt(self.leader, lead)
        following.join(PATIENCE_S)
        (steps, one), (others, other) = ended
        assert steps == others
        return steps, [one, other]

    def stays(self) -> bool:
        there = [member.process for member in self.leader.peers()]
        return not self.ends and self.leader.lost is None and there == list(range(1, len(self.places)))


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Slice]]:
    made: list[Slice] = []
    ends: list[str] = []
    monkeypatch.setattr(logging.getLogger("comfyui_tpu"), "handlers", [])  # followers add one each
    monkeypatch.setattr(distributed, "initialize", lambda place: None)
    monkeypatch.setattr(Follower, "_end", lambda self, why: ends.append(why))
    monkeypatch.setattr(handshake, "apply_environment", lambda environment: None)
    monkeypatch.setattr(auth, "check_listed", lambda address: None)

    def make(count: int) -> Slice:
        made.append(Slice(count))
        return made[-1]

    yield make
    monkeypatch.setattr(Leader, "_lost", lambda self, why: None)
    for one in made:
        one.leader._door.close()
    # Before its way to end is the real one again.
    until(lambda: all(follower._hearing.done() for one in made for follower in one.followers))
    assert len(ends) == sum(len(one.followers) for one in made)


class Peak:
    """By how much this process has grown at most, which holds the targets and the strangers."""

    def __init__(self) -> None:
        self._process, self._is_over = psutil.Process(), threading.Event()
        self._before, self.grown = self._process.memory_info().rss, 0
        self._looking = threading.Thread(target=self._look)
        self._looking.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            self.grown = max(self.grown, self._process.memory_info().rss - self._before)

    def end(self) -> int:
        self._is_over.set()
        self._looking.join()
        return self.grown


@pytest.mark.slow
@pytest.mark.parametrize("attack_s", [15.0, pytest.param(60.0, marks=pytest.mark.recorded)])
def test_hostile_peers_use_little_memory_and_do_not_disturb_members(slices: Callable[[int], Slice], attack_s: float):
    may_end = threading.Event()
    led, looking, works = slices(2), slices(3), Minute(may_end)
    led.join(led.start_followers())
    with contextlib.ExitStack() as ends, ThreadPoolExecutor(8) as pool:
        server = ends.enter_context(Server("127.0.0.1", 0, works))
        true = client.Client(f"127.0.0.1:{server.port}")
        served = pool.submit(true.choose, "Wan21", "tiny/wan21", "auto", Host())
        stage = pool.submit(led.stage, may_end)
        until(lambda: works.steps)
        false = hostile_peers.FalseLeader(looking.places[0].address.port)
        peak = Peak()
        waiting = looking.start_followers()
        hellos = (
            (server.port, {"source": client.versions.source_digest()}),
            (
                led.places[0].address.port,
                {"process": 1, "count": 2, "terms": handshake.host_versions()},
            ),  # the true one's, replayed
        )
        attacks = [pool.submit(hostile_peers.attack, port, hello, attack_s) for port, hello in hellos]
        at_serve, at_leader = (one.result(PATIENCE_S) for one in attacks)
        until(lambda: set(false.given) == hostile_peers.ANSWERS)
        grown = peak.end()
        false.close()
        may_end.set()
        steps, states = stage.result(PATIENCE_S)
        assert all(torch.equal(state, expected_state(steps)) for state in states) and steps > attack_s / STEP_S / 4
        assert torch.equal(served.result(PATIENCE_S), expected_state(works.steps))
        looking.join(waiting)
    print(f"grown by {grown / 2**20:.0f} MiB; {steps} steps; {at_serve}, {at_leader}, {sorted(false.given.values())}")
    assert grown < MOST_GROWTH, f"{grown / 2**20:.0f} MiB"
    assert at_serve["101"] and at_serve["401"] and at_leader["409"] and at_leader["401"]
    assert led.stays() and looking.stays() and not led.leader._refused
