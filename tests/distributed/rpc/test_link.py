"""Links between machines: who may come in, what a stranger costs, who is told what, and when an end is gone."""

import asyncio
import contextlib
import errno
import re
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from comfyui_tpu.distributed.rpc import auth, connection
from comfyui_tpu.distributed.rpc.connection import Connection, ConnectionLost, HandshakeRejected, RpcServer
from comfyui_tpu.distributed.rpc.messages import BarrierReached, StatusText
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.support.patience import until


class Echo:
    """A port that says what it hears, to who is named."""

    def __init__(self, heartbeat_s: float = connection.HEARTBEAT_S) -> None:
        self.links: list[Connection] = []
        self.made: list[Connection] = []
        self.door = RpcServer(lambda hello, address: hello["no"], self._speak, {"/health": lambda: "ok"}, heartbeat_s)
        self.where = auth.Address(host="127.0.0.1", port=self.door.listen("127.0.0.1", 0))

    async def _speak(self, one: Connection, hello: Any, address: str) -> None:
        self.links.append(one)
        with contextlib.suppress(ConnectionLost):
            while True:
                await one.say(await one.get((StatusText,)))
        self.links.remove(one)

    def connect(self, no: Any = None) -> Connection:
        self.made.append(connection.connect(self.where, {"no": no}))
        return self.made[-1]

    def raw(self, content: bytes) -> bytes:
        """What a connection is answered, up to its end."""
        with socket.create_connection((self.where.host, self.where.port), 60) as line:
            line.sendall(content)
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := line.recv(2**16):
                    found += piece
            return found


@pytest.fixture
def echo() -> Iterator[Echo]:
    found = Echo()
    yield found
    for one in found.made:
        one.close()
    found.door.close()


def test_handshake_accepts_token_and_rejection_gives_reason(echo: Echo, monkeypatch: pytest.MonkeyPatch):
    one = echo.connect()
    one.send(StatusText("é"))
    assert one.receive((StatusText,)) == StatusText("é")
    with pytest.raises(HandshakeRejected, match="^another time, é$"):
        echo.connect("another time, é")
    monkeypatch.setenv(auth.TOKEN_VARIABLE, "guess")
    with pytest.raises(HandshakeRejected, match="^the token is wrong or missing"):
        echo.connect()
    one.close()
    until(lambda: not echo.links)


def test_connection_unexpected_message_closes_link(echo: Echo):
    one = echo.connect()
    one.send(BarrierReached("x", 1))
    with pytest.raises(ConnectionLost):
        one.receive((StatusText,))


@pytest.mark.parametrize("length", ["-1", "abc", "99999999999999", "1e3"])
def test_listener_does_not_read_body_of_any_claimed_length(echo: Echo, length: str):
    """`Content-Length: -1` was read for ever into memory, also by who refused it."""
    for path in (b"/line", b"/tpu/run", b"/health"):
        said = echo.raw(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\n\r\n" % (path, length.encode()))
        assert said.startswith(b"HTTP/1.") and b"Traceback" not in said


def test_listener_rejects_browser_request_with_foreign_host(echo: Echo):
    """DNS rebinding: its Host is the attacker's, and its Origin."""
    given = (
        f"GET /line HTTP/1.1\r\nHost: evil\r\nOrigin: http://evil\r\nAuthorization: Bearer {auth.read_token()}\r\n\r\n"
    )
    assert echo.raw(given.encode()).startswith(b"HTTP/1.1 404")
    assert echo.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").endswith(b"ok")


def test_listener_rejects_oversized_header(echo: Echo):
    said = echo.raw(b"GET /line HTTP/1.1\r\nX: " + b"x" * 10**6)
    assert b"400" in said[:20] or not said
    assert echo.connect()


def test_listener_continues_after_accept_error(echo: Echo, monkeypatch: pytest.MonkeyPatch):
    """Whichever it was, nobody came in after it."""
    errors = [OSError(number, "") for number in (errno.EPERM, errno.ECONNABORTED, errno.EMFILE)]
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda one: fails(errors.pop()) if errors else accept(one))
    assert echo.connect() and not errors


def fails(error: Exception) -> Any:
    raise error


def test_listener_limits_and_times_out_unauthenticated_connections(echo: Echo, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 5.0)
    strangers = [socket.create_connection((echo.where.host, echo.where.port)) for _ in range(200)]
    until(lambda: len(echo.door._strangers) == connection.MAX_UNAUTHENTICATED)
    until(lambda: not echo.door._strangers)
    assert echo.connect()
    for one in strangers:
        one.close()


