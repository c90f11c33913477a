"""The coordinator process: takes the lead, listens, and runs the shell until a signal or the loss of the lead."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import zmq

from refitd import service
from refitd.buffers.arena import die_with_parent
from refitd.buffers.capacity import SERVER_DESCRIPTORS, raise_descriptor_limit, require_descriptors
from refitd.config import Config, EtcdPlace
from refitd.coordinator.journals import Journal, LeadLost
from refitd.coordinator.journals.etcd import LOOK_S, EtcdJournal, Lead, check_place
from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.journals.gateway import Gateway, NotReached
from refitd.coordinator.nodes import read_cluster
from refitd.coordinator.shell import CoordinatorShell
from refitd.errors import ConfigError
from refitd.logs import EventLog, Throttle, setup
from refitd.metrics import opened
from refitd.protocol import cluster
from refitd.protocol.channel import Router
from refitd.protocol.keys import ServerKeys
from refitd.security import coordinator_keys, coordinator_uids
from refitd.service import make_runtime_dir

if TYPE_CHECKING:
    from refitd.coordinator.metrics import CoordinatorMonitor


def _monitor(config: Config, address: tuple[str, int]) -> CoordinatorMonitor:
    from refitd.coordinator.metrics import CoordinatorMonitor

    return CoordinatorMonitor(config, address)


def _check_single(config: Config, with_parent: bool) -> None:
    if len(config.coordinator_endpoints) > 1:
        raise ConfigError(
            f"coordinator.endpoint lists {config.coordinator_endpoint}: a coordinator listens at one endpoint, its "
            "own; the list is for daemons"
        )
    if with_parent and isinstance(config.journal_place, EtcdPlace):
        raise ConfigError(
            f"coordinator.journal {config.journal_place}: the coordinator of a standalone daemon has no standby, so "
            "its journal is a file; leave --standalone out and run `refitd coordinator`"
        )


def run(config: Config, *, with_parent: bool = False) -> int:
    """Run the coordinator until SIGTERM or SIGINT; with `with_parent` also until the parent process ends.

    Raises:
        RefitdError: the endpoint is in use, the directory is unsafe or the journal cannot be opened.
    """
    if with_parent:
        die_with_parent()
    setup(config.log.level, config.log.format)
    log = EventLog("coordinator")
    raise_descriptor_limit()  # unfinished connections take descriptors, too
    require_descriptors(SERVER_DESCRIPTORS, "a coordinator")
    _check_single(config, with_parent)
    keys = coordinator_keys(config)
    read_cluster(config)  # a standby should not find out when it leads
    make_runtime_dir(config.runtime_dir, opened=bool(config.node.allowed_uids))
    stop: list[int] = []
    reloads: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        (reloads if number == signal.SIGHUP else stop).append(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if service.may_reload():
        signal.signal(signal.SIGHUP, on_signal)
    wakeup_r, wakeup_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
    told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    monitor = opened(config.metrics.address, partial(_monitor, config), log)
    manager = None if with_parent else service.ServiceManager()  # a child's is its daemon's
    try:
        while not stop:
            lead = None
            if isinstance(config.journal_place, EtcdPlace):
                lead = wait_to_lead(config, keys, stop, wakeup_r, log, monitor, manager)
                if lead is None:
                    break
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            try:
                _lead(config, keys, context, lead, stop, reloads, wakeup_r, told, log, with_parent, monitor, manager)
            except (LeadLost, NotReached) as exc:
                log("lead-lost", reason=str(exc))
            finally:
                context.destroy(linger=0)
                if lead is not None:
                    lead.release()
                    lead.gateway.close()
        if manager is not None:
            manager.stopping()
    finally:
        if monitor is not None:
            monitor.close()
    log("stopped", signal=stop[0])
    return 0


def _lead(
    config: Config,
    keys: ServerKeys | None,
    context: zmq.Context[zmq.Socket[bytes]],
    lead: Lead | None,
    stop: list[int],
    reloads: list[int],
    wakeup: int,
    told: tuple[int, int],
    log: EventLog,
    with_parent: bool,
    monitor: CoordinatorMonitor | None,
    manager: service.ServiceManager | None,
) -> None:
    """Listen and decide until `stop` holds a signal number; see CoordinatorShell.serve."""
    place = config.journal_place
    sending_s = 0.0
    router = Router(context, config.coordinator_endpoint, keys, uids=coordinator_uids(config))
    try:
        if isinstance(place, EtcdPlace):
            assert lead is not None
            journal: Journal = EtcdJournal(lead, place, cluster_of(keys))
        else:
            journal = FileJournal(place)
        log("ready", endpoint=config.coordinator_endpoint, journal=journal.name, pid=os.getpid())
        allowed = keys.allowed if keys else {}
        shell = CoordinatorShell(config, router, allowed, journal, log, told, with_parent, monitor, manager)
        if manager is not None:
            manager.ready()
        try:
            shell.serve(stop, reloads, wakeup)
            shell.end_writes()
            journal.close()  # another coordinator may lead from now on
            shell.say_goodbye()
            sending_s = cluster.LAST_WORDS_S
        finally:
            shell.close()
            journal.abandon()
    finally:
        router.close(sending_s=sending_s)


# --- standby ----------------------------------------------------------------------------------------------


def cluster_of(keys: ServerKeys | None) -> str:
    """Return the identity that the coordinators of one cluster share: their public key, "" without keys."""
    return keys.own.public if keys is not None else ""


def wait_to_lead(
    config: Config,
    keys: ServerKeys | None,
    stop: list[int],
    wakeup: int,
    log: EventLog,
    monitor: CoordinatorMonitor | None,
    manager: service.ServiceManager | None,
) -> Lead | None:
    """Return the lead once this process has it; None once `stop` holds a signal number; `wakeup` is readable then.

    Raises:
        CommitError: etcd refuses, or the journal there is another cluster's or of a newer refitd.
    """
    place = config.journal_place
    assert isinstance(place, EtcdPlace)
    gateway = Gateway(place, config.etcd)
    lead = Lead(gateway, place, config.coordinator_endpoint)
    throttle = Throttle()
    leads = told = ""
    checked = False
    while not stop:
        try:
            if not checked:
                check_place(gateway, place, cluster_of(keys))
                checked = True
            leads = lead.attempt()
            if not leads:
                return lead
            lacks = f"standby of {leads}"
            if lacks != told:
                log("standby", leader=leads, journal=str(place))
        except LeadLost:  # while it was being taken
            continue
        except NotReached as exc:
            gateway.look_up()
            lacks = str(exc)
            if throttle.allows("unreachable", time.monotonic()):
                log("etcd-unreachable", reason=lacks)
        told = lacks
        if monitor is not None:
            monitor.stands_by(lacks)
        if manager is not None:
            manager.ready()
            manager.alive(time.monotonic())
        select.select([wakeup], [], [], LOOK_S)
        with contextlib.suppress(BlockingIOError):  # SIGHUP: the keys are read when it leads
            os.read(wakeup, 4096)
    gateway.close()
    return None
