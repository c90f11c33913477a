"""Source ranks described as equal must hold equal bytes: no swap reads one of two different values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import refitd
from refitd import MXFP8Buffer, MXFP8Offer, ParameterMetadata, Tile
from refitd.testing import Cluster, Daemon, Engine, eventually
from tests.support.cuts import in_cuts, offered_in_cuts
from tests.support.names import named
from tests.support.shards import meta

UNIT = "experts.linear_fc1.weight0"


def experts(rank: int, *, says_it: bool) -> tuple[dict[str, torch.Tensor], list[refitd.ParameterMetadata]]:
    """Return half an expert over ETP2, with or without Megatron's attributes, and a norm that both ranks have."""
    half = torch.arange(24.0).view(8, 3).chunk(2)[rank].clone()
    norm, group = torch.ones(5), [0, 1] if says_it else None
    described = [meta(UNIT, half, rank, is_tp=says_it, tensor_parallel_group_ranks=group), meta("norm", norm, rank)]
    return {UNIT: half, "norm": norm}, described


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
        tensors = [trainer.allocate({"norm": ((5,), torch.float32)}) for _ in range(2)]
        for each in tensors:
            each["norm"].fill_(1.0)
        tensors[1]["norm"][4] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
        sources = [trainer.register_source(named("m"), tensors[r], rank=r, world_size=2) for r in range(2)]
        engine.register_target(named("m"), {"norm": torch.zeros(5)}, replica="r")
        leases = [source.lend(1) for source in sources]
        with pytest.raises(refitd.SwapFailed, match=r"norm: source rank 0 .* and source rank 1 .*drifted apart"):
            trainer.swap(named("m"), 1, timeout=60)
        for lease in leases:
            lease.withdraw()


@pytest.mark.parametrize("lends", ["lend", "publish"])
def test_a_rank_whose_replica_is_read_instead_is_told_that_the_swap_has_read(daemon: Daemon, lends: str) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        held = [trainer.allocate({"w": ((5,), torch.float32)}) for _ in range(3)]
        for each in held:
            each["w"].fill_(1.0)
        sources = [trainer.register_source(named("m"), held[rank], rank=rank, world_size=3) for rank in range(3)]
        target = engine.register_target(named("m"), live := {"w": torch.zeros(5)}, replica="r")
        with Engine(target), ThreadPoolExecutor() as pool:
            for version in (1, 2):
                if lends == "lend":
                    leases = [source.lend(version) for source in sources]
                    assert trainer.swap(named("m"), version, timeout=60).outcome == "committed"
                    for lease in leases:
                        lease.wait(30)
                    continue
                done = [pool.submit(source.publish, version, timeout=30) for source in sources]
                eventually(
                    lambda v=version: all(v in one.versions for one in engine.status().models[0].sources), "lent"
                )
                assert trainer.swap(named("m"), version, timeout=60).outcome == "committed"
                assert [each.result(30) for each in done] == [None] * 3
        assert torch.equal(live["w"], torch.ones(5))


