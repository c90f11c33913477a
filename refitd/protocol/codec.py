"""Encodes and decodes typed messages: MessagePack, size-checked before decoding, validated before use."""

from __future__ import annotations

import re
import zlib
from typing import Any, Generic, TypeVar, get_args

import msgpack
import msgspec
import xxhash

from refitd.errors import ProtocolError
from refitd.protocol.base import MAX_MESSAGE_BYTES, MAX_VALUES, PROTOCOL_VERSION, Message
from refitd.protocol.versions import shown

M = TypeVar("M", bound=Message)
V = TypeVar("V", bound=msgspec.Struct)

# The largest frames accepted before admission: a client's Hello, and a daemon's, which lists the node's resources.
HELLO_BYTES = 4 << 10
NODE_HELLO_BYTES = 64 << 10

# Smaller frames are not counted: decoded, they take some megabytes at most.
_UNCOUNTED_BYTES = 64 << 10


def encode(request_id: int, message: Message) -> bytes:
    """Return the frame of a message. `request_id` 0: no reply is expected."""
    frame = msgspec.msgpack.encode([request_id, message])
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} would take {len(frame)} bytes, the limit is {MAX_MESSAGE_BYTES}; "
            "register the model in several parts"
        )
    return frame


class Decoder(Generic[M]):
    """Decodes frames into one union of messages; refuses everything else with a ProtocolError."""

    def __init__(self, union: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._typed: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union, strict=True)
        self._kinds = frozenset(kind.__name__ for kind in get_args(union) or (union,))
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> tuple[int, M]:
        """Return (request id, message).

        Only values that the message's type allows are built. Holds the interpreter for about 30 ms per MB.

        Raises:
            UnknownKind: no message of this kind is in the union; a newer minor version may have it.
            ProtocolError: the frame is too large, is not MessagePack, repeats a key, lacks a field, or holds a wrong
                type or a number out of bounds.
        """
        size = len(frame)
        if size > self._max_bytes:
            raise ProtocolError(f"message of {size} bytes refused: the limit is {self._max_bytes}")
        request_id, body = _envelope(frame)
        try:
            message: M = self._typed.decode(body)
        except msgspec.ValidationError as exc:
            if (kind := _kind_of(body)) and kind not in self._kinds:
                raise UnknownKind(kind, request_id) from exc
            raise BadMessage(f"message {kind!r} refused: {exc}", request_id) from exc
        except Exception as exc:  # half a dozen unrelated types, also MemoryError
            raise ProtocolError(f"not a MessagePack message of {size} bytes: {exc or type(exc).__name__}") from exc
        _check_keys(body)
        return request_id, message


class _Kind(msgspec.Struct):
    """The type of a message; other fields are ignored."""

    type: str = ""


_ENVELOPE: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NUMBER = msgspec.msgpack.Decoder(int)
_KIND = msgspec.msgpack.Decoder(_Kind)


def request_of(frame: bytes | memoryview) -> tuple[int, str]:
    """Return request id and message type of a frame without decoding its body.

    Raises:
        ProtocolError: it is not a message envelope.
    """
    request_id, body = _envelope(frame)
    return request_id, _kind_of(body)


def _envelope(frame: bytes | memoryview) -> tuple[int, msgspec.Raw]:
    """Split a frame into request id and undecoded body, after checking how many values it holds."""
    _check_values(frame)
    size = len(frame)
    if size and not 0x90 <= frame[0] <= 0x9F:
        raise ProtocolError(f"a message of {size} bytes is an array [request id, body]")
    try:
        parts = _ENVELOPE.decode(frame)
    except Exception as exc:  # also RecursionError
        raise ProtocolError(f"not a MessagePack message of {size} bytes: {exc or type(exc).__name__}") from exc
    if len(parts) != 2:
        raise ProtocolError("a message is an array [request id, body]")
    try:
        request_id = _NUMBER.decode(parts[0])
    except msgspec.DecodeError:
        request_id = -1
    if not 0 <= request_id < 1 << 62:
        raise ProtocolError(f"request id {bytes(parts[0])[:20].hex()} is not an integer in 0..2^62")
    return request_id, parts[1]


def _kind_of(body: msgspec.Raw) -> str:
    try:
        return _KIND.decode(body).type
    except Exception:  # also UnicodeDecodeError, which is not a DecodeError
        return ""


