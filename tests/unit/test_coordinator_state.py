"""The coordinator's state is a value, and its work per swap grows linearly."""

from __future__ import annotations

import copy
import enum
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import refitd.coordinator
from refitd.config import Config, ModelConfig
from refitd.coordinator import actions as act
from refitd.coordinator.fleet import Ids
from refitd.coordinator.journals import SwapRecord
from refitd.coordinator.state import CoordinatorState
from refitd.protocol import cluster, local
from refitd.states import Busy
from tests.support.coordinator_harness import Harness, Past, commit, kinds, reports

# Immutable types; copies may share their objects.
_SHARED = (str, bytes, int, float, bool, type(None), type, enum.Enum)


class Compared(Harness):
    """Feeds each event to a copy first, then to the original, and compares their effects."""

    turns = 0

    def feed(self, event: act.Event) -> None:
        handle = self.state.handle

        def both(one: act.Event, now: float, wall: float = 0.0) -> list[act.Instruction]:
            other = copy.deepcopy(self.state)
            del other.handle
            expected = shown(other.handle(copy.deepcopy(one), now, wall))
            effects = handle(one, now, wall)
            assert shown(effects) == expected, one
            self.turns += 1
            return effects

        self.state.handle = both  # type: ignore[method-assign]
        try:
            super().feed(event)
        finally:
            del self.state.handle


def shown(effects: list[act.Instruction]) -> list[str]:
    """Effects as text; a request for a plan without its rosters, which are large.

    A copied set may iterate in another order, so the elements of each printed set are sorted.
    """
    texts = (
        str(msgspec.structs.replace(one, rosters=[])) if isinstance(one, act.MakePlan) else str(one) for one in effects
    )
    return [
        re.sub(r"\{([^{}:]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)
        for text in texts
    ]


def mutable_parts(root: object) -> Iterator[tuple[str, object]]:
    """Yield all mutable objects of a state, with the way to each."""
    seen: set[int] = set()
    pending = [("state", root)]
    while pending:
        way, found = pending.pop()
        if isinstance(found, _SHARED) or id(found) in seen:
            continue
        seen.add(id(found))
        assert not callable(found) or isinstance(found, type), f"{way} is a callback: {found}"
        if isinstance(found, dict):
            yield way, found
            pending += [(f"{way}[{key!r}]", value) for key, value in found.items()]
        elif isinstance(found, list | set | tuple | frozenset):
            if isinstance(found, list | set):
                yield way, found
            pending += [(f"{way}[{i}]", value) for i, value in enumerate(found)]
        elif type(found).__module__.startswith("refitd.coordinator"):
            yield way, found
            names = {name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())}
            names |= set(getattr(found, "__dict__", ()))
            pending += [(f"{way}.{name}", getattr(found, name)) for name in names if hasattr(found, name)]


def test_a_copy_shares_nothing_that_changes_and_holds_no_callback() -> None:
    h = Harness().ready()
    h.say("n0", local.RegisterController(member="c", model="m", replica="a", pid=7))
    h.until_staging()
    parts = dict(mutable_parts(h.state))
    other = dict(mutable_parts(copy.deepcopy(h.state)))
    assert parts.keys() == other.keys() and len(parts) > 50
    assert not [way for way in parts if parts[way] is other[way]]


def test_original_and_copy_give_equal_effects_from_registration_to_take_over() -> None:
    h = Compared()
    h.join("n0", workers=(1,)).join("n1", pid=11, workers=(2,))
    h.add("src")
    h.add("a")
    h.add("b", "n1")
    h.say("n0", local.Publish(member="src", version=1), request=4)
    sent = h.say("n0", local.StartSwap("m", progress=True), request=9)
    loads = [(node, m) for node, _, m in h.sent if isinstance(m, cluster.LoadPlan)]
    assert len(loads) == 2, kinds(sent)
    for node, load in loads:
        epoch = load.epoch.id if load.epoch is not None else ""
        h.say(node, cluster.PlanLoaded(plan=load.plan, epoch=epoch))
    (swap,) = {m.swap for _, _, m in h.sent if isinstance(m, cluster.Stage)}
    for node in ("n0", "n1"):
        h.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0))
    (report,) = reports(h.say("n1", local.CommitDone(swap=swap, member="b", paused_s=0.0)))
    assert report.outcome == "committed"
    h.say("n0", local.GetStatus(), request=10)
    h.say("n0", local.GetPlan("m"), request=11)
    h.feed(Busy(1.0))
    h.say("n1", local.Goodbye())
    h.now += 1.0
    h.tick()
    assert h.turns > 15


