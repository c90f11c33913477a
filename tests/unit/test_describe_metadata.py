"""From metadata to tiles, and canonical names."""

from __future__ import annotations

import pytest

from refitd import (
    ParameterMetadata,
    PlanError,
    Repeat,
    Tile,
    assign_ep_resolved_name_inplace,
    assign_resolved_name_inplace,
)
from refitd.describe.layout import global_shape_of, layout_problems, row_major, tiles_of
from refitd.describe.names import detect_expert_index, expert_range, layer_prefix_map, resolve_layer_prefix
from tests.support.layouts import meta, tp

TILE = Tile("q", (2,), (2,), 1, (1,))
EXPLICIT = meta("qkv", (4,), is_tp=True, tensor_parallel_group_ranks=[0, 1], tiles=(TILE,))


@pytest.mark.parametrize(
    ("shard", "sizes", "tiles", "whole"),
    [
        (tp("w", (4, 4), [0, 1])[1], None, (Tile("w", (4, 0), (4, 4), 0, (4, 1)),), (8, 4)),
        (  # a stride: 8 rows in two halves, two ranks: rank 1 holds 2:4 and 6:8
            tp("w", (4, 3), [0, 1], partition_stride=2)[1],
            None,
            (Tile("w", (2, 0), (2, 3), 0, (3, 1), Repeat(0, 2, 4, 6)),),
            (8, 3),
        ),
        (  # partition sizes: an empty block has no tile
            tp("w", (2, 6), [0, 1], dim=1, partition_sizes=[1, 0, 5])[1],
            None,
            (Tile("w", (0, 1), (2, 1), 0, (6, 1)), Tile("w", (0, 7), (2, 5), 1, (6, 1))),
            (2, 12),
        ),
        (tp("w", (3,), [0, 1, 2])[1], [4, 3, 3], (Tile("w", (4,), (3,), 0, (1,)),), (10,)),
        (tp("w", (0, 3), [0, 1])[1], None, (), (0, 3)),
        (meta("w", (2, 3)), None, (Tile("w", (0, 0), (2, 3), 0, (3, 1)),), (2, 3)),
        (meta("w", ()), None, (Tile("w", (), (), 0, ()),), ()),
        (meta("layers.0.w", (2,), resolved_name="layers.8.w"), None, (Tile("layers.8.w", (0,), (2,), 0, (1,)),), (2,)),
        (EXPLICIT, None, (TILE,), None),
    ],
)
def test_a_shard_is_these_tiles_of_a_tensor_of_this_shape(
    shard: ParameterMetadata, sizes: list[int] | None, tiles: tuple[Tile, ...], whole: tuple[int, ...] | None
) -> None:
    assert tiles_of(shard, sizes) == tiles
    assert global_shape_of(shard, sizes) == whole


def test_row_major_strides() -> None:
    assert (row_major((2, 3, 4)), row_major((5,)), row_major(())) == ((12, 4, 1), (1,), ())


def test_a_group_without_the_owner_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank None is not in its tensor-parallel group \[0, 1\]"):
        tiles_of(meta("w", (4,), None, is_tp=True, tensor_parallel_group_ranks=[0, 1]))


def test_uneven_shards_that_cannot_be_cut_alike_are_refused() -> None:
    shard = tp("w", (4,), [0, 1], partition_stride=2)[0]
    assert "cannot be cut into 2 parts" in layout_problems(shard, [4, 3])[0]


def test_problems_are_returned_together() -> None:
    found = layout_problems(meta("w", (4,), dtype="int8", element_size=2, global_shape=(-1,)))
    assert len(found) == 2


# --- Canonical names. -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("tensor", "resolved", "index"),
    [
        # 8 experts over ranks [4, 9]: rank 9 is second and holds experts 4 to 7
        (expert("mlp.experts.linear_fc1.weight1", 9, [4, 9], 8), "mlp.experts.linear_fc1.weight5", 5),
        # sequential experts have the name of grouped ones
        (expert("mlp.experts.local_experts.1.linear_fc1.weight", 1, [0, 1], 8), "mlp.experts.linear_fc1.weight5", 5),
        # a digit is not appended to a name that ends otherwise
        (expert("experts.local_experts.1.w1", 1, [0, 1], 8), "experts.local_experts.5.w1", 5),
        (meta("experts.local_experts.3.linear_fc1.weight", (4,), 0), "experts.linear_fc1.weight3", None),
        (expert("experts.gate_up_proj", 1, [0, 1], 8), "experts.gate_up_proj", None),
        (expert("experts.linear_fc1.weight3", 5, [5], None), "experts.linear_fc1.weight3", 3),
    ],
)
def test_local_experts_become_global_by_position_in_the_group(
    tensor: ParameterMetadata, resolved: str, index: int | None
) -> None:
    name = tensor.name
    assign_ep_resolved_name_inplace(tensor)
    assert (tensor.name, tensor.resolved_name, tensor.global_expert_index) == (name, resolved, index)


@pytest.mark.parametrize(
    ("layers", "prefixes"),
    [
        # numbers count from one, names from zero
        (
            [("decoder", None), ("decoder.layers", None), ("decoder.layers.0", 17), ("decoder.layers.1", 18)],
            {"decoder.layers.0": "decoder.layers.16", "decoder.layers.1": "decoder.layers.17"},
        ),
        # modules inside a layer keep their numbers
        (
            [
                ("decoder.layers.0", 5),
                ("decoder.layers.0.self_attention", 5),
                ("decoder.layers.0.mlp.experts.local_experts.0", 5),
            ],
            {"decoder.layers.0": "decoder.layers.4"},
        ),
        ([("0", 5), ("1", 6)], {"0": "4", "1": "5"}),
    ],
)
def test_layers_are_renumbered(layers: list[tuple[str, int | None]], prefixes: dict[str, str]) -> None:
    assert layer_prefix_map(layers) == prefixes


def test_other_names_stay_as_they_are() -> None:
    found = meta("decoder.final_layernorm.weight", (4,), 0)
    assign_resolved_name_inplace(found, layer_module_prefix_map={"decoder.layers.0": "decoder.layers.16"})
    assert (found.resolved_name, found.global_expert_index) == ("decoder.final_layernorm.weight", None)


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
