"""A digest that a device computes with tensor operations and tells the host only at its end.

    words    the bytes as 32-bit integers x[j], little-endian, signed; zeros behind the last byte
    sums     S[l] = sum over j of x[j] * K[l][j]  mod 2^64, for each BLOCK_WORDS words, with two lanes l of odd keys K
    digest   BLAKE2b of the length and the sums of every block

This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"): words differ by less than
2^32 and keys have 63 free bits, so a change in a block leaves a lane as it was for one in 2^32 choices of its keys, and
both lanes for one in 2^64. The keys are odd, so a change of a single word never does. Sums are linear: it does not
matter how the bytes were cut, nor that a device adds them up in any order. Blocks are told apart by BLAKE2b.

The same on every device, the CPU included. All hosts must be little-endian.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch

BLOCK_WORDS = 1 << 20
BLOCK_BYTES = 4 * BLOCK_WORDS
_GOLDEN = 0x9E3779B97F4A7C15


def make_keys(words: int = BLOCK_WORDS) -> torch.Tensor:
    """Return the keys, shape [2, words], int64: the outputs of splitmix64, begun at 0 and continued, made odd."""
    state = np.arange(1, 2 * words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64).reshape(2, words))


class DeviceDigests:
    """Makes digests of buffers on one device. Owns the keys there: 16 MiB."""

    def __init__(self, device: torch.device) -> None:
        self._keys = make_keys().to(device)

    def new(self) -> DeviceDigest:
        """Return a digest of nothing yet."""
        return DeviceDigest(self._keys)


class DeviceDigest:
    """A digest over buffers in the order they are given; position sensitive, equal however they are cut.

    Everything is queued on torch's current stream, which must be the same for all updates.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys
        self._length = 0
        self._sums: list[torch.Tensor] = []

    def update(self, buffer: torch.Tensor, /) -> None:
        """Take in one more buffer, uint8, contiguous, on the digest's device. Never waits for the device."""
        start, nbytes, at = self._length, buffer.numel(), 0
        while at < nbytes:
            block, offset = divmod(start + at, BLOCK_BYTES)
            step = min(nbytes - at, BLOCK_BYTES - offset)
            self._add(block, offset, buffer[at : at + step])
            at += step
        self._length += nbytes

    def _add(self, block: int, offset: int, part: torch.Tensor) -> None:
        first, lead = divmod(offset, 4)
        count = -(-(lead + part.numel()) // 4)
        if lead or part.numel() % 4 or part.storage_offset() % 4 or part.data_ptr() % 4:
            room = part.new_zeros(4 * count)
            room[lead : lead + part.numel()] = part
            part = room
        sums = (part.view(torch.int32) * self._keys[:, first : first + count]).sum(1)
        if block == len(self._sums):
            self._sums.append(sums)
        else:
            self._sums[block] = self._sums[block] + sums

    def sums(self) -> torch.Tensor:
        """Return the sums of every block, shape [blocks, 2], on the device. Equal for equal bytes of one length."""
        return torch.stack(self._sums) if self._sums else self._keys.new_zeros(0, 2)

    def digest(self) -> bytes:
        """Return 16 bytes; waits for the device."""
        sums: bytes = self.sums().cpu().numpy().tobytes()
        return hashlib.blake2b(struct.pack("<q", self._length) + sums, digest_size=16).digest()
