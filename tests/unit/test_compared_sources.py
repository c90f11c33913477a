"""Sources with equal elements in different shards are compared before a swap: coordinator and daemon separately."""

from __future__ import annotations

from typing import Self

import pytest

from refitd import ParameterMetadata
from refitd.buffers.layout import DIGEST_BYTES
from refitd.config import Config, ModelConfig
from refitd.coordinator.state import NODE_SILENCE_S
from refitd.daemon import actions as act
from refitd.daemon.digest_work import ATTEMPTS
from refitd.plan.table import RegionTable
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, digest_of, pack
from refitd.protocol.shards import shard_of
from refitd.states import Tick
from tests.support.coordinator_harness import Harness as Fleet
from tests.support.coordinator_harness import kinds, reports
from tests.support.daemon_harness import FC1, SOURCE, Harness, regions

# --- the coordinator ------------------------------------------------------------------------------------------


def described(rows: int, half: int) -> list[ParameterMetadata]:
    """Rank 0's 8 rows, or half of them: rank 1's and 2's."""
    split = {"is_tp": True, "partition_dim": 0, "tensor_parallel_group_ranks": [1, 2]} if rows == 4 else {}
    return [ParameterMetadata("w", (rows, 4), "bfloat16", 2, resolved_name="w", owner_rank=half, **split)]


