"""What happens to a random fleet: swaps, rollbacks, joins, faults. Each operation ends with every byte compared."""

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
    """A cluster, its models, and one client that asks. `note` is told of errors that are rightly raised."""

    cluster: Cluster
    models: list[Model]
    client: refitd.Client
    random: random.Random
    note: Callable[[str], None]

    def swap(self, model: Model, version: int) -> int:
        """Swap; what a fault has broken must work again soon. Return the version: what was lent may have to be anew.

        Raises:
            AssertionError: it does not.
        """
        for _ in range(ATTEMPTS):
            try:
                self.client.swap(model.name, version, timeout=SWAP_S)
                return version
            except refitd.RefitdError as exc:
                self.note(str(exc))
                time.sleep(1.0)
                # a version that was rounded before an engine came that needs it unrounded fits no more
                version = model.publish() if model.has_lent or model.casts else version
        raise AssertionError(f"{model.name}: no swap has worked {ATTEMPTS} times")

    def live(self, model: Model) -> int | None:
        """Return the version that was decided last, if its sources or another replica can still give it."""
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
    """Two models in one decision."""
    other = fleet.random.choice([one for one in fleet.models if one is not model])
    versions = {one.name: one.publish() for one in (model, other)}
    with ExitStack() as polling:
        for one in (model, other):
            polling.enter_context(one.polls())
        fleet.client.swap_together(versions, timeout=SWAP_S)
    for one in (model, other):
        one.check(versions[one.name])


def rollback(fleet: Fleet, model: Model) -> None:
    """Back to the version before, if anybody holds it."""
    with model.polls():
        try:
            report = fleet.client.rollback(model.name, timeout=SWAP_S)
        except refitd.RefitdError as exc:
            fleet.note(str(exc))
            model.check()
            return
    model.check(report.version)


def disturbed(fleet: Fleet, model: Model, disturb: Callable[[], None]) -> None:
    """Disturb a swap at a random time: it commits or leaves everything as it was, and the next one works."""
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
    """The coordinator dies between swaps, and comes back."""
    fleet.cluster.coordinator.kill()
    fleet.cluster.coordinator.start()
    version = model.publish()
    with model.polls():
        version = fleet.swap(model, version)
    model.check(version)


def restart_daemon(fleet: Fleet, model: Model) -> None:
    """A daemon dies between swaps, and comes back; clients hand it their arenas."""
    daemon = fleet.random.choice(list(fleet.cluster.daemons.values()))
    daemon.kill()
    daemon.start()
    version = model.publish()
    with model.polls():
        version = fleet.swap(model, version)
    model.check(version)


def rejoin(fleet: Fleet, model: Model) -> None:
    """A replica leaves, and comes back with another layout, on other nodes; it gets the live version."""
    replica = fleet.random.choice(sorted({rank.replica for rank in model.ranks}))
    for rank in model.ranks:
        if rank.replica == replica:
            rank.target.close()
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
    """A node is left out of a swap, and catches up."""
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
    """What serves is proven, but for what ranks registered with at a daemon that was restarted: it has no digests."""
    if any(rank.target.version for rank in model.ranks):
        with model.polls():
            found = fleet.client.verify(model.name, timeout=SWAP_S)
        unknown = [rank.reason for rank in found.members if rank.state != "proven"]
        are_returned = all("it registered with that version" in reason for reason in unknown)
        assert found.outcome != "differs" and are_returned, found


def spoil(fleet: Fleet, model: Model) -> None:
    """An engine writes to its own weights: a base that differs goes live nowhere, and the next versions are right."""
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
