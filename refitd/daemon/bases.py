"""Find the ranks of this node that hold a swap's base version, from which deltas may be taken."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from refitd.daemon.members import LocalMember
from refitd.protocol.cluster import Stage
from refitd.protocol.sidecar import HeldBase


def source_bases(stage: Stage, sources: Iterable[LocalMember]) -> list[HeldBase]:
    """Return the source slots that hold `stage.base` as well as the version to send; mark them as compared."""
    found = []
    for member in sources:
        slots = {slot.version: slot for slot in member.slots}
        new, base = slots.get(stage.version), slots.get(stage.base)
        is_held = stage.base is not None and new is not None and base is not None and member.run == stage.base_run
        if is_held and new is not None and base is not None and not member.waiting:  # a waiting publish needs the slot
            base.compared.add(stage.swap)
            found.append(HeldBase(new.arena, base.arena, _name(stage, member)))
    return found


def target_bases(stage: Stage, targets: Iterable[LocalMember]) -> list[HeldBase]:
    """Return what these ranks hold of `stage.base`, whole and proven. To be asked before they are staged into.

    A rank that is written in place gets every version whole: a wrong base would leave it poisoned.
    """
    return [
        HeldBase(member.staging, member.live_arena if member.flips else member.staging, _name(stage, member))
        for member in targets
        if not member.in_place
        and stage.base is not None
        and (member.state.holds, member.state.run) == (stage.base, stage.base_run)
        and member.bases.may_use((stage.base, stage.base_run))
    ]


def _name(stage: Stage, member: LocalMember) -> str:
    """Return what identifies a version in the whole cluster: model, number and run."""
    return xxhash.xxh3_128_hexdigest(repr((member.registration.model, stage.base, stage.base_run)).encode())
