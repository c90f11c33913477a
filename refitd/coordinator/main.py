"""The coordinator process: sockets, clock and journal around `refitd.coordinator.state`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Mapping
from types import FrameType

import zmq

from refitd.buffers.arena import die_with_parent
from refitd.buffers.room import raise_descriptor_limit
from refitd.commit.journal import Journal
from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.plans import make_plan
from refitd.coordinator.state import Coordinator
from refitd.errors import CommitError, PlanError, ProtocolError, RefitdError
from refitd.logs import EventLog, Throttle, setup
from refitd.protocol import cluster
from refitd.protocol.channel import Received, Router, make_runtime_dir
from refitd.protocol.codec import BadMessage, Decoder
from refitd.protocol.local import Failure
from refitd.protocol.roles import ANYONE, Allowed
from refitd.security import coordinator_keys

_TICK_S = 1.0

# Messages that are taken before time and the doors are looked at again: peers that flood must not stop the clock.
_BATCH = 256

# Lines whose number peers decide.
_NOISY = frozenset({"refused", "illegal"})


class CoordinatorShell:
    """Performs what the state says and feeds the results back."""

    def __init__(
        self, config: Config, router: Router, allowed: Mapping[str, Allowed], journal: Journal, log: EventLog
    ) -> None:
        self._router = router
        self._journal = journal
        self._log = log
        self._turned_away = Throttle()
        self._noise = Throttle(period_s=5.0)
        self._allowed = allowed
        self._decoder: Decoder[cluster.NodeMessage] = Decoder(cluster.NodeMessage)
        self._state = Coordinator(
            config=config,
            boot=secrets.token_hex(8),
            pid=os.getpid(),
            started=time.monotonic(),
            new_swap_id=lambda: secrets.token_hex(4),
            wall_clock=time.time,
            decided=journal.decided,
            recent=journal.recent,
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
            for _ in range(_BATCH):
                if (received := self._router.receive()) is None:
                    break
                self._take(received)
            if (now := time.monotonic()) >= deadline:
                next_tick = now + _TICK_S
                with contextlib.suppress(CommitError):  # it has been logged when it was noted
                    self._journal.flush()
                self._feed(act.Tick())

    def _take(self, received: Received) -> None:
        identity, allowed = received.identity, self._allowed.get(received.key, ANYONE)
        try:
            request, message = self._decoder.decode(received.frame)
        except ProtocolError as exc:
            if self._noise.lets(received.address, time.monotonic()):
                self._log("bad-message", peer=allowed.name or received.address, reason=str(exc))
            number = exc.request_id if isinstance(exc, BadMessage) else 0
            self._router.send(identity, number, Failure(code=exc.code, message=str(exc)))
            return
        try:
            self._feed(act.FromNode(identity, request, message, received.key, allowed))
        except Exception as exc:
            # a mistake of ours that one daemon's message brings out must not end everybody's coordinator
            if self._noise.lets(f"internal {type(message).__name__}", time.monotonic()):
                self._log.failed(
                    "internal-error", peer=allowed.name or received.address, message=type(message).__name__
                )
            text = f"the coordinator made a mistake over {type(message).__name__}: {exc!r}; its log has the details"
            self._router.send(identity, request, Failure(code="internal", message=text))

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
                except Exception as exc:  # a description that the planner did not expect must end its own swap only
                    self._log.failed("internal-error", message="MakePlan")
                    return act.Planned(ticket, None, PlanError(f"planning failed: {exc!r}; the log has the details"))
            case act.Decide(record):
                try:
                    self._journal.write(record)
                except CommitError as exc:
                    return act.JournalWritten(record.swap, exc)
                return act.JournalWritten(record.swap)
            case act.Remember(record):
                try:
                    self._journal.note(record)
                except CommitError as exc:
                    # the decision itself is on disk, and this is written as soon as there is room
                    self._log("journal-failed", swap=record.swap, reason=str(exc))
            case act.Log(event, fields):
                noisy = event in _NOISY
                subject = f"{event} {fields.get('node')} {fields.get('message')}"
                if not noisy or self._noise.lets(subject, time.monotonic()):
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
    raise_descriptor_limit()  # connections that are never finished take some, too
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
            CoordinatorShell(config, router, keys.allowed if keys else {}, journal, log).serve(stop, wakeup_r)
            journal.close()
        finally:
            router.close()
    finally:
        context.destroy(linger=0)
    log("stopped", signal=stop[0])
    return 0
