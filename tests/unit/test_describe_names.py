"""Canonical names."""

from __future__ import annotations

import pytest

from refitd import ParameterMetadata, PlanError, assign_ep_resolved_name_inplace, assign_resolved_name_inplace
from refitd.describe.names import detect_expert_index, expert_range, layer_prefix_map, resolve_layer_prefix
from tests.support.layouts import meta


def expert(name: str, rank: int, group: list[int] | None, num_experts: int | None) -> ParameterMetadata:
    return meta(name, (4,), rank, is_ep=True, expert_parallel_group_ranks=group, num_experts=num_experts)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("decoder.layers.0.mlp.experts.linear_fc1.weight12", 12),
        ("experts.linear_fc2.bias0", 0),
        ("experts.local_experts.3.linear_fc1.weight", 3),
        ("decoder.layers.0.mlp.linear_fc1.weight", None),
        ("router.expert_bias", None),
        ("lightweight3", None),
    ],
)
def test_expert_index_is_read_from_the_name(name: str, index: int | None) -> None:
    assert detect_expert_index(name) == index


def test_local_experts_become_global_by_position_in_the_group() -> None:
    # 8 experts over ranks [4, 9]: rank 9 is second and holds experts 4 to 7
    found = expert("mlp.experts.linear_fc1.weight1", 9, [4, 9], 8)
    assign_ep_resolved_name_inplace(found)
    assert (found.resolved_name, found.global_expert_index) == ("mlp.experts.linear_fc1.weight5", 5)
    assert found.name == "mlp.experts.linear_fc1.weight1"


def test_grouped_and_sequential_experts_have_one_name() -> None:
    grouped = expert("mlp.experts.linear_fc1.weight1", 1, [0, 1], 8)
    sequential = expert("mlp.experts.local_experts.1.linear_fc1.weight", 1, [0, 1], 8)
    assign_ep_resolved_name_inplace(grouped)
    assign_ep_resolved_name_inplace(sequential)
    assert grouped.resolved_name == sequential.resolved_name == "mlp.experts.linear_fc1.weight5"


def test_a_digit_is_never_glued_to_a_name_that_ends_otherwise() -> None:
    found = expert("experts.local_experts.1.w1", 1, [0, 1], 8)
    assign_ep_resolved_name_inplace(found)
    assert found.resolved_name == "experts.local_experts.5.w1"


def test_experts_that_are_not_split_keep_their_index() -> None:
    found = meta("experts.local_experts.3.linear_fc1.weight", (4,), 0)
    assign_ep_resolved_name_inplace(found)
    assert (found.resolved_name, found.global_expert_index) == ("experts.linear_fc1.weight3", None)


def test_other_names_stay_as_they_are() -> None:
    found = meta("decoder.final_layernorm.weight", (4,), 0)
    assign_resolved_name_inplace(found, layer_module_prefix_map={"decoder.layers.0": "decoder.layers.16"})
    assert (found.resolved_name, found.global_expert_index) == ("decoder.final_layernorm.weight", None)


def test_a_fused_expert_tensor_has_no_index() -> None:
    found = expert("experts.gate_up_proj", 1, [0, 1], 8)
    assign_ep_resolved_name_inplace(found)
    assert (found.resolved_name, found.global_expert_index) == ("experts.gate_up_proj", None)


def test_experts_are_dealt_in_order_and_the_first_positions_hold_more() -> None:
    assert [list(expert_range(8, 3, i)) for i in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [list(expert_range(8, 2, i)) for i in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("group", "num_experts", "why"),
    [
        (None, 8, "without an expert-parallel group"),
        ([0, 1], None, "number of experts is not known"),
        ([2, 3], 8, "not in its expert-parallel group"),
        ([0, 1], 4, "local expert 3, expected at most 2 experts"),
    ],
)
def test_missing_expert_information_raises(group: list[int] | None, num_experts: int | None, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        assign_ep_resolved_name_inplace(expert("experts.linear_fc1.weight3", 0, group, num_experts))


def test_a_group_of_one_needs_no_expert_count() -> None:
    found = expert("experts.linear_fc1.weight3", 5, [5], None)
    assign_ep_resolved_name_inplace(found)
    assert (found.resolved_name, found.global_expert_index) == ("experts.linear_fc1.weight3", 3)


def test_layer_numbers_count_from_one_and_names_from_zero() -> None:
    layers = [("decoder", None), ("decoder.layers", None), ("decoder.layers.0", 17), ("decoder.layers.1", 18)]
    assert layer_prefix_map(layers) == {
        "decoder.layers.0": "decoder.layers.16",
        "decoder.layers.1": "decoder.layers.17",
    }


def test_only_layers_are_renumbered_not_what_lies_inside() -> None:
    layers = [
        ("decoder.layers.0", 5),
        ("decoder.layers.0.self_attention", 5),
        ("decoder.layers.0.mlp.experts.local_experts.0", 5),
    ]
    assert layer_prefix_map(layers) == {"decoder.layers.0": "decoder.layers.4"}


def test_layers_with_one_global_name_are_refused() -> None:
    with pytest.raises(PlanError, match=r"layers\.1: layer_number 3 is also that of layers\.0"):
        layer_prefix_map([("layers.0", 3), ("layers.1", 3)])
    with pytest.raises(PlanError, match="layer_number is 0"):
        layer_prefix_map([("layers.0", 0)])


def test_the_longest_prefix_is_rewritten_at_a_dot() -> None:
    prefixes = {"layers.1": "layers.9", "layers.1.sub.0": "layers.9.sub.4"}
    assert resolve_layer_prefix("layers.1.sub.0.weight", prefixes) == "layers.9.sub.4.weight"
    assert resolve_layer_prefix("layers.1.sub.1.weight", prefixes) == "layers.9.sub.1.weight"
    assert resolve_layer_prefix("layers.10.weight", prefixes) == "layers.10.weight"


def test_pipeline_and_expert_numbers_are_resolved_together() -> None:
    found = expert("decoder.layers.0.mlp.experts.linear_fc1.weight0", 1, [0, 1], 8)
    prefixes = {"decoder.layers.0": "decoder.layers.16"}
    assign_resolved_name_inplace(found, layer_module_prefix_map=prefixes)
    assert found.resolved_name == "decoder.layers.16.mlp.experts.linear_fc1.weight4"
    assign_resolved_name_inplace(found, base_name="other.weight1")
    assert (found.resolved_name, found.global_expert_index) == ("other.weight5", 5)
