"""NeMo-RL's checkpoint engine: two policy ranks and two generation ranks, each a process, as its driver calls them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import refitd
from refitd.adapters.nemo_rl import RefitdTransport
from refitd.adapters.refit_shares import PublishedShare
from refitd.testing import Daemon, eventually, stopped
from tests.support.nemo_rl import CheckpointEngine, Failed, Job
from tests.support.nemo_rl_rank import BUCKET, expected

POLICY = "p0", "p1"
GENERATION = "g0", "g1"


@pytest.fixture(scope="module")
def only_daemon() -> Iterator[Daemon]:
    with Daemon("[deadlines]\ncommit_s = 4.0\n") as found:
        yield found


@pytest.fixture(scope="module")
def only_job(only_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(only_daemon, tmp_path_factory.mktemp("ranks")) as found:
        yield found


@pytest.fixture
def job(only_job: Job) -> Job:
    """Two ranks on each side, prepared anew: four processes that all tests share, because each takes long to start."""
    only_job.restart()
    only_job.finalize()
    only_job.prepare()
    return only_job


def check(found: dict[str, Any], step: int) -> None:
    for rank, said in found.items():
        assert said["loaded"] == expected(step), rank


def fails(job: Job, step: int, says: str, ranks: tuple[str, ...], **wrong: str) -> dict[str, str]:
    """Refit with something wrong; `ranks` say so."""
    with pytest.raises(Failed) as caught:
        job.refit(step, **wrong)
    for rank in ranks:
        assert says in caught.value.by[rank], caught.value
    return caught.value.by


def model(daemon: Daemon) -> Any:
    (found,) = [m for m in daemon.status().models if m.model == "policy"]
    return found


def source_class() -> type[Any]:
    """NeMo-RL's own base class where it is installed, and ours of the same form elsewhere."""
    try:
        from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine as Theirs
    except ImportError:
        return CheckpointEngine
    return Theirs


def test_it_has_the_methods_that_nemo_rl_calls():
    base = source_class()
    for name, method in inspect.getmembers(base, inspect.isfunction):
        ours = inspect.signature(getattr(RefitdTransport, name))
        assert [*ours.parameters] == [*inspect.signature(method).parameters], name
        assert [p.kind for p in ours.parameters.values()] == [
            p.kind for p in inspect.signature(method).parameters.values()
        ]
    assert RefitdTransport.shard_expert_weights is base.shard_expert_weights
    # what the configuration adds by itself, whatever the user has written
    engine = RefitdTransport(bucket_size=1 << 20, release_after_refit=False)
    with pytest.raises(refitd.RefusedError, match="call prepare first"):
        engine.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
    with pytest.raises(refitd.RefusedError, match="expected numbers above 0"):
        RefitdTransport(bucket_size=0)


def test_generation_ranks_load_what_policy_ranks_yield(job: Job):
    for step in (1, 2, 3):
        found = job.refit(step)
        check(found, step)
        assert all(said["largest"] <= BUCKET for said in found.values())
        assert all(said["stayed"] == (step > 1) for said in found.values())
    job.finalize()
    job.prepare()  # as `release_after_refit` has it
    check(job.refit(4), 4)


def test_whoever_fails_is_named_by_all_who_wait_and_the_next_refit_works(job: Job):
    # nothing is declared yet: generation ranks wait for the tensors
    fails(job, 1, "trainer rank 1: RuntimeError: the gather failed", ("p0", *GENERATION), p1="raises")
    by = fails(job, 2, "yields it twice", ("p1",), p1="twice")
    assert by.keys() == {*POLICY, *GENERATION}
    step = 3
    check(job.refit(step), step)
    for rank, wrong, says in (
        ("p0", "raises", "the gather failed"),
        ("p1", "missing", "ended without 1 of 7 tensors: ['model.layers.0.mlp.weight']"),
        ("p1", "shape", "it is [64, 128] torch.float32, in the first refit it was [128, 64]"),
        ("p0", "twice", "model.layers.0.mlp.weight: the iterator yields it twice"),
        ("p1", "unknown", "model.layers.0.mlp.weight.other: the iterator has not yielded it in the first refit"),
    ):
        fails(job, step + 1, says, (rank, "p0", *GENERATION), **{rank: wrong})
        step += 2
        found = job.refit(step)
        check(found, step)
        assert all(said["stayed"] for said in found.values())
    # an engine that cannot load what has arrived says so itself: the version is live
    assert fails(job, step + 1, "the loader failed", ("g1",), g1="raises").keys() == {"g1"}
    check(job.refit(step + 2), step + 2)


