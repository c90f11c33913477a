"""Versions that are staged while they are published: the coordinator, a daemon, a worker's job and a client apart."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from refitd.buffers.layout import WHOLE, Written
from refitd.config import Config, ModelConfig
from refitd.daemon import actions as act
from refitd.protocol import cluster, local, sidecar
from tests.support.coordinator_harness import Harness as Fleet
from tests.support.coordinator_harness import commit, kinds, stages
from tests.support.daemon_harness import Harness

AUTO = Config(models={"m": ModelConfig(auto_swap=True)})


def begin(h: Fleet, version: int, member: str = "src") -> list[object]:
    return h.say("n0", local.BeginPublish(member, version, is_writing=True))


def publish(h: Fleet, version: int, member: str = "src", **fields: bool) -> list[object]:
    return h.say("n0", local.Publish(member=member, version=version, **fields), request=4)


def live(config: Config = AUTO, **target: object) -> Fleet:
    """One source and a target, which serves version 1."""
    h = Fleet(config)
    h.join()
    h.add("src")
    h.add("a", **target)
    if not config.models["m"].auto_swap:
        return h
    (load,) = [m for m in publish(h, 1) if isinstance(m, cluster.LoadPlan)]
    (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
    commit(h, stage.swap, "a")
    return h


# --- the coordinator --------------------------------------------------------------------------------------


def test_a_version_is_staged_once_it_is_begun_and_decided_once_it_is_published() -> None:
    h = live()
    (stage,) = stages(begin(h, 2))
    assert stage.version == 2
    done = cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1)
    assert "CommitStaged" not in kinds(h.say("n0", done))
    assert "CommitStaged" in kinds(publish(h, 2))


def test_all_source_ranks_must_have_begun() -> None:
    h = Fleet(Config(models={"m": ModelConfig(auto_swap=True, check_replicas=False)})).join()
    for rank in range(3):
        h.add(f"src{rank}", rank=rank, world_size=3)
    h.add("a")
    assert not {"LoadPlan"} & {*kinds(begin(h, 1, "src0")), *kinds(publish(h, 1, "src1"))}
    assert kinds(begin(h, 1, "src2")) == ["LoadPlan"]


@pytest.mark.parametrize("how", ["withdrawn", "left", "late", "failed"])
def test_a_swap_that_fails_while_its_version_is_published_is_tried_again_only_once_it_is_complete(how: str) -> None:
    h = live()
    (stage,) = stages(begin(h, 2))
    if how == "late":
        h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
        h.now += Config().deadlines.stage_s + 1
        h.state.nodes["n0"].last_heard = h.now
        sent = h.tick()
    elif how == "failed":
        sent = h.say("n0", cluster.StageDone(swap=stage.swap, where="n0", reason="no space"))
    elif how == "left":
        sent = h.say("n0", local.Deregister(member="src", reason="its process has ended"))
    else:
        sent = h.say("n0", local.Withdraw(member="src", version=2))
    history = [record for record in h.journal.values() if record.version == 2]
    assert [record.state for record in history] == ["aborted"] and "Abort" in kinds(sent)
    if how != "failed":
        assert "source rank 0" in history[0].reason
    if how == "left":
        return
    assert not stages(h.tick())
    (again,) = stages(publish(h, 2))
    assert again.swap != stage.swap and "CommitStaged" in kinds(
        h.say("n0", cluster.StageDone(swap=again.swap, copies=1, bytes=32, seconds=0.1))
    )


def test_a_complete_version_comes_before_one_that_is_begun() -> None:
    h = live()
    (stage,) = stages(publish(h, 2))
    begin(h, 3)
    (next_one,) = stages(commit(h, stage.swap, "a"))
    assert (stage.version, next_one.version) == (2, 3)


def test_a_replica_written_in_place_waits_for_the_whole_version() -> None:
    h = live(in_place=True)
    assert not stages(begin(h, 2)) and not h.state.models["m"].membership.forming()
    assert stages(publish(h, 2))


def test_a_version_that_is_asked_for_may_have_begun() -> None:
    h = live(Config(models={"m": ModelConfig()}))
    publish(h, 1)
    begin(h, 2)
    for version in (3, 2):
        sent = kinds(h.say("n0", local.StartSwap("m", version), request=9))
        assert sent == (["Failure"] if version == 3 else ["LoadPlan"])


# --- a daemon ---------------------------------------------------------------------------------------------


def half_written(h: Harness, spans: Iterable[tuple[int, int]] = ((0, 512),)) -> tuple[str, int]:
    """Begin version 2 and write half of it; return its source and its slot."""
    source, _ = h.fleet()
    granted = h.ask(local.BeginPublish(member=source, version=2, timeout_s=5.0))
    assert isinstance(granted, local.SlotGranted)
    h.feed(act.ClientSaid(1, 0, local.Wrote(source, 2, (*spans,))))
    return source, granted.slot


def told(h: Harness) -> list[local.Wrote]:
    return [m for _, m in h.to_worker if isinstance(m, local.Wrote)]


def test_workers_are_told_what_is_written_until_all_is() -> None:
    h = Harness(workers=1)
    source, slot = half_written(h)
    arena = h.daemon.members[source].source.slots[slot].arena
    assert h.said(local.BeginPublish) == [local.BeginPublish(source, 2, is_writing=True)]
    runs = h.stage(version=2)
    ((_, run),) = [(w, m) for w, m in h.to_worker if isinstance(m, sidecar.RunJob)]
    assert run.unwritten == (sidecar.Unwritten(arena, 2, source),) and run.timeout_s > 0
    h.feed(act.ClientSaid(1, 0, local.Wrote(source, 2, ((512, 1024),))))
    assert h.ask(local.Publish(member=source, version=2, slot=slot)) == local.Done()
    assert [m.spans for m in told(h)] == [((0, 512),), ((512, 1024),), ((0, WHOLE),)]
    assert {m.arena for m in told(h)} == {arena} and len(h.said(local.BeginPublish)) == 1
    h.done(runs)
    assert not h.said(cluster.StageDone)[-1].reason
    assert h.ask(local.BeginPublish(member=source, version=3, timeout_s=5.0)) == local.SlotGranted(slot=0)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("how", ["withdrawn", "refused", "died"])
def test_a_version_whose_publication_fails_is_read_no_more(how: str, is_staged: bool) -> None:
    h = Harness(workers=1)
    source, slot = half_written(h)
    runs = h.stage(version=2)
    if is_staged:
        h.done(runs)
    if how == "withdrawn":
        h.ask(local.Withdraw(member=source, version=2))
    elif how == "refused":
        h.refuse_with = local.Failure(code="refused", message="publish 5 or above")
        assert isinstance(h.ask(local.Publish(member=source, version=2, slot=slot)), local.Failure)
    else:
        h.feed(act.SessionClosed(1, "died"))
    assert source in h.said(cluster.StageDone)[-1].where and h.said(cluster.StageDone)[-1].reason
    assert bool(h.restarted) is not is_staged
    assert how == "refused" or local.Withdraw(member=source, version=2) in h.to_coordinator
    slots = h.daemon.members[source].source.slots
    assert [(s.version, s.writing, s.readers) for s in slots] == [(1, None, set()), (None, None, set())]


def test_long_lists_of_ranges_fit_the_datagrams_of_workers() -> None:
    h = Harness(workers=1)
    half_written(h, [(at, at + 1) for at in range(0, 10_000, 2)])
    h.stage(version=2)
    assert [len(m.spans) for m in told(h)] == [2048, 2048, 904]


# --- ranges -----------------------------------------------------------------------------------------------


def test_ranges_are_joined() -> None:
    written = Written()
    for begin_at, end in ((10, 20), (30, 40), (20, 30), (50, 60), (5, 7), (0, 100)):
        assert not written.holds(begin_at, end)
        written.add(begin_at, end)
        assert written.holds(begin_at, end) and not written.holds(begin_at, 101)
    assert written.spans() == ((0, 100),) and written.holds(3, 3) and not Written().holds(0, 1)
