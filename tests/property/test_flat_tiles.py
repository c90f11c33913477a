"""Ranges of a flattened tensor as tiles: each element once, in memory order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refitd.describe.dtensors import flat_tiles
from refitd.describe.metadata import ParameterMetadata
from refitd.testing import oracle


@given(st.lists(st.integers(1, 5), max_size=4), st.tuples(st.floats(0, 1), st.floats(0, 1)), st.integers(0, 3))
def test_tiles_are_the_elements_of_the_run(shape: list[int], cut: tuple[float, float], offset: int) -> None:
    numel = int(np.prod(shape))
    start, stop = sorted(int(part * numel) for part in cut)
    tiles = flat_tiles("w", shape, start, stop, offset)
    assert len(tiles) <= max(1, 2 * len(shape) - 1)
    meta = ParameterMetadata("flat", (offset + stop - start,), torch.int64, 8, tiles=tiles, global_shape=tuple(shape))
    found = oracle.local_tensor(meta, 0, {"w": np.arange(numel).reshape(shape)})
    assert found.tolist() == [oracle.EMPTY] * offset + list(range(start, stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 13)])
def test_a_run_outside_of_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"w: elements .* are not all of a tensor of shape \[3, 4\]"):
        flat_tiles("w", (3, 4), start, stop)