def test_original_and_copy_give_equal_effects_in_a_take_over_by_a_standby() -> None:
    journal: dict[str, SwapRecord] = {}
    first = Harness(journal=journal).ready()
    swap = first.until_staging()
    first.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert journal[swap].state == "decided"
    h = Compared(journal=journal)
    h.join("n0")
    h.add("src", versions=(1,), run="run1", newest=1)
    sent = h.add("a", staged=swap, staged_version=1, staged_run="run1")
    assert "CommitStaged" in kinds(sent)
    h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0))
    assert journal[swap].state == "committed"
    h.say("n0", local.Publish(member="src", version=2), request=4)
    commit(h, h.until_staging(), "a")
    assert h.state.models["m"].live is not None and h.state.models["m"].live.version == 2


def test_ids_and_keys_follow_from_the_seed_and_cannot_be_guessed_without_it() -> None:
    ids, others = Ids(b"tell nobody"), Ids(b"another seed")
    state = CoordinatorState(Config(), "boot", 1, 0.0, ids, Past({}))
    again = copy.deepcopy(state).ids
    made = [ids.key() for _ in range(100)]
    assert [again.key() for _ in range(100)] == made and len(set(made)) == 100
    assert others.key() != made[0] and "tell nobody" not in repr(state)
    assert (len(ids.swap()), len(ids.run())) == (8, 8)


# --- The coordinator's work per swap grows linearly with the number of ranks, not with its square. ------


HERE = str(Path(refitd.coordinator.__file__).parent)


def fleet(count: int) -> Harness:
    """Return a model with `count` source ranks and `count` replicas, one pair per node."""
    h = Harness(Config(models={"m": ModelConfig(catch_up=False)}))
    for number in range(count):
        h.join(f"n{number}", pid=10 + number, workers=(1,))
        h.add(f"src{number}", f"n{number}", rank=number, world_size=count)
        h.add(f"a{number}", f"n{number}")
    return h


def swapped(h: Harness, version: int, count: int) -> None:
    """Publish and swap a version; all nodes answer."""
    for number in range(count):
        h.say(f"n{number}", local.Publish(member=f"src{number}", version=version))
    h.say("n0", local.StartSwap("m"), request=9)
    swap, pending, staged = "", list(h.sent), 0
    while pending:
        node, _, message = pending.pop(0)
        match message:
            case cluster.DigestRegions(asked, table=table):
                h.say(node, cluster.RegionsDigested(asked, bytes(8 * int(table["rows"]))))
            case cluster.LoadPlan(plan, epoch=epoch):
                h.say(node, cluster.PlanLoaded(plan, epoch.id if epoch is not None else ""))
            case cluster.Stage(swap):
                staged += 1
                h.say(node, cluster.StageDone(swap, 1, 32, 0.1))
            case cluster.CommitStaged(swap):
                h.say(node, local.CommitDone(swap, f"a{node[1:]}", 0.0))
                if done := reports([m for _, _, m in h.sent]):
                    assert done[0].outcome == "committed" and staged == count
                    return
            case _:
                continue
        pending += h.sent
    raise AssertionError(f"swap {swap} has not ended")


def lines(h: Harness, version: int, count: int) -> int:
    """Count the lines of the coordinator that a swap runs; every round of a loop counts, comprehensions' too."""
    found = 0

    def traced(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal found
        if event == "call" and not frame.f_code.co_filename.startswith(HERE):
            return None
        found += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        swapped(h, version, count)
    finally:
        sys.settrace(before)
    return found


def test_four_times_as_many_ranks_are_four_times_the_work() -> None:
    few, many = fleet(12), fleet(48)
    for version in (1, 2):
        one, four = lines(few, version, 12), lines(many, version, 48)
        assert four < 4.2 * one, f"version {version}: {one} lines for 12 nodes, {four} for 48"
