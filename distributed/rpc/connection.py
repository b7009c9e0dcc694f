"""A connection to another machine: a WebSocket that carries messages, and detects within seconds that a peer is lost.

All connections of a process share one thread with an asyncio loop. An unauthenticated peer can hold at most one
connection, a few KB and ten seconds. After authentication each message is limited to the size expected next.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import aiohttp
from aiohttp import WSMsgType, web

from ...tpu_runtime.messages import compose
from ...tpu_runtime.redact import redact
from . import auth, codec

log = logging.getLogger(__name__)

# Seconds between two pings of a silent connection; without an answer it counts as lost after 1.5 times as long.
HEARTBEAT_S = 20.0
# Deadline to connect and authenticate, in seconds; most unauthenticated connections; delay after a wrong token.
CONNECT_TIMEOUT_S, MAX_UNAUTHENTICATED, REJECT_DELAY_S = 10.0, 64, 1.0
_PATH, _HELLO, _REFUSED = "/line", "X-Hello", "X-Refused"
_PIECE, _AHEAD, _POLL_S = 2**20, 16, 0.1
_CLOSED = "it closed the connection"
# The exceptions of aiohttp for a lost connection.
_ERRORS = (OSError, RuntimeError, aiohttp.ClientError)
_HEAD: dict[str, Any] = {"max_line_size": 1024, "max_field_size": 4096, "max_headers": 32}


class ConnectionLost(ConnectionError):
    """The peer cannot be reached, or the connection to it was lost."""


class HandshakeRejected(ConnectionLost):
    """The peer rejected the handshake; the message is its reason."""


Result = TypeVar("Result")
Hello = Mapping[str, Any]  # a handshake: what a peer reports about itself
_starting, _loop = threading.Lock(), None


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections, which runs in a thread of its own."""
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="comfyui-tpu-line", daemon=True).start()
        return _loop


def run_on_loop(work: "Coroutine[Any, Any, Result]", look: Callable[[], None] = lambda: None) -> "Result":
    """Run `work` on the event loop from another thread, and return its result.

    look: called meanwhile, ten times a second; its exception cancels `work`.
    """
    future = asyncio.run_coroutine_threadsafe(work, event_loop())
    try:
        look()  # at least once, even if each of many calls is done at once
        while not wait([future], _POLL_S).done:
            look()
        return future.result()
    finally:
        future.cancel()


