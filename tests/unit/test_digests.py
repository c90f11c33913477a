"""Digests, of tensors and of devices: equal exactly if all bytes are, whatever the layout or the cuts."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd import Repeat, Tile, copy_services
from refitd.copy_services import digests as device_digest
from refitd.copy_services.digests import DeviceDigest, make_keys
from refitd.describe.names import digest_of


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


def test_a_buffer_on_a_gpu_is_digested_by_the_kernel_where_there_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    added: list[int] = []
    kernel = SimpleNamespace(add=lambda buffer, keys, sums, offset: added.append(offset))
    monkeypatch.setattr(copy_services, "digest_kernel", kernel, raising=False)
    for has_triton in (False, True):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=has_triton: found or None)
        digest = DeviceDigest(make_keys(64))
        for _ in range(2):
            digest.update(torch.zeros(300, dtype=torch.uint8).as_subclass(OnGpu))
        assert len(added) == 2 * has_triton


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


# --- The digest that devices compute: the same however bytes are cut, another one for other bytes. ------


WORDS = 64  # per block: small inputs then have several blocks
MASK = (1 << 64) - 1


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digest, "BLOCK_WORDS", WORDS)
    monkeypatch.setattr(device_digest, "BLOCK_BYTES", 4 * WORDS)


KEYS = make_keys(WORDS)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def digest(*parts: bytes) -> bytes:
    made = DeviceDigest(KEYS)
    for part in parts:
        made.update(tensor(part))
    return made.digest()


def splitmix(count: int) -> list[int]:
    state, found = 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append((z ^ (z >> 31)) | 1)
    return found


def oracle(data: bytes) -> bytes:
    keys = splitmix(2 * WORDS)
    sums = b""
    for block in range(0, len(data), 4 * WORDS):
        words = [
            int.from_bytes(data[at : min(at + 4, block + 4 * WORDS)].ljust(4, b"\0"), "little", signed=True)
            for at in range(block, min(len(data), block + 4 * WORDS), 4)
        ]
        for lane in range(2):
            total = sum(x * k for x, k in zip(words, keys[lane * WORDS :], strict=False)) & MASK
            sums += struct.pack("<Q", total)
    return hashlib.blake2b(struct.pack("<q", len(data)) + sums, digest_size=16).digest()


data = st.binary(max_size=5 * 4 * WORDS)


@given(data)
def test_it_is_what_slow_arithmetic_says(value: bytes) -> None:
    assert digest(value) == oracle(value)


@given(data, st.randoms(use_true_random=False))
def test_any_cutting_gives_the_same(value: bytes, rng: random.Random) -> None:
    edges = sorted(rng.choices(range(len(value) + 1), k=rng.randrange(8)))
    parts = [value[a:b] for a, b in zip([0, *edges], [*edges, len(value)], strict=True)]
    assert b"".join(parts) == value
    assert digest(*parts) == digest(value)


@given(st.binary(min_size=8, max_size=3 * 4 * WORDS), st.data())
def test_two_parts_that_change_places_are_found(value: bytes, draw: st.DataObject) -> None:
    size = draw.draw(st.integers(1, len(value) // 2))
    a = draw.draw(st.integers(0, len(value) - 2 * size))
    b = draw.draw(st.integers(a + size, len(value) - size))
    other = bytearray(value)
    other[a : a + size], other[b : b + size] = value[b : b + size], value[a : a + size]
    assert (digest(bytes(other)) == digest(value)) == (bytes(other) == value)


@settings(max_examples=200)
@given(st.integers(0, WORDS - 1), st.integers(0, WORDS - 1), st.integers(0, 31))
def test_two_bits_that_flip_in_one_place_of_two_words_do_not_cancel(a: int, b: int, bit: int) -> None:
    """As two signs of bf16 numbers would, if words were multiplied as 64-bit integers with odd keys."""
    value = bytearray(4 * WORDS)
    for word in {a, b}:
        value[4 * word + bit // 8] ^= 1 << bit % 8
    assert digest(bytes(value)) != digest(bytes(4 * WORDS))


def test_views_that_begin_anywhere_are_taken_in() -> None:
    whole = torch.arange(256, dtype=torch.uint8).repeat(5)
    for start in range(9):
        made = DeviceDigest(KEYS)
        made.update(whole[start : start + 1000])
        assert made.digest() == oracle(bytes(whole[start : start + 1000].tolist()))


def test_sums_are_rows_of_blocks_on_the_device() -> None:
    made = DeviceDigest(KEYS)
    assert made.sums().shape == (0, 2)
    made.update(torch.ones(4 * WORDS + 1, dtype=torch.uint8))
    assert made.sums().shape == (2, 2)
