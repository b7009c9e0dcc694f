"""Hostile peers: what they send to who listens, and what one in a leader's place answers to who follows."""

import base64
import contextlib
import hashlib
import itertools
import json
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from ....distributed.rpc import auth
from ...support.patience import PATIENCE_S

# Of one attack: connections that stay open, and those that send a byte now and then; seconds between two rounds.
CONNECTIONS, SLOW, ROUND_S = 1000, 30, 2.0
_RANDOM = random.Random(1)
_DEEP = json.dumps([0, None]).replace("null", "[" * 50_000 + "]" * 50_000).encode()


def upgrade(token: str = "guess", hello: str = "%7B%7D") -> bytes:
    lines = ["GET /line HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", f"Authorization: Bearer {token}", f"X-Hello: {hello}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def frame(content: bytes, claim: int | None = None, kind: int = 1, mask: bool = True) -> bytes:
    """A frame that says `claim` of its length; of a client with a mask of zeros."""
    size = struct.pack(">Q", len(content) if claim is None else claim)
    return bytes([0x80 | kind, 0xFF if mask else 0x7F]) + size + bytes(4 if mask else 0) + content


def of_strangers() -> list[bytes]:
    """What one without the secret may send."""
    return [
        _RANDOM.randbytes(4096),
        (2).to_bytes(8, "big") + (2**34).to_bytes(8, "big") + b"{}",  # which took 16 GiB of a leader
        upgrade()[:40],
        upgrade(),
        upgrade("x" * 4000),
        b"POST /line HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n" + bytes(10**5),
        b"POST /line HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + bytes(10**5),
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(10**4)),
    ]


def of_members(hello: object) -> list[bytes]:
    """What one with the secret, or who replays what a true one said, may send that it should not."""
    first = upgrade(auth.read_token(), quote(json.dumps(hello)))
    bad = [b"[17179869184, {}]", b'[0, {"__record__": "At", "what": [], "state": {}}]', _DEEP, _RANDOM.randbytes(500)]
    return [first, *(first + frame(content) for content in bad), first + frame(b"[0", 2**62), first + frame(b"", 9, 2)]


def send(port: int, content: bytes, answers: Counter[str]) -> None:
    """Sends, and counts the status that comes back."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 3.0) as line:
        with contextlib.suppress(OSError):
            line.sendall(content)
        found = re.match(rb"HTTP/1.[01] (\d+)", line.recv(2**16))
        answers[found[1].decode() if found else ""] += 1
        while line.recv(2**16):
            pass


def attack(port: int, hello: object, seconds: float) -> Counter[str]:
    """All of it for so long; the answers."""
    answers: Counter[str] = Counter()
    until = time.monotonic() + seconds
    crowds = [threading.Thread(target=_crowd, args=(port, until)), threading.Thread(target=_drip, args=(port, until))]
    for crowd in crowds:
        crowd.start()
    with ThreadPoolExecutor(16) as pool:
        while time.monotonic() < until:
            for content in (*of_strangers(), *of_members(hello)):
                pool.submit(send, port, content, answers)
            time.sleep(ROUND_S)
    for crowd in crowds:
        crowd.join(PATIENCE_S)
        assert not crowd.is_alive()
    return answers


def _crowd(port: int, until: float) -> None:
    """Connections that stay: in two waves, as each takes the places of strangers for ten seconds."""
    pause_s = (until - time.monotonic()) / 2
    with contextlib.ExitStack() as held:
        for number in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                line = held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
                line.sendall(b"GET /line HT" if number % 2 else b"")
            time.sleep(0.002 if number != CONNECTIONS // 2 else pause_s)
        while time.monotonic() < until:
            time.sleep(0.1)


def _drip(port: int, until: float) -> None:
    """Slow senders: a byte of a head each time, on a new connection whenever they are let go."""
    lines: dict[int, tuple[socket.socket, int]] = {}
    while time.monotonic() < until:
        for one in range(SLOW):
            try:
                if one not in lines:
                    lines[one] = socket.create_connection(("127.0.0.1", port), PATIENCE_S), 0
                line, sent = lines[one]
                line.sendall(upgrade()[sent : sent + 1])
                lines[one] = line, sent + 1
            except OSError:
                if one in lines:
                    lines.pop(one)[0].close()
        time.sleep(0.5)
    for line, _ in lines.values():
        line.close()


class FalseLeader:
    """Listens where a leader should, and gives each that comes the next of its answers; `given` counts them."""

    def __init__(self, port: int) -> None:
        self.given: Counter[str] = Counter()
        self._answers = itertools.cycle([*_BEFORE, *_BEHIND])
        self._listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listening.accept()
                threading.Thread(target=self._answer, args=(line, next(self._answers)), daemon=True).start()

    def _answer(self, line: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError), line:
            head = b""
            while b"\r\n\r\n" not in head:
                head += line.recv(2**12)
            found = re.search(rb"Sec-WebSocket-Key: (\S+)", head, re.IGNORECASE)
            assert found is not None
            self.given[name] += 1
            if name in _BEHIND:
                line.sendall(_taken_in(found[1]))
            for piece in {**_BEFORE, **_BEHIND}[name]():
                line.sendall(piece)
            line.settimeout(5.0)
            while line.recv(2**16):  # the other end leaves, or is left
                pass


def _taken_in(key: bytes) -> bytes:
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
    return b"\r\n".join([*lines, b"Sec-WebSocket-Accept: " + accept]) + b"\r\n\r\n"


def _slowly(content: bytes) -> Callable[[], object]:
    def pieces() -> object:
        for byte in content:
            yield bytes([byte])
            time.sleep(0.2)

    return pieces


def _of_server(content: bytes, claim: int | None = None, kind: int = 1) -> bytes:
    return frame(content, claim, kind, mask=False)


_BEFORE: dict[str, Callable[[], object]] = {
    "random bytes": lambda: [_RANDOM.randbytes(4096)],
    "half an answer": lambda: [b"HTTP/1.1 10"],
    "nothing": lambda: [],
    "a slow answer": _slowly(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n" * 2),
    "another key": lambda: [_taken_in(b"another")],
    "a long refusal": lambda: [b"HTTP/1.1 409 No\r\nX-Refused: " + b"x" * 10**5 + b"\r\n\r\n"],
    "a refusal": lambda: [b"HTTP/1.1 409 No\r\nX-Refused: no%0Asuch\r\nContent-Length: 2\r\n\r\nno"],
    "many headers": lambda: [b"HTTP/1.1 200 OK\r\n", *(b"X-%d: y\r\n" % number for number in range(10**4))],
    "an endless page": lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", *[bytes(2**16)] * 1000],
}
_BEHIND: dict[str, Callable[[], object]] = {
    "an oversized claim": lambda: [_of_server(b"[17179869184, {}]")],
    "a frame's claim": lambda: [_of_server(b"[0", 2**62)],
    "deep JSON": lambda: [_of_server(_DEEP)],
    "random text": lambda: [_of_server(_RANDOM.randbytes(500))],
    "half a message": lambda: [_of_server(b"[0, {", 500)],
    "a part of a part": lambda: [_of_server(b"x", kind=0)] * 100,
    "a leader's word with another type": lambda: [_of_server(b'[0, {"__record__": "Begin", "environment": []}]')],
    "what comes later": lambda: [_of_server(b'[0, {"__record__": "Stop"}]')] * 1000,
    "pings": lambda: [_of_server(b"x" * 100, kind=9)] * 10**4,
    "bytes": lambda: [_of_server(bytes(2**20), kind=2)] * 64,
}
ANSWERS = {*_BEFORE, *_BEHIND}
