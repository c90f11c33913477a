"""The live version of each model: the journal's, or the daemons' if the journal is lost, older or another's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from refitd.coordinator.journals.base import MAX_SEQUENCE
from refitd.coordinator.records import LiveVersion, Recovered
from refitd.protocol.cluster import LiveClaim

# Daemons register within about a second of each other; one that has missed its coordinator's goodbye is 5 s behind
# those that heard it. A coordinator whose journal is new, that daemons know more than, or that misses ranks which an
# earlier one knew, waits this long after the first of them before it begins a swap.
SETTLE_S = 6.0

# Limit on decided swaps remembered from daemons; late ranks ask about one of the last.
KEPT_DECISIONS = 4096


class Past(Protocol):
    """What the journal knows from earlier coordinators; implemented by `refitd.coordinator.journals.base.Journal`."""

    id: str

    @property
    def is_new(self) -> bool:
        """Whether it holds no decision."""

    def live(self, model: str) -> LiveVersion | None:
        """Return the version decided last."""

    def highest(self, model: str) -> int:
        """Return the highest version that was decided, -1 for none."""

    def tried(self, model: str) -> tuple[int, str]:
        """Return the highest version whose swap was aborted, and its run."""

    def before(self, model: str, version: int) -> LiveVersion | None:
        """Return the last decided version below this one."""

    def continues(self, journal: str) -> bool:
        """Whether this is the given journal, or continues it."""


class NoPast:
    """The past of a coordinator without a journal: empty, and not filled in by daemons."""

    id = ""
    is_new = False

    def live(self, model: str) -> LiveVersion | None:
        """Return None: nothing was decided."""
        return None

    def highest(self, model: str) -> int:
        """Return -1: no version was decided."""
        return -1

    def tried(self, model: str) -> tuple[int, str]:
        """Return (-1, ""): no swap was aborted."""
        return -1, ""

    def before(self, model: str, version: int) -> LiveVersion | None:
        """Return None: nothing was decided."""
        return None

    def continues(self, journal: str) -> bool:
        """Return whether `journal` is "", the id of this past."""
        return journal == ""


@dataclass(slots=True)
class _Known:
    live: LiveVersion | None
    decided_here: bool = False  # decided by this coordinator: no earlier decision outranks it
    confirmed: bool = False  # a daemon learned it from this journal
    highest: int = -1  # of all versions that were ever live


@dataclass(slots=True)
class LiveVersions:
    """The live versions. `recover` journals those that only daemons knew."""

    past: Past
    started: float
    is_standalone: bool  # started by a standalone daemon, usually the only daemon to wait for
    recover: Callable[[Recovered], None]
    wall_clock: Callable[[], float]
    log: Callable[..., None]
    _known: dict[str, _Known] = field(default_factory=dict)
    _continued: set[str] = field(default_factory=set)  # ids of continued journals, written yet or not
    _decided: dict[str, tuple[int, str]] = field(
        default_factory=dict
    )  # swap -> version identity, as last told to daemons
    _greeted: float | None = None  # when the first daemon was heard
    _settled: bool = False
    _in_doubt: bool = False  # daemons contradict the journal or know more

    def of(self, model: str) -> LiveVersion | None:
        """Return the live version of a model."""
        return self._found(model).live

    def keep(self, model: str) -> None:
        """Cache what the journal knows of a model; models that are only queried are not cached."""
        self._of(model)

    def _found(self, model: str) -> _Known:
        return self._known.get(model) or _Known(self.past.live(model), highest=self.past.highest(model))

    def _of(self, model: str) -> _Known:
        return self._known.setdefault(model, self._found(model))

    def models(self) -> list[str]:
        """Return the models with a known live version."""
        return sorted(model for model, known in self._known.items() if known.live is not None)

    def highest(self, model: str) -> int:
        """Return the highest version that is known to have been live, -1 for none."""
        known = self._found(model)
        return max(known.highest, -1 if known.live is None else known.live.version)

    def decided(self, model: str, live: LiveVersion) -> None:
        """Note a decision of this coordinator."""
        known = self._of(model)
        known.live, known.decided_here = live, True
        known.highest = max(known.highest, live.version)
        self.told(live.swap, live.version, live.run)

    def was_decided(self, swap: str) -> tuple[int, str] | None:
        """Return (version, run) of a swap that daemons know to be decided, even if the journal does not."""
        return self._decided.get(swap)

    def told(self, swap: str, version: int, run: str) -> None:
        """Note that daemons were told to commit this swap."""
        self._decided.pop(swap, None)
        self._decided[swap] = version, run
        if len(self._decided) > KEPT_DECISIONS:
            del self._decided[next(iter(self._decided))]

    def said(self, node: str, claims: Iterable[LiveClaim]) -> list[str]:
        """Handle a daemon's claims of live versions; return the models whose live version changed."""
        changed = []
        for claim in claims:
            if claim.sequence <= MAX_SEQUENCE:
                self.told(claim.swap, claim.version, claim.run)
                if self._said(node, claim):
                    changed.append(claim.model)
        return changed

    def _said(self, node: str, claim: LiveClaim) -> bool:
        known = self._of(claim.model)
        ours, theirs = known.live, LiveVersion(claim.version, claim.run, claim.sequence, claim.swap)
        is_mine = claim.journal in self._continued or self.past.continues(claim.journal)
        if ours == theirs or (is_mine and ours is not None and ours.sequence >= theirs.sequence):
            known.confirmed = known.confirmed or ours == theirs
            return False
        if is_mine:
            reason = "the journal is older than what this daemon was told"
        elif ours is None:
            reason = "the journal has no decision about it: it was lost, or is a new one"
        else:
            reason = "this daemon was told so from another journal"
        if known.decided_here or (known.confirmed and not is_mine):
            # raise the sequence, so that older claims rank below it
            assert ours is not None
            if is_mine or ours.sequence <= theirs.sequence:
                known.live = replace(ours, sequence=theirs.sequence + 1)
                self._keep(claim.model, known.live, claim.journal)
            self.log("live-outranked", model=claim.model, node=node, said=str(theirs), live=str(ours), reason=reason)
            return known.live is not ours
        self._in_doubt = True
        known.highest = max(known.highest, claim.highest, claim.version)
        if ours is not None and not is_mine:
            theirs = replace(theirs, sequence=max(ours.sequence, theirs.sequence) + 1)
        known.live = theirs
        self._keep(claim.model, theirs, claim.journal)
        was = "nothing" if ours is None else str(ours)
        self.log("live-recovered", model=claim.model, node=node, live=str(theirs), was=was, reason=reason)
        return True

    def serves(self, model: str, who: str, version: int, run: str) -> bool:
        """Take a registering rank's version as live if nothing better is known; return whether it was taken."""
        known = self._of(model)
        ours = known.live
        unsure = ours is None or (not ours.sequence and version > ours.version)
        if known.decided_here or not unsure:
            return False
        known.live = LiveVersion(version, run)
        self._in_doubt = True
        self._keep(model, known.live, "")
        self.log(
            "live-recovered", model=model, member=who, live=str(known.live), reason="no journal and no daemon knows"
        )
        return True

    def _keep(self, model: str, live: LiveVersion, journal: str) -> None:
        self._continued.add(journal)
        self.recover(Recovered(model, live, journal, self.wall_clock(), self.highest(model)))

    # --- when swaps may begin -----------------------------------------------------------------------------

    def is_settled(self, now: float) -> bool:
        """Whether swaps may begin: daemons that could know more have had time to report."""
        if self._greeted is not None and now >= self._greeted + SETTLE_S:
            self._settled = True
        return self._settled

    def greeted(self, now: float) -> None:
        """Note that a daemon has introduced itself."""
        if self._greeted is None:
            self._greeted = now

    def heard(self, now: float) -> bool:
        """Note that daemons have reported all they know; return whether swaps may begin."""
        if not self._in_doubt and (self.is_standalone or not self.past.is_new):
            self._settled = True
        return self.is_settled(now)

    def deadline(self) -> float | None:
        """Return when swaps may begin; None if they may now, or if no daemon is there."""
        return None if self._settled or self._greeted is None else self._greeted + SETTLE_S

    def unsure_until(self, model: str, lease_s: float, *, names_all: bool) -> float:
        """Return until when unknown ranks of a model may serve; 0 if none may.

        They may if the journal is lost, or does not name all ranks that an earlier coordinator knew (`names_all`).
        """
        known = self._found(model)
        was_live = known.live is not None and not known.decided_here
        return self.started + lease_s if self._in_doubt or (was_live and not names_all) else 0.0

    @property
    def is_in_doubt(self) -> bool:
        """Whether daemons or engines contradict the journal or know more than it."""
        return self._in_doubt

    def claim(self, model: str) -> LiveClaim | None:
        """Return the claim of a live version for daemons to remember."""
        live = self.of(model)
        if live is None:
            return None
        highest = max(live.version, self.highest(model))
        return LiveClaim(model, live.version, live.run, live.sequence, live.swap, self.past.id, highest)
