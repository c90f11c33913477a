"""Each publish reads the source's tensors again: replaced tensors are published, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from refitd import ParameterMetadata, RefusedError
from refitd.buffers.layout import packed_offsets
from refitd.client.slot_source import SourceSlots
from refitd.client.source import Source
from refitd.client.source_tensors import SourceTensors
from refitd.client.target_tensors import TargetTensors
from refitd.describe.module import RankGroups
from refitd.describe.names import digest_of
from refitd.errors import CommitError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of
from tests.support.arenas import arena_of


class Daemon:
    """A daemon that grants slot 0, accepts publish and lend, and may act between the two."""

    is_foreign = is_awaited = is_lost = False

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.granting: Callable[[], object] = lambda: None
        self.daemon = type("Peer", (), {"pid": os.getpid()})

    def listen(self, member: str, callback: Callable[[Message], None]) -> None:
        pass

    def unlisten(self, member: str) -> None:
        pass

    def request(self, message: Message, reply: type[Message], timeout: float) -> Message:
        self.said.append(message)
        if isinstance(message, local.BeginPublish):
            self.granting()
            return local.SlotGranted(slot=0)
        return local.Done()

    def steady(self, timeout: float) -> Daemon:
        return self

    def lasting(self, timeout: float, do: Callable[[Daemon, float], None]) -> None:
        do(self, timeout)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.said]


class Trainer:
    def __init__(self, given: Any, **options: Any) -> None:
        self.tensors = SourceTensors(
            given, 0, options.get("metadata"), options.get("groups"), None, options.get("offer")
        )
        sizes = [t.numel() * t.element_size() for t in self.tensors.tensors]
        self._offsets, nbytes = packed_offsets(sizes)
        self.slot = arena_of(nbytes)
        self.daemon = Daemon()
        registered = local.Registered(member="m", slots=(0,), nbytes=nbytes)
        message = local.RegisterSource(model="policy", rank=0, world_size=1, shard=shard_of(self.tensors.wire))
        slots = SourceSlots(message, registered, (self.slot,))
        line: Any = self.daemon
        self.source = Source(line, line, "policy", self.tensors, registered, slots)

    def published(self, name: str, version: int) -> torch.Tensor:
        """Publish; return the tensor in the slot."""
        self.source.publish(version)
        index = self.tensors.names.index(name)
        like = self.tensors.tensors[index]
        start = self._offsets[index]
        flat = torch.from_numpy(self.slot.bytes[start : start + like.numel() * like.element_size()].copy())
        return flat.view(like.dtype).view(like.shape)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def unwrapped(model: nn.Module) -> None:
    """Add and remove a parametrization (as weight norm or merged LoRA do), which moves the name to the end."""
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    with torch.no_grad():
        model[0].weight.fill_(7.0)


SEVENS = torch.full((4, 3), 7.0)
REPLACED: dict[str, Callable[[Any], object]] = {
    "assign": lambda model: model.load_state_dict(
        {name: torch.full_like(t, 7) for name, t in model.state_dict().items()}, assign=True
    ),
    "data": lambda model: setattr(model[0].weight, "data", SEVENS.clone()),
    "parameter": lambda model: setattr(model[0], "weight", nn.Parameter(SEVENS.clone())),
    "transposed": lambda model: setattr(model[0].weight, "data", SEVENS.t().contiguous().t()),
    "submodule": lambda model: nn.init.constant_((model.__setitem__(0, nn.Linear(3, 4)), model[0].weight)[1], 7.0),
    "removed and put back": lambda model: (
        delattr(model[0], "weight"),
        setattr(model[0], "weight", nn.Parameter(SEVENS.clone())),
    ),
    "unwrapped": unwrapped,
}


@pytest.mark.parametrize("change", REPLACED)
def test_what_replaces_a_tensor_of_a_module_is_published(model: nn.Module, change: str) -> None:
    trainer = Trainer(model)
    assert torch.equal(trainer.published("0.weight", 1), model[0].weight)
    REPLACED[change](model)
    assert torch.equal(trainer.published("0.weight", 2), SEVENS)


def test_what_is_bound_anew_in_a_dict_is_published_and_lent() -> None:
    given = {"w": torch.zeros(4), "v": torch.zeros(2)}
    trainer = Trainer(given)
    given["w"] = torch.full((4,), 7.0)
    assert torch.equal(trainer.published("w", 1), given["w"])
    del given["w"]
    given["w"] = torch.full((4,), 8.0)  # the last of them now
    trainer.source.lend(2)


def base() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4), "v": torch.zeros(8)[4:]}


# each names its tensor first
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "w is freed": lambda given: given["w"].untyped_storage().resize_(0),
    "v, a view, is freed": lambda given: given["v"].untyped_storage().resize_(0),
    "w has another shape": lambda given: given.update(w=torch.zeros(5)),
    "w has another type": lambda given: setattr(given["w"], "data", torch.zeros(4, dtype=torch.int32)),
    "w is gone": lambda given: given.pop("w"),
    "x is new": lambda given: given.update(x=torch.zeros(4)),
    "w is on the meta device": lambda given: given.update(w=torch.zeros(4, device="meta")),
    "w is nothing": lambda given: given.update(w=None),
    "w is sparse": lambda given: given.update(w=torch.ones(4).to_sparse()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_what_was_registered_is_refused_by_name_before_anything_is_read(change: str) -> None:
    given = base()
    trainer = Trainer(given)
    CHANGES[change](given)
    for act in (trainer.source.publish, trainer.source.lend):
        with pytest.raises(RefusedError, match=rf"\b{change[0]}\b"):
            act(1)
    assert trainer.daemon.said == []


@pytest.mark.parametrize("change", ["w is freed", "w has another shape", "w is gone", "w is on the meta device"])
def test_a_tensor_that_goes_while_a_slot_is_waited_for_gives_the_slot_back(change: str) -> None:
    given = base()
    trainer = Trainer(given)
    trainer.daemon.granting = lambda: CHANGES[change](given)
    with pytest.raises(RefusedError, match="w"):
        trainer.source.publish(1)
    assert trainer.daemon.kinds() == ["BeginPublish", "Withdraw"]


def test_what_is_bound_anew_while_a_slot_is_waited_for_is_published() -> None:
    given = base()
    trainer = Trainer(given)
    trainer.daemon.granting = lambda: given.update(w=torch.full((4,), 9.0))
    assert torch.equal(trainer.published("w", 1), torch.full((4,), 9.0))


def test_a_parameter_that_has_lost_how_it_is_cut_is_refused() -> None:
    module = nn.Linear(4, 2, bias=False)
    module.weight.tensor_model_parallel, module.weight.partition_dim = True, 0  # type: ignore[assignment]
    trainer = Trainer(module, groups=RankGroups(tp=[0, 1]))
    module.load_state_dict({"weight": torch.ones(2, 4)}, assign=True)
    with pytest.raises(RefusedError, match=r"weight: it is described otherwise.*is_tp"):
        trainer.source.publish(1)
    module.weight.tensor_model_parallel, module.weight.partition_dim = True, 0  # type: ignore[assignment]
    trainer.source.publish(1)


def test_an_expanded_source_gives_every_element_and_one_registered_twice_gives_both() -> None:
    row = torch.arange(3.0)
    trainer = Trainer({"a": row.expand(2, 3), "b": row, "c": row})
    assert torch.equal(trainer.published("a", 1), row.expand(2, 3))


def test_a_module_that_has_become_an_inference_model_is_still_its_tensors(model: nn.Module) -> None:
    trainer = Trainer(model)
    with torch.inference_mode():
        model[0].weight = nn.Parameter(torch.full((4, 3), 7.0), requires_grad=False)
        assert torch.equal(trainer.published("0.weight", 1), torch.full((4, 3), 7.0))


def test_dtensors_are_compared_with_their_placements(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        given = {"w": distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])}
        trainer = Trainer(given)
        assert trainer.tensors.metadata[0].tiles is not None
        given["w"] = distribute_tensor(torch.full((2, 3), 7.0), mesh, [Shard(0)])
        assert torch.equal(trainer.published("w", 1), torch.full((2, 3), 7.0))
        given["w"] = distribute_tensor(torch.full((2, 3), 7.0), mesh, [Replicate()])
        with pytest.raises(RefusedError, match="w: it is laid out otherwise"):
            trainer.source.publish(2)
        given["w"] = torch.full((2, 3), 7.0)
        with pytest.raises(RefusedError, match="w: it is laid out otherwise"):
            trainer.source.publish(2)
        given["w"] = torch.full((4, 3), 7.0)  # as FSDP leaves it after a forward pass
        with pytest.raises(RefusedError, match=r"w: .*was a DTensor.*call reshard\(\)"):
            trainer.source.publish(2)
        given = {"w": torch.full((4, 3), 7.0)}
        trainer = Trainer(given)  # registered while FSDP has gathered it
        given["w"] = distribute_tensor(torch.full((2, 3), 7.0), mesh, [Shard(0)])
        with pytest.raises(RefusedError, match=r"w: .*is a DTensor, and was none then.*call reshard\(\)"):
            trainer.source.publish(1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_target_whose_dict_is_bound_anew_fails_its_commit_by_name() -> None:
    given = {"w": torch.zeros(4)}
    tensors = TargetTensors(given, 0, None, None, None)
    tensors.check_unmoved()
    given["w"] = torch.zeros(4)
    with pytest.raises(CommitError, match="w: its storage has changed"):
        tensors.check_unmoved()


def test_a_tensor_that_leaves_the_arena_it_is_lent_from_is_refused() -> None:
    arena = arena_of(4096)
    given = {"w": torch.frombuffer(arena.bytes, dtype=torch.float32, count=4), "e": torch.empty(0, 3)}
    trainer = Trainer(given)
    trainer.tensors.arena_places = trainer.tensors.places({5: arena})
    assert [place.arena for place in trainer.tensors.arena_places] == [5, 5]
    assert not trainer.tensors.follow()
    given["w"] = given["w"].view(4)  # another object, the same memory
    trainer.tensors.follow()
    given["w"] = torch.zeros(4)
    with pytest.raises(RefusedError, match="w: it has left the arena"):
        trainer.source.lend(1)


def test_a_description_with_another_element_size_is_refused() -> None:
    described = [ParameterMetadata(name="w", shape=(4,), dtype=torch.float32, element_size=2)]
    with pytest.raises(RefusedError, match="w: element_size is 2, expected 4"):
        SourceTensors({"w": torch.zeros(4)}, 0, described, None, None)


def tied_by_memory() -> nn.Module:
    module = nn.Module()
    module.embed, module.out = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    module.out.weight = nn.Parameter(module.embed.weight.data)
    return module


def test_a_tie_of_memory_that_ends_is_refused_by_name_whatever_ended_it() -> None:
    module = tied_by_memory()
    trainer = Trainer(module)
    trainer.source.publish(1)
    both = torch.full((6, 4), 7.0)
    module.embed.weight.data, module.out.weight.data = both, both  # still one memory
    assert torch.equal(trainer.published("out.weight", 2), both)
    module.out.weight.data = both.clone()
    with pytest.raises(RefusedError, match=r"out\.weight: it is no longer the memory of embed\.weight"):
        trainer.source.publish(3)
    module = tied_by_memory()
    trainer = Trainer(module)
    module.double().float()
    with pytest.raises(RefusedError, match=r"out\.weight: it is no longer the memory of embed\.weight"):
        trainer.source.publish(1)
    given = {"a": both, "b": both}
    trainer = Trainer(given)
    given["b"] = both + 1
    with pytest.raises(RefusedError, match="b: it is no longer the memory of a"):
        trainer.source.publish(1)


def test_tensors_that_become_one_memory_are_published() -> None:
    given = {"a": torch.zeros(4), "b": torch.ones(4)}
    trainer = Trainer(given)
    given["a"] = given["b"] = torch.full((4,), 7.0)
    assert torch.equal(trainer.published("b", 1), given["a"])


def cut(rows: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(rows)
    module.w.tensor_model_parallel, module.w.partition_dim, module.w.partition_stride = True, 0, 1  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(
    ("attribute", "value"), [("partition_stride", 2), ("partition_dim", 1), ("partition_sizes", [1, 3])]
)
def test_attributes_that_say_another_cut_are_refused_whether_or_not_memory_moves(
    moves: bool, attribute: str, value: Any
) -> None:
    module = cut(torch.ones(4, 2))
    trainer = Trainer(module, groups=RankGroups(tp=[0, 1]))
    trainer.source.publish(1)
    setattr(module.w, attribute, value)
    if moves:
        module.w.data = torch.zeros(4, 2)
    with pytest.raises(RefusedError, match=f"w: it is described otherwise.*{attribute}"):
        trainer.source.publish(2)
    setattr(module.w, attribute, {"partition_stride": 1, "partition_dim": 0}.get(attribute))
    trainer.source.publish(2)


def test_a_list_of_sizes_that_is_changed_in_place_is_refused() -> None:
    module = cut(torch.ones(4, 2))
    module.w.partition_sizes = [2, 2]  # type: ignore[assignment]
    trainer = Trainer(module, groups=RankGroups(tp=[0, 1]))
    module.w.partition_sizes[:] = [1, 3]  # type: ignore[index]
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"w: it is described otherwise.*partition_sizes"):
            trainer.source.publish(1)


def chunk(value: Any, first: int) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    local = value._local_tensor
    local.__create_chunk_list__ = lambda: [ChunkStorageMetadata(offsets=torch.Size((first, 0)), sizes=local.shape)]
    return value


@pytest.mark.parametrize("kind", ["bound anew", "in place", "module in place", "module data", "explicit"])
def test_a_dtensor_that_says_it_lies_elsewhere_is_refused(kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))

        def made(first: int) -> Any:
            shape = {"run_check": False, "shape": torch.Size((6, 2)), "stride": (2, 1)}
            return chunk(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], **shape), first)

        given: Any = {"w": made(0)}
        metadata = SourceTensors(given, 0, None, None, None).metadata if kind == "explicit" else None
        if kind.startswith("module"):
            module = nn.Module()
            module.w = nn.Parameter(given["w"])
            chunk(module.w, 0)
            given = module
        trainer = Trainer(given, metadata=metadata)
        trainer.source.publish(1)
        if kind == "module data":
            module.w._local_tensor = made(4)._local_tensor  # type: ignore[assignment]
        elif kind == "module in place":
            chunk(module.w, 4)
        elif kind == "in place":
            chunk(given["w"], 4)
        else:
            given["w"] = made(4)
        with pytest.raises(RefusedError, match=r"w: (it is described otherwise.*tiles|its chunk metadata is)"):
            trainer.source.publish(2)
    finally:
        torch.distributed.destroy_process_group()


def test_bytes_of_bools_are_kept_whatever_the_strides() -> None:
    held = torch.tensor([0, 1, 2, 3, 255, 128, 64, 7], dtype=torch.uint8).view(torch.bool).reshape(2, 4)
    columns = held.view(torch.uint8).t().contiguous().t().view(torch.bool)
    trainer = Trainer({"w": columns})
    assert torch.equal(trainer.published("w", 1).view(torch.uint8), held.view(torch.uint8))
    to = torch.zeros(4, 2, dtype=torch.bool).t()
    target = TargetTensors({"w": to}, 0, None, None, None)
    target.copy(trainer.slot, into_arena=False)
    assert torch.equal(to.view(torch.uint8), held.view(torch.uint8))
    assert target.differing(trainer.slot) is None
    assert digest_of(columns) == digest_of(held)


def test_names_of_one_rank_that_are_declared_one_weight_and_differ_are_refused_at_the_first_version() -> None:
    given = {"e": torch.ones(4), "o": torch.full((4,), 2.0)}
    metadata = [
        ParameterMetadata(name, (4,), torch.float32, 4, owner_rank=0, aliases=(other,))
        for name, other in (("e", "o"), ("o", "e"))
    ]
    trainer = Trainer(given, metadata=metadata)
    for act in (trainer.source.publish, trainer.source.lend):
        with pytest.raises(RefusedError, match="e and o: they are declared to be one weight"):
            act(1)
    assert trainer.daemon.said == []
    given["o"].fill_(1)
    trainer.source.publish(1)