def test_policy_ranks_that_do_not_agree_are_refused(job: Job):
    by = fails(job, 1, "the policy ranks do not yield the same tensors", ("p0", *GENERATION), p1="missing")
    assert "shut the weight synchronizer down" in by["p0"]
    job.finalize()
    job.prepare()
    check(job.refit(2), 2)


@pytest.mark.slow
def test_a_restarted_trainer_goes_on_above_what_was_live(job: Job, only_daemon: Daemon):
    check(job.refit(1), 1)
    check(job.refit(2), 2)
    before = model(only_daemon).live
    job.restart(*POLICY)  # the generation ranks stay
    job.prepare()
    check(job.refit(3), 3)
    assert (live := model(only_daemon).live) is not None and live > before


def test_a_generation_rank_that_has_died_fails_the_refit_by_name(job: Job):
    check(job.refit(1), 1)
    job.kill("g1")
    fails(job, 2, "generation rank 1 has gone", ("p0", "g0"))
    job.restart()
    job.prepare()
    check(job.refit(3), 3)


@pytest.mark.slow
def test_a_generation_rank_that_dies_in_a_swap_fails_the_refit_by_name(job: Job, only_daemon: Daemon):
    check(job.refit(1), 1)
    failed: list[Failed] = []

    def refit() -> None:
        try:
            job.refit(2, without="g1")
        except Failed as exc:
            failed.append(exc)

    with stopped([job.members["g1"].pid]):  # it does not stand still when it is asked to
        thread = threading.Thread(target=refit)
        thread.start()
        eventually(lambda: any(m.swap is not None for m in only_daemon.status().models), "the swap has begun")
        job.kill("g1")
        thread.join()
    assert "generation rank 1" in failed[0].by["p0"]
    assert "generation rank 1" in failed[0].by["g0"]
    job.restart()
    job.prepare()
    check(job.refit(3), 3)


@pytest.mark.slow
def test_a_trainer_rank_that_dies_fails_the_refit_by_name(job: Job):
    check(job.refit(1), 1)
    job.kill("p0")
    fails(job, 2, "trainer rank 0 has gone", GENERATION)
    job.restart(*POLICY)
    job.prepare()
    check(job.refit(3), 3)


def test_after_a_daemon_has_ended_all_ranks_are_prepared_anew(job: Job, only_daemon: Daemon):
    check(job.refit(1), 1)
    only_daemon.kill()
    by = fails(job, 2, "PeerLost: ", (*POLICY, *GENERATION))
    assert by.keys() == {*POLICY, *GENERATION}
    only_daemon.start()
    fails(job, 3, "PeerLost: ", (*POLICY, *GENERATION))
    job.finalize()
    job.prepare()
    check(job.refit(4), 4)


def test_a_rank_that_holds_nothing_declares_nothing(job: Job, only_daemon: Daemon):
    for step in (1, 2):
        for said in job.refit(step, tensors=1).values():
            assert said["loaded"] == expected(step, tensors=1)
    assert model(only_daemon).source_world_size == 1
    # it sees all the same what the others see
    with pytest.raises(Failed, match=r"p1: RefusedError: the iterator has ended without 1 of 1"):
        job.refit(3, tensors=1, p1="none")


def test_tensors_go_to_the_rank_with_the_fewest_bytes():
    weights = [("a", torch.zeros(8)), ("b", torch.zeros(2)), ("c", torch.zeros(2)), ("d", torch.zeros(2))]
    shares = [PublishedShare(rank, 3) for rank in range(3)]
    assert [[name for name, _ in share.first(weights)] for share in shares] == [["a"], ["b", "d"], ["c"]]
    assert [[name for name, _ in share.again(reversed(weights))] for share in shares] == [["a"], ["d", "b"], ["c"]]
    with pytest.raises(refitd.RefusedError, match="yields no tensors"):
        [*PublishedShare(0, 1).first([])]
    with pytest.raises(refitd.RefusedError, match="expected \\(name, tensor\\)"):
        [*PublishedShare(0, 1).first([torch.zeros(1)])]  # type: ignore[list-item]
