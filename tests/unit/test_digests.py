"""Digests: equal exactly where the same elements are the same bytes, however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from refitd import Repeat, Tile
from refitd.describe.digests import digest_of


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (200, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_digest_is_of_elements_in_order_whatever_the_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = (torch.arange(torch.Size(shape).numel()) % 251).view(shape).to(dtype)
    wide = torch.zeros((*shape, 2), dtype=dtype)[..., 1]
    wide.copy_(value)
    assert digest_of(value) == digest_of(wide) == digest_of(value.clone()) != 0
    if value.numel() > 1:
        assert digest_of(value) == digest_of(value.t().contiguous().t() if value.dim() == 2 else value)
        other = value.clone()
        other.view(-1)[-1] = 0 if dtype is torch.bool else 250
        assert torch.equal(other, value) or digest_of(other) != digest_of(value)


def test_a_tile_has_the_digest_of_its_elements_in_canonical_order() -> None:
    # gate and up of one rank, transposed in memory: two boxes of 2 x 3
    whole = torch.arange(24.0).view(8, 3)
    mine = torch.cat([whole[2:4], whole[6:8]])
    plain = Tile("w", (2, 0), (2, 3), 0, (3, 1), Repeat(0, 2, 4, 6))
    turned = Tile("w", (2, 0), (2, 3), 0, (1, 4), Repeat(0, 2, 4, 2))
    assert digest_of(mine, plain) == digest_of(mine.t().contiguous(), turned) == digest_of(mine)


def test_bools_of_any_byte_have_one_digest_whatever_the_strides() -> None:
    raw = torch.arange(48, dtype=torch.uint8).view(6, 8)
    strided = raw.t().contiguous().t()

    assert digest_of(strided.view(torch.bool)) == digest_of(raw.view(torch.bool)) == digest_of(raw)
    assert digest_of((raw != 0).t().contiguous().t()) != digest_of(strided.view(torch.bool))
