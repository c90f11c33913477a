"""Torch modules as metadata."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from refitd import PlanError, extract_param_metadata, get_refit_tensor_dict, invalidate_refit_tensor_cache
from refitd.describe.module import (
    RankGroups,
    describe_module,
    local_tensor,
    module_tensors,
    named_persistent_buffers,
    named_refit_tensors,
)


def split(shape: tuple[int, ...], dim: int, **attributes: Any) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape))
    for name, value in {
        "tensor_model_parallel": True,
        "partition_dim": dim,
        "partition_stride": 1,
        **attributes,
    }.items():
        setattr(param, name, value)
    return param


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.fc1 = nn.Module()
        self.fc1.weight = split((8, 4), 0, partition_stride=2)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


class Stage(nn.Module):
    """The second stage of a pipeline: layers 3 and 4 of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(3), Layer(4)])


def test_layer_names_are_global_and_split_tensors_have_their_group() -> None:
    found = {m.name: m for m in describe_module(Stage(), 5, RankGroups(tp=[4, 5], dp=[1, 5], pp=[1, 5]))}
    fc1 = found["layers.0.fc1.weight"]
    assert fc1.resolved_name == "layers.2.fc1.weight"
    assert (fc1.is_tp, fc1.partition_dim, fc1.partition_stride) == (True, 0, 2)
    assert (fc1.owner_rank, fc1.tensor_parallel_group_ranks) == (5, [4, 5])
    assert (fc1.data_parallel_group_ranks, fc1.pipeline_parallel_group_ranks) == ([1, 5], [1, 5])
    assert (fc1.shape, fc1.dtype, fc1.element_size) == ((8, 4), torch.float32, 4)
    norm = found["layers.1.norm.weight"]
    assert (norm.resolved_name, norm.is_tp) == ("layers.3.norm.weight", False)


def test_persistent_buffers_travel_and_others_do_not() -> None:
    stage = Stage()
    names = [name for name, *_ in named_persistent_buffers(stage)]
    assert names == ["layers.0.expert_bias", "layers.1.expert_bias"]
    full, parent, name, tensor = next(named_persistent_buffers(stage))
    assert getattr(parent, name) is tensor and full == "layers.0.expert_bias"
    assert list(dict(named_refit_tensors(stage)))[-2:] == names
    assert {m.name for m in describe_module(stage, 0, RankGroups(tp=[0]))} == set(dict(named_refit_tensors(stage)))


def test_equal_groups_are_one_list() -> None:
    found = describe_module(Stage(), 0, RankGroups(tp=[0, 1], dp=[0, 2]))
    assert len({id(m.data_parallel_group_ranks) for m in found}) == 1


@pytest.mark.parametrize("kind", ["mapping", "object", "own"])
def test_groups_come_as_a_mapping_an_object_or_from_the_module(kind: str) -> None:
    stage = Stage()
    groups: Any = {"tp": [0, 1]}
    if kind == "object":
        groups = SimpleNamespace(tp=[0, 1])
    if kind == "own":
        stage.pg_collection = SimpleNamespace(tp=[0, 1])  # type: ignore[assignment]
        groups = None
    assert describe_module(stage, 1, groups)[0].tensor_parallel_group_ranks == [0, 1]


