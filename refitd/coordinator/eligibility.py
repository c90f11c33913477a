"""Choose the version that may be swapped into a model's targets; if none may, say what is missing and where."""

from __future__ import annotations

from collections.abc import Sequence

from refitd.coordinator.members import Member
from refitd.coordinator.membership import Membership
from refitd.coordinator.partial import as_offered, part_problems
from refitd.coordinator.requirements import offer_problems, shortened
from refitd.errors import RefusedError


def version_to_swap(model: Membership, wanted: int | None, *, may_be_older: bool = False) -> int:
    """Return the version that a swap would make live; older than the served one only with `may_be_older`.

    Raises:
        RefusedError: it cannot be swapped now; the text says what is missing and where.
    """
    if not model.sources:
        raise RefusedError(f"model {model.name!r} has no source; start the trainer and let it register_source")
    if missing := model.missing_sources():
        raise RefusedError(
            f"model {model.name!r}: source ranks {missing} of {model.source_world()} have not registered"
        )
    _check_run(model)
    if drained := model.drained_sources():
        nodes = sorted({m.node for m in drained})
        raise RefusedError(
            f"model {model.name!r}: {drained[0].describe()} is on drained node {drained[0].node!r}, and no source "
            f"can be left out; refitctl resume {' and '.join(nodes)}, or start the trainer on another node"
        )
    complete = model.complete_versions()
    held = ", ".join(f"rank {r}: {sorted(m.versions) or 'none'}" for r, m in sorted(model.sources.items()))
    if wanted is None and not complete:
        raise RefusedError(
            f"model {model.name!r} has no version that every source rank has published ({held}); publish one"
        )
    version = complete[-1] if wanted is None else wanted
    if version not in complete:
        raise RefusedError(
            f"model {model.name!r}: version {version} is not held by every source rank ({held}); "
            f"complete versions: {complete or 'none'}"
        )
    check_targets(model, version, may_be_older=may_be_older)
    return version


def spare_run(model: Membership, version: int) -> str | None:
    """Return the run of a version that every target rank can exchange its live one for; None if some cannot.

    Raises:
        RefusedError: a rank is missing, or has another version to commit first.
    """
    held = {m.spare for m in model.targets.values()}
    found = held.pop() if len(held) == 1 else None
    if found is None or found[0] != version:
        return None
    check_targets(model, version, may_be_older=True)
    return found[1]


def _check_run(model: Membership) -> None:
    if model.run() is not None:
        return
    ranks: dict[str, list[int]] = {}
    for rank, member in sorted(model.sources.items()):
        ranks.setdefault(member.run, []).append(rank)
    sides = "; ".join(f"run {run or '?'}: ranks {found[:8]}" for run, found in sorted(ranks.items()))
    raise RefusedError(
        f"model {model.name!r}: its source ranks are of several runs of the trainer ({sides}), whose versions are "
        "not the same though they have one number; start the ranks of the older run again"
    )


def check_targets(model: Membership, version: int, *, may_be_older: bool) -> None:
    """Check that every target can be given this version, by the sources or by seeds.

    Raises:
        RefusedError: as `version_to_swap`.
    """
    if not model.targets:
        raise RefusedError(f"model {model.name!r} has no target; start an engine and let it register_target")
    offers = _Offers(model)
    for replica, ranks in model.replicas().items():
        world, there = ranks[0].added.world_size, {member.added.rank for member in ranks}
        if missing := [rank for rank in range(world) if rank not in there]:
            raise RefusedError(
                f"model {model.name!r}: replica {replica!r} lacks ranks {missing} of {world}; "
                "wait until they have registered, or stop the others"
            )
        if model.lacks_controller(replica, ranks):
            raise RefusedError(
                f"model {model.name!r}: replica {replica!r} commits only when its controller says so, and has none; "
                f"call client.control_replica({model.name!r}, {replica!r}, ...) in the process that drives it"
            )
        for member in ranks:
            if member.staged is not None:
                raise RefusedError(
                    f"model {model.name!r}: {member.describe()} has not yet taken over the version of swap "
                    f"{member.staged}; it must reach a commit point (poll or wait), or be restarted"
                )
            if member.version is not None and member.version > version and not may_be_older:
                raise RefusedError(
                    f"model {model.name!r}: {member.describe()} serves version {member.version}, which is newer "
                    f"than {version}; publish a higher version, or `refitctl rollback` to it"
                )
            _check_held(model, member, offers)
        if problems := offers.unfollowable(ranks):
            raise RefusedError(f"model {model.name!r}: replica {replica!r}: {shortened(problems)}")


def _check_held(model: Membership, member: Member, offers: _Offers) -> None:
    if member.added.stale:
        raise RefusedError(
            f"model {model.name!r}: {member.describe()} has {', '.join(member.added.stale)} derived from its "
            "weights, and no hook that makes it anew; register it with Derived(..., refresh=...)"
        )
    if problems := offers.lacking(member):
        raise RefusedError(f"model {model.name!r}: {member.describe()}: {shortened(problems)}")


def unoffered(model: Membership) -> list[str]:
    """Return the parts that targets want in MXFP8 and no source offers, and tensors that replicas may not keep."""
    offers = _Offers(model)
    found = [f"{m.describe()}: {what}" for m in model.targets.values() for what in offers.lacking(m)]
    for replica, ranks in model.replicas().items():
        found += [f"replica {replica!r}: {what}" for what in offers.unfollowable(ranks)]
    return found


class _Offers:
    """What sources or seeds offer, compared once with targets of equal descriptions: there may be thousands of them."""

    def __init__(self, model: Membership) -> None:
        self._offered = {m.added.digest: m.shard for m in model.givers()}.values()
        self._are_seeds = bool(model.seeds)
        self._lacking: dict[str, list[str]] = {}
        self._unfollowable: dict[tuple[str, ...], list[str]] = {}

    def lacking(self, member: Member) -> list[str]:
        """Return what a target wants in MXFP8 that is not offered."""
        if member.wants and member.added.digest not in self._lacking:
            self._lacking[member.added.digest] = offer_problems(self._offered, member.wants)
        return self._lacking[member.added.digest] if member.wants else []

    def unfollowable(self, ranks: Sequence[Member]) -> list[str]:
        """Return why a replica of these ranks cannot follow what is offered."""
        alike = tuple(m.added.digest for m in ranks)
        if alike not in self._unfollowable:
            shards = [m.shard for m in ranks]
            offered = as_offered(self._offered, shards) if self._are_seeds else self._offered
            self._unfollowable[alike] = part_problems(offered, shards)
        return self._unfollowable[alike]