def add(h: Fleet, member: str, rank: int, node: str, rows: int, **fields: object) -> None:
    shard = shard_of(described(rows, rank))
    h.say(node, cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
    answer = h.add(member, node, rank=rank, digest=digest_of(shard), **fields)
    assert not any(isinstance(m, local.Failure) for m in answer), answer


def fleet(config: Config | None = None) -> Fleet:
    """Rank 0 holds all rows on n0, ranks 1 and 2 halves on n1; one target; version 1 is complete."""
    h = Fleet(config)
    h.join("n0")
    h.join("n1", pid=11)
    for rank, node, rows in ((0, "n0", 8), (1, "n1", 4), (2, "n1", 4)):
        add(h, f"src{rank}", rank, node, rows, world_size=3)
    add(h, "a", 0, "n0", 8)
    for rank, node in enumerate(("n0", "n1", "n1")):
        h.say(node, local.Publish(member=f"src{rank}", version=1))
    return h


def asked(h: Fleet, timeout_s: float = 0.0) -> dict[str, cluster.DigestRegions]:
    h.say("n0", local.StartSwap("m", timeout_s=timeout_s), request=9)
    return {node: m for node, _, m in h.sent if isinstance(m, cluster.DigestRegions)}


def digests(request: cluster.DigestRegions, differs: str = "") -> cluster.RegionsDigested:
    """Return a node's answer: equal digests for rows of one group; a node that `differs` has other digests."""
    groups = RegionTable.from_wire(request.table).group
    return cluster.RegionsDigested(swap=request.swap, digests=(groups + 7 + len(differs)).astype("<u8").tobytes())


def test_each_node_is_asked_once_for_what_its_ranks_hold_and_the_swap_goes_on_when_all_is_equal() -> None:
    h = fleet()
    requests = asked(h)
    assert {node: (r.ranks, r.members, r.version) for node, r in requests.items()} == {
        "n0": ((0,), ("src0",), 1),
        "n1": ((1, 2), ("src1", "src2"), 1),
    }
    assert {node: len(RegionTable.from_wire(r.table)) for node, r in requests.items()} == {"n0": 2, "n1": 2}
    assert kinds(h.say("n0", digests(requests["n0"]))) == []
    assert kinds(h.say("n0", digests(requests["n0"], "again"))) == [], "the first answer of a node counts"
    loads = kinds(h.say("n1", digests(requests["n1"])))
    assert set(loads) == {"LoadPlan"}


def test_what_was_equal_once_is_not_asked_again_until_a_rank_registers_anew() -> None:
    h = fleet()
    for node, request in asked(h).items():
        h.say(node, digests(request))
    h.say("n0", local.AbortSwap(model="m", reason="x"), request=2)
    assert not asked(h)
    h.say("n0", local.AbortSwap(model="m", reason="x"), request=2)
    h.say("n1", local.Deregister(member="src2", reason="left"))
    add(h, "src2b", 2, "n1", 4, world_size=3, versions=(1,), run="run1")
    assert asked(h)["n1"].members == ("src1", "src2b")


@pytest.mark.parametrize("is_anew", [False, True])
def test_a_version_that_is_being_published_is_compared_once_it_is_complete(is_anew: bool) -> None:
    h = fleet()
    done = local.Publish(member="src2", version=2, is_anew=is_anew)
    for rank, node in ((0, "n0"), (1, "n1")):
        h.say(node, local.Publish(member=f"src{rank}", version=2))
    h.say("n1", local.BeginPublish("src2", 2, is_writing=True))
    assert kinds(h.say("n0", local.StartSwap("m", 2), request=9)) == []
    requests = {node: m for node, _, m in (h.say("n1", done), h.sent)[1] if isinstance(m, cluster.DigestRegions)}
    assert set(requests) == {"n0", "n1"}
    for node, request in requests.items():
        said = h.say(node, digests(request))
    assert set(kinds(said)) == {"LoadPlan"}
    # its ranks were equal: the next one is not compared, unless a rank publishes other tensors
    h.say("n0", local.AbortSwap(model="m", reason="x"), request=2)
    for rank, node in ((0, "n0"), (1, "n1")):
        h.say(node, local.Publish(member=f"src{rank}", version=3))
    h.say("n1", local.BeginPublish("src2", 3, is_writing=True))
    assert set(kinds(h.say("n0", local.StartSwap("m", 3), request=9))) == {"LoadPlan"}
    sent = h.say("n1", local.Publish(member="src2", version=3, is_anew=is_anew))
    assert bool(reports(sent)) is is_anew
    assert not is_anew or "which must be compared first" in reports(sent)[0].reason


def test_ranks_that_differ_end_the_swap_by_name_and_it_is_compared_again_next_time() -> None:
    for _ in range(2):
        h = fleet()
        requests = asked(h)
        h.say("n0", digests(requests["n0"]))
        (report,) = reports(h.say("n1", digests(requests["n1"], "differs")))
        assert (report.outcome, report.phase) == ("aborted", "plan")
        assert "w" in report.reason and "check_replicas = false" in report.reason
        assert all(f"src{rank}" in report.reason or f"rank {rank}" in report.reason for rank in (0, 1))
    assert set(asked(h)) == {"n0", "n1"}


def test_a_node_that_cannot_read_its_sources_ends_the_swap_with_its_words_and_the_others_stop() -> None:
    h = fleet()
    request = asked(h)["n1"]
    sent = h.say("n1", cluster.RegionsDigested(swap=request.swap, reason="version 1 is no longer held"))
    (report,) = reports(sent)
    assert "no longer held" in report.reason
    assert {node for node, _, m in h.sent if isinstance(m, cluster.Abort)} == {"n0", "n1"}
    assert kinds(h.say("n0", digests(request))) == []


@pytest.mark.parametrize("timeout_s", [0.0, 3.0])
def test_nodes_that_are_late_are_named_before_the_deadline_with_what_to_do(timeout_s: float) -> None:
    h = fleet()
    requests = asked(h, timeout_s)
    limit = timeout_s or Config().deadlines.plan_s
    assert all(r.timeout_s < limit for r in requests.values())
    h.say("n0", digests(requests["n0"]))
    h.sent.clear()
    h.now += 0.95 * limit
    for node in h.state.nodes.values():
        node.last_heard = h.now
    h.feed(Tick())
    (report,) = reports([m for _, _, m in h.sent])
    assert "n1" in report.reason and "n0" not in report.reason and "check_replicas = false" in report.reason
    assert {node for node, _, m in h.sent if isinstance(m, cluster.Abort)} == {"n0", "n1"}


@pytest.mark.parametrize("how", ["withdrawn", "left", "lost", "aborted"])
def test_whatever_ends_the_swap_meanwhile_ends_the_comparison(how: str) -> None:
    h = fleet()
    request = asked(h)["n1"]
    match how:
        case "withdrawn":
            # whichever of them the plan reads
            said = [("n0", "src0"), ("n1", "src1"), ("n1", "src2")]
            sent = [m for node, who in said for m in h.say(node, local.Withdraw(member=who, version=1))]
        case "left":
            sent = h.say("n1", local.Deregister(member="src1", reason="left"))
        case "lost":
            h.now += NODE_SILENCE_S + 1
            h.state.nodes["n0"].last_heard = h.now
            sent = h.tick()
        case _:
            sent = h.say("n0", local.AbortSwap(model="m", reason="x"), request=2)
    (report,) = reports(sent)
    assert report.outcome == "aborted"
    assert "LoadPlan" not in kinds(h.say("n1", digests(request))) and not h.illegal


def test_sources_are_not_compared_where_the_model_says_so() -> None:
    h = fleet(Config(models={"m": ModelConfig(check_replicas=False)}))
    assert not asked(h)
    assert "LoadPlan" in kinds([m for _, _, m in h.sent])


# --- the daemon -----------------------------------------------------------------------------------------------


class Reading(Harness):
    """A source with version 1 published."""

    def __init__(self) -> None:
        super().__init__()
        registered = self.ask(SOURCE)
        assert isinstance(registered, local.Registered)
        self.source = registered.member
        assert self.publish(self.source, 1) == local.Done()

    def ask_regions(self, version: int = 1, swap: str = "s", tensor: str = FC1) -> Self:
        self.to_coordinator.clear()
        table = regions(tensor, (96, 48), [(0, 48), (48, 96)])
        run = self.daemon.members[self.source].source.run
        message = cluster.DigestRegions(swap, version, run, (self.source,), (0,), (0,), table.to_wire(), 5.0)
        self.feed(act.CoordinatorSaid(0, message))
        return self

    def taking(self) -> list[tuple[int, sidecar.ReadSpans]]:
        found = [(worker, m) for worker, m in self.to_worker if isinstance(m, sidecar.ReadSpans)]
        self.to_worker.clear()
        return found

    def give(self, worker: int, message: sidecar.ReadSpans) -> None:
        taken = b"".join(bytes([span.first % 256]) * DIGEST_BYTES for span in message.spans)
        self.feed(act.WorkerSaid(worker, sidecar.SpansRead(run=message.run, digests=taken)))

    def answer(self) -> cluster.RegionsDigested | None:
        found = self.said(cluster.RegionsDigested)
        assert len(found) <= 1
        return found[0] if found and isinstance(found[0], cluster.RegionsDigested) else None

    def is_slot_free(self) -> bool:
        """Whether both slots may be overwritten because no reader is left."""
        return all(not slot.readers for slot in self.daemon.members[self.source].source.slots)


def test_workers_read_the_regions_and_the_node_answers_with_a_digest_of_each() -> None:
    h = Reading().ask_regions()
    assert not h.is_slot_free() and h.answer() is None
    for worker, message in h.taking():
        assert {span.count for span in message.spans}
        h.give(worker, message)
    answer = h.answer()
    assert answer is not None and not answer.reason and len(answer.digests) == 2 * 8
    assert not h.is_slot_free(), "the swap is going to read it"
    h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap="s", version=1, members=(h.source,))))
    assert h.is_slot_free()


