"""The daemon process: sockets, processes, memory and clock around `refitd.daemon.state`."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType

import zmq

from refitd.buffers import arena as memory
from refitd.buffers import room
from refitd.config import Config
from refitd.copy_services.measure import pull_seconds
from refitd.copy_services.registry import installed
from refitd.daemon import actions as act
from refitd.daemon.address import reachable_address
from refitd.daemon.beside import CoordinatorBeside
from refitd.daemon.gate import Gate
from refitd.daemon.state import Daemon
from refitd.daemon.workers import Workers
from refitd.errors import ArenaError, ConfigError, ProtocolError, RefitdError, RefusedError
from refitd.logs import EventLog, Throttle, setup
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.channel import Dealer, Received, Router, make_runtime_dir
from refitd.protocol.codec import BadMessage, Decoder
from refitd.protocol.keys import ClientKeys
from refitd.security import daemon_keys, node_users

TICK_S = 1.0

# Messages of clients that are taken before everything else has its turn.
_BATCH = 256

# Messages that a client may leave unread before more are dropped.
CLIENT_MARK = 1000


class DaemonShell:
    """Performs what the state says and feeds the results back."""

    def __init__(
        self, config: Config, keys: ClientKeys | None, context: zmq.Context[zmq.Socket[bytes]], log: EventLog
    ) -> None:
        """Open every socket and start the workers.

        Raises:
            RefusedError: a socket is in use.
            ConfigError: the coordinator's endpoint is none.
        """
        self._log = log
        self._uncoordinated = Throttle()
        self._started = time.monotonic()
        self._host = socket.gethostname()
        self._config = config
        # before anything is bound: what cannot be must leave nothing behind
        services, address = _services(config.transport.service), reachable_address(config)
        self._poller = zmq.Poller()
        directory = config.runtime_dir
        endpoint = f"ipc://{directory / 'refitd.sock'}"
        self._users = node_users(config)
        self._noise = Throttle(period_s=5.0)
        self._dealer = Dealer(context, config.coordinator_endpoint, keys)
        self._gate = Gate(directory / "refitd.fds", endpoint, self._users.uids, self._watch, self._goodbye)
        self._router = Router(context, endpoint, uids=self._users.uids, unsent=CLIENT_MARK)
        for sock in (self._router.socket, self._dealer.socket, *self._dealer.doors):
            self._poller.register(sock, zmq.POLLIN)
        self._clients: Decoder[local.ClientRequest] = Decoder(local.ClientRequest)
        self._cluster: Decoder[cluster.CoordinatorMessage] = Decoder(cluster.CoordinatorMessage)
        self._arena_fds: dict[int, int] = {}
        self._arena_numbers = 0
        self._maker = ThreadPoolExecutor(1, "arenas")
        self._made_r, self._made_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watch(self._made_r, select.POLLIN)
        self._making: dict[int, Future[list[int]]] = {}
        self._measuring: dict[tuple[int, int], Future[local.PullMeasured]] = {}  # by session and request
        self._workers = Workers(config.node.workers, config.node.threads_per_worker, self._watch)
        self._state = Daemon(
            config.node_name,
            self._host,
            os.getpid(),
            config.node.workers,
            config.node.max_arena_bytes,
            address,
            services,
            config.node.keep_targets_s,
        )

    def serve(self, stop: list[int], wakeup: int, beside: CoordinatorBeside | None, ready_fd: int | None) -> None:
        """Work until `stop` holds a signal number; tell `ready_fd` once clients can work."""
        self._watch(wakeup, select.POLLIN)
        told = False
        self._feed(act.Tick())
        next_tick = time.monotonic() + TICK_S
        while not stop:
            if not told and (beside is None or self._state.is_coordinated):
                told = True
                self._tell_ready(ready_fd)
            wait_ms = max(0, int((next_tick - time.monotonic()) * 1000) + 1)
            for ready, events in self._poller.poll(wait_ms):
                self._serve_one(ready, events)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._dealer.retry()
                self._tell_if_alone(time.monotonic())
                if late := self._gate.expire(time.monotonic()):
                    self._log("turned-away", clients=late, reason="they connected and said no Hello")
                self._feed(act.Tick())
                if beside is not None and (status := beside.restart_if_ended()) is not None:
                    self._log("coordinator-restarted", status=status)

    def _tell_ready(self, ready_fd: int | None) -> None:
        self._log("ready", node=self._config.node_name, dir=str(self._config.runtime_dir), pid=os.getpid())
        if ready_fd is not None:
            os.write(ready_fd, b"ready\n")
            os.close(ready_fd)

    def _serve_one(self, ready: object, events: int) -> None:
        if ready is self._router.socket:
            for _ in range(_BATCH):
                if (received := self._router.receive()) is None:
                    break
                self._from_client(received)
        elif ready is self._dealer.socket:
            while (frame := self._dealer.receive()) is not None:
                self._from_coordinator(frame)
        elif ready in self._dealer.doors:
            self._no_handshake()
        elif ready == self._gate.listener_fd:
            refusal = self._gate.accept()
            if refusal and self._noise.lets(refusal, time.monotonic()):
                self._log("turned-away", reason=refusal)
        elif ready == self._made_r:
            self._collect()
        elif isinstance(ready, int) and self._gate.owns(ready):
            gone = self._gate.serve(ready, self._fetch)
            if gone is not None:
                self._feed(act.SessionClosed(gone, "its process has ended or closed the connection"))
        elif isinstance(ready, int) and (worker := self._workers.fds().get(ready)) is not None:
            self._from_worker(worker, events)

    def _no_handshake(self) -> None:
        reason = self._dealer.failure()
        if reason is None:
            return
        self._feed(act.CoordinatorUnreachable(reason))
        if self._uncoordinated.lets(reason, time.monotonic()):
            self._log("handshake-failed", reason=reason)

    def _tell_if_alone(self, now: float) -> None:
        waited_s = now - self._started
        if self._state.is_coordinated or waited_s < self._config.deadlines.connect_s:
            return
        if self._uncoordinated.lets("alone", now):
            reason = "no coordinator answers; check that it runs, its endpoint, firewalls and keys"
            self._log("no-coordinator", endpoint=self._config.coordinator_endpoint, reason=reason)

    def _from_worker(self, worker: int, events: int) -> None:
        if events & select.POLLOUT:
            self._workers.flush(worker)
        if not events & ~select.POLLOUT:
            return
        said = self._workers.receive(worker)
        if isinstance(said, str):
            if self._workers.is_failing(worker):
                raise RefusedError(f"worker {worker} dies as soon as it starts: it {said}; see its output above")
            self._feed(act.WorkerDied(worker, said))
            return
        for message in said:
            self._feed(act.WorkerSaid(worker, message))

    def _from_client(self, received: Received) -> None:
        identity = received.identity
        try:
            request, message = self._clients.decode(received.frame)
        except ProtocolError as exc:
            number = exc.request_id if isinstance(exc, BadMessage) else 0
            if self._noise.lets(f"bad {received.address}", time.monotonic()):
                session = self._gate.session_of(received)
                self._log("bad-message", session=session, peer=received.address, reason=str(exc))
            self._router.send(identity, number, local.Failure(code=exc.code, message=str(exc)))
            return
        if isinstance(message, local.Hello):
            self._router.send(identity, request, self._hello(received, message))
            return
        session = self._gate.session_of(received)
        if session is None:
            failure = local.Failure(code=RefusedError.code, message="say Hello with a session token first")
            self._router.send(identity, request, failure)
            return
        try:
            self._feed(act.ClientSaid(session, request, message))
        except Exception as exc:
            # a mistake of ours that one client's message brings out must not end everybody's daemon
            if self._noise.lets(f"internal {session} {type(message).__name__}", time.monotonic()):
                self._log.failed("internal-error", session=session, message=type(message).__name__)
            text = f"the daemon made a mistake over {type(message).__name__}: {exc!r}; its log has the details"
            self._router.send(identity, request, local.Failure(code="internal", message=text))

    def _goodbye(self, session: int) -> None:
        self._state.goodbye(session)

    def _hello(self, received: Received, hello: local.Hello) -> local.Welcome | local.Failure:
        if hello.protocol != PROTOCOL_VERSION:
            text = f"this client speaks protocol {hello.protocol}, the daemon {PROTOCOL_VERSION}; upgrade one of them"
            return local.Failure(code=ProtocolError.code, message=text)
        try:
            session, peer = self._gate.admit(received, hello.token)
        except RefitdError as exc:
            return local.Failure(code=exc.code, message=str(exc))
        self._feed(act.SessionOpened(session, peer.pid, hello.name, self._users.roles_of(peer.uid), peer.uid))
        return local.Welcome(
            protocol=PROTOCOL_VERSION,
            node=self._config.node_name,
            host=self._host,
            coordinator=self._state.is_coordinated,
        )

    def _from_coordinator(self, frame: bytes) -> None:
        try:
            request, message = self._cluster.decode(frame)
        except ProtocolError as exc:
            self._log("bad-message", peer="coordinator", reason=str(exc))
            return
        try:
            self._feed(act.CoordinatorSaid(request, message))
        except Exception:
            # the coordinator hears nothing and gives the swap up at its deadline; the weights held here stay
            self._log.failed("internal-error", peer="coordinator", message=type(message).__name__)

    def _fetch(self, session: int, arena: int, write: bool) -> tuple[int, int, str]:
        found = self._state.may_fetch(session, arena, write)
        return self._arena_fds[arena], found.nbytes, found.device

    def _feed(self, event: act.Event) -> None:
        for instruction in self._state.handle(event, time.monotonic()):
            self._perform(instruction)

    def _perform(self, instruction: act.Instruction) -> None:
        match instruction:
            case act.ToClient(session, request, message):
                identity = self._gate.identity_of(session)
                if identity is not None:
                    self._router.send(identity, request, message)
            case act.ToCoordinator(request, message):
                try:
                    if not self._dealer.send(request, message) and request:
                        self._feed(act.Unsent(request))
                except ProtocolError as exc:
                    failure = local.Failure(code=exc.code, message=str(exc))
                    self._feed(act.CoordinatorSaid(request, failure))
            case act.ToWorker(worker, message, arena, block):
                fd = self._arena_fds[arena] if arena is not None else None
                try:
                    self._workers.send(worker, message, fd, block)
                except OSError as exc:
                    reason = f"{exc.strerror}; raise `ulimit -Hn` or LimitNOFILE= of the daemon, or free memory"
                    self._feed(act.NotSent(worker, message, reason))
            case act.MakeArenas(ticket, wanted, held, device):
                future = self._maker.submit(_make_arenas, wanted, held, self._config.node.workers, device)
                self._making[ticket] = future
                future.add_done_callback(lambda _: os.write(self._made_w, b"."))
            case act.MeasurePull(session, request, pid, spans):
                if any(waiting == session for waiting, _ in self._measuring):
                    text = "this client has a measurement under way; wait for its end"
                    failure = local.Failure(code=RefusedError.code, message=text)
                    self._perform(act.ToClient(session, request, failure))
                    return
                measured = self._maker.submit(_measure, pid, spans)
                self._measuring[(session, request)] = measured
                measured.add_done_callback(lambda _: os.write(self._made_w, b"."))
            case act.WriteArena(arena, data):
                os.pwrite(self._arena_fds[arena], data, 0)
            case act.CloseArena(arena):
                os.close(self._arena_fds.pop(arena))
            case act.RestartWorker(worker):
                self._workers.restart(worker)
            case act.Log(event, fields):
                # clients decide how many requests are refused
                subject = f"{event} {fields.get('session')} {fields.get('message')}"
                if event != "refused" or self._noise.lets(subject, time.monotonic()):
                    self._log.write(event, fields)

    def _collect(self) -> None:
        os.read(self._made_r, 4096)
        for ticket, future in list(self._making.items()):
            if not future.done():
                continue
            del self._making[ticket]
            error = future.exception()
            if error is not None:
                reason = error if isinstance(error, RefitdError) else ArenaError(f"arena: {error}")
                self._feed(act.ArenasRefused(ticket, reason))
                continue
            numbers = []
            for fd in future.result():
                self._arena_numbers += 1
                self._arena_fds[self._arena_numbers] = fd
                numbers.append(self._arena_numbers)
            self._feed(act.ArenasMade(ticket, tuple(numbers)))

        for (session, request), measured in list(self._measuring.items()):
            if measured.done():
                del self._measuring[(session, request)]
                self._perform(act.ToClient(session, request, measured.result()))

    def _watch(self, fd: int, events: int) -> None:
        if events:
            self._poller.register(fd, events)
        elif fd in self._poller:
            self._poller.unregister(fd)

    def close(self) -> None:
        """End the workers, close every socket, give the memory back."""
        self._workers.close()
        self._gate.close()
        self._router.close()
        self._dealer.close()
        self._maker.shutdown(wait=True, cancel_futures=True)
        for fd in self._arena_fds.values():
            os.close(fd)


def _services(needed: str) -> tuple[str, ...]:
    """Return the copy services that can run here; raises ConfigError, with what to install, if `needed` cannot."""
    registry = installed()
    if registry.find(needed).join is None:
        raise ConfigError(f"transport.service {needed!r} does not cross nodes; use gloo, or nccl between GPUs")
    return tuple(backend.name for backend in registry if not backend.missing())


def _make_arenas(
    wanted: tuple[tuple[int, str], ...], held: tuple[int, ...], workers: int, device: str = ""
) -> list[int]:
    """Make all of them or none; `device` names the GPU, if they are to lie on one."""
    room.check_descriptors(wanted, len(held), workers)
    if device:
        from refitd.buffers import cuda

        return cuda.create_all(wanted, cuda.index_of(device))
    room.check_bytes(wanted, sum(held))
    fds: list[int] = []
    try:
        for nbytes, label in wanted:
            fds.append(memory.create(nbytes, label))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _measure(pid: int, spans: tuple[tuple[int, int, int], ...]) -> local.PullMeasured:
    """Read another process as a worker would: both are this user's, and a client that lets one read lets the other."""
    try:
        return local.PullMeasured(seconds=pull_seconds(pid, spans))
    except (RefitdError, ValueError, MemoryError, OverflowError) as exc:
        return local.PullMeasured(seconds=0.0, reason=str(exc).partition(";")[0])


def run(config: Config, beside: CoordinatorBeside | None, ready_fd: int | None) -> int:
    """Run the daemon until SIGTERM or SIGINT.

    Args:
        config: what to run.
        beside: the coordinator of a standalone daemon, watched from here.
        ready_fd: a descriptor to write "ready" to, once clients can connect and a coordinator has answered.

    Raises:
        RefitdError: a socket is in use, the directory is unsafe, a worker or the coordinator cannot be kept alive.
    """
    setup(config.log.level)
    log = EventLog("daemon")
    was, now = room.raise_descriptor_limit()
    if was != now:
        log("descriptor-limit-raised", was=was, now=now)
    keys = daemon_keys(config)
    make_runtime_dir(config.runtime_dir)
    stop: list[int] = []
    wakeup_r, wakeup_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def on_signal(number: int, _: FrameType | None) -> None:
        stop.append(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        shell = DaemonShell(config, keys, context, log)
        try:
            shell.serve(stop, wakeup_r, beside, ready_fd)
        finally:
            shell.close()
    finally:
        context.destroy(linger=0)
    log("stopped", signal=stop[0])
    return 0
