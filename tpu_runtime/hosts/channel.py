"""A connection between two hosts that carries whole messages, and knows within seconds when the other end is gone."""

import socket
import threading
from collections.abc import Mapping
from typing import Any

from . import wire

# How often each end lets the other hear something, and after how long of silence that is taken for gone: a machine that
# is cut off, or stopped. One whose process ended is noticed at once.
BEAT_S, SILENCE_S = 5.0, 30.0
_BEAT: Mapping[str, Any] = {"beat": True}


class Gone(ConnectionError):
    """The other end is not there any more."""


class Channel:
    """Messages may be sent by several threads, and are received by one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_S)
        self._connection = connection
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="comfyui-tpu-hosts-beat", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        parts = wire.pack(message)
        try:
            with self._sending:
                for part in parts:
                    self._connection.sendall(part)
        except OSError as error:
            raise Gone(str(error)) from None

    def receive(self) -> dict[str, Any]:
        """The next message; raises `Gone`."""
        while True:
            message = wire.unpack(self._read)
            if message != _BEAT:
                return message

    def _read(self, size: int) -> bytearray:
        found = bytearray(size)
        view, done = memoryview(found), 0
        try:
            while done < size:
                count = self._connection.recv_into(view[done:])
                if not count:
                    raise Gone("it closed the connection")
                done += count
        except TimeoutError:
            raise Gone(f"nothing was heard of it for {SILENCE_S:.0f} s") from None
        except OSError as error:
            raise Gone(str(error)) from None
        return found

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self.send(_BEAT)
            except Gone:
                return

    def close(self) -> None:
        self._closed.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()


def listen(port: int) -> socket.socket:
    """A socket that takes connections, on all addresses of the machine."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)
