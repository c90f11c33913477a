"""The digest that devices compute: the same however bytes are cut, another one for other bytes."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.copy_services import device_digest
from refitd.copy_services.device_digest import DeviceDigest, make_keys

WORDS = 64  # of a block, so that small inputs have several
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


@given(st.binary(min_size=1, max_size=3 * 4 * WORDS), st.integers(min_value=0), st.integers(1, 255))
def test_a_change_of_one_byte_is_found(value: bytes, at: int, flip: int) -> None:
    other = bytearray(value)
    other[at % len(value)] ^= flip
    assert digest(bytes(other)) != digest(value)


@given(st.binary(min_size=8, max_size=3 * 4 * WORDS), st.data())
def test_two_parts_that_change_places_are_found(value: bytes, draw: st.DataObject) -> None:
    size = draw.draw(st.integers(1, len(value) // 2))
    a = draw.draw(st.integers(0, len(value) - 2 * size))
    b = draw.draw(st.integers(a + size, len(value) - size))
    other = bytearray(value)
    other[a : a + size], other[b : b + size] = value[b : b + size], value[a : a + size]
    assert (digest(bytes(other)) == digest(value)) == (bytes(other) == value)


@given(st.binary(min_size=1, max_size=2 * 4 * WORDS), st.integers(1, 40))
def test_a_shift_and_a_truncation_are_found(value: bytes, by: int) -> None:
    assert digest(bytes(by) + value) != digest(value)
    assert digest(value + bytes(by)) != digest(value), "zeros behind the end count"
    assert digest(value[:-1]) != digest(value)


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