def test_torch_process_groups_are_rank_lists(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world = torch.distributed.group.WORLD
        assert describe_module(Stage(), 0, SimpleNamespace(tp=world))[0].tensor_parallel_group_ranks == [0]
    finally:
        torch.distributed.destroy_process_group()


def test_rank_offset_moves_groups_and_not_the_owner() -> None:
    fc1 = describe_module(Stage(), 9, RankGroups(tp=[0, 1]), rank_offset=8)[0]
    assert (fc1.owner_rank, fc1.tensor_parallel_group_ranks) == (9, [8, 9])


def test_a_split_tensor_without_a_group_raises_and_names_it() -> None:
    with pytest.raises(PlanError, match=r"layers\.0\.fc1\.weight on rank 0: it is tensor parallel") as caught:
        describe_module(Stage(), 0)
    assert len(caught.value.violations) == 2


def test_a_split_tensor_in_a_group_of_one_is_whole() -> None:
    assert describe_module(Stage(), 0, {"tp": None})[0].tensor_parallel_group_ranks is None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_number = 2
        self.router = nn.Linear(4, 8, bias=False)
        self.linear_fc1 = nn.Module()
        for i in range(2):
            self.linear_fc1.register_parameter(f"weight{i}", split((6, 4), 0, allreduce=False))


def test_expert_tensors_take_the_expert_groups() -> None:
    groups = RankGroups(tp=[2, 3], expt_tp=[3], ep=[1, 3], dp=[3])
    found = {m.name: m for m in describe_module(Experts(), 3, groups, num_experts=4)}
    second = found["linear_fc1.weight1"]
    assert (second.is_ep, second.num_experts, second.expert_parallel_group_ranks) == (True, 4, [1, 3])
    assert (second.global_expert_index, second.resolved_name) == (3, "linear_fc1.weight3")
    assert second.tensor_parallel_group_ranks == [3]
    assert (found["router.weight"].is_ep, found["router.weight"].expert_parallel_group_ranks) == (False, None)


def test_expert_tensors_fall_back_to_the_dense_group() -> None:
    found = describe_module(Experts(), 3, {"tp": [2, 3], "ep": [1, 3]}, num_experts=4)
    assert [m.tensor_parallel_group_ranks for m in found if m.is_ep] == [[2, 3], [2, 3]]


def test_the_number_of_experts_comes_from_the_config_or_is_missed() -> None:
    module = Experts()
    with pytest.raises(PlanError, match="number of experts is not known"):
        describe_module(module, 3, {"tp": [3], "ep": [1, 3]})
    module.config = SimpleNamespace(num_moe_experts=4)  # type: ignore[assignment]
    assert any(m.global_expert_index == 3 for m in describe_module(module, 3, {"tp": [3], "ep": [1, 3]}))


def test_partition_sizes_are_read() -> None:
    meta = extract_param_metadata(split((6,), 0, partition_sizes=(4, 2)), "in_proj", 0, {"tp": [0, 1]})
    assert meta.partition_sizes == [4, 2]
    whole = split((6,), 0, partition_sizes=(4, 2))
    whole.tensor_model_parallel = False
    assert extract_param_metadata(whole, "in_proj", 0, None).partition_sizes == [4, 2]


def test_contradictory_attributes_are_refused_with_the_rank() -> None:
    module = nn.Module()
    module.weight = split((4,), 0, partition_sizes=[1])
    with pytest.raises(PlanError, match=r"weight: partition_sizes \[1\] sum to 1, expected 4.*\(rank 1\)"):
        describe_module(module, 1, {"tp": [0, 1]})


def test_chunks_of_a_virtual_pipeline_have_names_of_their_own() -> None:
    first, second = nn.Module(), nn.Module()
    first.layers, second.layers = nn.ModuleList([Layer(1)]), nn.ModuleList([Layer(5)])
    found = {m.name: m.resolved_name for m in describe_module([first, second], 0, {"tp": [0]})}
    assert found["chunk0.layers.0.fc1.weight"] == "layers.0.fc1.weight"
    assert found["chunk1.layers.0.fc1.weight"] == "layers.4.fc1.weight"
    assert set(found) == set(get_refit_tensor_dict([first, second])) == set(module_tensors([first, second]))
    assert [m.name for m in describe_module([first], 0, {"tp": [0]})] == list(module_tensors(first))


def test_chunks_with_one_global_name_are_refused() -> None:
    chunk = nn.Module()
    chunk.layers = nn.ModuleList([Layer(1)])
    with pytest.raises(PlanError, match="is also that of chunk0"):
        describe_module([chunk, copy.deepcopy(chunk)], 0, {"tp": [0]})


def test_the_tensor_dict_has_parameters_then_persistent_buffers_as_torch_names_them() -> None:
    stage = Stage()
    saved = stage.state_dict(keep_vars=True)
    params = dict(stage.named_parameters())
    invalidate_refit_tensor_cache(stage)
    found = get_refit_tensor_dict(stage)
    assert list(found) == [*params, *(name for name in saved if name not in params and name in found)]
    assert all(saved[name] is tensor for name, tensor in found.items())


def test_a_shared_parameter_is_described_once() -> None:
    module = nn.Module()
    module.embedding, module.output = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    module.output.weight = module.embedding.weight
    (tied,) = describe_module(module, 0)
    assert (tied.name, tied.aliases) == ("embedding.weight", ("output.weight",))


def test_other_names_of_a_shared_parameter_are_canonical() -> None:
    stage = nn.Module()
    stage.layers = nn.ModuleList([Layer(17), Layer(18), Layer(19)])
    stage.layers[2].norm.weight = stage.layers[1].norm.weight = stage.layers[0].norm.weight  # type: ignore[union-attr]
    found = {m.resolved_name: m.aliases for m in describe_module(stage, 0, {"tp": [0]})}
    assert found["layers.16.norm.weight"] == ("layers.17.norm.weight", "layers.18.norm.weight")
    assert found["layers.17.norm.bias"] == ()


def test_a_layer_that_is_used_twice_has_no_name_at_its_second_place() -> None:
    stage = nn.Module()
    layer = Layer(17)
    stage.layers = nn.ModuleList([layer, layer])
    assert all(m.aliases == () for m in describe_module(stage, 0, {"tp": [0]}))


def test_local_tensors_share_the_storage() -> None:
    param = nn.Parameter(torch.zeros(3))
    assert local_tensor(param).data_ptr() == param.data_ptr()
    assert not local_tensor(param).requires_grad


def test_one_piece_of_memory_under_two_names_is_one_weight_to_targets() -> None:
    from refitd.client.source_tensors import SourceTensors

    weight = torch.ones(4, 2)
    found = SourceTensors({"embed": weight, "head": weight, "norm": torch.ones(2)}, 0, None, None, None)
    assert {m.name: m.aliases for m in found.metadata} == {"embed": ("head",), "head": ("embed",), "norm": ()}


def test_wrappers_have_no_names_and_layers_inside_them_are_global() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def described(module: nn.Module) -> list[tuple[str, str | None]]:
        return [(m.name, m.resolved_name) for m in describe_module(module, 0, RankGroups(tp=[0]))]

    bare = described(Stage())
    wrapped = Stage()
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped.layers[1].norm = torch.compile(wrapped.layers[1].norm)
    around = nn.Module()
    around.module = torch.compile(wrapped)  # type: ignore[assignment]
    found = described(around)
    assert [resolved for _, resolved in found] == [resolved for _, resolved in bare]
    # the local names are the module's own
    assert [name for name, _ in found] == [name for name, _ in named_refit_tensors(around)]
    assert any("_checkpoint_wrapped_module" in name for name, _ in found)


def test_what_a_model_says_of_its_groups_and_experts_is_found_inside_wrappers() -> None:
    class Precision(nn.Module):
        """A wrapper without parameters, like Megatron's Float16Module."""

    class DistributedDataParallel(nn.Module):
        """Known by its name."""

    module = Experts()
    module.pg_collection = {"tp": [2, 3], "ep": [1, 3]}  # type: ignore[assignment]
    module.config = SimpleNamespace(num_moe_experts=4)  # type: ignore[assignment]
    inner, outer = Precision(), DistributedDataParallel()
    inner.module, outer.module, outer.other = module, inner, nn.Identity()
    bare, wrapped = describe_module(module, 3), describe_module(outer, 3)
    assert [replace(m, name="", resolved_name="") for m in bare] == [
        replace(m, name="", resolved_name="") for m in wrapped
    ]
    assert [m.resolved_name for m in wrapped] == [m.resolved_name or m.name for m in bare]
    outer.pg_collection = {"tp": [3], "ep": [1, 3]}  # type: ignore[assignment]  # the outermost that says so
    assert all(m.tensor_parallel_group_ranks in (None, [3]) for m in describe_module(outer, 3))


def test_a_scripted_module_is_described_as_the_module_that_it_was() -> None:
    plain = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    for module, scripted in (
        (plain, torch.jit.script(plain)),
        (plain, torch.jit.trace(plain.eval(), torch.zeros(1, 4))),
        (nn.Sequential(plain), torch.jit.script(nn.Sequential(plain))),
    ):
        again = describe_module(scripted, 0)
        assert [replace(m, owner_rank=0) for m in again] == describe_module(module, 0)
        assert get_refit_tensor_dict(scripted)["0.weight" if module is plain else "0.0.weight"] is next(
            scripted.parameters()
        )


def test_names_that_clash_without_wrappers_are_refused_with_both() -> None:
    module = nn.Module()
    module._orig_mod = nn.Linear(2, 2, bias=False)  # type: ignore[assignment]
    module.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(PlanError, match=r"(?s)_orig_mod\.weight.*canonical name weight is also that of weight"):
        describe_module(module, 0)


def test_a_child_called_module_beside_others_and_a_parametrization_keep_their_names() -> None:
    module = nn.Module()
    module.module, module.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    nn.utils.parametrizations.weight_norm(module.head)
    assert [m.resolved_name for m in describe_module(module, 0)] == [
        "module.weight",
        "head.parametrizations.weight.original0",
        "head.parametrizations.weight.original1",
    ]


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"0\.weight on rank 0: it is an UninitializedParameter"):
        describe_module(nn.Sequential(nn.LazyLinear(3)), 0)
