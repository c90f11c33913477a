"""Partial updates: a version is the tensors that the sources offer; kept tensors of a target are never written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import refitd
from refitd import Derived, MXFP8Buffer
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support.controls import controlled
from tests.support.fleet import go_live
from tests.support.names import policy
from tests.support.programs import Program, python, refitctl

Tensors = dict[str, torch.Tensor]


def trained(version: int) -> Tensors:
    """Return the two tensors of four that a version offers."""
    return {"head": torch.full((64, 32), float(version)), "norm": torch.full((32,), version + 0.5)}


def own(base: float = 7.0) -> Tensors:
    """Return an engine's tensors before its first version."""
    return {
        "embed": torch.full((128, 32), base),
        "head": torch.zeros(64, 32),
        "norm": torch.zeros(32),
        "tower": torch.full((16,), -base),
    }


class Fleet:
    """A trainer that offers two tensors, and replica "a" that keeps the rest."""

    def __init__(self, daemon: Daemon, model: str = "") -> None:
        self.daemon, self.model = daemon, (model := model or policy())
        self.trainer, self.client = daemon.connect("trainer"), daemon.connect("engine")
        self.given = trained(1)
        self.source = self.trainer.register_source(model, self.given, partial=True)
        self.live = own()
        self.target = self.client.register_target(model, self.live, replica="a", keeps=True)

    def publish(self, version: int) -> None:
        for name, tensor in trained(version).items():
            self.given[name].copy_(tensor)
        self.source.publish(version)

    def swap(self, version: int, *targets: refitd.Target) -> refitd.SwapReport:
        self.publish(version)
        with Engine(self.target, *targets):
            return self.trainer.swap(self.model, version, timeout=60)

    def close(self) -> None:
        self.client.close()
        self.source.close()
        self.trainer.close()


