"""Digests of messages: of bytes in main memory, of bytes on a device, and as MACs with an epoch's key.

Without a key, digests find accidents: xxh3-128 in main memory, and on a device a digest of tensor operations, which the
host reads only at the end:

    words    the bytes as little-endian signed 32-bit integers x[j], zero-padded at the end
    sums     S[l] = sum over j of x[j] * K[l][j]  mod 2^64, for each BLOCK_WORDS words and two lanes l of odd keys K
    digest   BLAKE2b of the length and the sums of every block

This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"). Words differ by less than
2^32 and keys have 63 free bits, so a changed block keeps a lane's sum for one in 2^32 choices of keys, and both
lanes' for one in 2^64. A change of a single word always changes the sums, since keys are odd. Sums are linear: neither
how the bytes were cut nor the order of additions on the device matters. BLAKE2b makes the order of blocks matter. All
devices, the CPU included, give equal digests. All hosts must be little-endian.

With the key of an epoch, workers prove that they have it (`peers.prove`) and authenticate everything that they send:

    meeting   each worker sends all others a nonce, then a proof to each: a MAC of the epoch, and of the labels and
              nonces of both workers
    session   a key derived from the epoch's key and id, which differs for each lane
    record    a small agreement (peers.py); ends with a MAC of its number, sender, receiver and subject
    stream    messages (packed.py); ends with a MAC of all their bytes and of the stream's subject

All MACs are HMAC-SHA256, cut to 16 bytes. In main memory a stream's bytes enter as their GMAC under a secret key. The
GMAC is a universal hash whose value is never sent, so one nonce per session is safe. On a device the keys K are secret,
and an HMAC replaces BLAKE2b. Without the key, one guess in 2^128 / blocks of 16 bytes is a valid MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import struct
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from refitd.errors import TransportError

KEY_BYTES = 32
MAC_BYTES = 16
DIGEST_BYTES = 16
BLOCK_WORDS = 1 << 20
BLOCK_BYTES = 4 * BLOCK_WORDS
_GOLDEN = 0x9E3779B97F4A7C15
_LENGTH = struct.Struct("<q")


class Digest(Protocol):
    """A digest of buffers in the order given; depends on every byte's position, not on how the bytes are cut."""

    def update(self, buffer: Any, /) -> None:
        """Add a uint8 buffer."""

    def digest(self) -> bytes:
        """Return the digest, DIGEST_BYTES long."""


class HostDigest:
    """xxh3-128 of buffers in main memory."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, buffer: torch.Tensor, /) -> None:
        """Add a uint8 buffer."""
        data: Any = buffer.numpy()  # numpy arrays are buffers, which numpy's type stubs do not declare
        self._state.update(data)

    def digest(self) -> bytes:
        """Return the digest."""
        return self._state.digest()


class Authenticator:
    """Makes and checks MACs with one key."""

    def __init__(self, key: bytes) -> None:
        """Use a key of KEY_BYTES.

        Raises:
            TransportError: it has another length.
        """
        if len(key) != KEY_BYTES:
            raise TransportError(
                f"an epoch's key has {len(key)} bytes, expected {KEY_BYTES}; use one version of refitd"
            )
        self._key = key
        self._stream_key = self.derive(b"stream key")
        _gmac(self._stream_key)  # loads the library now, not in the first run

    def derive(self, purpose: bytes, *parts: bytes) -> bytes:
        """Return an HMAC-SHA256, 32 bytes. Each part enters with its length: other parts give another result."""
        made = hmac.new(self._key, digestmod="sha256")
        for part in (purpose, *parts):
            made.update(_LENGTH.pack(len(part)))
            made.update(part)
        return made.digest()

    def mac(self, purpose: bytes, *parts: bytes) -> bytes:
        """Return the MAC of some parts, MAC_BYTES long. A MAC for one purpose is invalid for every other."""
        return self.derive(purpose, *parts)[:MAC_BYTES]

    def is_mac(self, found: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Whether `found` is the MAC of these parts."""
        return hmac.compare_digest(found, self.mac(purpose, *parts))

    def stream(self, about: bytes) -> StreamMac:
        """Return the MAC of a stream that is about to begin, and of its subject `about`."""
        return StreamMac(self, self._stream_key, about)

    def random_bytes(self, purpose: bytes, nbytes: int) -> bytes:
        """Return bytes that are unpredictable without the key."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(self.derive(b"random bytes", purpose)), modes.CTR(bytes(16)))
        return cipher.encryptor().update(bytes(nbytes))


def session(key: bytes, epoch: str) -> Authenticator:
    """Return the authenticator of an epoch's connections: relays pass MACs on, so all workers have one."""
    return Authenticator(Authenticator(key).derive(b"session", epoch.encode()))


