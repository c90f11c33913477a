"""Source ranks described as equal must hold equal bytes: no swap reads one of two different values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd.testing import Cluster, Daemon, Engine, eventually
from tests.support.cuts import in_cuts, offered_in_cuts

UNIT = "experts.linear_fc1.weight0"


def experts(rank: int, *, says_it: bool) -> tuple[dict[str, torch.Tensor], list[refitd.ParameterMetadata]]:
    """One half of an expert over ETP2, which says so or not, beside a norm that both ranks hold."""
    half = torch.arange(24.0).view(8, 3).chunk(2)[rank].clone()
    meta = refitd.ParameterMetadata(
        name=UNIT,
        shape=(4, 3),
        dtype=torch.float32,
        element_size=4,
        is_tp=says_it,
        owner_rank=rank,
        tensor_parallel_group_ranks=[0, 1] if says_it else None,
    )
    norm = refitd.ParameterMetadata("norm", (5,), torch.float32, 4, owner_rank=rank)
    return {UNIT: half, "norm": torch.ones(5)}, [meta, norm]


def offer(client: refitd.Client, *, says_it: bool) -> list[tuple[refitd.client.source.Source, dict[str, torch.Tensor]]]:  # type: ignore[name-defined]
    found = []
    for rank in range(2):
        tensors, described = experts(rank, says_it=says_it)
        found.append((client.register_source("moe", tensors, rank=rank, world_size=2, metadata=described), tensors))
    return found


def want(client: refitd.Client, rank: int, **options: object) -> tuple[object, dict[str, torch.Tensor]]:
    tensors = {UNIT: torch.zeros(4, 3), "norm": torch.zeros(5)}
    _, described = experts(rank, says_it=bool(options.pop("says_it", False)))
    target = client.register_target("moe", tensors, replica="r", rank=rank, world_size=2, metadata=described)
    return target, tensors


def test_replicas_that_differ_refuse_every_swap_by_name_until_they_say_what_they_hold(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = offer(trainer, says_it=False)
        targets = [want(engine, rank) for rank in range(2)]
        with Engine(*(target for target, _ in targets)):
            for version in (1, 2):  # the description stays wrong
                for source, _ in sources:
                    source.publish(version)
                with pytest.raises(refitd.SwapFailed) as caught:
                    trainer.swap("moe", version, timeout=60)
                for words in (UNIT, "source rank 0", "source rank 1", "tensor_model_parallel", "check_replicas"):
                    assert words in str(caught.value)
                assert "norm" not in str(caught.value)
        assert not any(tensors[UNIT].any() for _, tensors in targets)
        for source, _ in sources:
            source.close()
        for target, _ in targets:
            target.close()
        for source, _ in offer(trainer, says_it=True):
            source.publish(3)
        targets = [want(engine, rank, says_it=True) for rank in range(2)]
        with Engine(*(target for target, _ in targets)):
            assert trainer.swap("moe", 3, timeout=60).outcome == "committed"
        for rank, (_, tensors) in enumerate(targets):
            assert torch.equal(tensors[UNIT], experts(rank, says_it=True)[0][UNIT])


def test_replicas_that_have_drifted_apart_are_told_of_when_lent_too(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        tensors = [{"norm": torch.ones(5)}, {"norm": torch.ones(5)}]
        tensors[1]["norm"][4] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
        sources = [trainer.register_source("m", tensors[r], rank=r, world_size=2, pull=True) for r in range(2)]
        engine.register_target("m", {"norm": torch.zeros(5)}, replica="r")
        leases = [source.lend(1) for source in sources]
        with pytest.raises(refitd.SwapFailed, match=r"norm: source rank 0 .* and source rank 1 .*drifted apart"):
            trainer.swap("m", 1, timeout=60)
        for lease in leases:
            lease.withdraw()


@pytest.mark.parametrize("lends", ["lend", "publish"])
def test_a_rank_whose_replica_is_read_instead_is_told_that_the_swap_has_read(daemon: Daemon, lends: str) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = [
            trainer.register_source("m", {"w": torch.ones(5)}, rank=rank, world_size=3, pull=True) for rank in range(3)
        ]
        target = engine.register_target("m", live := {"w": torch.zeros(5)}, replica="r")
        with Engine(target), ThreadPoolExecutor() as pool:
            for version in (1, 2):
                if lends == "lend":
                    leases = [source.lend(version) for source in sources]
                    assert trainer.swap("m", version, timeout=60).outcome == "committed"
                    for lease in leases:
                        lease.wait(30)
                    continue
                done = [pool.submit(source.publish, version, lend=True, timeout=30) for source in sources]
                eventually(
                    lambda v=version: all(v in one.versions for one in engine.status().models[0].sources), "lent"
                )
                assert trainer.swap("m", version, timeout=60).outcome == "committed"
                assert [each.result(30) for each in done] == [None] * 3
        assert torch.equal(live["w"], torch.ones(5))


def test_the_check_can_be_switched_off(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[models.m]\ncheck_replicas = false\n")
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank in range(2):
            source = trainer.register_source("m", {"w": torch.full((5,), rank + 1.0)}, rank=rank, world_size=2)
            source.publish(1)
        target = engine.register_target("m", live := {"w": torch.zeros(5)}, replica="r")
        with Engine(target):
            assert trainer.swap("m", 1, timeout=60).outcome == "committed"
        assert float(live["w"][0]) in (1.0, 2.0)


def test_what_no_target_wants_may_differ(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank in range(2):
            held = {"w": torch.ones(5), "steps_here": torch.tensor([rank])}
            trainer.register_source("m", held, rank=rank, world_size=2).publish(1)
        target = engine.register_target("m", live := {"w": torch.zeros(5)}, replica="r")
        with Engine(target):
            assert trainer.swap("m", 1, timeout=60).outcome == "committed"
        assert torch.equal(live["w"], torch.ones(5))


@pytest.mark.parametrize("stays", [True, False])
def test_a_coordinator_that_starts_anew_knows_what_replicas_hold(
    start_daemon: Callable[..., Daemon], stays: bool
) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    with daemon.connect() as trainer, daemon.connect() as engine:
        for source, _ in offer(trainer, says_it=False):
            source.publish(1)
            source.publish(2)
        targets = [want(engine, rank) for rank in range(2)]
        if not stays:
            trainer.close()  # what it has published stays
        coordinator.kill()
        daemon.start_coordinator()
        eventually(lambda: members(engine) == 4, "the coordinator knows everybody", 30)
        with Engine(*(target for target, _ in targets)), pytest.raises(refitd.SwapFailed) as caught:
            engine.swap("moe", 2, timeout=60)
        for words in (UNIT, "source rank 0", "source rank 1"):
            assert words in str(caught.value)
        assert not any(tensors[UNIT].any() for _, tensors in targets)


def members(client: refitd.Client) -> int:
    return sum(len(model.sources) + len(model.targets) for model in client.status().models)


ROWS, COLUMNS = 8, 6


@pytest.mark.parametrize("mode", ["copied", "pulled", "strided", "arena"])
@pytest.mark.parametrize("cuts", [(None, 0), (0, None), (0, 1), (1, 0, None)])
def test_ranks_that_hold_the_same_elements_in_different_cuts_must_agree(
    shared_daemon: Daemon, cuts: tuple[int | None, ...], mode: str
) -> None:
    whole, model = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + 1, f"cuts-{mode}-{cuts}"
    with shared_daemon.connect() as trainer, shared_daemon.connect() as engine:
        offered = offered_in_cuts(trainer, model, in_cuts(whole, cuts), mode)
        target = engine.register_target(model, live := {"w": torch.zeros(ROWS, COLUMNS)}, replica="r")
        with Engine(target):
            for rank, (_, wrong) in enumerate(offered):
                wrong[-1, -1] += 0.5  # of any one rank
                leases = [source.lend(rank + 1) for source, _ in offered]
                with pytest.raises(refitd.SwapFailed) as caught:
                    trainer.swap(model, rank + 1, timeout=60)
                for words in ("w: source rank", f"source rank {rank} ", "describe the same elements", "check_replicas"):
                    assert words in str(caught.value)
                assert not live["w"].any()
                for lease in leases:
                    lease.withdraw()
                wrong[-1, -1] -= 0.5
            for version in (10, 11):  # they are compared once
                leases = [source.lend(version) for source, _ in offered]
                assert trainer.swap(model, version, timeout=60).outcome == "committed"
                for lease in leases:
                    lease.wait(30)
                assert torch.equal(live["w"], whole + version - 10)
                for _, tensor in offered:
                    tensor.add_(1)
        for source, _ in offered:
            source.close()
        target.close()


def test_sources_in_different_cuts_on_several_nodes_are_compared() -> None:
    whole = torch.arange(512.0 * 600).view(512, 600)
    held = in_cuts(whole, (None, 0, 1))
    with (
        Cluster(("n0", "n1")) as cluster,
        cluster.daemons["n0"].connect() as here,
        cluster.daemons["n1"].connect() as there,
    ):
        offered = [offered_in_cuts((here, there)[rank % 2], "m", held, "copied", [rank])[0] for rank in range(5)]
        target = there.register_target("m", live := {"w": torch.zeros_like(whole)}, replica="r")
        with Engine(target):
            for version, rank in enumerate((0, 2, 3), start=1):
                offered[rank][1][0, -1] += 64
                for source, _ in offered:
                    source.publish(version)
                with pytest.raises(refitd.SwapFailed, match=f"w: .*source rank {rank} .*hold different values"):
                    here.swap("m", version, timeout=60)
                offered[rank][1][0, -1] -= 64
            for source, _ in offered:
                source.publish(9)
            assert here.swap("m", 9, timeout=60).outcome == "committed"
        assert torch.equal(live["w"], whole)
