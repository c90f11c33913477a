"""Choose the version that may be swapped into a model's targets; if none may, say what is missing and where.

The members must be complete and may not have another version to commit. Sources must offer what targets want in MXFP8,
and targets that keep some of their tensors must agree with the sources on which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

from msgspec.structs import replace

from refitd.coordinator.descriptions import canonical_names
from refitd.coordinator.members import Member, Membership
from refitd.dtypes import Offered, unrounded
from refitd.errors import RefusedError
from refitd.mxfp8.parts import MARK, is_convertible, part_name, part_of
from refitd.protocol.shards import KeptTensor, Shard, WireTensor

# Problems in one error.
_SHOWN = 5

# Kept tensors that a status names.
MAX_NAMED = 8


def version_to_swap(
    model: Membership, wanted: int | None, *, may_be_older: bool = False, is_planned: bool = False
) -> int:
    """Return the version that a swap would make live; older than the served one only with `may_be_older`.

    With `is_planned`, a plan of these members exists, so their descriptions have been checked.

    Raises:
        RefusedError: it cannot be swapped now; the text says what is missing and where.
    """
    if not model.sources:
        raise RefusedError(f"model {model.name!r} has no source; start the trainer and let it register_source")
    offered = model.offered()
    if offered.missing:
        raise RefusedError(
            f"model {model.name!r}: source ranks {offered.missing} of {offered.world} have not registered"
        )
    if offered.run is None:
        raise RefusedError(_several_runs(model))
    if offered.drained:
        first, nodes = offered.drained[0], sorted({m.node for m in offered.drained})
        raise RefusedError(
            f"model {model.name!r}: {first.describe()} is on drained node {first.node!r}, and no source "
            f"can be left out; refitctl resume {' and '.join(nodes)}, or start the trainer on another node"
        )
    complete = offered.complete
    version = wanted if wanted is not None else complete[-1] if complete else None
    if version is None or (version not in complete and version != model.forming()):
        held = ", ".join(f"rank {r}: {sorted(m.source.versions) or 'none'}" for r, m in sorted(model.sources.items()))
        if version is None:
            raise RefusedError(
                f"model {model.name!r} has no version that every source rank has published ({held}); publish one"
            )
        raise RefusedError(
            f"model {model.name!r}: version {version} is not held by every source rank ({held}); "
            f"complete versions: {complete or 'none'}"
        )
    check_targets(model, version, may_be_older=may_be_older, is_planned=is_planned)
    return version


def spare_run(model: Membership, version: int) -> str | None:
    """Return the run of a version that every target rank can exchange its live one for; None if some cannot.

    Raises:
        RefusedError: a rank is missing, or has another version to commit first.
    """
    held = {m.arenas.spare for m in model.targets.values()}
    found = held.pop() if len(held) == 1 else None
    if found is None or found[0] != version:
        return None
    check_targets(model, version, may_be_older=True)
    return found[1]


def _several_runs(model: Membership) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, member in sorted(model.sources.items()):
        ranks.setdefault(member.run, []).append(rank)
    sides = "; ".join(f"run {run or '?'}: ranks {found[:8]}" for run, found in sorted(ranks.items()))
    return (
        f"model {model.name!r}: its source ranks are of several runs of the trainer ({sides}), whose versions are "
        "not the same though they have one number; start the ranks of the older run again"
    )


def check_targets(model: Membership, version: int, *, may_be_older: bool, is_planned: bool = False) -> None:
    """Check that every target can be given this version, by the sources or by seeds; see `version_to_swap`.

    Raises:
        RefusedError: as `version_to_swap`.
    """
    if not model.targets:
        raise RefusedError(f"model {model.name!r} has no target; start an engine and let it register_target")
    offers = None if is_planned else _Offers(model)
    for replica, ranks in model.replicas().items():
        world, there = ranks[0].added.world_size, {member.added.rank for member in ranks}
        if missing := [rank for rank in range(world) if rank not in there]:
            raise RefusedError(
                f"model {model.name!r}: replica {replica!r} lacks ranks {missing} of {world}; "
                "wait until they have registered, or stop the others"
            )
        if lacking := model.lacks_controller(replica, ranks):
            raise RefusedError(
                f"model {model.name!r}: replica {replica!r} {lacking}; call "
                f"client.control_replica({model.name!r}, {replica!r}, pause=..., commit=...) in the process that "
                "drives it"
            )
        for member in ranks:
            if member.pending is not None:
                raise RefusedError(
                    f"model {model.name!r}: {member.describe()} has not yet taken over the version of swap "
                    f"{member.staged}; it must reach a commit point (poll or wait), or be restarted"
                )
            if member.version is not None and member.version > version and not may_be_older:
                raise RefusedError(
                    f"model {model.name!r}: {member.describe()} serves version {member.version}, which is newer "
                    f"than {version}; publish a higher version, or `refitctl rollback` to it"
                )
            if offers is not None:
                _check_held(model, member, offers)
        if offers is not None and (problems := offers.unfollowable(ranks)):
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
    """The tensors that sources or seeds offer, compared once with all targets of equal descriptions."""

    def __init__(self, model: Membership) -> None:
        self._offered = {m.added.digest: m.described.shard for m in model.givers()}.values()
        self._are_seeds = bool(model.seeds)
        self._lacking: dict[str, list[str]] = {}
        self._unfollowable: dict[tuple[str, ...], list[str]] = {}

    def lacking(self, member: Member) -> list[str]:
        """Return what a target wants in MXFP8 that is not offered."""
        if member.described.wants and member.added.digest not in self._lacking:
            self._lacking[member.added.digest] = offer_problems(
                self._offered, member.described.wants, may_convert=not self._are_seeds
            )
        return self._lacking[member.added.digest] if member.described.wants else []

    def unfollowable(self, ranks: Sequence[Member]) -> list[str]:
        """Return why a replica of these ranks cannot follow what is offered."""
        alike = tuple(m.added.digest for m in ranks)
        if alike not in self._unfollowable:
            shards = [m.described.shard for m in ranks]
            offered = as_offered(self._offered, shards) if self._are_seeds else self._offered
            self._unfollowable[alike] = part_problems(offered, shards)
        return self._unfollowable[alike]


# --- MXFP8 ------------------------------------------------------------------------------------------------


def offer_problems(
    sources: Iterable[Shard], wanted: Iterable[tuple[str, str]], *, may_convert: bool = True
) -> list[str]:
    """Return the `wanted_parts` that no source offers in MXFP8 and no sender can convert, each with advice."""
    parts = sorted(set(wanted))
    if not parts:
        return []
    offered: set[str] = set()
    convertible: set[str] = set()
    for shard in sources:
        for tensor in shard.tensors:
            names = canonical_names(tensor) | set(tensor.aliases)
            offered |= names
            convertible |= names if may_convert and is_convertible(tensor.dtype) else set()
    found = []
    for tensor_name, rounding in parts:
        if part_name(tensor_name, rounding, "data") in offered or tensor_name in convertible:
            continue
        others = sorted({p.rounding for name in offered if (p := part_of(name)) and p.tensor == tensor_name})
        if others:
            found.append(
                f"{tensor_name}: sources round its scales {', '.join(others)}, wanted is {rounding}; declare one "
                "rounding on both sides"
            )
        else:
            found.append(
                f"{tensor_name}: it is wanted in MXFP8, and no source offers it so, or in bfloat16; declare it there "
                "(register_source(mxfp8=...)), or register the target with convert_on_send=False"
            )
    return found


def shortened(problems: list[str]) -> str:
    """Return the first few problems in one line."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


