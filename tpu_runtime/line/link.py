"""A link to another machine: a WebSocket that carries messages, and knows within seconds when the other end is gone.

All links of a process live on one thread with an asyncio loop. Before a stranger has shown the secret it costs a
connection, a few KB and ten seconds; after that each piece is bounded by what is expected next.
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
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
from aiohttp import WSMsgType, web

from ..redact import redact
from . import trust, wire

log = logging.getLogger(__name__)

# Between two pings of a silent link: without an answer it is taken for gone after half as long again.
HEARTBEAT_S = 20.0
# Deadline to connect and authenticate; most unauthenticated connections; delay after a wrong token.
LATE_S, MOST_STRANGERS, WRONG_S = 10.0, 64, 1.0
_PATH, _HELLO, _REFUSED = "/line", "X-Hello", "X-Refused"
_PIECE, _AHEAD, _LOOK_S = 2**20, 16, 0.1
_CLOSED = "it closed the connection"
# What aiohttp raises where the other end is gone.
_ERRORS = (OSError, RuntimeError, aiohttp.ClientError)
_HEAD: dict[str, Any] = {"max_line_size": 1024, "max_field_size": 4096, "max_headers": 32}


class Gone(ConnectionError):
    """The other end is not there, or not any more."""


class Refused(Gone):
    """The other end does not take this one in, and says why."""


_starting, _loop = threading.Lock(), None


def loop() -> asyncio.AbstractEventLoop:
    """The loop of all links, in a thread of its own."""
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="comfyui-tpu-line", daemon=True).start()
        return _loop


def run(work: Coroutine[Any, Any, Any], look: Callable[[], None] = lambda: None) -> Any:
    """What `work` gives, done on the loop, for another thread; `look` is called meanwhile, and may raise."""
    future = asyncio.run_coroutine_threadsafe(work, loop())
    try:
        look()  # also where each of many is done at once
        while not wait([future], _LOOK_S).done:
            look()
        return future.result()
    finally:
        future.cancel()


class MachineLink:
    """Messages may be sent by several threads. `close` ends it at once."""

    def __init__(self, line: Any, end: Callable[[], Awaitable[Any]], heartbeat_s: float) -> None:
        self._line, self._end, self._silence_s = line, end, 1.5 * heartbeat_s
        self._sending = asyncio.Lock()
        # Read ahead, so that pings are answered while nobody waits for a message.
        self._frames: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(_AHEAD)
        self._reading = loop().create_task(self._read())

    async def _read(self) -> None:
        is_open = True
        while is_open:
            frame = await self._line.receive()
            is_open = frame.type in (WSMsgType.TEXT, WSMsgType.BINARY)
            await self._frames.put(frame)

    def send(self, message: Any, look: Callable[[], None] = lambda: None) -> None:
        """Raises `Gone`."""
        run(self.put(*wire.pack(message)), look)

    def tell(self, message: Any) -> None:
        """`send`, where nothing follows from an end that is gone."""
        with contextlib.suppress(Gone):
            self.send(message)

    def post(self, message: Any) -> None:
        """Without waiting; what cannot be sent is dropped."""
        asyncio.run_coroutine_threadsafe(self.put(*wire.pack(message)), loop())

    async def say(self, message: Any) -> None:
        """`send`, on the loop."""
        await self.put(*await asyncio.to_thread(wire.pack, message))

    async def put(self, head: str, body: bytes) -> None:
        """A packed message, or without a head a part of a file that was announced."""
        try:
            async with self._sending:
                if head:
                    await self._line.send_str(head)
                for start in range(0, len(body), _PIECE):
                    await self._line.send_bytes(memoryview(body)[start : start + _PIECE])
        except _ERRORS:
            raise Gone(_CLOSED) from None

    async def get(self, messages: Sequence[type], values: Sequence[type] = wire.SETTINGS, most_bytes: int = 0) -> Any:
        """The next message, one of `messages`; raises `Gone`, also for what is none of them."""
        try:
            size, packed = wire.read_head(await self._frame(WSMsgType.TEXT), most_bytes)
            body = bytearray()
            async for piece in self.pieces(size):
                body += piece
            unpack = functools.partial(wire.unpack, packed, body, messages, values)
            return await asyncio.to_thread(unpack) if body else unpack()
        except wire.WireError as error:
            await self.end()
            raise Gone(f"{error}") from None

    async def pieces(self, size: int) -> AsyncIterator[bytes]:
        """The parts of `size` bytes, as they come."""
        while size:
            piece = await self._frame(WSMsgType.BINARY)
            size -= len(piece)
            if size < 0 or not piece:
                raise wire.WireError("more bytes came than were announced, or none")
            yield piece

    async def _frame(self, kind: WSMsgType) -> Any:
        if not (self._reading.done() and self._frames.empty()):
            frame = await self._frames.get()
            if frame.type == kind:
                return frame.data
            if frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                raise wire.WireError("what came is not what is expected next")
        if isinstance(self._line.exception(), TimeoutError):
            raise Gone(f"nothing was heard of it for {self._silence_s:.0f} s")
        raise Gone(_CLOSED)

    def receive(self, messages: Sequence[type], look: Callable[[], None] = lambda: None, **limits: Any) -> Any:
        """`get`, for another thread."""
        return run(self.get(messages, **limits), look)

    async def end(self) -> None:
        """At once. What came and was not asked for is dropped, so that who reads ahead does not wait for room."""
        self._reading.cancel()
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(aiohttp.WSMessage(WSMsgType.CLOSED, None, None))  # for who waits
        await self._end()

    def close(self) -> None:
        """`end`, for another thread."""
        asyncio.run_coroutine_threadsafe(self.end(), loop())


def connect(
    where: trust.Address, hello: Mapping[str, Any], look: Callable[[], None] = lambda: None, **options: Any
) -> MachineLink:
    """A link to a machine that listens. Raises `Refused` with its sentence, `TimeoutError` where it does not answer,
    `ConnectionRefusedError` where nothing listens, and `Gone`.
    """
    try:
        return run(_connect(where, hello, trust.token(), trust.client_tls(), **options), look)
    except aiohttp.WSServerHandshakeError as error:
        said = unquote((error.headers or {}).get(_REFUSED, ""))
        raise Refused(redact(said)[:1000] or f"{error.status} {error.message}") from None
    except aiohttp.ClientConnectorError as error:
        raise (error.os_error if isinstance(error.os_error, OSError) else Gone(str(error))) from None
    except aiohttp.ClientError as error:
        raise Gone(redact(str(error)) or type(error).__name__) from None


async def _connect(
    where: trust.Address, hello: Mapping[str, Any], token: str, tls: Any, heartbeat_s: float = HEARTBEAT_S
) -> MachineLink:
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(LATE_S):
            line = await session.ws_connect(
                f"{'wss' if tls else 'ws'}://{where}{_PATH}",
                headers={"Authorization": f"Bearer {token}", _HELLO: quote(json.dumps(hello))},
                heartbeat=heartbeat_s, max_msg_size=2 * _PIECE, compress=0, ssl=tls or True,
            )  # fmt: skip
        return MachineLink(line, stack.pop_all().aclose, heartbeat_s)


class Door(web.Server):
    """Listens at one port. `welcome` gets a hello and its address, and returns why it is refused; `speak` has a link
    until it returns. `pages` are what else may be read there, by path; without the secret those that end in `health`.
    """

    def __init__(
        self,
        welcome: Callable[[dict[str, Any], str], str | None],
        speak: Callable[[MachineLink, dict[str, Any], str], Awaitable[None]],
        pages: Mapping[str, Callable[[], str]] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        quiet = logging.getLogger(f"{__name__}.aiohttp")
        quiet.setLevel(logging.CRITICAL)
        super().__init__(self._answer, loop=loop(), access_log=None, logger=quiet, lingering_time=0.0, **_HEAD)
        self._welcome, self._speak, self._pages, self._heartbeat_s = welcome, speak, pages or {}, heartbeat_s
        self._strangers: set[Any] = set()
        self._token = trust.make_token(log.warning).encode()
        self._listening: asyncio.Server | None = None

    def listen(self, host: str, port: int) -> int:
        """Begins; the port. On all addresses where `host` is empty. Raises OSError."""
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=both)
        self._listening = run(loop().create_server(self, sock=listening, ssl=trust.server_tls()))  # pyright: ignore[reportArgumentType]
        return listening.getsockname()[1]

    def close(self) -> None:
        async def close() -> None:
            if self._listening is not None:
                self._listening.close()
            for transport in list(self._connections.values()):
                transport.abort()

        run(close())

    def connection_made(self, handler: Any, transport: Any) -> None:
        super().connection_made(handler, transport)
        if len(self._strangers) >= MOST_STRANGERS:
            loop().call_soon(transport.abort)  # aiohttp begins its work with it before that
        else:
            self._strangers.add(handler)
            loop().call_later(LATE_S, lambda: transport.abort() if handler in self._strangers else None)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self._strangers.discard(handler)
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        address = str(request.remote).removeprefix("::ffff:")
        page = self._pages.get(request.path)
        if page is not None and request.path.endswith("health"):
            return _said(200, page())
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            await asyncio.sleep(WRONG_S)  # still one of few strangers: so many may guess, so often
            return _said(401, f"the token is wrong or missing: set {trust.VARIABLE} to the one of the other machine.")
        if page is not None:
            return _said(200, page())
        if request.path != _PATH or "Origin" in request.headers:  # a page in a browser names where it is from
            return _said(404, f"there is nothing at {request.path} for you.")
        try:
            hello = json.loads(unquote(request.headers[_HELLO]))
            problem = self._welcome(hello, address)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            problem = f"its handshake cannot be read ({type(error).__name__})."
        if problem is not None:
            return _said(409, problem)
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
            link = MachineLink(line, end, self._heartbeat_s)
            await self._speak(link, hello, address)
        except (OSError, wire.WireError) as error:  # `Gone` among them
            log.info("%s is gone: %s", address, error)
        except Exception:  # whatever it is, the others stay
            log.exception("the link with %s failed", address)
        finally:
            await (link.end() if link else end())
        return line


def _said(status: int, text: str) -> web.Response:
    """A page, or why there is none, also where `connect` finds it."""
    headers = {} if status == 200 else {_REFUSED: quote(text[:1000])}
    response = web.Response(status=status, text=text, headers=headers)
    response.force_close()
    return response