def test_what_a_dead_worker_had_is_read_by_another_and_not_for_ever() -> None:
    h = Reading().ask_regions()
    for attempt in range(ATTEMPTS):
        *_, (worker, message) = h.taking()
        assert h.answer() is None, attempt
        h.feed(act.WorkerDied(worker, "was killed"))
        if attempt < ATTEMPTS - 1:
            h.feed(act.WorkerStarted(worker))  # not counted as another death
    answer = h.answer()
    assert answer is not None and f"died {ATTEMPTS} times" in answer.reason
    h.give(worker, message)  # a late message of the last worker
    assert len(h.said(cluster.RegionsDigested)) == 1


def test_workers_that_do_not_answer_are_waited_for_as_long_as_was_asked() -> None:
    h = Reading().ask_regions()
    assert h.daemon.next_deadline == 5.0
    h.now = 5.1
    h.feed(act.CoordinatorSaid(0, local.Done()), act.Due())
    answer = h.answer()
    assert answer is not None and "within 5.0 s" in answer.reason and "workers" in answer.reason and h.restarted


@pytest.mark.parametrize("how", ["another version", "another swap's source", "another tensor", "another run"])
def test_what_is_not_held_as_described_is_the_answer(how: str) -> None:
    h = Reading()
    if how == "another version":
        h.ask_regions(version=2)
    elif how == "another tensor":
        h.ask_regions(tensor="no.such.tensor")
    elif how == "another run":
        h.daemon.members[h.source].source.run = "r"
        table = regions(FC1, (96, 48), [(0, 48)]).to_wire()
        h.to_coordinator.clear()
        h.feed(act.CoordinatorSaid(0, cluster.DigestRegions("s", 1, "other", (h.source,), (0,), (0,), table, 5.0)))
    else:
        h.ask(local.Deregister(member=h.source))
        h.to_coordinator.clear()
        table = regions(FC1, (96, 48), [(0, 48)]).to_wire()
        h.feed(act.CoordinatorSaid(0, cluster.DigestRegions("s", 1, "", ("gone",), (0,), (0,), table, 5.0)))
    answer = h.answer()
    assert answer is not None and answer.reason and "n0" in answer.reason
    assert not h.taking()


def test_a_version_that_is_taken_back_meanwhile_is_not_said_to_be_compared() -> None:
    h = Reading().ask_regions()
    ((worker, message),) = h.taking()
    h.ask(local.Withdraw(member=h.source, version=1))
    h.give(worker, message)
    answer = h.answer()
    assert answer is not None and "taken back" in answer.reason


def test_a_worker_that_cannot_read_is_quoted() -> None:
    h = Reading().ask_regions()
    ((worker, message),) = h.taking()
    h.feed(act.WorkerSaid(worker, sidecar.SpansRead(run=message.run, reason="no such process")))
    answer = h.answer()
    assert answer is not None and "no such process" in answer.reason and "worker" in answer.reason


@pytest.mark.parametrize("how", ["aborted", "another coordinator"])
def test_nothing_is_answered_once_nobody_waits_for_it(how: str) -> None:
    h = Reading().ask_regions()
    ((worker, message),) = h.taking()
    if how == "aborted":
        h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    else:
        h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    assert h.is_slot_free()
    h.give(worker, message)
    assert h.answer() is None and h.daemon.next_deadline is None
    h.ask_regions(swap="t")
    ((worker, message),) = h.taking()
    h.give(worker, message)
    assert h.answer() is not None