def digest_of(value: msgspec.Struct) -> str:
    """Return the content digest of a value: xxh3-128 of its encoding, the same on every machine."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value))


def pack(value: msgspec.Struct) -> bytes:
    """Return a large value compressed, for a bytes field of a message. zlib level 1: what is large is repetitive."""
    return zlib.compress(msgspec.msgpack.encode(value), 1)


def unpack(data: bytes, kind: type[V], digest: str) -> V:
    """Return the value that `pack` packed and whose `digest_of` is `digest`.

    Raises:
        ProtocolError: the bytes are damaged, do not match, or exceed a message's size; then nothing is built.
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
    _check_values(raw)
    try:
        value = msgspec.msgpack.decode(raw, type=kind, strict=True)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"a packed {kind.__name__} is refused: {exc}") from exc
    except Exception as exc:
        raise ProtocolError(f"a packed {kind.__name__} is no MessagePack: {exc or type(exc).__name__}") from exc
    _check_keys(raw)
    return value


def _sized(heads: range, first: int) -> bytes:
    """Return a pattern of alternatives: each head in turn, followed by `first`, `first` + 1, ... bytes."""
    return b"|".join(rb"\x%02x.{%d}" % (head, first + head - heads.start) for head in heads)


# Values counted by one match of the pattern.
_STRETCH = 64

# The head of one MessagePack value, with its content unless that consists of further values: small numbers, heads of
# maps and arrays, nil and booleans; larger numbers and heads; strings; bytes. Strings and bytes of 256 and more are
# left out.
_VALUES = re.compile(
    rb"(?s)(?:[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]|[\xcd\xd1\xdc\xde]..|[\xca\xce\xd2\xdd\xdf].{4}|[\xcc\xd0].|"
    rb"[\xcb\xcf\xd3].{8}|%s|[\xd9\xc4](?:%s)){1,%d}+" % (_sized(range(0xA1, 0xC0), 1), _sized(range(256), 0), _STRETCH)
)
_LONG = {0xDA: 2, 0xDB: 4, 0xC5: 2, 0xC6: 4}  # heads of long strings and bytes -> the bytes of their length


def _check_values(frame: bytes | memoryview) -> None:
    """Refuse a frame with more values than a message may have, before any is built.

    An empty array takes one byte in the frame and eighty in memory. MessagePack writes each head before its content, so
    a regular expression (compiled code) can count the values.
    """
    size = len(frame)
    if size <= _UNCOUNTED_BYTES:
        return
    limit = min(MAX_VALUES, _UNCOUNTED_BYTES + size // 2)
    at = count = 0
    while at < size:
        start = at
        if (found := _VALUES.match(frame, at)) is not None:
            at = found.end()
        elif (width := _LONG.get(frame[at])) is not None:
            at += 1 + width + int.from_bytes(frame[at + 1 : at + 1 + width], "big")
        else:
            raise ProtocolError(f"not a MessagePack message of {size} bytes: byte {at} begins no value that is whole")
        # a match cut short by a long string counts as a full one, unless it has fewer bytes than that
        count += min(_STRETCH, at - start)
        if count > limit:
            raise ProtocolError(f"a message of {size} bytes holds more than {limit} values, which is the limit for it")


def _check_keys(frame: bytes | memoryview) -> None:
    """Refuse a repeated key in a frame that is otherwise valid. The decoded values are discarded."""
    try:
        msgpack.unpackb(
            frame,
            max_str_len=len(frame),
            max_bin_len=len(frame),
            max_array_len=len(frame),
            max_map_len=len(frame),
            object_pairs_hook=_unique,
            list_hook=len,  # any small result
        )
    except ProtocolError:
        raise
    except Exception as exc:  # in a field that is unknown here: too deep, bad text, keys that are no text
        raise ProtocolError(f"a message of {len(frame)} bytes is damaged: {exc or type(exc).__name__}") from exc


def _unique(pairs: list[tuple[Any, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ProtocolError("a message map repeats a key")


class BadMessage(ProtocolError):
    """A well-formed frame with invalid content; the sender can be told which request it was."""

    def __init__(self, message: str, request_id: int = 0) -> None:
        super().__init__(message)
        self.request_id = request_id


class UnknownKind(BadMessage):
    """A message of a kind that this process does not have. A request of it is refused, a notification ignored."""

    def __init__(self, kind: str, request_id: int) -> None:
        super().__init__(
            f"message {kind[:512]!r} refused: it is not one that protocol {shown(PROTOCOL_VERSION)} has here; if its "
            "sender is newer, upgrade this process (docs/upgrades.md)",
            request_id,
        )
