"""This process's own TCP sockets, as the kernel lists them, including those that a transport opens internally."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SO_ATTACH_FILTER = 26
_RETURN = 0x06  # BPF_RET | BPF_K: how many bytes of a packet pass

_ESTABLISHED = 1  # the first byte of struct tcp_info: tcpi_state, TCP_ESTABLISHED

Address = tuple[str, int]


class TcpConnection(NamedTuple):
    """One connection of this process."""

    own: Address
    peer: Address
    is_whole: bool  # neither end has closed it


def _tcp() -> Iterator[tuple[int, socket.socket]]:
    """Yield (descriptor, a duplicate as a socket) for each TCP socket of this process; duplicates are closed again."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type & socket.SOCK_STREAM:
                    yield int(name), sock


def listening() -> dict[int, int]:
    """Return this process's listening sockets: descriptor -> port."""
    return {
        fd: sock.getsockname()[1] for fd, sock in _tcp() if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def connected() -> list[TcpConnection]:
    """Return this process's TCP connections."""
    found = []
    for _, sock in _tcp():
        with contextlib.suppress(OSError):  # a listening or reset socket has no peer
            is_whole = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
            found.append(TcpConnection(_plain(sock.getsockname()), _plain(sock.getpeername()), is_whole))
    return found


def _plain(address: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return address[0].removeprefix("::ffff:"), address[1]


def shut(fd: int) -> None:
    """Make a listening socket ignore all packets, without closing it; without effect if the kernel refuses."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    wanted = struct.pack("HP", 1, ctypes.addressof(program))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, wanted)


def owner(address: Address) -> str:
    """Return whose end of a connection this is, for errors: also its uid if the process is on this host."""
    host, port = address
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            found, _, found_port = words[1].partition(":")
            if int(found_port, 16) == port and socket.inet_ntoa(struct.pack("=I", int(found, 16))) == host:
                return f"{host}:{port}, a process of uid {words[7]} on this host"
    return f"{host}:{port}"
