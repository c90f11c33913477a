"""Bytes to typed messages and back: MessagePack, bounded before anything is built, validated before use."""

from __future__ import annotations

import zlib
from typing import Any, Generic, TypeVar

import msgpack
import msgspec
import xxhash

from refitd.errors import ProtocolError
from refitd.protocol.base import MAX_ITEMS, MAX_MESSAGE_BYTES, MAX_TEXT_BYTES, Message

M = TypeVar("M", bound=Message)
V = TypeVar("V", bound=msgspec.Struct)


def encode(request_id: int, message: Message) -> bytes:
    """Return the frame of a message. `request_id` 0 means: no reply belongs to it."""
    frame: bytes = msgpack.packb([request_id, msgspec.to_builtins(message, builtin_types=(bytes,))])
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} would take {len(frame)} bytes, the limit is {MAX_MESSAGE_BYTES}; "
            "register the model in several parts"
        )
    return frame


class Decoder(Generic[M]):
    """Turns frames into one union of messages; everything else is refused with a ProtocolError."""

    def __init__(self, union: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._union = union
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> tuple[int, M]:
        """Return (request id, message).

        Raises:
            ProtocolError: the frame is too large, is not MessagePack, repeats a key, or holds an unknown type,
                a missing or unknown field, a wrong type or a number out of bounds.
        """
        size = len(frame)
        if size > self._max_bytes:
            raise ProtocolError(f"message of {size} bytes refused: the limit is {self._max_bytes}")
        envelope = _bounded(frame)
        if not isinstance(envelope, list) or len(envelope) != 2:
            raise ProtocolError("a message is an array [request id, body]")
        request_id, body = envelope
        if not isinstance(request_id, int) or isinstance(request_id, bool) or not 0 <= request_id < 1 << 62:
            raise ProtocolError(f"request id {request_id!r} is not an integer in 0..2^62")
        try:
            message: M = msgspec.convert(body, self._union, strict=True)
        except msgspec.ValidationError as exc:
            kind = body.get("type") if isinstance(body, dict) else None
            raise BadMessage(f"message {kind!r} refused: {exc}", request_id) from exc
        return request_id, message


def digest_of(value: msgspec.Struct) -> str:
    """Return the name of a value by its content: xxh3-128 of its encoding, the same on every machine."""
    return xxhash.xxh3_128_hexdigest(msgpack.packb(msgspec.to_builtins(value)))


def pack(value: msgspec.Struct) -> bytes:
    """Return a large value compressed, for a bytes field of a message (zlib, level 1: descriptions repeat)."""
    return zlib.compress(msgpack.packb(msgspec.to_builtins(value)), 1)


def unpack(data: bytes, kind: type[V], digest: str) -> V:
    """Return a value that `pack` made, whose `digest_of` is `digest`.

    Raises:
        ProtocolError: it is not one, or larger than a message may be; it is refused before it is built.
    """
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, MAX_MESSAGE_BYTES)
    except zlib.error as exc:
        raise ProtocolError(f"a packed {kind.__name__} is damaged: {exc}") from exc
    if not inflate.eof:
        raise ProtocolError(f"a packed {kind.__name__} is cut short or takes more than {MAX_MESSAGE_BYTES} bytes")
    if (found := xxhash.xxh3_128_hexdigest(raw)) != digest:
        raise ProtocolError(f"a packed {kind.__name__} was named {digest}, its content is {found}")
    try:
        return msgspec.convert(_bounded(raw), kind, strict=True)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"a packed {kind.__name__} is refused: {exc}") from exc


def _bounded(frame: bytes | memoryview) -> Any:
    """Decode MessagePack into plain values; no claimed length exceeds what the frame can hold."""
    size = len(frame)
    try:
        return msgpack.unpackb(
            frame,
            max_str_len=min(MAX_TEXT_BYTES * 4, size),
            max_bin_len=size,
            max_array_len=min(MAX_ITEMS, size),
            max_map_len=min(MAX_ITEMS, size),
            max_ext_len=0,
            strict_map_key=True,
            object_pairs_hook=_unique,
            use_list=True,
        )
    except ProtocolError:
        raise
    except Exception as exc:  # msgpack raises half a dozen unrelated types, RecursionError among them
        raise ProtocolError(f"not a MessagePack message of {size} bytes: {exc or type(exc).__name__}") from exc


class BadMessage(ProtocolError):
    """A well-formed frame whose content is refused; the sender can be told which request it was."""

    def __init__(self, message: str, request_id: int = 0) -> None:
        super().__init__(message)
        self.request_id = request_id


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("a message map repeats a key")
    return found
