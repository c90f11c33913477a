"""An attacker on the path between two workers: TCP proxies that can flip a bit of the traffic."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading

_CHUNK = 1 << 16
_LOCAL = socket.inet_aton("127.0.0.1")


class Proxies:
    """Replaces each address that a gloo worker sends to the others.

    Of two workers the one with the higher address connects. Each compares its own address with the one that it
    received, ports by their bytes in memory: the lower byte first. To make both agree, the proxies of one worker use 0
    as that byte and the proxies of the other worker 255.
    """

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self.flips = threading.Event()  # whether a bit of the next large piece is flipped; cleared when that is done
        self.passed = 0  # bytes

    def instead(self, index: int, value: bytes) -> bytes:
        """Return the address message of gloo worker `index` (0 or 1), with a proxy's port instead of its own."""
        at = value.find(_LOCAL)
        if at < 2:
            return value
        (port,) = struct.unpack_from("!H", value, at - 2)
        listener = _listener(255 if index else 0)
        self._listeners.append(listener)
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


def _listener(low_byte: int) -> socket.socket:
    """Return a listener whose port ends in this byte."""
    ports = [number << 8 | low_byte for number in range(16, 128)]  # below the range of ephemeral ports
    random.shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError):  # the port is in use
            return socket.create_server(("127.0.0.1", port))
    raise OSError(f"no free port of {len(ports)}")
