"""Bad input: a clear error before the first transfer, and the old version is still served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.names import policy
from tests.support.two_replicas import Fleet


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("extra.bias", torch.zeros(3)),  # no source has it
        ("layers.0.norm.weight", torch.zeros(49).bfloat16()),
        ("layers.0.norm.weight", torch.zeros(48)),  # of another dtype
    ],
)
def test_a_target_that_does_not_fit_refuses_the_swap_by_name(fleet: Fleet, name: str, tensor: torch.Tensor) -> None:
    with fleet.daemon.connect("bad") as client:
        client.register_target(policy(), {**fleet.full, name: tensor}, replica="bad")
        with Engine(*fleet.targets), pytest.raises(refitd.RefitFailed, match=name) as failure:
            fleet.trainer.swap(policy(), 2, timeout=60)
        assert failure.value.report is not None and failure.value.report.phase == "plan"
        assert "replica 'bad' rank 0" in str(failure.value)
        with pytest.raises(refitd.PlanError, match=name):
            fleet.trainer.plan(policy())
        assert fleet.serves_first()
    eventually(lambda: all(t.replica != "bad" for t in fleet.trainer.status().models[0].targets), "it has left")
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_source_that_covers_only_part_is_named(daemon: Daemon) -> None:
    full = shards.whole(1)
    half = shards.cut(full, 0, 2)
    with daemon.connect() as client:
        # one source rank that claims the first of two halves
        source = client.register_source(policy(), half, metadata=shards.describe(half, 0, 2))
        target = client.register_target(policy(), shards.zeros_like(full), replica="r")
        source.publish(1)
        with Engine(target), pytest.raises(refitd.RefitFailed, match=r"embedding\.weight"):
            client.swap(policy(), timeout=10)
        assert target.version is None


def test_an_unfinished_source_pool_is_told_which_ranks_are_missing(daemon: Daemon) -> None:
    half = shards.cut(shards.whole(1), 0, 2)
    with daemon.connect() as client:
        source = client.register_source(policy(), half, world_size=2, metadata=shards.describe(half, 0, 2))
        source.publish(1)
        with pytest.raises(refitd.RefusedError, match=r"source ranks \[1\] of 2"):
            client.swap(policy(), timeout=10)


def test_publishing_an_older_version_is_refused(fleet: Fleet) -> None:
    for version in (1, 2):
        with pytest.raises(refitd.RefusedError, match=f"version {version} is not newer than 2"):
            fleet.source.publish(version)
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_swapping_an_older_version_than_is_served_is_refused(fleet: Fleet) -> None:
    assert fleet.swap_succeeds()
    with pytest.raises(refitd.RefusedError, match="serves version 2, which is newer than 1"):
        fleet.trainer.swap(policy(), 1, timeout=5)
    assert fleet.serves_second()


def test_unknown_models_and_versions_are_refused_with_what_there_is(fleet: Fleet) -> None:
    with pytest.raises(refitd.RefusedError, match=r"no model 'polcy' is registered; registered models: policy"):
        fleet.trainer.swap("polcy")
    with pytest.raises(refitd.RefusedError, match=r"version 7 is not held .* complete versions: \[1, 2\]"):
        fleet.trainer.swap(policy(), 7)
    assert fleet.serves_first()


def test_metadata_that_does_not_fit_the_tensors_is_refused_at_once(fleet: Fleet) -> None:
    described = shards.describe(fleet.full, 0, 1)
    with pytest.raises(refitd.RefusedError, match="name different parameters"):
        fleet.client.register_target(policy(), {"other": torch.zeros(1)}, replica="x", metadata=described)
    described[0].shape = (1, 1)
    with pytest.raises(refitd.RefusedError, match=r"embedding\.weight: described as \(1, 1\)"):
        fleet.client.register_target(policy(), fleet.live[0], replica="x", metadata=described)


def test_a_second_swap_while_one_runs_is_refused(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), policy(), 2)
        running.wait_phase("stage")
        with pytest.raises(refitd.RefusedError, match=r"swap \w+ to version 2 is running"):
            fleet.trainer.swap(policy(), 2)
    with Engine(*fleet.targets):
        assert running.result().outcome == "committed"


def test_more_memory_than_there_is_is_refused_with_the_numbers(shared_daemon: Daemon, tmp_path: Path) -> None:
    with shared_daemon.connect() as client:
        # a sparse file without data
        huge = torch.from_file(str(tmp_path / "holes"), shared=True, size=1 << 40, dtype=torch.uint8)
        with pytest.raises(refitd.ArenaError, match=r"1099511627776 bytes asked for, \d+ bytes available under \w+"):
            client.register_target(policy(), {"w": huge}, replica="r")
        assert client.status().nodes[0].arenas == 0


def test_a_tensor_that_was_replaced_fails_the_commit_and_is_named(fleet: Fleet) -> None:
    module = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    source_module = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    source = fleet.trainer.register_source("linear", source_module)
    target = fleet.client.register_target("linear", module, replica="r")
    source.publish(1)
    module.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    engine = Engine(target)
    with engine, pytest.raises(refitd.RefitFailed, match="weight: its storage has changed") as failure:
        fleet.trainer.swap("linear", timeout=60)
    assert failure.value.report is not None and failure.value.report.outcome == "incomplete"
    assert target.version is None
    assert isinstance(engine.errors[0], refitd.CommitError)