# --- sources that offer a part of the model ---------------------------------------------------------------


def part_problems(sources: Iterable[Shard], ranks: Iterable[Shard]) -> list[str]:
    """Return why a replica cannot follow these sources, [] if it can or if neither side speaks of a part.

    Args:
        sources: the shards of all source ranks.
        ranks: the shards of all ranks of the replica.
    """
    sources, ranks = list(sources), list(ranks)
    kept = [tensor for shard in ranks for tensor in shard.kept]
    if not any(shard.is_partial for shard in sources):
        if not kept:
            return []
        return [
            f"it keeps {_named(kept)}, and the sources do not say that they offer a part of the model; "
            "register them with partial=True, or the target without keeps"
        ]
    offered = names_of(sources)
    if overlap := [tensor for tensor in kept if not offered.isdisjoint(tensor.tensors)]:
        return [f"it keeps {_named(overlap)}, which the sources offer; register the target again without that"]
    return _missing(offered, ranks) or _untaken(sources, ranks, kept)


def as_offered(seeds: Iterable[Shard], ranks: Iterable[Shard]) -> list[Shard]:
    """Return the shards of serving ranks as source shards, for `part_problems` of a replica's ranks.

    It is unknown whether the sources offered a part. If the replica keeps tensors, the check assumes that they did.
    """
    is_partial = any(shard.kept or shard.keeps_rest for shard in ranks)
    return [replace(shard, is_partial=is_partial) for shard in seeds]