class StreamMac:
    """The MAC of buffers in the order given: a Digest."""

    def __init__(self, authenticator: Authenticator, key: bytes, about: bytes) -> None:
        self._authenticator, self._about = authenticator, about
        self._gmac = _gmac(key)
        self._length, self._made = 0, b""

    def update(self, buffer: torch.Tensor, /) -> None:
        """Add a uint8 buffer in main memory."""
        self._gmac.authenticate_additional_data(buffer.numpy())
        self._length += buffer.numel()

    def digest(self) -> bytes:
        """Return the MAC, MAC_BYTES long. No buffer may be added afterwards."""
        if not self._made:
            self._gmac.finalize()
            length = _LENGTH.pack(self._length)
            self._made = self._authenticator.mac(b"stream", self._about, length, self._gmac.tag)
        return self._made


def _gmac(key: bytes) -> Any:
    """Return an AES-GCM encryptor that is used without a text: it only authenticates."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()


def make_keys(words: int = BLOCK_WORDS) -> torch.Tensor:
    """Return the keys, int64, shape [2, words]: the outputs of splitmix64 with seed 0, made odd."""
    state = np.arange(1, 2 * words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64).reshape(2, words))


def make_secret_keys(authenticator: Authenticator, words: int = BLOCK_WORDS) -> torch.Tensor:
    """Return keys in the form of `make_keys`, known only to an epoch's workers."""
    drawn = np.frombuffer(authenticator.random_bytes(b"device digest", 2 * words * 8), np.int64)
    return torch.from_numpy((drawn | 1).reshape(2, words))


def _has_kernel(buffer: torch.Tensor) -> bool:
    """Return whether a kernel computes the sums of this buffer; tensor operations do otherwise."""
    return buffer.is_cuda and importlib.util.find_spec("triton") is not None


class DeviceDigests:
    """Creates digests of buffers on one device. Owns the keys there: 16 MiB."""

    def __init__(self, device: torch.device, authenticator: Authenticator | None = None) -> None:
        """With an authenticator, digests are MACs."""
        self._authenticator = authenticator
        self._keys = (make_keys() if authenticator is None else make_secret_keys(authenticator)).to(device)

    @property
    def keys(self) -> torch.Tensor:
        """The keys, int64, [2, BLOCK_WORDS], for kernels that add up sums while they write."""
        return self._keys

    def new(self, about: bytes = b"") -> DeviceDigest:
        """Return an empty digest; a MAC also covers its subject `about`."""
        return DeviceDigest(self._keys, self._authenticator, about)


class DeviceDigest:
    """A Digest of buffers on one device.

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
        self._length += nbytes
        if nbytes and _has_kernel(buffer):
            from refitd.copy_services import digest_kernel

            block, offset = divmod(start, BLOCK_BYTES)
            sums = self._keys.new_zeros(-(-(offset + nbytes) // BLOCK_BYTES), 2)
            digest_kernel.add(buffer, self._keys, sums, offset)
            for number, row in enumerate(sums, block):
                self._collect(number, row)
            return
        while at < nbytes:
            block, offset = divmod(start + at, BLOCK_BYTES)
            step = min(nbytes - at, BLOCK_BYTES - offset)
            self._add(block, offset, buffer[at : at + step])
            at += step

    def _add(self, block: int, offset: int, part: torch.Tensor) -> None:
        first, lead = divmod(offset, 4)
        count = -(-(lead + part.numel()) // 4)
        if lead or part.numel() % 4 or part.storage_offset() % 4 or part.data_ptr() % 4:
            room = part.new_zeros(4 * count)
            room[lead : lead + part.numel()] = part
            part = room
        self._collect(block, (part.view(torch.int32) * self._keys[:, first : first + count]).sum(1))

    def _collect(self, block: int, sums: torch.Tensor) -> None:
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
        length = _LENGTH.pack(self._length)
        if self._authenticator is not None:
            return self._authenticator.mac(b"device stream", self._about, length, sums)
        return hashlib.blake2b(length + sums, digest_size=16).digest()
