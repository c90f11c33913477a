"""A standby coordinator: while another one leads, it decides nothing and listens nowhere."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from refitd.config import Config, EtcdPlace
from refitd.coordinator.journals.base import LeadLost
from refitd.coordinator.journals.etcd import check_place
from refitd.coordinator.journals.gateway import Gateway, NotReached
from refitd.coordinator.journals.lead import LOOK_S, Lead
from refitd.logs import EventLog, Throttle
from refitd.protocol.keys import ServerKeys
from refitd.service import ServiceManager

if TYPE_CHECKING:
    from refitd.coordinator.metrics import CoordinatorMonitor


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
    manager: ServiceManager | None,
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
