"""An attacker on the path between two workers: TCP proxies that can flip a bit of the traffic."""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK = 1 << 16


class Proxies:
    """Replaces the workers' addresses by addresses of proxies."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self.flips = threading.Event()  # whether a bit of the next large piece is flipped; cleared when that is done
        self.passed = 0  # bytes

    def instead(self, address: bytes) -> bytes:
        """Return the address of a proxy for the worker at HOST:PORT."""
        host, _, port = address.decode().rpartition(":")
        listener = socket.create_server((host, 0))
        self._listeners.append(listener)
        threading.Thread(target=self._serve, args=(listener, int(port)), daemon=True).start()
        return f"{host}:{listener.getsockname()[1]}".encode()

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