@pytest.fixture
def fleet(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    found = Fleet(shared_daemon, request.node.name)
    yield found
    found.close()


def holds(live: Tensors, version: int, base: float = 7.0) -> bool:
    """Return whether these tensors have a version, and all others are unchanged."""
    wanted = own(base) | trained(version)
    return all(torch.equal(live[name], tensor) for name, tensor in wanted.items())


def test_what_is_not_offered_is_kept_and_told(fleet: Fleet) -> None:
    assert fleet.target.kept == ("embed", "tower")
    kept_bytes = 4 * (128 * 32 + 16)
    report = fleet.swap(1)
    assert holds(fleet.live, 1) and (report.kept_tensors, report.kept_bytes) == (2, kept_bytes)
    assert report.bytes == 4 * (64 * 32 + 32)
    model = fleet.trainer.status().models[0]
    (target,), (source,) = model.targets, model.sources
    assert source.is_partial and target.kept == ("embed", "tower")
    # kept tensors are not staged either
    assert (target.kept_tensors, target.kept_bytes) == (2, kept_bytes) and target.staging_bytes < kept_bytes
    assert [(one.name, one.bytes) for one in fleet.trainer.plan(fleet.model).kept] == [("embed", 16384), ("tower", 64)]
    assert set(fleet.trainer.tensors(fleet.model)) == {"head", "norm"}
    fleet.live["embed"] = fleet.live["embed"].clone().add_(1)  # the engine's tensor: it may even move
    assert fleet.trainer.verify(fleet.model, timeout=60).outcome == "proven"
    fleet.live["head"][3, 4] = 9
    assert fleet.trainer.verify(fleet.model, timeout=60).outcome == "differs"
    fleet.live["embed"] = own()["embed"]
    assert fleet.swap(2).outcome == "committed" and holds(fleet.live, 2)
    for words, says in (
        (("plan", fleet.model), "targets keep 16.4 kB of their own: embed, tower"),
        (("status",), "the sources offer a part"),
    ):
        ran = refitctl(fleet.daemon, *words)
        assert says in " ".join(ran.stdout.split()), ran.stdout + ran.stderr


def test_an_aborted_swap_a_rollback_and_a_replica_that_joins(fleet: Fleet) -> None:
    fleet.swap(1)
    fleet.publish(2)
    with stopped(fleet.daemon.node().workers):
        running = RunningSwap(fleet.daemon.connect(), fleet.model, 2, timeout=60)
        running.wait_phase("stage")
        fleet.trainer.abort(fleet.model)
    assert holds(fleet.live, 1)
    with Engine(fleet.target):
        fleet.trainer.swap(fleet.model, 2, timeout=60)
        assert holds(fleet.live, 2)
        fleet.trainer.rollback(fleet.model, timeout=60)
    assert holds(fleet.live, 1)
    # a joining target gets the offered tensors; of the rest it keeps its initial values, not those of its peers
    with fleet.daemon.connect("joins") as client:
        late = own(3.0)
        target = client.register_target(fleet.model, late, replica="b", keeps=("embed", "tow*"))
        assert target.wait(1, timeout=60) == 1 and holds(late, 1, 3.0)
        fleet.swap(3, target)
        assert holds(late, 3, 3.0) and holds(fleet.live, 3)


ENGINE = """
from tests.support.names import policy
import sys, torch, refitd
directory, way, base = sys.argv[1:]
sys.stdin.readline()  # torch is imported
client = refitd.connect(directory, name="crashes")
live = {"embed": torch.full((128, 32), float(base)), "head": torch.zeros(64, 32), "norm": torch.zeros(32)}
if way == "arena":
    held = client.allocate({name: (t.shape, t.dtype) for name, t in live.items()})
    for name, tensor in held.items():
        tensor.copy_(live[name])
    live = held
target = client.register_target(policy(), live, replica="crashes", keeps=True)
print(target.kept, target.version, flush=True)
for line in sys.stdin:
    target.wait(int(line), timeout=60)
    print(target.version, *(sorted({float(x) for x in t.unique()}) for t in live.values()), flush=True)
"""


@pytest.mark.parametrize("way", ["private", pytest.param("arena", marks=pytest.mark.slow)])
def test_an_engine_that_crashes_and_returns_keeps_what_it_comes_with(daemon: Daemon, way: str) -> None:
    """The arena that it left contains only offered tensors; a restore must not overwrite the engine's kept tensors."""

    fleet = Fleet(daemon)

    def said(engine: Program, line: object = "") -> str:
        engine.tell(str(line))
        return engine.line()

    command = python(fleet.daemon, ENGINE, way)
    with Program([*command, "5"]) as first, Program([*command, "6"]) as second:
        assert said(first) == "('embed',) None"
        fleet.publish(1)
        with Engine(fleet.target):
            running = RunningSwap(fleet.daemon.connect(), policy(), 1, timeout=60)
            assert said(first, 1) == "1 [5.0] [1.0] [1.5]"
            running.result()
        first.kill()
        eventually(lambda: len(fleet.trainer.status().models[0].targets) == 1, "it is gone")
        assert said(second) == "('embed',) 1"
        assert said(second, 1) == "1 [6.0] [1.0] [1.5]"
    fleet.close()


def test_tensors_that_workers_write_and_tensors_written_in_place(fleet: Fleet) -> None:
    with fleet.daemon.connect("others") as client:
        held: list[Tensors] = []
        for _ in range(2):
            tensors = client.allocate({name: (t.shape, t.dtype) for name, t in own().items()})
            for name, tensor in own().items():
                tensors[name].copy_(tensor)
            held.append(tensors)
        shadow = client.register_target(fleet.model, held[0], replica="shadow", keeps=True)
        controlled(client, fleet.model, held[1], replica="in-place", keeps=True, mode="in-place")
        for version in (1, 2):
            fleet.swap(version, shadow)
            assert all(holds(live, version) for live in (fleet.live, *held))
        assert fleet.trainer.verify(fleet.model, timeout=60).outcome == "proven"


def test_mxfp8_casts_ties_and_derived_tensors(shared_daemon: Daemon) -> None:
    with shared_daemon.connect("trainer") as trainer, shared_daemon.connect("engine") as client:
        weight = torch.randn(64, 64).to(torch.bfloat16)
        embed = torch.randn(8, 32)
        given = {"q": weight, "embed": embed, "lm_head": embed}  # tied there
        source = trainer.register_source("forms", given, partial=True)
        buffers = {
            name: MXFP8Buffer(
                torch.zeros(64, 64, dtype=torch.float8_e4m3fn), torch.zeros(64, 2, dtype=torch.float8_e8m0fnu)
            )
            for name in ("q", "k")
        }
        buffers["k"].data.view(torch.uint8).fill_(3)
        head = torch.zeros(8, 32, dtype=torch.bfloat16)
        fused, seen = torch.zeros(1), []
        derived = {"fused": Derived(fused, ("q", "k", "frozen"), lambda tensor: seen.append(tensor.fill_(1.0)))}
        live = {**buffers, "lm_head": head, "frozen": torch.full((4,), 2.0)}
        target = client.register_target("forms", live, replica="a", keeps=True, cast=True, derived=derived)
        assert target.kept == ("k", "frozen")
        source.publish(1)
        with Engine(target):
            assert trainer.swap("forms", 1, timeout=60).kept_tensors == 2
        assert seen and bool(fused == 1) and torch.equal(head, embed.bfloat16())
        assert bool((buffers["k"].data.view(torch.uint8) == 3).all())
        assert buffers["q"].data.view(torch.uint8).any() and bool((live["frozen"] == 2).all())
        assert trainer.verify("forms", timeout=60).outcome == "proven"
        target.close()
        source.close()


def test_a_part_is_saved_only_where_that_is_meant(daemon: Daemon, tmp_path: Any) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    fleet = Fleet(daemon)
    fleet.swap(1)
    with pytest.raises(refitd.RefusedError, match=r"a part of the model.*--partial"):
        refitd.save_checkpoint(fleet.trainer, policy(), tmp_path / "whole")
    saved = refitd.save_checkpoint(fleet.trainer, policy(), tmp_path / "part", partial=True)
    found = load_file(tmp_path / "part" / "model.safetensors")
    assert saved.tensors == 2 and all(torch.equal(found[name], t) for name, t in trained(1).items())
    fleet.trainer.close()
    # published again as a partial version after the trainer has ended: engines that keep the rest take it
    with fleet.daemon.connect("publisher") as client:
        eventually(lambda: not client.status().models[0].sources[0].attached, "the trainer is gone")
        version = refitd.publish_checkpoint(client, policy(), tmp_path / "part", partial=True).version
        with Engine(fleet.target):
            client.swap(policy(), version, timeout=60)
    assert holds(fleet.live, 1)
    fleet.client.close()


def test_after_a_full_trainer_a_partial_one_is_followed_only_by_who_says_so(daemon: Daemon) -> None:
    with daemon.connect("engine") as client:
        live = own()
        with daemon.connect("full") as full:
            target = client.register_target(policy(), live, replica="a")
            every = {**own(), **trained(1), "embed": torch.full((128, 32), 11.0)}
            source = full.register_source(policy(), every)
            go_live(full, source, 1, target)
        eventually(lambda: not client.status().models[0].sources[0].attached, "the full trainer has gone")
        with daemon.connect("part") as part:
            source = part.register_source(policy(), trained(2), partial=True)
            source.publish(source.next_version)
            with pytest.raises(refitd.RefusedError, match=r"embed: no source offers it.*keeps=True"):
                part.swap(policy(), timeout=60)
            assert target.version == 1
            # registered again, it keeps the values of the full version
            target.close()
            target = client.register_target(policy(), live, replica="a", keeps=True)
            with Engine(target):
                part.swap(policy(), timeout=60)
            assert holds(live | {"embed": own()["embed"]}, 2) and bool((live["embed"] == 11).all())
        eventually(lambda: not client.status().models[0].sources[0].attached, "the partial one, too")
        with daemon.connect("full") as full:
            source = full.register_source(policy(), every)
            source.publish(source.next_version)
            with pytest.raises(refitd.RefusedError, match="keeps 'embed' and 1 more, and the sources do not say"):
                full.swap(policy(), timeout=60)


def test_ranks_of_several_replicas_and_trainers_must_agree(shared_daemon: Daemon) -> None:
    with shared_daemon.connect("trainer") as trainer, shared_daemon.connect("engine") as client:
        trainer.register_source("p", {"a": torch.ones(4)}, rank=0, world_size=2, partial=True)
        with pytest.raises(refitd.RefusedError, match=r"rank 1 has partial=False, source rank 0 .* has partial=True"):
            trainer.register_source("p", {"b": torch.ones(4)}, rank=1, world_size=2)
        with pytest.raises(refitd.DeadlineExceeded, match=r"source ranks \[1\] have not registered"):
            client.register_target("p", {"a": torch.ones(4)}, replica="e", keeps=True, timeout=2.0)
        # a stage without trained tensors offers none
        with pytest.raises(refitd.RefusedError, match=r"no tensor .* is called 'head'"):
            trainer.register_source("p", {"b": torch.ones(4)}, rank=1, world_size=2, partial=["head"])
        second = trainer.register_source("p", {"b": torch.ones(4)}, rank=1, world_size=2, partial=("head*",))
        assert set(client.tensors("p")) == {"a"}
        with pytest.raises(refitd.RefusedError, match="keep all that it registers"):
            client.register_target("p", {"model.a": torch.ones(4)}, replica="e", keeps=True)
        for keeps, says in (("nothing",), "no tensor .* is called 'nothing'"), ("a", "expected True, False"):
            with pytest.raises(refitd.RefusedError, match=says):
                client.register_target("p", {"a": torch.ones(4)}, replica="e", keeps=keeps)
        del second


# tensors and options that an engine registers, and why it cannot follow sources of "a" and "b", tied to no "c"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name differs, and would be kept for ever": (
        {"tensors": ("a", "x.b"), "keeps": True},
        "keeps 'x.b', and does not take 'b', which is offered; do the names differ",
    ),
    "it keeps what is offered": ({"tensors": ("a", "b"), "keeps": ("b",)}, "keeps 'b', which the sources offer"),
    "it does not say that it keeps": ({"tensors": ("a", "b", "z"), "keeps": False}, "z: no source offers it"),
    "a part of a fused tensor": ({"tensors": ("a", "b", ("qkv", "a", "z")), "keeps": True}, "offer a and not z"),
    "a tie that the sources do not know": ({"tensors": ("b",), "tied": ("a", "z"), "keeps": True}, "tied with z"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_a_replica_that_would_mix_versions_is_refused_by_name(
    shared_daemon: Daemon, case: tuple[dict[str, Any], str]
) -> None:
    said, why = case
    live, metadata = {}, []
    for one in said["tensors"]:
        name, *parts = (one, one) if isinstance(one, str) else one
        tiles = tuple(refitd.Tile(part, (0,), (4,), 4 * i, (1,)) for i, part in enumerate(parts))
        live[name] = torch.zeros(4 * len(parts))
        metadata.append(refitd.ParameterMetadata(name, (4 * len(parts),), torch.float32, 4, tiles=tiles))
    if "tied" in said:
        name, other = said["tied"]
        live[name] = torch.zeros(4)
        metadata.append(refitd.ParameterMetadata(name, (4,), torch.float32, 4, aliases=(other,)))
    with shared_daemon.connect("trainer") as trainer, shared_daemon.connect("engine") as client:
        source = trainer.register_source("p", {"a": torch.ones(4), "b": torch.ones(4)}, partial=True)
        client.register_target("p", live, replica="e", metadata=metadata, keeps=said["keeps"])
        source.publish(1)
        with pytest.raises(refitd.RefusedError, match=why):
            trainer.swap("p", 1, timeout=60)
        with pytest.raises(refitd.PlanError, match=why):
            trainer.plan("p")
        source.close()


def test_ranks_that_are_cut_take_their_shares_and_a_frozen_stage_takes_nothing(shared_daemon: Daemon) -> None:
    def cut(name: str, shape: tuple[int, ...], dim: int, rank: int) -> refitd.ParameterMetadata:
        described: dict[str, Any] = {"is_tp": True, "partition_dim": dim, "tensor_parallel_group_ranks": [0, 1]}
        return refitd.ParameterMetadata(name, shape, torch.float32, 4, owner_rank=rank, **described)

    whole = torch.arange(64.0).reshape(8, 8)
    with shared_daemon.connect("trainer") as trainer, shared_daemon.connect("engine") as client:
        sources = [
            trainer.register_source(
                "cut",
                {"w": whole.chunk(2)[rank].clone()},
                metadata=[cut("w", (4, 8), 0, rank)],
                rank=rank,
                world_size=2,
                partial=True,
            )
            for rank in range(2)
        ]
        live = [{"w": torch.zeros(8, 4), "frozen": torch.full((4,), float(rank))} for rank in range(2)]
        live.append({"frozen.too": torch.full((4,), 2.0)})
        targets = [
            client.register_target(
                "cut",
                tensors,
                metadata=[cut("w", (8, 4), 1, rank), cut("frozen", (4,), 0, rank)] if rank < 2 else None,
                replica="e",
                rank=rank,
                world_size=3,
                keeps=("frozen*",) if rank else True,
            )
            for rank, tensors in enumerate(live)
        ]
        for source in sources:
            source.publish(1)
        with Engine(*targets):
            report = trainer.swap("cut", 1, timeout=60)
        assert report.kept_tensors == 3 and [target.version for target in targets] == [1, 1, 1]
        assert torch.equal(torch.cat([tensors["w"] for tensors in live[:2]], 1), whole)
        assert all(bool((tensors["frozen"] == rank).all()) for rank, tensors in enumerate(live[:2]))
        for source in sources:
            source.close()


def test_a_module_offers_the_named_part_and_may_replace_the_rest(shared_daemon: Daemon) -> None:
    def module() -> torch.nn.Module:
        return torch.nn.ModuleDict({"frozen": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 4)})

    given, live = module(), module()
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    with shared_daemon.connect("trainer") as trainer, shared_daemon.connect("engine") as client:
        with pytest.raises(refitd.RefusedError, match=r"partial: no tensor .* is called 'tail\.\*'"):
            trainer.register_source("modules", given, partial=("head.*", "tail.*"))
        source = trainer.register_source("modules", given, partial=("head.*",))
        target = client.register_target("modules", live, replica="e", keeps=True)
        assert set(target.kept) == {"frozen.weight", "frozen.bias"}
        for version in (1, 2):
            with torch.no_grad():
                given["head"].weight.add_(1)
            for one in (given, live):  # refitd does not use the frozen part
                one["frozen"].weight = torch.nn.Parameter(one["frozen"].weight.detach().clone())
            go_live(trainer, source, version, target, model="modules")
            assert torch.equal(live["head"].weight, given["head"].weight)
            assert torch.equal(live["frozen"].weight, before["frozen.weight"])
        given["head"].weight = torch.nn.Parameter(torch.zeros(4, 4))  # refitd follows the replaced parameter
        with source.lend(3), Engine(target):
            trainer.swap("modules", 3, timeout=60)
        assert not live["head"].weight.any()
        source.close()
