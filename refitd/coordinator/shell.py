"""The loop around `refitd.coordinator.state`: sockets, clock, journal and threads."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import zmq

from refitd import service
from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.descriptions import ShardRead, unpack_shard
from refitd.coordinator.fleet import Ids
from refitd.coordinator.journals import Journal, LeadLost, Recovered, SwapRecord
from refitd.coordinator.nodes import cables_for, read_cluster
from refitd.coordinator.plan_reports import completed
from refitd.coordinator.plans import PlanMemory, make_plan
from refitd.coordinator.state import CoordinatorState
from refitd.errors import CommitError, PlanError, ProtocolError, RefitdError, RefusedError
from refitd.logs import EventLog, Throttle
from refitd.protocol import cluster
from refitd.protocol.base import (
    LARGE_FRAME,
    NODE_HELLO_BYTES,
    BackgroundThread,
    BadMessage,
    Decoder,
    UnknownKind,
    request_of,
)
from refitd.protocol.channel import Received, Router, framed, hear_out
from refitd.protocol.keys import ANYONE, Allowed
from refitd.protocol.local import Failure
from refitd.security import coordinator_keys
from refitd.states import Busy, Log, Tick

if TYPE_CHECKING:
    from refitd.coordinator.metrics import CoordinatorMonitor

_TICK_S = 1.0

# Between collections of everything, which stop the loop for 0.2 s with 8,000 ranks.
_FULL_COLLECTION_S = 3600.0

# Messages handled before the clock and other sockets are checked again: no peer may stop the clock.
_BATCH = 256

# A turn of the loop that takes this long is logged.
_SLOW_TURN_S = 0.5

# Messages of one node that may queue behind a large one.
_MAX_HELD = 1 << 14

# Packed descriptions larger than this are unpacked on another thread: unpacked they may be a thousand times as large.
_LARGE_SHARD = 4 << 10

# Log events that peers can cause without limit.
_NOISY = frozenset({"refused", "illegal"})


class CoordinatorShell:
    """Performs the state's instructions and feeds the results back."""

    def __init__(
        self,
        config: Config,
        router: Router,
        allowed: Mapping[str, Allowed],
        journal: Journal,
        log: EventLog,
        told: tuple[int, int],
        is_standalone: bool = False,
        monitor: CoordinatorMonitor | None = None,
        manager: service.ServiceManager | None = None,
    ) -> None:
        """`told` is a pipe that outlives this object: a thread that still plans writes to it."""
        self._manager = manager
        self._router = router
        self._monitor = monitor
        self._journal = journal
        self._log = log
        self._turned_away = Throttle()
        self._noise = Throttle(period_s=5.0)
        self._config = config
        self._allowed = allowed
        self._decoder: Decoder[cluster.NodeMessage] = Decoder(cluster.NodeMessage)
        self._strangers: Decoder[cluster.NodeMessage] = Decoder(cluster.NodeHello, NODE_HELLO_BYTES)
        self._told_r, self._told_w = told
        self._reader = BackgroundThread[Received]("refitd-reader", self._told)
        self._planner = BackgroundThread[int]("refitd-planner", self._told)
        self._memory = PlanMemory()  # only the planner uses it
        self._answers = BackgroundThread[tuple[bytes, int]]("refitd-answers", self._told)
        self._writer = BackgroundThread[act.Decide | act.WriteDrain | act.Remember | None]("refitd-journal", self._told)
        # by identity: a node's messages that wait behind a large one
        self._held: dict[bytes, deque[Received]] = {}
        self._state = CoordinatorState(
            config=config,
            boot=secrets.token_hex(8),
            pid=os.getpid(),
            started=time.monotonic(),
            ids=Ids(secrets.token_bytes(32)),
            past=journal,
            drained=journal.drained(),
            known=journal.nodes(),
            wall=time.time(),
            is_standalone=is_standalone,
            host=socket.gethostname(),
            speeds=read_cluster(config),
            max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def _told(self) -> None:
        """Wake the loop; callable from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._told_w, b".")

    def serve(self, stop: list[int], reloads: list[int], wakeup: int) -> None:
        """Run until `stop` holds a signal number, and read keys for each in `reloads`; `wakeup` is readable then.

        Raises:
            LeadLost: another coordinator may lead; this one must stop sending.
        """
        poller = zmq.Poller()
        poller.register(wakeup, zmq.POLLIN)
        poller.register(self._told_r, zmq.POLLIN)
        controls = self._router.control_sockets
        for sock in (self._router.socket, *controls):
            poller.register(sock, zmq.POLLIN)
        guards = self._journal.is_remote  # the lead of a local journal lasts as long as this process
        next_tick = time.monotonic() + _TICK_S
        next_full = next_tick + _FULL_COLLECTION_S
        self._publish()
        while not stop:
            deadline = min(next_tick, self._state.next_deadline() or next_tick)
            ready = dict(poller.poll(max(0, int((deadline - time.monotonic()) * 1000) + 1)))
            began = time.monotonic()
            if guards:
                self._journal.guard()  # before any message: this process may have been stopped
            if reloads:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                reloads.clear()
                self.read_files()
            if self._told_r in ready:
                self._collect()
            if any(sock in ready for sock in controls):
                for fields in self._router.turned_away():
                    if self._turned_away.allows(str(fields), time.monotonic()):
                        self._log.write("turned-away", fields)
            for _ in range(_BATCH):
                if (received := self._router.receive()) is None:
                    break
                if guards:  # an answer renews permits from when the message was sent: not later than the lead ends
                    self._journal.guard()
                self._take(received)
            if (now := time.monotonic()) >= deadline:
                next_tick = now + _TICK_S
                if self._manager is not None:
                    self._manager.alive(now)
                self._flush()
                # peers were not silent: this process was stopped or busy
                if (late_s := now - deadline) > _SLOW_TURN_S:
                    self._feed(Busy(late_s))
                self._feed(Tick())
                self._publish()
                # with 8,000 ranks a full collection stops the loop for 0.2 s; later ones skip what survives this one
                if now >= next_full:  # frozen objects may have become garbage
                    next_full = now + _FULL_COLLECTION_S
                    gc.unfreeze()
                gc.collect()
                gc.freeze()
            if (took_s := time.monotonic() - began) > _SLOW_TURN_S:
                self._log("slow-turn", seconds=took_s)

    def _flush(self) -> None:
        """Make what the journal has noted durable; a failure was logged when it happened."""
        if not self._journal.is_remote:
            with contextlib.suppress(CommitError):
                self._journal.flush()
        elif not len(self._writer):
            self._writer.submit(None, self._journal.flush)

    def end_writes(self) -> None:
        """Wait until the journal has answered about everything; afterwards only this thread uses it."""
        self._writer.close()
        self._writer.join()

    def say_goodbye(self) -> None:
        """Tell all daemons that this coordinator ends and they must find the next one; wait for their last words."""
        if not self._state.nodes:
            return
        text = (
            f"the coordinator on {socket.gethostname()} (pid {os.getpid()}) was stopped; `refitctl history` says what "
            "became of a swap; try again when the next one runs"
        )
        for node in self._state.nodes.values():
            self._router.send(node.identity, 0, Failure(code=cluster.LEAVES, message=text))
        hear_out([self._router.socket], cluster.LAST_WORDS_S)

    def close(self) -> None:
        """End the threads, once they have done what they are doing."""
        for thread in (self._reader, self._planner, self._answers, self._writer):
            thread.close()

    def _publish(self) -> None:
        if self._monitor is not None:
            frames = len(self._reader) + sum(map(len, self._held.values()))
            queues = {"frames": frames, "plans": len(self._planner), "answers": len(self._answers)}
            self._monitor.publish(self._state, queues)

    def _take(self, received: Received) -> None:
        identity, allowed = received.identity, self._allowed.get(received.key, ANYONE)
        decoder = self._decoder
        node = self._state.node_at.get(identity)
        try:
            if node is None or node.key != received.key:
                # decode only a NodeHello; a daemon of an earlier coordinator must send it again
                decoder = self._strangers
                request, kind = request_of(received.frame) if len(received.frame) <= NODE_HELLO_BYTES else (0, "")
                if kind != cluster.NodeHello.__name__:
                    text = "say NodeHello first"
                    self._router.send(identity, request, Failure(code="unknown-node", message=text))
                    return
            elif len(received.frame) > LARGE_FRAME:
                self._hold(received, lambda: (*decoder.decode(received.frame), None))
                return
            request, message = decoder.decode(received.frame)
        except ProtocolError as exc:
            if self._noise.allows(received.address, time.monotonic()):
                self._log("bad-message", peer=allowed.name or received.address, reason=str(exc))
            self._refuse(identity, exc)
            return
        if identity in self._held and not isinstance(message, cluster.NodeUpdate):
            self._hold(received)
        elif isinstance(message, cluster.DescribeShard) and len(message.packed) > _LARGE_SHARD:
            self._hold(received, lambda: self._unpacked(request, message))
        else:
            self._said(received, request, message, None)

    def _hold(self, received: Received, read: Callable[[], object] | None = None) -> None:
        """Decode a large message on another thread; the node's later messages, except heartbeats, queue behind it."""
        held = self._held.get(received.identity)
        if held is not None and len(held) >= _MAX_HELD:
            text = f"{_MAX_HELD} messages wait for a large one before them to be read; send less at once"
            self._router.send(received.identity, 0, Failure(code=RefusedError.code, message=text))
        elif held is not None:
            held.append(received)
        elif read is not None:
            self._held[received.identity] = deque()
            self._reader.submit(received, read)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._told_r, 4096)
        for written, result in self._writer.collect():
            if written is None:
                if isinstance(result, Exception) and not isinstance(result, CommitError):
                    raise result
            elif (event := self._journalled(written, result)) is not None:
                self._feed(event)
        for _, planned in self._planner.collect():
            assert isinstance(planned, act.Planned)
            self._feed(planned)
        for (identity, request), frame in self._answers.collect():
            if isinstance(frame, bytes):
                self._router.send_frame(identity, frame)
                continue
            self._log("internal-error", message="Answer", reason=repr(frame))
            text = f"the coordinator made a mistake over an answer: {frame!r}"
            self._router.send(identity, request, Failure(code="internal", message=text))
        for received, found in self._reader.collect():
            if isinstance(found, tuple):
                request, message, read = found
                if isinstance(message, cluster.DescribeShard) and read is None:
                    self._reader.submit(received, partial(self._unpacked, request, message))
                    continue
                self._said(received, request, message, read)
            elif isinstance(found, RefitdError):
                self._log("bad-message", peer=received.address, reason=str(found))
                self._refuse(received.identity, found)
            else:
                self._log("internal-error", peer=received.address, reason=repr(found))
            for later in self._held.pop(received.identity, ()):
                self._take(later)

    def _refuse(self, identity: bytes, error: RefitdError) -> None:
        """Answer a message that cannot be read, unless it is a notification that only a newer daemon knows."""
        number = error.request_id if isinstance(error, BadMessage) else 0
        if number or not isinstance(error, UnknownKind):
            self._router.send(identity, number, Failure(code=error.code, message=str(error)))

    def _said(self, received: Received, request: int, message: cluster.NodeMessage, read: ShardRead | None) -> None:
        identity, allowed = received.identity, self._allowed.get(received.key, ANYONE)
        if self._allowed and received.key not in self._allowed:  # taken off the list after its connection was made
            text = "the key of this daemon was taken off the file security.allowed of the coordinator"
            self._router.send(identity, request, Failure(code=RefusedError.code, message=text))
            return
        try:
            self._feed(act.FromNode(identity, request, message, received.key, allowed, read))
        except LeadLost:
            raise
        except Exception as exc:
            # an internal error that one daemon's message triggers must not end the coordinator
            if self._noise.allows(f"internal {type(message).__name__}", time.monotonic()):
                self._log.failed(
                    "internal-error", peer=allowed.name or received.address, message=type(message).__name__
                )
            text = f"the coordinator made a mistake over {type(message).__name__}: {exc!r}; its log has the details"
            self._router.send(identity, request, Failure(code="internal", message=text))

    def read_files(self, waiter: tuple[bytes, int] | None = None) -> None:
        """Read admitted keys and the cluster file again, then answer `waiter`; an invalid file is ignored."""
        event = "keys-not-read"
        try:
            keys = coordinator_keys(self._config)
            event = "cables-not-read"
            speeds = read_cluster(self._config)
        except RefitdError as exc:
            self._log(event, reason=str(exc))
            if waiter is not None:
                self._router.send(*waiter, Failure(code=exc.code, message=str(exc)))
            return
        if keys is not None:
            self._allowed = keys.allowed
            self._router.admit(keys.allowed)
        self._feed(act.FilesRead(None if keys is None else keys.allowed, waiter, speeds))

    def _feed(self, event: act.Event) -> None:
        pending, lines, one = [event], list[Log](), event
        try:
            while pending:
                one = pending.pop(0)
                instructions = self._state.handle(one, time.monotonic(), time.time())
                for instruction in instructions:
                    if isinstance(instruction, Log):
                        lines.append(instruction)
                    elif (result := self._perform(instruction)) is not None:
                        pending.append(result)
                if self._monitor is not None:
                    self._monitor.watch(one, instructions, self._state)
        except LeadLost:
            raise
        except Exception as exc:
            if any(isinstance(each, act.JournalWritten) for each in (one, *pending)):
                # its swaps wait for this answer only; the journal, opened and read again, has it
                self._log.failed("internal-error", message="JournalWritten")
                raise LeadLost(f"the journal's answer about a decision was not handled: {exc!r}") from exc
            raise
        finally:
            for line in lines:  # last: a line takes as long as a message
                if line.event in _NOISY:
                    subject = f"{line.event} {line.fields.get('node')} {line.fields.get('message')}"
                    if not self._noise.allows(subject, time.monotonic()):
                        continue
                self._log.write(line.event, line.fields)

    def _plan(self, asked: act.MakePlan) -> act.Planned:
        try:
            cables = cables_for(asked.cluster, (roster.node for roster in asked.rosters))
            plan = make_plan(asked.rosters, self._memory, may_relay=asked.may_relay, last=asked.last, cables=cables)
            return act.Planned(asked.ticket, plan)
        except RefitdError as exc:
            return act.Planned(asked.ticket, None, exc)
        except Exception as exc:  # an unexpected description must fail only its own swap
            self._log.failed("internal-error", message="MakePlan")
            return act.Planned(asked.ticket, None, PlanError(f"planning failed: {exc!r}; the log has the details"))

    def _perform(self, instruction: act.Instruction) -> act.Event | None:
        match instruction:
            case act.Send(identity, request, message):
                self._router.send(identity, request, message)
            case act.ReadFiles(waiter):
                self.read_files(waiter)
            case act.Answer(identity, request) as answer:
                self._answers.submit((identity, request), lambda: framed(request, completed(answer)))
            case act.MakePlan(ticket) as asked:
                self._planner.submit(ticket, partial(self._plan, asked))
            case act.Decide() | act.WriteDrain() | act.Remember() if self._journal.is_remote:
                self._writer.submit(instruction, partial(self._to_journal, instruction))
            case act.Decide() | act.WriteDrain() | act.Remember():
                try:
                    result: Exception | tuple[int, ...] = self._to_journal(instruction)
                except Exception as exc:
                    result = exc
                return self._journalled(instruction, result)
        return None

    def _to_journal(self, instruction: act.Decide | act.WriteDrain | act.Remember) -> tuple[int, ...]:
        """Write, and return the numbers of decisions; raises what the journal raises."""
        with contextlib.nullcontext() if self._monitor is None else self._monitor.journalling():
            match instruction:
                case act.Decide(records):
                    return tuple(self._journal.write(*records))
                case act.WriteDrain(drain):
                    self._journal.set_drain(drain, time.time())
                case act.Remember(record):
                    self._journal.note(record)
        return ()

    def _journalled(
        self, instruction: act.Decide | act.WriteDrain | act.Remember, result: Exception | tuple[int, ...]
    ) -> act.Event | None:
        """Return the event that follows from the journal's answer: an error, or the numbers of decisions.

        Raises:
            LeadLost: another coordinator leads, or neither outcome is certain.
        """
        error = result if isinstance(result, Exception) else None
        match instruction:
            case _ if isinstance(error, LeadLost):
                raise error
            case act.Decide(records) if not isinstance(result, Exception):
                return act.JournalWritten(tuple(record.swap for record in records), None, result)
            case act.Decide(records) if isinstance(error, CommitError):
                return act.JournalWritten(tuple(record.swap for record in records), error)
            case act.WriteDrain(drain, waiter) if error is None:
                return act.DrainWritten(drain, waiter)
            case act.WriteDrain(drain, waiter) if isinstance(error, CommitError):
                self._log("journal-failed", node=drain.node, reason=str(error))
                if waiter is not None:
                    self._router.send(*waiter, Failure(code=error.code, message=str(error)))
            case act.Remember(record) if isinstance(error, CommitError):
                # the decision itself is on disk; this entry is written as soon as there is room
                subject = (
                    "swap" if isinstance(record, SwapRecord) else "model" if isinstance(record, Recovered) else "node"
                )
                what = {subject: getattr(record, subject)}
                self._log("journal-failed", **what, reason=str(error))
            case act.Decide():  # the journal is opened and read again
                self._log("internal-error", message="Decide", reason=repr(error))
                text = f"journal {self._journal.name}: it is not known whether the last write holds: {error!r}"
                raise LeadLost(text) from error
            case _ if error is not None:
                raise error
        return None

    def _unpacked(self, request: int, message: cluster.DescribeShard) -> tuple[int, cluster.NodeMessage, ShardRead]:
        lists = self._state.descriptions.lists
        return request, message, unpack_shard(message.packed, message.digest, lists)
