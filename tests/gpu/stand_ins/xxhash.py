"""Stands in for xxhash on a machine without it: the functions that refitd uses, with BLAKE2b's values.

All processes of one gpu-check use the same values; they never meet a refitd elsewhere.
"""

from __future__ import annotations

import hashlib
from typing import Any


class _Digest:
    def __init__(self, size: int, data: Any = b"") -> None:
        self._state = hashlib.blake2b(data, digest_size=size)

    def update(self, data: Any) -> None:
        self._state.update(data)

    def digest(self) -> bytes:
        return self._state.digest()

    def hexdigest(self) -> str:
        return self._state.hexdigest()

    def intdigest(self) -> int:
        return int.from_bytes(self._state.digest(), "big")


def xxh3_64(data: Any = b"") -> _Digest:
    return _Digest(8, data)


def xxh3_128(data: Any = b"") -> _Digest:
    return _Digest(16, data)


def xxh3_64_digest(data: Any) -> bytes:
    return xxh3_64(data).digest()


def xxh3_64_hexdigest(data: Any) -> str:
    return xxh3_64(data).hexdigest()


def xxh3_64_intdigest(data: Any) -> int:
    return xxh3_64(data).intdigest()


def xxh3_128_digest(data: Any) -> bytes:
    return xxh3_128(data).digest()


def xxh3_128_hexdigest(data: Any) -> str:
    return xxh3_128(data).hexdigest()