def test_connection_without_heartbeat_answer_is_closed():
    """As a process that is stopped: its kernel still takes what is sent."""
    echo = Echo(heartbeat_s=2.0)
    session: list[Any] = []

    async def connect() -> None:
        import aiohttp

        session.append(aiohttp.ClientSession())
        given = {"Authorization": f"Bearer {auth.read_token()}", "X-Hello": '{"no": null}'}
        session.append(await session[0].ws_connect(f"http://{echo.where}/line", headers=given, autoping=False))

    connection.run_on_loop(connect())
    until(lambda: echo.links)
    began = time.monotonic()
    until(lambda: not echo.links)
    assert time.monotonic() - began < 30
    connection.run_on_loop(session[0].close())
    echo.door.close()


def test_connection_send_can_be_cancelled(echo: Echo):
    """Cancel was deaf while a LoRA was sent to who did not read it."""
    hanging = asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), connection.event_loop())
    one = echo.connect()
    looks = iter([None] * 3)

    class Cancelled(Exception):
        pass

    def look() -> None:
        if next(looks, Cancelled) is Cancelled:
            raise Cancelled

    async def stuck(*_: Any) -> None:
        await asyncio.Event().wait()

    one._line.send_bytes = stuck
    with pytest.raises(Cancelled):
        connection.run_on_loop(one.put("", b"x"), look)
    hanging.cancel()


def test_event_loop_is_shared_between_threads():
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(connection.event_loop())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


# --- what the owner of a machine says


@pytest.fixture
def owner(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in (auth.TOKEN_VARIABLE, auth.REMOTES_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "comfyui-tpu"


def test_ensure_token_creates_secret_once_with_export_command(owner: Any):
    with raises_message(auth.AuthError, "remote.no_token"):
        auth.read_token()
    said: list[str] = []
    made = auth.ensure_token(said.append)
    assert said[0].endswith(f"export COMFYUI_TPU_TOKEN={made}") and len(made) >= 32
    assert auth.ensure_token(said.append) == auth.read_token() == made and len(said) == 1
    assert stat.S_IMODE((owner / "token").stat().st_mode) == 0o600
    (owner / "token").chmod(0o644)
    with raises_message(auth.AuthError, "remote.token_readable_by_others"):
        auth.ensure_token(said.append)


def test_check_listed_allows_only_remotes_of_owner(owner: Any, monkeypatch: pytest.MonkeyPatch):
    """A workflow's JSON took it to any address that its widget named."""
    address = auth.parse_address("10.0.0.7:8190")
    with raises_message(
        auth.AuthError, "remote.address_not_listed", address="10.0.0.7:8190", remotes_variable=re.compile(r"^COMFYUI")
    ):
        auth.check_listed(address)
    owner.mkdir()
    (owner / "remotes").write_text("# mine\n\n10.0.0.7  # the port is the usual one\n")
    auth.check_listed(address)
    with pytest.raises(auth.AuthError):
        auth.check_listed(auth.parse_address("10.0.0.7:8191"))
    monkeypatch.setenv(auth.REMOTES_VARIABLE, "gpu-1, [::1]:99")
    auth.check_listed(auth.parse_address("gpu-1:8190"))
    auth.check_listed(auth.parse_address("[::1]:99"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")
def test_tls_connection_is_encrypted_and_other_certificate_is_rejected(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    for name in ("own", "other"):
        made = [
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            "/CN=x",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *made]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setenv(auth.TLS_CERT_VARIABLE, str(tmp_path / "own.pem"))
    monkeypatch.setenv(auth.TLS_KEY_VARIABLE, str(tmp_path / "own.key"))
    echo = Echo()
    try:
        monkeypatch.setenv(auth.TLS_CA_VARIABLE, str(tmp_path / "own.pem"))
        one = echo.connect()
        one.send(StatusText("x"))
        assert one.receive((StatusText,)) == StatusText("x")
        for authority in (str(tmp_path / "other.pem"), ""):
            monkeypatch.setenv(auth.TLS_CA_VARIABLE, authority)
            with pytest.raises(OSError):
                echo.connect()
        monkeypatch.setenv(auth.TLS_KEY_VARIABLE, str(tmp_path / "other.key"))
        with raises_message(auth.AuthError, "remote.certificate_or_key_wrong"):
            Echo()
    finally:
        one.close()
        echo.door.close()
