from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import refitd
from refitd.inprocess.uneven_dtensor import (
    filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata,
    get_unflattened_state_dict,
)
from refitd.plan.boxes import layout_violations, slice_intersection, slice_moved


def test_boxes_that_tile_a_tensor_have_no_violations() -> None:
    assert layout_violations((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))]) == []
    assert layout_violations((), [((), ())]) == []
    assert layout_violations((0, 3), []) == []
    assert layout_violations((3,), [((0,), (3,)), ((3,), (0,))]) == []


def test_an_interior_gap_is_found_though_every_border_is_touched() -> None:
    ring = [((0, 0), (1, 3)), ((2, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 1))]

    assert layout_violations((3, 3), ring) == ["no chunk holds [1:2, 1:2]"]


def test_overlaps_and_chunks_outside_are_found() -> None:
    found = layout_violations((4,), [((0,), (3,)), ((2,), (2,)), ((3,), (2,))])

    assert "chunk [3:5] lies outside the tensor [0:4]" in found
    assert "chunks [0:3] and [2:4] overlap" in found


@pytest.mark.parametrize("seed", range(60))
def test_violations_agree_with_counting_elements(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    boxes = []
    for _ in range(rng.randint(0, 5)):
        offset = tuple(rng.randrange(n) for n in shape)
        boxes.append((offset, tuple(rng.randint(0, n - o) for n, o in zip(shape, offset, strict=True))))
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for offset, size in boxes:
        for place in itertools.product(*(range(o, o + n) for o, n in zip(offset, size, strict=True))):
            counts[place] += 1
    found = layout_violations(shape, boxes)

    assert any("overlap" in line for line in found) == any(count > 1 for count in counts.values())
    assert any("no chunk" in line for line in found) == any(count == 0 for count in counts.values())


def test_paths_of_a_nested_dict_and_what_is_there() -> None:
    tree = {"a": {"b": 1, "c": "x"}, "d": 2}

    assert filter_unflattened_state_dict(tree, visit_condition=lambda v: isinstance(v, int)) == [["a", "b"], ["d"]]
    assert filter_unflattened_state_dict(tree, ["top"], lambda v: v == "x") == [["top", "a", "c"]]
    assert filter_unflattened_state_dict(tree) == []
    assert get_unflattened_state_dict(tree, ["a", "c"]) == "x"
    assert get_unflattened_state_dict(tree) is tree
    with pytest.raises(KeyError, match=r"no 'q' at a; there is \['b', 'c'\]"):
        get_unflattened_state_dict(tree, ["a", "q"])
    with pytest.raises(KeyError, match="there is a int"):
        get_unflattened_state_dict(tree, ["d", "q"])


def test_slices_meet_and_move() -> None:
    assert slice_intersection(slice(0, 5), slice(3, 9)) == slice(3, 5)
    assert slice_intersection(slice(0, 2), slice(3, 9)) == slice(3, 3)
    assert slice_moved(slice(3, 5), -3) == slice(0, 2)


@pytest.mark.parametrize(
    "function",
    [
        refitd.gather_uneven_dtensor_to_full_tensor,
        refitd.update_uneven_dtensor_chunk_metadata,
        refitd.validate_uneven_dtensor,
        lambda tensor: refitd.split_dtensor(tensor, 2),
        gather_and_compute_chunk_metadata,
    ],
)
def test_a_plain_tensor_is_refused_by_type_before_any_rank_is_asked(function: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"found a Parameter of shape \(4, 3\), expected a DTensor"):
        function(torch.nn.Parameter(torch.zeros(4, 3)))
    with pytest.raises(TypeError, match="found a list, expected a DTensor"):
        function([1])
