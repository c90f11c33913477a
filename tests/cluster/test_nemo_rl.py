"""NeMo-RL's checkpoint engine: its interface, and ranks that differ; test_adapters.py has what all adapters do."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import pytest
import torch

import refitd
from refitd.adapters.nemo_rl import RefitdTransport
from refitd.adapters.streams import PublishedShare
from refitd.testing import Daemon, eventually
from tests.support.adapters import TRAINER, WALKER, Failed, NemoRlJob

pytestmark = pytest.mark.own_daemon


class CheckpointEngine(ABC):
    """As NeMo-RL's base class (commit 7ea279a, `nemo_rl/utils/checkpoint_engines`)."""

    shard_expert_weights: bool = False

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        return None

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:
        return

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]: ...


@pytest.fixture
def job(daemon: Daemon) -> Iterator[NemoRlJob]:
    """Two policy ranks and two generation ranks."""
    found = NemoRlJob(daemon, "a", "b")
    yield found
    found.kill_all()


def refit(job: NemoRlJob, step: int, **faults: str) -> None:
    """Refit; `faults` is the error of each policy rank's stream."""
    tell(job, step, **faults)
    job.answers(*job.ranks, *job.engines)


def tell(job: NemoRlJob, step: int, **faults: str) -> None:
    for rank in job.ranks:
        job.tell(rank, "send", step, faults.get(rank, ""))
    for name in job.engines:
        job.tell(name, "receive", step, "")


def source_class() -> type[Any]:
    """NeMo-RL's base class where it is installed, and an equivalent of ours elsewhere."""
    try:
        from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine as Theirs
    except ImportError:
        return CheckpointEngine
    return Theirs


def test_it_has_the_methods_that_nemo_rl_calls() -> None:
    base = source_class()
    for name, method in inspect.getmembers(base, inspect.isfunction):
        ours = inspect.signature(getattr(RefitdTransport, name))
        assert [*ours.parameters] == [*inspect.signature(method).parameters], name
        assert [p.kind for p in ours.parameters.values()] == [
            p.kind for p in inspect.signature(method).parameters.values()
        ]
    assert RefitdTransport.shard_expert_weights is base.shard_expert_weights
    # settings that the configuration adds to the user's
    engine = RefitdTransport(bucket_size=1 << 20, release_after_refit=False)
    with pytest.raises(refitd.RefusedError, match="call prepare first"):
        engine.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
    with pytest.raises(refitd.RefusedError, match="expected numbers above 0"):
        RefitdTransport(bucket_size=0)


def test_a_rank_that_fails_is_named_by_all_that_wait(job: NemoRlJob) -> None:
    # no tensors are declared yet: generation ranks wait for them
    with pytest.raises(Failed) as caught:
        refit(job, 1, **{WALKER: "raises"})
    assert caught.value.by.keys() == {TRAINER, WALKER, "a", "b"}
    for rank in (TRAINER, "a", "b"):
        assert "trainer rank 1: RuntimeError: the gather failed" in caught.value.by[rank], caught.value
    refit(job, 2)
    with pytest.raises(Failed) as caught:
        refit(job, 3, **{WALKER: "shape"})
    for rank in (TRAINER, "a", "b"):
        assert "it is [64, 128] torch.float32, in the first refit it was [128, 64]" in caught.value.by[rank]
    refit(job, 4)
    assert job.holding(4) == ["a", "b"]


def test_policy_ranks_that_do_not_agree_are_refused(job: NemoRlJob) -> None:
    with pytest.raises(Failed) as caught:
        refit(job, 1, **{WALKER: "missing"})
    for rank in (TRAINER, "a", "b"):
        assert "the policy ranks do not yield the same tensors" in caught.value.by[rank], caught.value
    assert "shut the weight synchronizer down" in caught.value.by[TRAINER]
    job.regroup()
    refit(job, 2)


@pytest.mark.slow
def test_a_generation_rank_that_dies_in_a_swap_fails_the_refit_by_name(job: NemoRlJob) -> None:
    refit(job, 1)
    job.stop("b")  # it does not pause when asked
    tell(job, 2)
    eventually(lambda: any(m.swap is not None for m in job.daemon.status().models), "the swap has begun")
    job.kill("b")
    with pytest.raises(Failed) as caught:
        job.answers(*job.ranks, "a")
    for rank in (TRAINER, "a"):
        assert "generation-1 " in caught.value.by[rank]  # its replica, or the replica's controller
    job.replace("b")
    refit(job, 3)


def test_a_rank_that_holds_nothing_declares_nothing(job: NemoRlJob) -> None:
    one = {TRAINER: "one", WALKER: "one"}
    for step in (1, 2):
        refit(job, step, **one)
    (model,) = [m for m in job.daemon.status().models if m.model == "policy"]
    assert model.source_world_size == 1
    # it still sees the same outcome as the other ranks
    with pytest.raises(Failed, match=r"walker: RefusedError: the iterator has ended without 1 of 1"):
        refit(job, 3, **{TRAINER: "one", WALKER: "none"})


def test_tensors_go_to_the_rank_with_the_fewest_bytes() -> None:
    weights = [("a", torch.zeros(8)), ("b", torch.zeros(2)), ("c", torch.zeros(2)), ("d", torch.zeros(2))]
    shares = [PublishedShare(rank, 3) for rank in range(3)]
    assert [[name for name, _ in share.first(weights)] for share in shares] == [["a"], ["b", "d"], ["c"]]
    assert [[name for name, _ in share.again(reversed(weights))] for share in shares] == [["a"], ["d", "b"], ["c"]]
    with pytest.raises(refitd.RefusedError, match="yields no tensors"):
        [*PublishedShare(0, 1).first([])]
    with pytest.raises(refitd.RefusedError, match="expected \\(name, tensor\\)"):
        [*PublishedShare(0, 1).first([torch.zeros(1)])]  # type: ignore[list-item]
