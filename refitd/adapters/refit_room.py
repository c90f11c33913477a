"""The ranks of both sides of a refit: each hears when another fails, and sees when one has gone."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import torch

import refitd

TRAINER, GENERATION = "trainer", "generation"
LOOK_S = 1.0  # between two looks at whether a rank has gone without a word
WORD_S = 0.25  # for the word of a rank that has failed to arrive
TELL_S = 3.0  # for the others to be there, so that they hear of a failure
RETRY_S = 0.1
MAX_REASON = 1000  # characters of an error that travel


class Room:
    """All ranks of one session, each registered as a target that no version reaches: evicting them tells them why.

    So a rank that waits hears at once that another has failed, and sees that one has gone without a word.
    """

    def __init__(
        self, client: refitd.Client, model: str, session: str, side: str, rank: int, worlds: dict[str, int]
    ) -> None:
        self._client, self._name, self._session = client, f"{model}.refit", session
        self.side, self.rank, self.worlds = side, rank, worlds
        self.serial = 0  # of the refit; all ranks count alike, because the driver calls all of them for each
        self.mark = f"refitd.refit.{session}"  # the tensor that says which refit a version is of
        self._seen: set[tuple[str, int]] = set()
        self._gone: set[tuple[str, int]] = set()
        self._looked = 0.0
        self._seat: refitd.Target | None = None
        self._sit()

    def _sit(self) -> None:
        self._seen, self._gone, self._seat = set(), set(), None
        self._seat = self._client.register_target(
            self._name,
            {"seat": torch.zeros(1, dtype=torch.uint8)},
            replica=f"{self.side}-{self._session}",
            rank=self.rank,
            world_size=self.worlds[self.side],
        )

    def begin(self) -> None:
        """Begin the next refit; a failure of an earlier one is over."""
        self.serial += 1
        self.check()

    def check(self) -> None:
        """Raise RefitFailed if another rank has failed in this refit, PeerLost if the daemon has gone."""
        found = self._heard()
        if found is None:
            return
        serial, why = found
        if serial >= self.serial:
            raise refitd.RefitFailed(f"refit {self.serial} has failed elsewhere: {why}")
        try:
            self._sit()
            if (self.side, self.rank) in self._here(self._client.status()):
                return
            why = "it is not registered"
        except (refitd.RefusedError, refitd.ArenaError) as exc:
            why = str(exc)
        self._seat = None  # it was evicted before it could hear of it
        raise refitd.RefitFailed(f"refit {self.serial} has failed elsewhere while this rank came in: {why}")

    def leave(self) -> None:
        """Give the seat back."""
        with contextlib.suppress(refitd.RefitdError):  # the daemon may have gone
            if self._seat is not None:
                self._seat.close()

    def look(self) -> Any:
        """Return the cluster's status; raise PeerLost if a rank that was here has gone."""
        report = self._client.status()
        here = self._here(report)
        if self._seen - here:
            time.sleep(WORD_S)
            self.check()  # who was told of a failure has not gone
            report = self._client.status()
            here = self._here(report)
        if gone := self._seen - here:
            self._gone = gone
            who = ", ".join(f"{side} rank {rank}" for side, rank in sorted(gone)[:10])
            raise refitd.PeerLost(f"refit {self.serial}: {who} has gone")
        self._seen |= here
        return report

    def _here(self, report: Any) -> set[tuple[str, int]]:
        """Return which ranks of this session a status has."""
        sides = {f"{side}-{self._session}": side for side in self.worlds}
        targets = [t for m in report.models if m.model == self._name for t in m.targets]
        return {(sides[t.replica], t.rank) for t in targets if t.replica in sides}

    def look_at_times(self) -> None:
        """Look, if this is its side's first rank and it has not looked just now."""
        if self.rank == 0 and time.monotonic() > self._looked + LOOK_S:
            self._looked = time.monotonic()
            self.look()

    def fail(self, exc: BaseException) -> None:
        """Tell those who may wait why this refit has failed, unless this rank was told: all ranks were, then."""
        why = " ".join(f"{type(exc).__name__}: {exc}".split())[:MAX_REASON]
        why = "".join(c if c.isprintable() else "?" for c in why)
        reason = f"refit {self.serial}: {self.side} rank {self.rank}: {why}"
        waiting = {(TRAINER, 0), *((GENERATION, rank) for rank in range(self.worlds[GENERATION]))}
        untold, until = waiting - {(self.side, self.rank)}, time.monotonic() + TELL_S
        self._seen = set()  # they sit down again in the next refit
        with contextlib.suppress(refitd.RefitdError):  # without a daemon nobody can be told
            while untold and not self._is_told() and time.monotonic() < until:
                for side, rank in sorted(untold):
                    with contextlib.suppress(refitd.RefusedError):  # it has yet to begin this refit
                        self._client.evict(self._name, f"{side}-{self._session}", rank, reason)
                        untold.discard((side, rank))
                if untold <= self._gone:
                    return
                time.sleep(RETRY_S)

    def _is_told(self) -> bool:
        found = self._heard()
        return self._seat is None or (found is not None and found[0] >= self.serial)

    def _heard(self) -> tuple[int, str] | None:
        """Return which refit this rank was told has failed, and why."""
        if self._seat is None:
            return -1, ""
        try:
            self._seat.poll()
        except refitd.RefusedError as exc:
            said = re.search(r"refit (\d+): (.*); register_target again", str(exc), re.DOTALL)
            return (int(said[1]), said[2]) if said else (self.serial, str(exc))
        return None
