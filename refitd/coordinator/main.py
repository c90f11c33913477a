"""The coordinator process: sockets, clock and journal around `refitd.coordinator.state`."""

from __future__ import annotations

import os
import secrets
import signal
import time
from types import FrameType

import zmq

from refitd.buffers.arena import die_with_parent
from refitd.commit.journal import Journal
from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.plans import make_plan
from refitd.coordinator.state import Coordinator
from refitd.errors import CommitError, ProtocolError, RefitdError
from refitd.logs import EventLog, Throttle, setup
from refitd.protocol import cluster
from refitd.protocol.channel import Router, make_runtime_dir
from refitd.protocol.codec import BadMessage, Decoder
from refitd.protocol.local import Failure
from refitd.security import coordinator_keys

_TICK_S = 1.0


class CoordinatorShell:
    """Performs what the state says and feeds the results back."""

    def __init__(self, config: Config, router: Router, journal: Journal, log: EventLog) -> None:
        self._router = router
        self._journal = journal
        self._log = log
        self._turned_away = Throttle()
        self._decoder: Decoder[cluster.NodeMessage] = Decoder(cluster.NodeMessage)
        self._state = Coordinator(
            config=config,
            boot=secrets.token_hex(8),
            pid=os.getpid(),
            started=time.monotonic(),
            new_swap_id=lambda: secrets.token_hex(4),
            wall_clock=time.time,
            decided=journal.decided,
        )

    def serve(self, stop: list[int], wakeup: int) -> None:
        """Work until `stop` holds a signal number; `wakeup` becomes readable when it does."""
        poller = zmq.Poller()
        poller.register(wakeup, zmq.POLLIN)
        for sock in (self._router.socket, *self._router.doors):
            poller.register(sock, zmq.POLLIN)
        next_tick = time.monotonic() + _TICK_S
        while not stop:
            deadline = min(next_tick, self._state.next_deadline() or next_tick)
            poller.poll(max(0, int((deadline - time.monotonic()) * 1000) + 1))
            for fields in self._router.turned_away():
                if self._turned_away.lets(str(fields), time.monotonic()):
                    self._log.write("turned-away", fields)
            while (received := self._router.receive()) is not None:
                self._take(*received)
            if (now := time.monotonic()) >= deadline:
                next_tick = now + _TICK_S
                self._feed(act.Tick())

    def _take(self, identity: bytes, frame: bytes) -> None:
        try:
            request, message = self._decoder.decode(frame)
        except ProtocolError as exc:
            self._log("bad-message", reason=str(exc))
            number = exc.request_id if isinstance(exc, BadMessage) else 0
            self._router.send(identity, number, Failure(code=exc.code, message=str(exc)))
            return
        self._feed(act.FromNode(identity, request, message))

    def _feed(self, event: act.Event) -> None:
        pending = [event]
        while pending:
            for instruction in self._state.handle(pending.pop(0), time.monotonic()):
                result = self._perform(instruction)
                if result is not None:
                    pending.append(result)

    def _perform(self, instruction: act.Instruction) -> act.Event | None:
        match instruction:
            case act.Send(identity, request, message):
                self._router.send(identity, request, message)
            case act.MakePlan(ticket, rosters):
                try:
                    return act.Planned(ticket, make_plan(rosters))
                except RefitdError as exc:
                    return act.Planned(ticket, None, exc)
            case act.Decide(record):
                try:
                    self._journal.write(record)
                except CommitError as exc:
                    return act.JournalWritten(record.swap, exc)
                return act.JournalWritten(record.swap)
            case act.Remember(record):
                try:
                    self._journal.write(record)
                except CommitError as exc:
                    # the decision itself is on disk; how it ended is told by the members when they register
                    self._log("journal-failed", swap=record.swap, reason=str(exc))
            case act.Log(event, fields):
                self._log.write(event, fields)
        return None


def run(config: Config, *, with_parent: bool = False) -> int:
    """Run the coordinator until SIGTERM or SIGINT; `with_parent`: also end when the starting process ends.

    Raises:
        RefitdError: the endpoint is in use, the directory is unsafe or the journal cannot be opened.
    """
    if with_parent:
        die_with_parent()
    setup(config.log.level)
    log = EventLog("coordinator")
    keys = coordinator_keys(config)
    make_runtime_dir(config.runtime_dir)
    stop: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        stop.append(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    wakeup_r, wakeup_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = Router(context, config.coordinator_endpoint, keys)
        try:
            journal = Journal(config.journal_path)
            log("ready", endpoint=config.coordinator_endpoint, journal=str(config.journal_path), pid=os.getpid())
            CoordinatorShell(config, router, journal, log).serve(stop, wakeup_r)
            journal.close()
        finally:
            router.close()
    finally:
        context.destroy(linger=0)
    log("stopped", signal=stop[0])
    return 0
