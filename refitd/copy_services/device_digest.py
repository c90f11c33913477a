"""A digest computed with tensor operations on a device; the host reads it only at the end.

    words    the bytes as little-endian signed 32-bit integers x[j], zero-padded at the end
    sums     S[l] = sum over j of x[j] * K[l][j]  mod 2^64, for each BLOCK_WORDS words and two lanes l of odd keys K
    digest   BLAKE2b of the length and the sums of every block

This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"). Words differ by less than
2^32 and keys have 63 free bits, so a changed block keeps a lane's sum for one in 2^32 choices of keys, and both
lanes' for one in 2^64. A change of a single word always changes the sums, since keys are odd. Sums are linear: neither
how the bytes were cut nor the order of additions on the device matters. BLAKE2b makes the order of blocks matter.

In an epoch the keys are secret, and an HMAC takes BLAKE2b's place: a MAC, of what the digest is about, too.

All devices, the CPU included, give the same digest. All hosts must be little-endian.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch

from refitd.copy_services.authentication import Authenticator

BLOCK_WORDS = 1 << 20
BLOCK_BYTES = 4 * BLOCK_WORDS
_GOLDEN = 0x9E3779B97F4A7C15


def make_keys(words: int = BLOCK_WORDS) -> torch.Tensor:
    """Return the keys, int64, shape [2, words]: the outputs of splitmix64 with seed 0, made odd."""
    state = np.arange(1, 2 * words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64).reshape(2, words))


def make_secret_keys(authenticator: Authenticator, words: int = BLOCK_WORDS) -> torch.Tensor:
    """Return keys like those of `make_keys` that only an epoch's workers know."""
    drawn = np.frombuffer(authenticator.random_bytes(b"device digest", 2 * words * 8), np.int64)
    return torch.from_numpy((drawn | 1).reshape(2, words))


class DeviceDigests:
    """Creates digests of buffers on one device. Owns the keys there: 16 MiB."""

    def __init__(self, device: torch.device, authenticator: Authenticator | None = None) -> None:
        """With an authenticator, digests are MACs."""
        self._authenticator = authenticator
        self._keys = (make_keys() if authenticator is None else make_secret_keys(authenticator)).to(device)

    def new(self, about: bytes = b"") -> DeviceDigest:
        """Return an empty digest; a MAC is also one of what it is `about`."""
        return DeviceDigest(self._keys, self._authenticator, about)


class DeviceDigest:
    """A digest of buffers in the order given; depends on every byte's position, not on how the bytes are cut.

    All work is queued on torch's current stream, which must be the same for all updates.
    """

    def __init__(self, keys: torch.Tensor, authenticator: Authenticator | None = None, about: bytes = b"") -> None:
        self._keys = keys
        self._authenticator, self._about = authenticator, about
        self._length = 0
        self._sums: list[torch.Tensor] = []

    def update(self, buffer: torch.Tensor, /) -> None:
        """Add a contiguous uint8 buffer on the digest's device. Never waits for the device."""
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
        """Return the sums of every block, shape [blocks, 2], on the device; equal bytes give equal sums."""
        return torch.stack(self._sums) if self._sums else self._keys.new_zeros(0, 2)

    def digest(self) -> bytes:
        """Return the digest, 16 bytes; waits for the device."""
        sums: bytes = self.sums().cpu().numpy().tobytes()
        length = struct.pack("<q", self._length)
        if self._authenticator is not None:
            return self._authenticator.mac(b"device stream", self._about, length, sums)
        return hashlib.blake2b(length + sums, digest_size=16).digest()
