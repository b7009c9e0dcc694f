"""A hostile peer against `serve`, and against a leader in the middle of a stage: memory stays, the stage ends right,
and every true member stays. The load is bounded; nothing here waits for seconds.
"""

import contextlib
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from comfyui_tpu.fleet.serve import Server, Stages
from comfyui_tpu.tests.support.host import Host
from comfyui_tpu.tests.support.hosts import free_port
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime.hosts import distributed, terms
from comfyui_tpu.tpu_runtime.hosts.follower import Follower
from comfyui_tpu.tpu_runtime.hosts.leader import Leader
from comfyui_tpu.tpu_runtime.hosts.place import Place
from comfyui_tpu.tpu_runtime.line import link, trust
from comfyui_tpu.tpu_runtime.line.records import Call, Load, Text
from comfyui_tpu.tpu_runtime.remote import client

ROUNDS, CONNECTIONS, MOST_GROWTH = 10, 1000, 64 * 2**20
MESSAGES = random.Random(1)


def upgrade(token: str = "guess", hello: str = "%7B%7D") -> bytes:
    lines = ["GET /line HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", f"Authorization: Bearer {token}", f"X-Hello: {hello}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def frame(content: bytes, claim: int | None = None, kind: int = 1) -> bytes:
    """A masked frame of a client, that says `claim` of its length."""
    return bytes([0x80 | kind, 0xFF]) + struct.pack(">Q", len(content) if claim is None else claim) + bytes(4) + content


def strangers(port: int) -> list[bytes]:
    """What one without the secret may send."""
    return [
        MESSAGES.randbytes(4096),
        (2).to_bytes(8, "big") + (2**34).to_bytes(8, "big") + b"{}",  # which took 16 GiB of a leader
        upgrade()[:40],
        upgrade(),
        upgrade("x" * 4000),
        b"POST /line HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n" + bytes(10**5),
        b"POST /line HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + bytes(10**5),
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(10**4)),
    ]


def members(hello: str) -> list[bytes]:
    """What one with the secret may send that it should not."""
    deep = json.dumps([0, None]).replace("null", "[" * 50_000 + "]" * 50_000).encode()
    first = upgrade(trust.token(), hello)
    bad = [b"[17179869184, {}]", b'[0, {"__record__": "At", "what": [], "state": {}}]', deep, MESSAGES.randbytes(500)]
    return [*(first + frame(content) for content in bad), first + frame(b"[0", claim=2**62), first + frame(b"", 9, 2)]


def sent(port: int, content: bytes, keep: list[socket.socket] | None = None) -> None:
    with contextlib.suppress(OSError):
        line = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        if keep is not None:
            keep.append(line)
        with contextlib.suppress(OSError):
            line.sendall(content)
        if keep is None:
            line.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while line.recv(2**16):
                    pass
            line.close()


def attack(port: int, hello: str, while_at_it: Callable[[], None]) -> int:
    """All of it, with `while_at_it` between; by how much this process grew."""
    process, held = psutil.Process(), []
    contents = [*strangers(port), *members(hello)]
    for content in contents:
        sent(port, content)
    before = process.memory_info().rss
    for _ in range(ROUNDS):
        threads = [threading.Thread(target=sent, args=(port, content)) for content in contents]
        for thread in threads:
            thread.start()
        while_at_it()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    for number in range(CONNECTIONS):
        sent(port, b"GET /line HT" if number % 2 else b"", held)  # slow ones, that stay
        if number % 100 == 0:
            while_at_it()
    grown = process.memory_info().rss - before
    for line in held:
        line.close()
    return grown


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "WRONG_S", 0.01)


def test_serve_goes_on_serving(monkeypatch: pytest.MonkeyPatch):
    with Server("127.0.0.1", 0, Stages()) as server:
        hello = {"source": client.versions.source_digest()}
        true = link.connect(trust.Address(host="127.0.0.1", port=server.port), hello)
        true.receive((Load,))

        def nothing() -> None:
            assert server.clients >= 1

        grown = attack(server.port, quote(json.dumps(hello)), nothing)
        assert grown < MOST_GROWTH, f"{grown / 2**20:.0f} MiB"
        true.send(Call("no stage", {}))
        assert "is no stage" in true.receive((client.Failed, Text)).text
        true.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Leader, Follower, list[Any]]]:
    """A leader and its follower, joined; and what ended."""
    ends: list[Any] = []
    monkeypatch.setattr(distributed, "start", lambda place: None)
    monkeypatch.setattr(Follower, "_end", lambda self, why: ends.append(why))
    monkeypatch.setattr(terms, "take_over", lambda environment: None)
    places = [Place(process=process, count=2, host="127.0.0.1", port=free_port()) for process in range(2)]
    places[1] = Place(process=1, count=2, host="127.0.0.1", port=places[0].port)
    leader = Leader(places[0], lambda sentence, stuck: ends.append(sentence))
    follower = Follower(places[1])
    joining = threading.Thread(target=follower.join)
    leader.listen()
    joining.start()
    with leader.joining(Host()):
        joining.join(PATIENCE_S)
    yield leader, follower, ends
    monkeypatch.setattr(Leader, "_lost", lambda self, why: None)
    leader._members._door.close()
    until(lambda: ends)  # before the follower's way to end is the real one again


def test_a_stage_ends_right_and_every_member_stays(pair: tuple[Leader, Follower, list[Any]]):
    leader, follower, ends = pair
    port, hello = leader._members._place.port, {"process": 1, "count": 2, "terms": terms.terms()}
    asked = threading.Semaphore(0)
    answers: list[bool] = []
    led: list[bool] = []
    is_over = threading.Event()

    def follow() -> None:
        while True:
            asked.acquire()
            if is_over.is_set():
                return
            answers.append(follower.agree("step", len(answers)))

    def lead() -> None:
        asked.release()
        led.append(leader.agree("step", len(led)))

    following = threading.Thread(target=follower.attempt, args=(follow, lambda error: "failed"))
    following.start()
    with leader.stage("denoise", {}, Host()):

        def work() -> int:
            given = quote(json.dumps(hello))
            grown = attack(port, given, lead)
            is_over.set()
            asked.release()
            return grown

        grown = leader.attempt(work, lambda error: "failed")
    following.join(PATIENCE_S)
    assert grown < MOST_GROWTH, f"{grown / 2**20:.0f} MiB"
    assert all(answers) and answers == led and len(led) == ROUNDS + CONNECTIONS // 100
    assert leader._members.lost is None and not ends and not leader._members._refused
    assert [member.process for member in leader._members.all()] == [1]
