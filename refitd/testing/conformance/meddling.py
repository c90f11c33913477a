"""Alter what a process receives from its peers before its service reads it.

flip     one bit of a stream's first message; its digest is computed again
swap     the first two messages of a stream; its digest is computed again
replay   all streams and their digests of the previous run
say      one bit of each agreement
delta NODE   one bit of the first message, on this node only; its digest stays. For a delta, this changes a word
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import xxhash

from refitd.copy_services.digests import DIGEST_BYTES
from refitd.copy_services.packed import TAG

_TAGS = 1 << 16  # of messages; agreements have smaller ones


class Between:
    """Intercepts a two-sided service's messages. Until told to alter them it only records them."""

    def __init__(self, service: Any) -> None:
        self._peers = service.peers
        self._receive, self._wait = self._peers.receive, self._peers.wait
        self._how = ""
        self._is_altered = False
        self._before: dict[int, list[bytes]] = {}
        self._came: dict[int, list[bytes]] = defaultdict(list)  # messages of this run, by position
        self._posted: dict[int, list[Any]] = defaultdict(list)  # receives of messages, in order
        self._agreements: list[Any] = []
        self._peers.receive, self._peers.wait = self.receive, self.wait

    def leave(self) -> None:
        """Remove the hooks: a reference cycle would keep the peers and their connections open."""
        for name in ("receive", "wait"):
            vars(self._peers).pop(name, None)
        self.meddle("")
        self._before = {}

    def meddle(self, how: str) -> None:
        """Begin a run, and set how to alter it."""
        self._how, self._before, self._came = how, self._came, defaultdict(list)
        self._posted, self._agreements = defaultdict(list), []
        self._is_altered = False

    def receive(self, tensor: Any, position: int, tag: int) -> Any:
        """See Peers.receive."""
        posted = self._receive(tensor, position, tag)
        if tag < TAG or tag >= TAG + _TAGS:
            self._agreements.append(posted)
        else:
            self._posted[position].append(posted)
        return posted

    def wait(self, posted: Any, position: int, deadline: Any, purpose: str) -> None:
        """See Peers.wait."""
        mine = self._posted[position]
        number = next((n for n, each in enumerate(mine) if each is posted), -1)
        if self._how == "swap" and number == 1:
            return  # it has been waited for
        self._wait(posted, position, deadline, purpose)
        if self._how == "say" and any(each is posted for each in self._agreements):
            posted.tensor[0] ^= 1
        if number < 0:
            return
        arrived = [posted.tensor]
        if self._how == "swap" and number == 0:
            self._wait(mine[1], position, deadline, purpose)
            arrived.append(mine[1].tensor)
            n = min(len(tensor) for tensor in arrived)  # the last message is shorter
            first = arrived[0][:n].clone()
            arrived[0][:n].copy_(arrived[1][:n])
            arrived[1][:n].copy_(first)
        for tensor in arrived:
            self._alter(tensor, position, len(self._came[position]))
            self._came[position].append(tensor.numpy().tobytes())

    def _alter(self, tensor: Any, position: int, number: int) -> None:
        if self._how == "replay":
            self._write(tensor, self._before[position][number])
        elif self._how in ("flip", "swap") and tensor.numel() == DIGEST_BYTES:
            self._write(tensor, xxhash.xxh3_128_digest(b"".join(self._came[position])))
        elif self._how == "flip" and number == 0:
            tensor[len(tensor) // 2] ^= 1
        elif self._how.startswith("delta ") and tensor.numel() > DIGEST_BYTES and not self._is_altered:
            node = self._how.removeprefix("delta ")
            if f"on node {node} " in self._peers.label(self._peers.index):
                tensor[0] ^= 1
                self._is_altered = True

    @staticmethod
    def _write(tensor: Any, data: bytes) -> None:
        tensor.numpy()[:] = memoryview(data)
