"""The settings that scripts/test explores; `scripts/explore` explores them for longer."""

from __future__ import annotations

from tests.exploration.nodes import Mode
from tests.exploration.worlds import Setting

# Explored in every test run.
SHORT = {
    "one fault in every order": Setting(faults=1),
    "two faults, in the order in which they come first": Setting(faults=2, delays=0),
    "ranks that flip": Setting(Mode(flips=True), swaps=3, faults=1, delays=0),
    "slow sockets": Setting(Mode(is_slow=True), faults=1, delays=1),
    "a controller pauses a replica": Setting(controlled=True, faults=1, delays=1),
    "a decision that waits for a permit to end": Setting(held=True, faults=1, delays=1),
    "a version that is staged while it is published": Setting(early=True, faults=1, delays=1),
    "a swap after an aborted one": Setting(swaps=2, faults=1, delays=2),
    "ranks in place, paused before they are written": Setting(
        Mode(in_place=True), controlled=True, swaps=2, faults=1, delays=1
    ),
    "clients that do not wait for the next daemon": Setting(Mode(waits=False), faults=1, delays=0),
    "a rank that hangs in its commit, another replica that wakes": Setting(
        Mode(is_slow=True, hangs=True), swaps=2, faults=1, delays=1, asleep=True
    ),
}


def long(faults: int, delays: int | None) -> dict[str, Setting]:
    """Return the same settings with this many faults and delays, each once, for `scripts/explore`."""
    found: dict[Setting, str] = {}
    for name, setting in SHORT.items():
        found.setdefault(setting._replace(faults=faults, delays=delays), name)
    return {name: setting for setting, name in found.items()}