def names_of(shards: Iterable[Shard]) -> set[str]:
    """Return the canonical tensors of shards and their aliases; the parts of one in MXFP8 count as that tensor."""
    return {
        name.partition(MARK)[0]
        for shard in shards
        for tensor in shard.tensors
        for name in (*canonical_names(tensor), *tensor.aliases)
    }


def kept_names(kept: Sequence[KeptTensor]) -> tuple[str, ...]:
    """Return the names of the first kept tensors, as a status shows them."""
    return tuple(tensor.name for tensor in kept[:MAX_NAMED])


def _missing(offered: set[str], ranks: Iterable[Shard]) -> list[str]:
    """Return a problem for each tensor that is not, or not completely, offered."""
    found: dict[str, None] = {}
    for tensor in (tensor for shard in ranks for tensor in shard.tensors if prod(tensor.shape)):
        names = {name.partition(MARK)[0] for name in (*canonical_names(tensor), *tensor.aliases)}
        lacking, there = ", ".join(sorted(names - offered)), ", ".join(sorted(names & offered))
        if not there:
            found[
                f"{tensor.name}: no source offers it, and the sources say that they offer a part of the model; where "
                "the target is to keep it as it is, register it with keeps=True, or with its name in keeps"
            ] = None
        elif lacking and tensor.aliases:
            # the offered one may be trained and the other frozen: the target would hold one value for two
            found[
                f"{tensor.name}: it is tied with {lacking} there, and the sources offer {there} and say nothing of the "
                "tie; declare the aliases at the source, or register an untied model"
            ] = None
        elif lacking:
            found[
                f"{tensor.name}: it is made of several tensors, and the sources offer {there} and not {lacking}; a "
                "target keeps a tensor as a whole: offer all of its parts"
            ] = None
    return list(found)


def _untaken(sources: Iterable[Shard], ranks: Sequence[Shard], kept: Sequence[KeptTensor]) -> list[str]:
    """Return the problem of a replica that takes no offered tensor, or that keeps the rest and does not take all."""
    taken = names_of(ranks)
    # each is one weight, under all of its names
    weights = [
        {name.partition(MARK)[0] for name in names}
        for shard in sources
        for tensor in shard.tensors
        for names in ([{*canonical_names(tensor), *tensor.aliases}] if tensor.aliases else _each(tensor))
    ]
    unused = sorted({min(names) for names in weights if taken.isdisjoint(names)})
    if kept and all(taken.isdisjoint(names) for names in weights):
        return [f"it keeps all that it has ({_named(kept)}) and takes nothing; do its names differ from the sources'?"]
    if unused and any(shard.keeps_rest for shard in ranks):
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        return [
            f"it keeps {_named(kept) if kept else 'nothing'}, and does not take {unused[0]!r}{more}, which is offered; "
            "do the names differ? If it is right so, name what it keeps: keeps=(...)"
        ]
    return []


def _each(tensor: WireTensor) -> list[set[str]]:
    return [{name} for name in canonical_names(tensor)]


def _named(kept: Sequence[KeptTensor]) -> str:
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return f"{kept[0].name!r}{more}"


# --- tensors that sources round ---------------------------------------------------------------------------


def unrounded_by(membership: Membership, source: Member) -> tuple[str, ...]:
    """Return the canonical tensors that a source rank rounds and that some target of its model needs unrounded.

    Equal descriptions are compared once.
    """
    offered: dict[str, Offered] | None = None
    needed: set[str] = set()
    for digest, shard in {m.added.digest: m.described.shard for m in membership.targets.values()}.items():
        key = source.added.digest, digest
        found = membership.unrounded.get(key)
        if found is None:
            offered = _offered(source.described.shard) if offered is None else offered
            membership.unrounded.put(key, found := frozenset(unrounded(offered, _held(shard, offered))))
        needed |= found
    return tuple(sorted(needed))


def _offered(shard: Shard) -> dict[str, Offered]:
    return {
        name: Offered(tensor.dtype, tensor.cast_from)
        for tensor in shard.tensors
        if tensor.cast_from is not None
        for name in (*canonical_names(tensor), *tensor.aliases)
    }


def _held(shard: Shard, offered: dict[str, Offered]) -> dict[str, set[tuple[str, str | None]]]:
    held: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
    for tensor in shard.tensors if offered else ():
        for name in (*canonical_names(tensor), *tensor.aliases):
            if name in offered:
                held[name].add((tensor.dtype, tensor.cast_from))
    return held
