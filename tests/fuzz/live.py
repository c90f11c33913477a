"""Fuzz both live sockets: send frames and datagrams to a daemon and a coordinator that also run swaps."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from refitd.buffers import handoff
from refitd.errors import ProtocolError, RefitdError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, Decoder, digest_of, encode, pack
from refitd.protocol.reports import NodeStatus
from refitd.testing import Daemon, eventually
from tests.fuzz.readers import SHARD, frame_of, kinds_of
from tests.support.hostile import Figures, Fleet, RawPeer, figures

# Frames between two checks that all processes still answer.
BATCH = 200
SWAP_EVERY = 10  # batches
CONFIG = '[node]\nmax_arena_bytes = 67_108_864\n[log]\nlevel = "error"\n'


@dataclass
class Surface:
    """The inputs sent to one socket, and the answers."""

    name: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    unanswered: int = 0


@dataclass
class Peak:
    """The most memory and descriptors of a process, measured after each batch, and those at the start."""

    before: Figures
    private_bytes: int = 0
    resident_bytes: int = 0  # by the kernel's count, with shared memory
    descriptors: int = 0
    after: Figures = field(default_factory=lambda: Figures(0, 0))

    def look(self, pid: int) -> None:
        self.after = figures(pid)
        fields = Path(f"/proc/{pid}/status").read_text()
        self.resident_bytes = int(fields.partition("VmHWM:")[2].split()[0]) << 10
        self.private_bytes = max(self.private_bytes, self.after.private_bytes)
        self.descriptors = max(self.descriptors, self.after.descriptors)


class Live:
    """A daemon with its coordinator, a fleet that swaps, and three peers that send random input."""

    def __init__(self, daemon: Daemon, rng: random.Random) -> None:
        self._daemon, self._rng = daemon, rng
        self._fleet = Fleet(daemon)
        self._fleet.swap()
        self._pids = {"daemon": daemon.pid, "coordinator": daemon.status().coordinator_pid}
        self.peaks = {name: Peak(figures(pid)) for name, pid in self._pids.items()}
        self.surfaces = {
            name: Surface(name) for name in ("daemon: ZeroMQ", "daemon: descriptors", "coordinator: ZeroMQ")
        }
        self._batches = 0
        self._peer: RawPeer | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._node: zmq.Socket[bytes] | None = None
        self._clients = Decoder[local.ClientReply](local.ClientReply)
        self._nodes = Decoder[cluster.CoordinatorMessage](cluster.CoordinatorMessage)
        self.requests, self.swaps = 0, 0
        self._mine = "?"

    def run(self, inputs: int) -> None:
        """Send `inputs` to each of the three sockets, in turns."""
        for _ in range(max(1, inputs // BATCH)):
            for batch in (self._to_daemon, self._to_descriptors, self._to_coordinator):
                batch(min(inputs, BATCH))
                self._look()

    def _look(self) -> None:
        """Check that all processes run, answer within a deadline and have not grown."""
        self._batches += 1
        with self._daemon.connect("normal") as client:
            status = client.status()
            assert status.coordinator_pid == self._pids["coordinator"], "the coordinator has been started again"
        self.requests += 1
        if self._batches % SWAP_EVERY == 0:
            self._fleet.swap()
            self.swaps += 1
        for name, pid in self._pids.items():
            self.peaks[name].look(pid)

    def _names(self) -> tuple[str, ...]:
        fleet = self._fleet
        own = (self._mine, self._mine, self._mine, "f1", "f2", _DIGEST, _DIGEST)
        return (*own, "mine", "n0", "fuzz", "a", fleet.source.member, fleet.target.member)

    # --- the daemon's ZeroMQ socket -----------------------------------------------------------------------

    def _to_daemon(self, count: int) -> None:
        if self._peer is not None and self._rng.random() < 0.2:
            self._peer.close()
            self._peer = None
        if self._peer is None:
            self._peer = RawPeer(self._daemon.directory, hello=self._rng.random() < 0.9)
            shard = local.RegisterSource(model="mine", rank=0, world_size=1, shard=SHARD)
            answer = self._peer.ask(shard)
            self._mine = answer.member if isinstance(answer, local.Registered) else "?"
        kinds = [k for k in kinds_of(local.ClientRequest) if k.tag not in _THE_FLEETS]
        self._send(self._peer.socket, kinds, count, "daemon: ZeroMQ", self._clients)

    # --- the coordinator's --------------------------------------------------------------------------------

    def _to_coordinator(self, count: int) -> None:
        if self._node is not None and self._rng.random() < 0.2:
            self._node.close()
            self._node = None
        if self._node is None:
            self._node = self._context.socket(zmq.DEALER)
            self._node.setsockopt(zmq.LINGER, 0)
            self._node.connect(f"ipc://{self._daemon.directory / 'coordinator.sock'}")
            status = NodeStatus(node="fuzz", host="h", pid=1, workers=(1,), clients=0, arenas=0, arena_bytes=0)
            if self._rng.random() < 0.9:
                self._node.send(encode(1, cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status)))
                self._node.send(encode(0, cluster.DescribeShard(digest=_DIGEST, packed=pack(SHARD))))
        kinds = [k for k in kinds_of(cluster.NodeMessage) if k.tag not in _THE_FLEETS]
        self._send(self._node, kinds, count, "coordinator: ZeroMQ", self._nodes)

    def _send(
        self, to: zmq.Socket[bytes], kinds: list[object], count: int, name: str, decoder: Decoder[local.ClientReply]
    ) -> None:
        surface, names = self.surfaces[name], self._names()
        answers = 0
        for _ in range(count):
            if self._rng.random() < 0.03:
                to.send_multipart([self._rng.randbytes(5)] * self._rng.choice((2, 3, 50)))
            else:
                to.send(frame_of(kinds, self._rng, names))
        # the answer to the last frame ends the batch; earlier frames have been answered by then
        to.send(encode(_LAST, local.GetPlan(model="?")))
        while True:
            assert to.poll(20_000), f"{name}: no answer within 20 s"
            try:
                number, answer = decoder.decode(to.recv())
            except ProtocolError as exc:
                raise AssertionError(f"{name} sent what its peer refuses: {exc}") from exc
            if number == _LAST:
                break
            answers += 1
            if isinstance(answer, local.Failure):
                assert answer.code != "internal", f"{name}: {answer.message}"
                surface.refused += 1
            else:
                surface.accepted += 1
        surface.inputs += count
        surface.unanswered += max(0, count - answers)

    # --- the descriptor socket ----------------------------------------------------------------------------

    def _to_descriptors(self, count: int) -> None:
        # Goodbye has no answer to wait for
        kinds = [kind for kind in kinds_of(sidecar.DescriptorRequest) if kind.tag != "Goodbye"]
        surface = self.surfaces["daemon: descriptors"]
        sent = 0
        while sent < count:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(20)
            try:
                peer.connect(str(self._daemon.directory / "refitd.fds"))
                handoff.close_all(handoff.receive(peer)[1])
                while sent < count:
                    sent += 1
                    data = frame_of(kinds, self._rng)[: handoff.MAX_DATAGRAM] or b"x"
                    handoff.send(peer, data, (0,) * self._rng.choice((0, 0, 0, 0, 1, 3)))
                    answer, fds = handoff.receive(peer, 4)
                    handoff.close_all(fds)
                    # this session owns no descriptors of the daemon
                    assert b"Failure" in answer and not fds, answer
                    surface.refused += 1
            except (RefitdError, ConnectionError):
                surface.refused += 1  # by closing the connection
            finally:
                peer.close()
        surface.inputs += count

    def close(self) -> None:
        """Close all peers, wait until their versions can be dropped, and swap once more."""
        if self._peer is not None:
            self._peer.close()
        self._context.destroy(linger=0)
        eventually(self._is_inherited, "versions of the fuzzer's can be taken over and dropped", 30)
        self._fleet.swap()
        self.swaps += 1
        for name, pid in self._pids.items():
            before = self.peaks[name].before.descriptors
            eventually(
                lambda pid=pid, before=before: figures(pid).descriptors <= before, f"{name} closes what is left", 20
            )
            self.peaks[name].look(pid)
        self._fleet.close()

    def _is_inherited(self) -> bool:
        """Register the same rank again and close it, in case a fuzzed publish has outlived its peer."""
        peer = RawPeer(self._daemon.directory, hello=True)
        try:
            answer = peer.ask(local.RegisterSource(model="mine", rank=0, world_size=1, shard=SHARD))
            if not isinstance(answer, local.Registered):
                return False  # the daemon has not noticed the loss of the old peer yet
            return isinstance(peer.ask(local.Deregister(member=answer.member)), local.Done)
        finally:
            peer.close()


_LAST = 1 << 60
_DIGEST = digest_of(SHARD)
# Messages that may change the fleet that swaps beside the fuzzer: any operator may send them.
_THE_FLEETS = ("AbortSwap", "DrainNode", "Evict", "Forget", "StartSwap", "StartSwaps")