class Connection:
    """A connection over which several threads may send messages. `close` ends it at once."""

    def __init__(self, line: Any, end: Callable[[], Awaitable[Any]], heartbeat_s: float) -> None:
        self._line, self._end, self._silence_s = line, end, 1.5 * heartbeat_s
        self._sending = asyncio.Lock()
        # Frames are read in advance, so that pings are answered while no message is awaited.
        self._frames: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(_AHEAD)
        self._reading = event_loop().create_task(self._read())

    async def _read(self) -> None:
        is_open = True
        while is_open:
            frame = await self._line.receive()
            is_open = frame.type in (WSMsgType.TEXT, WSMsgType.BINARY)
            await self._frames.put(frame)

    def send(self, message: object, look: Callable[[], None] = lambda: None) -> None:
        """Send a message from another thread. Raises Gone. look: see `run`."""
        run_on_loop(self.put(*codec.pack(message)), look)

    def tell(self, message: object) -> None:
        """Send a message, and ignore a lost connection."""
        with contextlib.suppress(ConnectionLost):
            self.send(message)

    def post(self, message: object) -> None:
        """Send a message without waiting; it is dropped if it cannot be sent."""
        asyncio.run_coroutine_threadsafe(self.put(*codec.pack(message)), event_loop())

    async def say(self, message: object) -> None:
        """Send a message, on the event loop."""
        await self.put(*await asyncio.to_thread(codec.pack, message))

    async def put(self, head: str, body: bytes) -> None:
        """Write a packed message; with an empty `head`, write a chunk of an announced file."""
        try:
            async with self._sending:
                if head:
                    await self._line.send_str(head)
                for start in range(0, len(body), _PIECE):
                    await self._line.send_bytes(memoryview(body)[start : start + _PIECE])
        except _ERRORS:
            raise ConnectionLost(_CLOSED) from None

    async def get(
        self, messages: Sequence[type], values: Sequence[type] = codec.SETTINGS_RECORDS, most_bytes: int = 0
    ) -> Any:
        """Return the next message, which must be one of `messages`. Raises Gone, also for an invalid message.

        values: records that it may contain. most_bytes: limit of its tensors.
        """
        try:
            size, packed = codec.read_header(await self._frame(WSMsgType.TEXT), most_bytes)
            body = bytearray()
            async for piece in self.pieces(size):
                body += piece
            unpack = functools.partial(codec.unpack, packed, body, messages, values)
            return await asyncio.to_thread(unpack) if body else unpack()
        except codec.CodecError as error:
            await self.end()
            raise ConnectionLost(f"{error}") from None

    async def pieces(self, size: int) -> AsyncIterator[bytes]:
        """Yield the chunks of `size` bytes as they arrive."""
        while size:
            piece = await self._frame(WSMsgType.BINARY)
            size -= len(piece)
            if size < 0 or not piece:
                raise codec.CodecError("more bytes were received than announced, or an empty frame")
            yield piece

    async def _frame(self, kind: WSMsgType) -> Any:
        if not (self._reading.done() and self._frames.empty()):
            frame = await self._frames.get()
            if frame.type == kind:
                return frame.data
            if frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                raise codec.CodecError("a message of another type was expected")
        if isinstance(self._line.exception(), TimeoutError):
            raise ConnectionLost(f"nothing was received from it for {self._silence_s:.0f} s")
        raise ConnectionLost(_CLOSED)

    def receive(self, messages: Sequence[type], look: Callable[[], None] = lambda: None, **limits: Any) -> Any:
        """Return the next message, from another thread. limits: see `get`; look: see `run`."""
        return run_on_loop(self.get(messages, **limits), look)

    async def end(self) -> None:
        """Close the connection at once. Unread frames are dropped, so that the reader task does not block."""
        self._reading.cancel()
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(aiohttp.WSMessage(WSMsgType.CLOSED, None, None))  # wakes a waiting reader
        await self._end()

    def close(self) -> None:
        """Close the connection at once, from another thread."""
        asyncio.run_coroutine_threadsafe(self.end(), event_loop())


def connect(where: auth.Address, hello: Hello, look: Callable[[], None] = lambda: None, **options: Any) -> Connection:
    """Return a connection to a machine that listens.

    where: its address. hello: the handshake. look: see `run`. Raises Refused with the peer's reason, TimeoutError if it
    does not answer, ConnectionRefusedError if nothing listens, and Gone.
    """
    try:
        return run_on_loop(_connect(where, hello, auth.read_token(), auth.make_client_tls(), **options), look)
    except aiohttp.WSServerHandshakeError as error:
        reason = unquote((error.headers or {}).get(_REFUSED, ""))
        raise HandshakeRejected(redact(reason)[:1000] or f"{error.status} {error.message}") from None
    except aiohttp.ClientConnectorError as error:
        raise (error.os_error if isinstance(error.os_error, OSError) else ConnectionLost(str(error))) from None
    except aiohttp.ClientError as error:
        raise ConnectionLost(redact(str(error)) or type(error).__name__) from None


async def _connect(
    where: auth.Address, hello: Hello, token: str, tls: Any, heartbeat_s: float = HEARTBEAT_S
) -> Connection:
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            line = await session.ws_connect(
                f"{'wss' if tls else 'ws'}://{where}{_PATH}",
                headers={"Authorization": f"Bearer {token}", _HELLO: quote(json.dumps(hello))},
                heartbeat=heartbeat_s, max_msg_size=2 * _PIECE, compress=0, ssl=tls or True,
            )  # fmt: skip
        return Connection(line, stack.pop_all().aclose, heartbeat_s)