def test_the_check_can_be_switched_off(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[models.m]\ncheck_replicas = false\n")
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank in range(2):
            source = trainer.register_source(named("m"), {"w": torch.full((5,), rank + 1.0)}, rank=rank, world_size=2)
            source.publish(1)
        target = engine.register_target(named("m"), live := {"w": torch.zeros(5)}, replica="r")
        with Engine(target):
            assert trainer.swap(named("m"), 1, timeout=60).outcome == "committed"
        assert float(live["w"][0]) in (1.0, 2.0)


def test_what_no_target_wants_may_differ(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank in range(2):
            held = {"w": torch.ones(5), "steps_here": torch.tensor([rank])}
            trainer.register_source(named("m"), held, rank=rank, world_size=2).publish(1)
        target = engine.register_target(named("m"), live := {"w": torch.zeros(5)}, replica="r")
        with Engine(target):
            assert trainer.swap(named("m"), 1, timeout=60).outcome == "committed"
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
            trainer.close()  # its published version stays
        coordinator.kill()
        daemon.start_coordinator()
        eventually(lambda: members(engine) == 4, "the coordinator knows everybody")
        with Engine(*(target for target, _ in targets)), pytest.raises(refitd.SwapFailed) as caught:
            engine.swap("moe", 2, timeout=60)
        for words in (UNIT, "source rank 0", "source rank 1"):
            assert words in str(caught.value)
        assert not any(tensors[UNIT].any() for _, tensors in targets)


def members(client: refitd.Client) -> int:
    return sum(len(model.sources) + len(model.targets) for model in client.status().models)


ROWS, COLUMNS = 8, 6


@pytest.mark.parametrize("mode", ["copied", "strided", "arena"])
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
        offered = [offered_in_cuts((here, there)[rank % 2], named("m"), held, "copied", [rank])[0] for rank in range(5)]
        target = there.register_target(named("m"), live := {"w": torch.zeros_like(whole)}, replica="r")
        with Engine(target):
            for version, rank in enumerate((0, 2, 3), start=1):
                offered[rank][1][0, -1] += 64
                for source, _ in offered:
                    source.publish(version)
                with pytest.raises(refitd.SwapFailed, match=f"w: .*source rank {rank} .*hold different values"):
                    here.swap(named("m"), version, timeout=60)
                offered[rank][1][0, -1] -= 64
            for source, _ in offered:
                source.publish(9)
            assert here.swap(named("m"), 9, timeout=60).outcome == "committed"
        assert torch.equal(live["w"], whole)


Held = tuple[dict[str, torch.Tensor], list[ParameterMetadata]]
_numbers = itertools.count()
DIFFERS = r"{}: .*hold(s)? different values"


def split(name: str, tensor: torch.Tensor, rank: int, group: Sequence[int], **fields: Any) -> ParameterMetadata:
    return meta(name, tensor, rank, is_tp=True, partition_dim=0, tensor_parallel_group_ranks=list(group), **fields)


def swap(daemon: Daemon, ranks: list[Held], live: dict[str, Any], **options: Any) -> None:
    """Publish and swap the ranks' tensors. `mxfp8` goes to sources, other options to the target."""
    model = f"families-{next(_numbers)}"
    offer = {"mxfp8": options.pop("mxfp8")} if "mxfp8" in options else {}
    with daemon.connect() as trainer, daemon.connect() as engine, contextlib.ExitStack() as stack:
        for rank, (tensors, metas) in enumerate(ranks):
            source = trainer.register_source(model, tensors, rank=rank, world_size=len(ranks), metadata=metas, **offer)
            stack.callback(source.close)
            source.publish(1)
        target = engine.register_target(model, live, replica="r", **options)
        stack.callback(target.close)
        with Engine(target):
            assert trainer.swap(model, 1, timeout=60).outcome == "committed"


def uneven(one: tuple[int, ...], other: tuple[int, ...], drifted: int) -> list[Held]:
    """Rows 1..6 in two tensor-parallel groups of these shards; the last row of one rank is wrong."""
    found: list[Held] = []
    for sizes in (one, other):
        group = range(len(found), len(found) + len(sizes))
        for rank, part in zip(group, (torch.arange(6.0) + 1).split(sizes), strict=True):
            held = part.clone()
            held[-1] += 50 * (rank == drifted)
            found.append(({"w": held}, [split("w", held, rank, group)]))
    return found


@pytest.mark.parametrize("again", [False, True])
def test_replicas_whose_first_versions_have_different_numbers_are_compared(shared_daemon: Daemon, again: bool) -> None:
    model = f"numbers-{again}"
    with shared_daemon.connect() as trainer, shared_daemon.connect() as engine:
        held = [{"w": torch.full((5,), 1.0)}, {"w": torch.full((5,), 1.0 + (not again))}]
        one, two = (trainer.register_source(model, held[r], rank=r, world_size=2) for r in range(2))
        target = engine.register_target(model, live := {"w": torch.zeros(5)}, replica="r")
        with Engine(target):
            one.publish(1)
            if again:  # only one rank returns, with other weights
                two.publish(1)
                assert trainer.swap(model, 1, timeout=60).outcome == "committed"
                two.close()
                held[1]["w"].fill_(2.0)
                two = trainer.register_source(model, held[1], rank=1, world_size=2)
            version = max(one.next_version, two.next_version)
            for source in (one, two):
                source.publish(version)
            with pytest.raises(refitd.SwapFailed, match=DIFFERS.format("w")):
                trainer.swap(model, version, timeout=60)
            assert live["w"].tolist() == [float(again)] * 5
        for each in (one, two, target):
            each.close()


def test_a_parameter_that_replaces_another_is_compared_again(shared_daemon: Daemon) -> None:
    model = "replaced"
    modules = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    with shared_daemon.connect() as trainer, shared_daemon.connect() as engine:
        sources = [trainer.register_source(model, m, rank=r, world_size=2) for r, m in enumerate(modules)]
        target = engine.register_target(model, {"weight": torch.zeros(4, 4)}, replica="r")

        def publish(version: int) -> None:
            leases = [source.lend(version) for source in sources]
            try:
                assert trainer.swap(model, version, timeout=60).outcome == "committed"
            finally:
                for lease in leases:
                    lease.withdraw()

        with Engine(target):
            publish(1)
            modules[1].weight = torch.nn.Parameter(torch.ones(4, 4))
            with pytest.raises(refitd.SwapFailed, match=DIFFERS.format("weight")):
                publish(2)
            modules[1].weight = torch.nn.Parameter(modules[0].weight.detach().clone())
            publish(3)
        for each in (*sources, target):
            each.close()


@pytest.mark.parametrize(
    ("one", "other", "drifted"), [((2, 4), (1, 1, 4), 1), ((1, 2, 3), (1, 3, 2), 2), ((2, 3, 1), (3, 2, 1), 1)]
)
def test_uneven_groups_are_compared_where_they_meet(
    shared_daemon: Daemon, one: tuple[int, ...], other: tuple[int, ...], drifted: int
) -> None:
    with pytest.raises(refitd.SwapFailed, match=DIFFERS.format("w")):
        swap(shared_daemon, uneven(one, other, drifted), {"w": torch.zeros(6)})


@pytest.mark.parametrize("other", [(2, 2, 2), (3, 2, 1), (1, 2, 3)])
def test_uneven_groups_that_hold_the_same_are_swapped(shared_daemon: Daemon, other: tuple[int, ...]) -> None:
    swap(shared_daemon, uneven((1, 2, 3), other, -1), live := {"w": torch.zeros(6)})
    assert live["w"].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("count", [2, 64, 65, 300])
def test_tensors_of_many_tiles_are_compared(shared_daemon: Daemon, count: int) -> None:
    """Grouped experts stack all of a rank's experts in one tensor."""
    tiles = tuple(Tile(f"e{i}", (0,), (4,), 4 * i, (1,)) for i in range(count))
    held = [torch.zeros(count, 4) for _ in range(2)]
    held[1][-1, -1] = 1
    ranks: list[Held] = [({"w": t}, [meta("w", t, rank, tiles=tiles)]) for rank, t in enumerate(held)]
    with pytest.raises(refitd.SwapFailed, match=DIFFERS.format(f"e{count - 1}")):
        swap(shared_daemon, ranks, {f"e{i}": torch.zeros(4) for i in range(count)})


@pytest.mark.parametrize("instead", [False, True])
def test_what_is_offered_in_mxfp8_is_compared(shared_daemon: Daemon, instead: bool) -> None:
    offer = {"mxfp8": MXFP8Offer(("w",), instead=instead), "convert_on_send": True}
    held = [torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    ranks: list[Held] = [({"w": t}, [meta("w", t, rank)]) for rank, t in enumerate(held)]
    swap(shared_daemon, ranks, {"w": MXFP8Buffer.empty((64, 64))}, **offer)
    held[1][3, 3] = 2.0
    with pytest.raises(refitd.SwapFailed, match=r"hold different values"):
        swap(shared_daemon, ranks, {"w": MXFP8Buffer.empty((64, 64))}, **offer)


@pytest.mark.parametrize("rank", range(5))
def test_blocks_of_a_fused_tensor_are_compared_with_tiles(shared_daemon: Daemon, rank: int) -> None:
    whole = torch.arange(48.0).view(12, 4) + 1
    fused = [torch.cat([whole[0:4], whole[8:10]]), torch.cat([whole[4:8], whole[10:12]])]
    ranks: list[Held] = [({"v": t}, [split("v", t, r, [0, 1], partition_sizes=[4, 2])]) for r, t in enumerate(fused)]
    for r, first in enumerate((0, 4, 8), start=2):
        tile = Tile("v", (first, 0), (4, 4), 0, (4, 1))
        part = whole[first : first + 4].clone()
        ranks.append(({"v": part}, [meta("v", part, r, tiles=(tile,), global_shape=(12, 4))]))
    ranks[rank][0]["v"][0, 0] = -1
    with pytest.raises(refitd.SwapFailed, match=DIFFERS.format("v")):
        swap(shared_daemon, ranks, {"v": torch.zeros(12, 4)})


@pytest.mark.parametrize("differs", [True, False])
def test_a_second_copy_of_another_ranks_shard_is_compared(shared_daemon: Daemon, differs: bool) -> None:
    whole = torch.arange(16.0).view(8, 2) + 1
    copy = whole[4:] + differs
    tile = Tile("w", (4, 0), (4, 2), 0, (2, 1))
    first = [split("w", whole[:4], 0, [0, 1]), meta("copy", copy, 0, tiles=(tile,), global_shape=(8, 2))]
    ranks: list[Held] = [
        ({"w": whole[:4].clone(), "copy": copy}, first),
        ({"w": whole[4:].clone()}, [split("w", whole[4:], 1, [0, 1])]),
    ]
    live = {"w": torch.zeros(8, 2)}
    if differs:
        with pytest.raises(refitd.SwapFailed, match=DIFFERS.format("w")):
            swap(shared_daemon, ranks, live)
    else:
        swap(shared_daemon, ranks, live)
        assert torch.equal(live["w"], whole)


@pytest.mark.parametrize("differs", [True, False])
def test_one_rank_that_holds_the_same_twice_holds_the_same(shared_daemon: Daemon, differs: bool) -> None:
    held = {"a": torch.ones(4), "b": torch.ones(4) + differs}
    metas = [meta(name, tensor, 0, resolved_name="w") for name, tensor in held.items()]
    live = {"w": torch.zeros(4)}
    if differs:
        with pytest.raises(refitd.SwapFailed, match=r"source rank 0 .*describes the same elements of it twice"):
            swap(shared_daemon, [(held, metas)], live)
    else:
        swap(shared_daemon, [(held, metas)], live)
        assert live["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("count", [2_000, pytest.param(17_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_however_many_tensors_are_cut_differently_all_of_them_are_compared(
    shared_daemon: Daemon, count: int, is_wrong: bool
) -> None:
    names = [f"layers.{i}.w" for i in range(count)]
    whole = torch.arange(4.0 * count).view(count, 4)
    halves = [whole[:, :2].clone(), whole[:, 2:].clone()]
    halves[1][-1, 0] += is_wrong
    ranks: list[Held] = [(dict(zip(names, whole, strict=True)), [meta(n, whole[0], 0) for n in names])]
    for rank, half in enumerate(halves, start=1):
        metas = [split(n, half[0], rank, [1, 2]) for n in names]
        ranks.append((dict(zip(names, half, strict=True)), metas))
    live = torch.zeros(count, 4)
    if not is_wrong:
        swap(shared_daemon, ranks, dict(zip(names, live, strict=True)))
        assert torch.equal(live, whole)
    else:
        with pytest.raises(refitd.SwapFailed, match=DIFFERS.format(names[-1])):
            swap(shared_daemon, ranks, dict(zip(names, live, strict=True)))


def test_ranks_that_are_not_read_do_not_end_a_swap_by_publishing_on(start_daemon: Callable[..., Daemon]) -> None:
    """Data-parallel ranks with two slots, as in the README; swaps read one of them, and not the others."""
    daemon = start_daemon("[models.m]\nauto_swap = true\n")
    with daemon.connect() as trainer, daemon.connect() as engine:
        held = [{"w": torch.zeros(1 << 18)} for _ in range(3)]
        sources = [trainer.register_source(named("m"), held[r], rank=r, world_size=3) for r in range(3)]
        target = engine.register_target(named("m"), live := {"w": torch.zeros(1 << 18)}, replica="r")
        with Engine(target):
            for version in range(1, 60):
                for source, tensors in zip(sources, held, strict=True):
                    tensors["w"].fill_(version)
                    source.publish(version)
            target.wait(59, 60)
        reads = {pair.source for pair in engine.plan(named("m")).pairs}
        assert len(reads) == 1
        # the rank that swaps read may be too fast for a busy machine, and so may any rank before the first comparison
        too_fast = (next(iter(reads)), "comparing the sources")
        for swap in engine.history(named("m"), 200).swaps:
            assert swap.state == "committed" or any(who in swap.reason for who in too_fast), swap
        assert live["w"].unique().tolist() == [59.0]
