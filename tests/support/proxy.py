"""Somebody on the path between two workers of a test: TCP proxies that can flip a bit of what passes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_CHUNK = 1 << 16
_LOCAL = socket.inet_aton("127.0.0.1")


class Proxies:
    """Takes the place of each address that a gloo worker tells the others. All listen before the workers do."""

    def __init__(self, count: int) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self._unused = list(self._listeners)
        self._sockets: list[socket.socket] = []
        self.flips = threading.Event()  # whether a bit of the next large piece is flipped; cleared when that is done
        self.passed = 0  # bytes

    def instead(self, value: bytes) -> bytes:
        """Return what gloo has told of an address, with a proxy's port in place of the worker's."""
        at = value.find(_LOCAL)
        if at < 2:
            return value
        (port,) = struct.unpack_from("!H", value, at - 2)
        listener = self._unused.pop()
        threading.Thread(target=self._serve, args=(listener, port), daemon=True).start()
        return value[: at - 2] + struct.pack("!H", listener.getsockname()[1]) + value[at:]

    def _serve(self, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                there = socket.create_connection(("127.0.0.1", port))
                self._sockets += [here, there]
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(_CHUNK)):
                if len(data) > _CHUNK // 4 and self.flips.is_set():
                    data[len(data) // 2] ^= 1
                    self.flips.clear()
                self.passed += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Cut all connections."""
        for each in (*self._listeners, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
