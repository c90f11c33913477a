"""Digests of versions and checks of live tensors: their order, restarts and failures."""

from __future__ import annotations

import pytest
import torch

from refitd.commit.target_state import Live, Step
from refitd.coordinator.descriptions import Described
from refitd.coordinator.inquiries import MAX_CHECKS, MAX_DIFFERENCES, Checks
from refitd.coordinator.members import Member, Membership, Place
from refitd.daemon import actions as act
from refitd.daemon.members import RankProofs
from refitd.errors import RefusedError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.cluster import MemberChecked
from refitd.protocol.reports import Difference, VerifyReport
from refitd.protocol.shards import Shard
from refitd.worker import host_jobs
from tests.support.proofs import LIVE, STAGING, Node

SHAPES = [((300,), torch.uint8), ((7, 11), torch.bfloat16)]
KIB = 1 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks and runs a thousand times smaller."""
    monkeypatch.setattr("refitd.buffers.layout.MIN_BLOCK_BYTES", 1 * KIB)
    monkeypatch.setattr("refitd.daemon.digest_work.RUN_BYTES", 64 * KIB)


def sent(node: Node) -> list[tuple[int, object]]:
    """Dispatch; return the new messages to workers as (worker, message)."""
    node.dispatch()
    found = [(do.worker, do.message) for do in node.out if isinstance(do, act.ToWorker)]
    node.out.clear()
    return found


def said(node: Node, kind: type) -> list[object]:
    return [
        do.message for do in node.out if isinstance(do, act.ToClient | act.ToCoordinator) if type(do.message) is kind
    ]


def large() -> Node:
    """Return a node with 3 x 60 KiB staged: three runs."""
    return Node([((60 * KIB,), torch.uint8)] * 3, "packed", 1)


def test_digests_are_taken_by_one_worker_at_a_time_and_not_while_a_swap_runs() -> None:
    node = large()
    node.is_swapping = True
    node.proofs.committed(node.out, node.member)
    assert sent(node) == []
    node.is_swapping = False
    assert sent(node) == []  # the next swap may be about to begin
    node.tick()
    ((worker, message),) = sent(node)
    assert worker == 0 and isinstance(message, sidecar.ReadSpans)
    assert sum(span.count for span in message.spans) <= 64 * KIB
    assert sent(node) == []  # it has not answered
    node.is_swapping = True  # a swap that begins waits for this run only
    node.digests.worker_said(node.out, host_jobs.taken(message, node.arenas))
    assert sent(node) == []
    node.is_swapping = False
    node.run()
    assert node.member.proofs.live is not None and node.member.proofs.live.version == 7


def test_what_is_asked_for_is_done_by_all_workers_and_while_a_swap_runs() -> None:
    node = large()
    node.proofs.committed(node.out, node.member)
    node.is_swapping = True
    node.ask()
    assert [worker for worker, _ in sent(node)] == [0, 1]


def test_a_staging_that_begins_throws_unfinished_digests_away() -> None:
    node = large()
    node.proofs.committed(node.out, node.member)
    node.tick()
    ((_, message),) = sent(node)
    node.becomes(holds=None)  # as staging does
    assert isinstance(message, sidecar.ReadSpans)
    node.digests.worker_said(node.out, host_jobs.taken(message, node.arenas))
    node.run()
    assert node.member.proofs.live is None
    found = node.check()
    assert found.state == "unknown" and "was not taken" in found.reason and found.version == 7


def test_what_a_dead_worker_had_is_done_again_and_given_up_after_some_times() -> None:
    node = Node(SHAPES, "packed", 1)
    node.ask()
    for _ in range(3):
        ((worker, _),) = sent(node)
        node.digests.worker_gone(node.out, worker, died=True)
    ((worker, message),) = sent(node)
    assert isinstance(message, sidecar.ReadSpans)
    node.digests.worker_said(node.out, host_jobs.taken(message, node.arenas))
    node.run()
    assert node.answers.pop().members[0].state == "proven"

    node.member.proofs = RankProofs()
    node.ask()
    for _ in range(4):
        ((worker, _),) = sent(node)
        node.digests.worker_gone(node.out, worker, died=True)
    node.run()
    found = node.answers.pop().members[0]
    assert found.state == "unknown" and "died 4 times" in found.reason
    assert node.check().state == "proven"  # retried on the next request


def test_an_arena_that_a_worker_has_not_mapped_is_said() -> None:
    node = Node(SHAPES, "packed", 1)
    del node.arenas[STAGING]
    found = node.check()
    assert found.state == "unknown" and "arena 1 is not mapped" in found.reason


def test_who_asks_during_a_check_is_answered_by_one_that_began_afterwards() -> None:
    node = Node(SHAPES, "packed", 1)
    assert node.check().state == "proven"
    node.ask("first")
    (question,) = said(node, local.CheckLive)
    node.out.clear()
    node.client._answer(question)  # type: ignore[arg-type]
    node.live[0][5] ^= 1  # after it was read for the first time
    node.ask("second")
    node.proofs.client_said(node.out, node.member, node.said.pop())  # type: ignore[arg-type]
    node.run()
    states = {answer.check: answer.members[0].state for answer in node.answers}
    assert states == {"first": "proven", "second": "differs"}


def test_a_process_that_does_not_answer_is_named_and_asked_again_only_when_it_has() -> None:
    node = Node(SHAPES, "packed", 1)
    assert node.check().state == "proven"
    node.ask("first", now=0.0)
    (question,) = said(node, local.CheckLive)
    node.out.now = 9.0
    node.proofs.expire(node.out)
    assert said(node, cluster.MembersChecked) == []
    node.out.now = 10.0
    node.proofs.expire(node.out)
    node.ask("second", now=11.0)
    node.out.now = 21.0
    node.proofs.expire(node.out)
    late = said(node, cluster.MembersChecked)
    assert [answer.check for answer in late] == ["first", "second"]  # type: ignore[attr-defined]
    for answer in late:
        (one,) = answer.members  # type: ignore[attr-defined]
        assert one.state == "unknown" and f"pid {node.member.registration.pid}" in one.reason and one.version == 7
    assert len(said(node, local.CheckLive)) == 1
    node.out.clear()
    node.ask("third", now=22.0)
    node.client._answer(question)  # type: ignore[arg-type]
    node.proofs.client_said(node.out, node.member, node.said.pop())  # type: ignore[arg-type]
    node.run()
    assert [(a.check, a.members[0].state) for a in node.answers] == [("third", "proven")]


def test_a_version_that_is_taken_over_meanwhile_is_checked_instead() -> None:
    node = Node(SHAPES, "packed", 1)
    assert node.check().state == "proven"
    node.ask()
    (question,) = said(node, local.CheckLive)
    node.out.clear()
    node.client._answer(question)  # type: ignore[arg-type]
    reply = node.said.pop()
    node.staging.bytes[:] ^= 1  # version 8 is staged and committed
    for i in range(len(SHAPES)):
        node.write(i, node.staged(i))
    node.becomes(version=8, holds=8)
    node.proofs.committed(node.out, node.member)
    node.proofs.client_said(node.out, node.member, reply)  # type: ignore[arg-type]
    node.run()
    (found,) = node.answers.pop().members
    assert (found.state, found.version) == ("proven", 8)


def test_a_commit_between_two_blocks_has_the_client_say_so() -> None:
    node = Node(SHAPES, "packed", 1)
    assert node.check().state == "proven"
    node.ask()
    (question,) = said(node, local.CheckLive)
    tensors = node.client._tensors
    check = tensors.check_unmoved

    def commits() -> None:
        check()
        tensors.check_unmoved = check  # type: ignore[method-assign]
        with node.client.committing():
            pass

    tensors.check_unmoved = commits  # type: ignore[method-assign, assignment]
    node.client._answer(question)  # type: ignore[arg-type]
    (reply,) = node.said
    assert isinstance(reply, local.LiveChecked) and reply.again and not reply.digests
    node.run()
    assert node.answers.pop().members[0].state == "proven"


def test_arena_tensors_that_differ_while_a_commit_is_under_way_are_unknown() -> None:
    node = Node(SHAPES, "arena", 1)
    assert node.check().state == "proven"
    node.live[0][5] ^= 1
    node.becomes(step=Step.COMMITTING, swap="s")
    assert node.check().state == "unknown"
    node.becomes(step=Step.IDLE, swap=None)
    assert node.check().state == "differs"


def test_what_is_written_in_place_is_digested_at_once_and_never_later() -> None:
    node = Node(SHAPES, "in-place", 1)
    assert node.check().state == "proven"
    node.is_swapping = True  # of another model, say
    node.proofs.committed(node.out, node.member)
    assert len(sent(node)) == 1
    node.proofs.committed(node.out, node.member)
    node.becomes(holds=None, live=Live.WRITTEN, swap="s8", step=Step.STAGING)  # staging has begun
    found = node.check()
    assert found.state == "unknown" and "swap s8 is writing it in place" in found.reason
    node.becomes(live=Live.SERVING, step=Step.IDLE, holds=7)
    found = node.check()
    assert found.state == "unknown" and "could not be taken" in found.reason, "of what it holds now it proves nothing"


def test_what_is_written_in_place_during_a_check_is_unknown() -> None:
    node = Node(SHAPES, "in-place", 1)
    node.ask()
    ((_, message),) = sent(node)
    node.live[0].zero_()
    node.becomes(holds=None, live=Live.WRITTEN, swap="s8", step=Step.STAGING)
    assert isinstance(message, sidecar.ReadSpans)
    node.digests.worker_said(node.out, host_jobs.taken(message, node.arenas))
    node.run()
    (found,) = node.answers.pop().members
    assert found.state == "unknown" and "swap s8 is writing it in place" in found.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda n: n.becomes(version=None), "serves nothing"),
        (lambda n: n.becomes(live=Live.BEHIND), "fenced"),
        (lambda n: setattr(n.member, "proofs", RankProofs(verifies=False)), "[models.m] verify"),
        (lambda n: n.becomes(holds=None), "was not taken"),
    ],
)
def test_why_a_rank_cannot_be_checked_is_said(change: object, reason: str) -> None:
    node = Node(SHAPES, "packed", 1)
    change(node)  # type: ignore[operator]
    found = node.check()
    assert found.state == "unknown" and reason in found.reason


@pytest.mark.parametrize(("arena", "way"), [(STAGING, "packed"), (LIVE, "arena")])
def test_arenas_on_a_gpu_are_read_by_its_worker_alone(arena: int, way: str) -> None:
    node = Node([((60 * KIB,), torch.uint8)] * 3, way, 1)
    node.gpus[arena] = 1
    node.proofs.committed(node.out, node.member)
    node.ask()
    readers = []
    while told := sent(node):
        for worker, message in told:
            assert isinstance(message, sidecar.ReadSpans)
            if arena in {span.arena for span in message.spans}:
                readers.append(worker)
            node.digests.worker_said(node.out, host_jobs.taken(message, node.arenas))
    assert readers and set(readers) == {1}


def test_what_is_known_is_said_at_once_though_others_are_late() -> None:
    node = Node(SHAPES, "packed", 1)
    assert node.check().state == "proven"
    node.out.clear()
    members = (node.member.id, "nobody")
    node.out.now = 0.3
    node.proofs.check(node.out, cluster.CheckMembers(check="c", members=members, timeout_s=1.8))
    (answer,) = said(node, cluster.MembersChecked)
    assert [one.member for one in answer.members] == ["nobody"]  # type: ignore[attr-defined]
    assert node.proofs.next_deadline == 2.1
    node.out.now = 2.1
    node.proofs.expire(node.out)
    _, late = said(node, cluster.MembersChecked)
    assert [one.member for one in late.members] == [node.member.id]  # type: ignore[attr-defined]
    assert node.proofs.next_deadline is None


def test_a_member_that_leaves_or_is_not_there_is_said() -> None:
    node = Node(SHAPES, "packed", 1)
    node.ask()
    node.proofs.left(node.out, node.member, "its client is gone")
    (answer,) = said(node, cluster.MembersChecked)
    assert answer.members[0].reason == "its client is gone"  # type: ignore[attr-defined]
    node.out.clear()
    node.proofs.check(node.out, cluster.CheckMembers(check="c", members=("nobody",), timeout_s=1.0))
    (answer,) = said(node, cluster.MembersChecked)
    assert "not registered on node n0" in answer.members[0].reason  # type: ignore[attr-defined]


def test_many_differences_are_counted_and_the_first_ones_located() -> None:
    node = Node([((300 * KIB // 4,), torch.float32)], "packed", 1)
    assert node.check().state == "proven"
    node.live[0].zero_()
    found = node.check()
    assert found.blocks == 64 and len(found.differences) == 16
    assert all(d.differing for d in found.differences)


# --- the coordinator --------------------------------------------------------------------------------------

WAITER = (b"n", 5)


def fleet(*nodes: str) -> Membership:
    """A replica of one rank on each of these nodes."""
    model = Membership("m", auto_swap=False)
    for i, node in enumerate(nodes):
        added = cluster.AddShard(
            member=f"t{i}", model="m", role="target", replica=f"r{i}", rank=0, world_size=1, pid=i + 1, digest="same"
        )
        model.add(Member(added, Described(Shard(tensors=()), 0), Place(node, f"host-{node}")))
    return model


def proven(member: str, **fields: object) -> MemberChecked:
    return MemberChecked(**{"member": member, "state": "proven", "version": 3, "digest": "d", "form": "f", **fields})  # type: ignore[arg-type]


def reported(checks: Checks, *answers: tuple[MemberChecked, ...]) -> VerifyReport:
    found = [
        report
        for members in answers
        for waiter, report in checks.answered(cluster.MembersChecked(check="c", members=members), 2.0)
        if waiter == WAITER
    ]
    (report,) = found
    return report


@pytest.mark.parametrize(
    ("members", "outcome"),
    [
        ((proven("t0"), proven("t1")), "proven"),
        ((proven("t0"), MemberChecked("t1", "unknown", reason="it serves nothing")), "proven"),
        ((proven("t0"), MemberChecked("t1", "unknown", version=3, reason="late")), "unknown"),
        ((MemberChecked("t0", "unknown"), MemberChecked("t1", "unknown")), "unknown"),
        ((proven("t0"), proven("t1", state="differs")), "differs"),
        ((proven("t0", version=2), proven("t1", digest="e")), "proven"),
        ((proven("t0", form="g"), proven("t1", digest="e")), "proven"),
        ((proven("t0"), proven("t1", digest="e")), "differs"),
    ],
)
def test_the_outcome_is_proven_only_if_all_that_serve_are_and_equals_are_equal(
    members: tuple[MemberChecked, ...], outcome: str
) -> None:
    checks = Checks()
    checks.begin("c", fleet("n0", "n0"), WAITER, 10.0, 0.0)
    report = reported(checks, members)
    assert report.outcome == outcome
    mixed = outcome == "differs" and members[1].state == "proven"
    assert len(report.mixed) == mixed and all("'r0' rank 0" in m and "'r1' rank 0" in m for m in report.mixed)


def test_a_node_that_is_lost_or_says_nothing_is_named() -> None:
    checks = Checks()
    checks.begin("c", fleet("n0", "n1"), WAITER, 10.0, 0.0)
    assert not list(checks.lost("n1", "its daemon died", 1.0))
    assert not list(checks.tick(9.0))
    ((_, report),) = checks.tick(10.0)
    reasons = [m.reason for m in report.members]
    assert "n0 has not answered within 10.0 s" in reasons[0] and "its daemon died" in reasons[1]
    assert report.outcome == "unknown" and not list(checks.tick(20.0))


def test_checks_and_what_they_list_are_bounded() -> None:
    checks = Checks()
    model = fleet(*["n0"] * 80)
    with pytest.raises(RefusedError, match="no target"):
        checks.begin("c", Membership("m", auto_swap=False), WAITER, 10.0, 0.0)
    for i in range(MAX_CHECKS):
        checks.begin("c" if not i else str(i), model, WAITER, 10.0, 0.0)
    with pytest.raises(RefusedError, match="under way"):
        checks.begin("more", model, WAITER, 10.0, 0.0)
    many = (Difference("w", (4,), 0, 0, "[0]", 1),) * 16
    report = reported(checks, tuple(proven(f"t{i}", state="differs", blocks=16, differences=many) for i in range(80)))
    assert sum(len(m.differences) for m in report.members) == MAX_DIFFERENCES
    assert all(m.blocks == 16 for m in report.members)
