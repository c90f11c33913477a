"""Connect the ranks of both sides of a refit: each learns when another fails or disappears."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import torch

import refitd

TRAINER, GENERATION = "trainer", "generation"
LOOK_S = 1.0  # interval between checks for ranks that disappeared without a message
WORD_S = 0.25  # time for a failed rank's message to arrive
TELL_S = 3.0  # time for the other ranks to register and receive a failure
RETRY_S = 0.1
MAX_REASON = 1000  # characters of an error that are sent


class SessionRoom:
    """All ranks of one session. Each registers a target ("seat") that receives no versions.

    A rank that fails evicts the other ranks' targets and gives the reason, so waiting ranks learn it immediately. A
    rank that disappears without a message is missing from the coordinator's status.
    """

    def __init__(
        self, client: refitd.Client, model: str, session: str, side: str, rank: int, worlds: dict[str, int]
    ) -> None:
        self._client, self._name, self._session = client, f"{model}.refit", session
        self.side, self.rank, self.worlds = side, rank, worlds
        self.serial = 0  # the refit's number; equal on all ranks, because the driver calls all of them for each refit
        self.mark = f"refitd.refit.{session}"  # the tensor that carries a version's refit number
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
        """Begin the next refit; failures of earlier ones no longer count."""
        self.serial += 1
        self.check()

    def check(self) -> None:
        """Raise RefitFailed if another rank failed in this refit, PeerLost if the daemon is lost."""
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
        self._seat = None  # evicted before this rank could read the reason
        raise refitd.RefitFailed(f"refit {self.serial} has failed elsewhere while this rank came in: {why}")

    def leave(self) -> None:
        """Close this rank's target."""
        with contextlib.suppress(refitd.RefitdError):  # the daemon may be lost
            if self._seat is not None:
                self._seat.close()

    def look(self) -> Any:
        """Return the cluster's status; raise PeerLost if a registered rank has disappeared."""
        report = self._client.status()
        here = self._here(report)
        if self._seen - here:
            time.sleep(WORD_S)
            self.check()  # raises RefitFailed if ranks left because of a failure
            report = self._client.status()
            here = self._here(report)
        if gone := self._seen - here:
            self._gone = gone
            who = ", ".join(f"{side} rank {rank}" for side, rank in sorted(gone)[:10])
            raise refitd.PeerLost(f"refit {self.serial}: {who} has gone")
        self._seen |= here
        return report

    def _here(self, report: Any) -> set[tuple[str, int]]:
        """Return the ranks of this session that a status lists."""
        sides = {f"{side}-{self._session}": side for side in self.worlds}
        targets = [t for m in report.models if m.model == self._name for t in m.targets]
        return {(sides[t.replica], t.rank) for t in targets if t.replica in sides}

    def look_at_times(self) -> None:
        """Call `look` every LOOK_S seconds, but only on the first rank of each side."""
        if self.rank == 0 and time.monotonic() > self._looked + LOOK_S:
            self._looked = time.monotonic()
            self.look()

    def fail(self, exc: BaseException) -> None:
        """Send the waiting ranks the reason of the failure, unless this rank received it itself: then all ranks did."""
        why = " ".join(f"{type(exc).__name__}: {exc}".split())[:MAX_REASON]
        why = "".join(c if c.isprintable() else "?" for c in why)
        reason = f"refit {self.serial}: {self.side} rank {self.rank}: {why}"
        waiting = {(TRAINER, 0), *((GENERATION, rank) for rank in range(self.worlds[GENERATION]))}
        untold, until = waiting - {(self.side, self.rank)}, time.monotonic() + TELL_S
        self._seen = set()  # all ranks register again in the next refit
        with contextlib.suppress(refitd.RefitdError):  # without a daemon the ranks cannot be reached
            while untold and not self._is_told() and time.monotonic() < until:
                for side, rank in sorted(untold):
                    with contextlib.suppress(refitd.RefusedError):  # the rank has not begun this refit yet
                        self._client.evict(self._name, f"{side}-{self._session}", rank, reason)
                        untold.discard((side, rank))
                if untold <= self._gone:
                    return
                time.sleep(RETRY_S)

    def _is_told(self) -> bool:
        found = self._heard()
        return self._seat is None or (found is not None and found[0] >= self.serial)

    def _heard(self) -> tuple[int, str] | None:
        """Return the failed refit's number and the reason, if this rank received a failure; else None."""
        if self._seat is None:
            return -1, ""
        try:
            self._seat.poll()
        except refitd.RefusedError as exc:
            said = re.search(r"refit (\d+): (.*); register_target again", str(exc), re.DOTALL)
            return (int(said[1]), said[2]) if said else (self.serial, str(exc))
        return None
