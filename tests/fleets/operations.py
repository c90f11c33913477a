"""Random operations on a fleet: swaps, rollbacks, joins, faults. Every byte is compared after each."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import refitd
from refitd.testing import Cluster, RunningSwap, eventually
from tests.fleets.model import Model

SWAP_S = 60.0
JOIN_S = 100.0
ATTEMPTS = 8


@dataclass
class Fleet:
    """A cluster, its models, and one client for requests. `note` is called with expected errors."""

    cluster: Cluster
    models: list[Model]
    client: refitd.Client
    random: random.Random
    note: Callable[[str], None]

    def swap(self, model: Model, version: int) -> int:
        """Swap, and retry after a fault. Return the version: a new one if a lent version must be published again.

        Raises:
            AssertionError: no attempt succeeded.
        """
        for _ in range(ATTEMPTS):
            try:
                self.client.swap(model.name, version, timeout=SWAP_S)
                return version
            except refitd.RefitdError as exc:
                self.note(str(exc))
                time.sleep(1.0)
                # a version rounded before an engine joined that needs it unrounded no longer fits
                version = model.publish() if model.has_lent or model.casts else version
        raise AssertionError(f"{model.name}: no swap has worked {ATTEMPTS} times")

    def live(self, model: Model) -> int | None:
        """Return the last decided version, if its sources or another replica can still send it."""
        (status,) = (one for one in self.client.status().models if one.model == model.name)
        others = {rank.replica for rank in model.ranks if rank.kind != "mxfp8" and rank.dtype is model.offered}
        is_held = status.live in status.complete_versions or len(others) > 1
        return status.live if is_held and not model.casts else None


def swap(fleet: Fleet, model: Model) -> None:
    """Publish once or twice, and swap the newest."""
    for _ in range(fleet.random.choice((1, 1, 2))):
        version = model.publish()
    with model.polls():
        fleet.client.swap(model.name, version, timeout=SWAP_S)
    model.check(version)


def publish(fleet: Fleet, model: Model) -> None:
    """Publish only."""
    model.publish()


def together(fleet: Fleet, model: Model) -> None:
    """Swap two models in one decision."""
    other = fleet.random.choice([one for one in fleet.models if one is not model])
    versions = {one.name: one.publish() for one in (model, other)}
    with ExitStack() as polling:
        for one in (model, other):
            polling.enter_context(one.polls())
        fleet.client.swap_together(versions, timeout=SWAP_S)
    for one in (model, other):
        one.check(versions[one.name])


def rollback(fleet: Fleet, model: Model) -> None:
    """Roll back to the previous version, if any rank still has it."""
    with model.polls():
        try:
            report = fleet.client.rollback(model.name, timeout=SWAP_S)
        except refitd.RefitdError as exc:
            fleet.note(str(exc))
            model.check()
            return
    model.check(report.version)


def disturbed(fleet: Fleet, model: Model, disturb: Callable[[], None]) -> None:
    """Disturb a swap at a random time: it commits or changes nothing, and the next one works."""
    version = model.publish()
    with model.polls():
        asking = fleet.random.choice(list(fleet.cluster.daemons.values())).connect()
        swapping = RunningSwap(asking, model.name, version, SWAP_S)
        time.sleep(0.15 * fleet.random.random())
        disturb()
        has_failed = False
        try:
            swapping.result(SWAP_S + 30)
        except refitd.RefitdError as exc:
            fleet.note(str(exc))
            has_failed = True
        time.sleep(0.3)
        model.check()
        if has_failed:
            version = fleet.swap(model, version)
    model.check(version)


def abort(fleet: Fleet, model: Model) -> None:
    """An operator aborts a swap."""

    def ask() -> None:
        try:
            fleet.client.abort(model.name)
        except refitd.RefitdError as exc:  # it has ended, or is decided
            fleet.note(str(exc))

    disturbed(fleet, model, ask)


def kill_worker(fleet: Fleet, model: Model) -> None:
    """A worker dies during a swap."""
    daemon = fleet.random.choice(list(fleet.cluster.daemons.values()))
    disturbed(fleet, model, lambda: os.kill(fleet.random.choice(daemon.workers()), signal.SIGKILL))


def restart_coordinator(fleet: Fleet, model: Model) -> None:
    """Kill the coordinator between swaps, and start it again."""
    fleet.cluster.coordinator.kill()
    fleet.cluster.coordinator.start()
    version = model.publish()
    with model.polls():
        version = fleet.swap(model, version)
    model.check(version)


def restart_daemon(fleet: Fleet, model: Model) -> None:
    """Kill a daemon between swaps, and start it again; clients hand it their arenas."""
    daemon = fleet.random.choice(list(fleet.cluster.daemons.values()))
    daemon.kill()
    daemon.start()
    version = model.publish()
    with model.polls():
        version = fleet.swap(model, version)
    model.check(version)


def rejoin(fleet: Fleet, model: Model) -> None:
    """Remove a replica, and add it with another layout, on other nodes; it gets the live version."""
    replica = fleet.random.choice(sorted({rank.replica for rank in model.ranks}))
    for rank in model.ranks:
        if rank.replica == replica:
            rank.target.close()
    if (controller := model.controllers.pop(replica, None)) is not None:
        controller.close()
    model.ranks = [rank for rank in model.ranks if rank.replica != replica]
    model.add(replica)
    version = fleet.live(model)
    with model.polls():
        if version is None:
            fleet.swap(model, version := model.publish())
        mine = [rank.target for rank in model.ranks if rank.replica == replica]
        eventually(lambda: {target.version for target in mine} == {version}, f"{replica} has caught up", JOIN_S)
    model.check()


def drain(fleet: Fleet, model: Model) -> None:
    """Drain a node during a swap; afterwards it catches up."""
    node = fleet.random.choice(sorted(fleet.cluster.daemons))
    fleet.client.drain(node, timeout=SWAP_S)
    version = model.publish()
    with model.polls():
        try:
            fleet.client.swap(model.name, version, timeout=SWAP_S)
        except refitd.RefitdError as exc:  # a source is there, or every replica
            fleet.note(str(exc))
        fleet.client.resume(node)
        version = fleet.swap(model, version)
        targets = [rank.target for rank in model.ranks]
        eventually(lambda: {target.version for target in targets} == {version}, "all have caught up", JOIN_S)
    model.check(version)


def verify(fleet: Fleet, model: Model) -> None:
    """Verify live versions, except for ranks that registered at a restarted daemon, which lacks their digests."""
    if any(rank.target.version for rank in model.ranks):
        with model.polls():
            found = fleet.client.verify(model.name, timeout=SWAP_S)
        unknown = [rank.reason for rank in found.members if rank.state != "proven"]
        are_returned = all("it registered with that version" in reason for reason in unknown)
        assert found.outcome != "differs" and are_returned, found


def spoil(fleet: Fleet, model: Model) -> None:
    """Have an engine write to its own weights: a wrong base does not go live, and the next versions are right."""
    spoilt = [rank for rank in model.ranks if rank.kind != "mxfp8" and rank.target.version]
    if not spoilt:
        return
    live = fleet.random.choice(spoilt).live
    flat = live[fleet.random.choice(sorted(live))].view(-1)
    flat[fleet.random.randrange(flat.numel())] += 1
    version = model.publish()
    with model.polls():
        version = fleet.swap(model, version)
    model.check(version)


OPERATIONS: tuple[Callable[[Fleet, Model], None], ...] = (
    *(swap,) * 5,
    publish,
    together,
    rollback,
    abort,
    kill_worker,
    restart_coordinator,
    restart_daemon,
    rejoin,
    drain,
    verify,
    spoil,
)