class RpcServer(web.Server):
    """A server that listens at one port, and authenticates peers.

    welcome: `welcome(hello, address)` returns why a peer is rejected, or None. speak: has the connection until it
        returns.
    pages: further pages by path; those ending in `health` need no token.
    """

    def __init__(
        self,
        welcome: Callable[[Hello, str], str | None],
        speak: Callable[[Connection, Hello, str], Awaitable[None]],
        pages: Mapping[str, Callable[[], str]] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        quiet = logging.getLogger(f"{__name__}.aiohttp")
        quiet.setLevel(logging.CRITICAL)
        super().__init__(self._answer, loop=event_loop(), access_log=None, logger=quiet, lingering_time=0.0, **_HEAD)
        self._welcome, self._speak, self._pages, self._heartbeat_s = welcome, speak, pages or {}, heartbeat_s
        self._strangers: set[Any] = set()
        self._token = auth.ensure_token(log.warning).encode()
        self._listening: asyncio.Server | None = None

    def listen(self, host: str, port: int) -> int:
        """Start listening, and return the port. An empty `host` means all addresses. Raises OSError."""
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=both)
        self._listening = run_on_loop(event_loop().create_server(self, sock=listening, ssl=auth.make_server_tls()))  # pyright: ignore[reportArgumentType]
        return listening.getsockname()[1]

    def close(self) -> None:
        async def close() -> None:
            if self._listening is not None:
                self._listening.close()
            for transport in list(self._connections.values()):
                transport.abort()

        run_on_loop(close())

    def connection_made(self, handler: Any, transport: Any) -> None:
        super().connection_made(handler, transport)
        if len(self._strangers) >= MAX_UNAUTHENTICATED:
            event_loop().call_soon(transport.abort)  # after aiohttp has set the connection up
        else:
            self._strangers.add(handler)
            event_loop().call_later(
                CONNECT_TIMEOUT_S, lambda: transport.abort() if handler in self._strangers else None
            )

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self._strangers.discard(handler)
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        address = str(request.remote).removeprefix("::ffff:")
        page = self._pages.get(request.path)
        if page is not None and request.path.endswith("health"):
            return _respond(200, page())
        header = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(header, b"Bearer " + self._token):
            await asyncio.sleep(REJECT_DELAY_S)  # it still counts as unauthenticated, which limits the rate of guesses
            return _respond(401, compose("remote.token_wrong", token_variable=auth.TOKEN_VARIABLE))
        if page is not None:
            return _respond(200, page())
        if request.path != _PATH or "Origin" in request.headers:  # browsers send the origin of a page
            return _respond(404, compose("remote.path_unknown", path=request.path))
        try:
            hello = json.loads(unquote(request.headers[_HELLO]))
            problem = self._welcome(hello, address)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return _respond(409, compose("remote.handshake_unreadable", error_type=type(error).__name__))
        if problem is not None:
            return _respond(409, problem)
        self._strangers.discard(request.protocol)
        line = web.WebSocketResponse(
            heartbeat=self._heartbeat_s, max_msg_size=2 * _PIECE, compress=False, autoclose=False, timeout=1.0
        )
        link = None

        async def end() -> None:
            if request.transport is not None:
                request.transport.abort()

        try:
            await line.prepare(request)
            link = Connection(line, end, self._heartbeat_s)
            await self._speak(link, hello, address)
        except (OSError, codec.CodecError) as error:  # `ConnectionLost` among them
            log.info("%s disconnected: %s", address, error)
        except Exception:  # of any kind: other connections are not affected
            log.exception("the link with %s failed", address)
        finally:
            await (link.end() if link else end())
        return line


def _respond(status: int, text: str) -> web.Response:
    """Return a page, or an error that is also in a header, for `connect`."""
    headers = {} if status == 200 else {_REFUSED: quote(text[:1000])}
    response = web.Response(status=status, text=text, headers=headers)
    response.force_close()
    return response
