"""Messages: their base types, limits and versions; encode and decode them.

Sizes are checked before decoding. Large frames are decoded on another thread.
"""

from __future__ import annotations

import functools
import queue
import re
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, TypeVar, cast, get_args

import msgspec
import xxhash

from refitd.errors import ProtocolError

# 1,000 x major + minor. docs/operate.md says which change raises which number; `check_version` compares.
PROTOCOL_VERSION = 5_000

# Several times the size of a 100,000-tensor shard's registration, or of a 10,000-rank node's plan.
MAX_MESSAGE_BYTES = 64 << 20
MAX_VALUES = 1 << 23  # in one message, counting maps and arrays
MAX_TEXT_BYTES = 1 << 16

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 20))]
Step = Annotated[int, msgspec.Meta(ge=-(1 << 30), le=(1 << 30))]  # difference between two ranks
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Label = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_BYTES)]
Events = Annotated[tuple[Label, ...], msgspec.Meta(max_length=64)]  # the last events, oldest first


def clipped(text: str) -> str:
    """Truncate a text to MAX_TEXT_BYTES."""
    return text if len(text) <= MAX_TEXT_BYTES else f"{text[: MAX_TEXT_BYTES - 40]} ... ({len(text)} characters)"


class Value(msgspec.Struct, frozen=True):
    """A part of a message. New fields need defaults, and no field is ever retyped.

    Unknown fields are ignored: the sender may have a newer minor version.
    """


class Secret(Value, frozen=True):
    """A key of 32 bytes in a message; its repr hides the bytes."""

    data: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        return "Secret(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """One message. Its class name is sent as `type` and selects the handler."""


_MINORS = 1000  # a version is 1,000 x major + minor


def shown(version: int) -> str:
    """Return a version as text: "3.1"."""
    major, minor = divmod(version, _MINORS)
    return f"{major}.{minor}" if major else str(version)


def check_version(theirs: int, peer: str, me: str) -> None:
    """Check that a peer has this process's major version; minor versions may differ.

    Raises:
        ProtocolError: the major versions differ; the error names both ends, their versions and the remedy.
    """
    if theirs // _MINORS != PROTOCOL_VERSION // _MINORS:
        raise ProtocolError(
            f"{peer} speaks protocol {shown(theirs)}, {me} {shown(PROTOCOL_VERSION)}: the numbers before the point "
            "must be the same; install a refitd with the same one at both ends (`refitctl docs operate`)"
        )


# --- the codec --------------------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)
V = TypeVar("V", bound=msgspec.Struct)

# The largest frames accepted before admission: a client's Hello, and a daemon's NodeHello with the node's resources.
HELLO_BYTES = 4 << 10
NODE_HELLO_BYTES = 64 << 10

# Values of smaller frames are not counted: decoded, such frames take some megabytes at most.
_UNCOUNTED_BYTES = 64 << 10

_RequestId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


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
        # one call of the codec checks the request id and every value of the message
        self._typed: msgspec.msgpack.Decoder[tuple[int, M]] = msgspec.msgpack.Decoder(tuple[_RequestId, union])
        self._kinds = frozenset(kind.__name__ for kind in get_args(union) or (union,))
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> tuple[int, M]:
        """Return (request id, message).

        Only values that the message's type allows are built. Holds the interpreter for about 30 ms per MB.

        Raises:
            UnknownKind: no message of this kind is in the union; a newer minor version may have it.
            ProtocolError: the frame is too large, is not MessagePack, lacks a field, or holds a wrong type or a number
                out of bounds.
        """
        size = len(frame)
        if size > self._max_bytes:
            raise ProtocolError(f"message of {size} bytes refused: the limit is {self._max_bytes}")
        if size > _UNCOUNTED_BYTES:
            _check_values(frame)
        try:
            return self._typed.decode(frame)
        except msgspec.ValidationError as exc:
            request_id, body = _envelope(frame)  # it may be the envelope that is invalid
            if (kind := _kind_of(body)) and kind not in self._kinds:
                raise UnknownKind(kind, request_id) from exc
            raise BadMessage(f"message {kind!r} refused: {exc}", request_id) from exc
        except Exception as exc:  # half a dozen unrelated types, also MemoryError
            raise ProtocolError(f"not a MessagePack message of {size} bytes: {exc or type(exc).__name__}") from exc


class _Kind(msgspec.Struct):
    """The type of a message, decoded without its other fields."""

    type: str = ""


_ENVELOPE: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NUMBER = msgspec.msgpack.Decoder(int)
_KIND = msgspec.msgpack.Decoder(_Kind)


def request_of(frame: bytes | memoryview) -> tuple[int, str]:
    """Return request id and message type of a frame without decoding its body.

    Raises:
        ProtocolError: it is not a message envelope.
    """
    if len(frame) > _UNCOUNTED_BYTES:
        _check_values(frame)
    request_id, body = _envelope(frame)
    return request_id, _kind_of(body)


def _envelope(frame: bytes | memoryview) -> tuple[int, msgspec.Raw]:
    """Split a frame into request id and undecoded body."""
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
    """Return a large value compressed, for a bytes field of a message.

    zlib level 1 suffices, because large values are repetitive.
    """
    return zlib.compress(msgspec.msgpack.encode(value), 1)


def unpack(data: bytes, kind: type[V], digest: str) -> V:
    """Return the value that `pack` packed, after checking that its `digest_of` is `digest`.

    Raises:
        ProtocolError: as `inflated` and `decoded`.
    """
    value: V = decoded(inflated(data, kind.__name__, digest), kind, kind.__name__)
    return value


def inflated(data: bytes, what: str, digest: str) -> bytes:
    """Return the encoding of the value that `pack` packed, after checking that its `digest_of` is `digest`.

    Raises:
        ProtocolError: the bytes are damaged, do not match, or exceed a message's size.
    """
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, MAX_MESSAGE_BYTES)
    except zlib.error as exc:
        raise ProtocolError(f"a packed {what} is damaged: {exc}") from exc
    if not inflate.eof:
        raise ProtocolError(f"a packed {what} is cut short or takes more than {MAX_MESSAGE_BYTES} bytes")
    if (found := xxhash.xxh3_128_hexdigest(raw)) != digest:
        raise ProtocolError(f"a packed {what} was named {digest}, its content is {found}")
    return raw


def decoded(raw: bytes | msgspec.Raw, kind: Any, what: str) -> Any:
    """Return a value of this type from its encoding.

    Raises:
        ProtocolError: it is no such value, or holds more values than a message may; no value is built then.
    """
    view = memoryview(raw)
    if len(view) > _UNCOUNTED_BYTES:
        _check_values(view)
    return _decoded(view, kind, what)


def fields_of(raw: bytes, kind: type[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    """Return the fields of a value's encoding, not decoded and by name, without fields unknown to the type.

    Raises:
        ProtocolError: it is no map.
    """
    found = _decoded(raw, _undecoded(kind), kind.__name__)
    values = {name: getattr(found, name) for name in kind.__struct_fields__}
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}


@functools.cache  # one for each type that is read so
def _undecoded(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in kind.__struct_fields__]
    return msgspec.defstruct(kind.__name__, fields)


def _decoded(raw: bytes | memoryview, kind: Any, what: str) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"a packed {what} is refused: {exc}") from exc
    except Exception as exc:
        raise ProtocolError(f"a packed {what} is no MessagePack: {exc or type(exc).__name__}") from exc


def _sized(heads: range, first: int) -> bytes:
    """Return a pattern of alternatives: each head in turn, followed by `first`, `first` + 1, ... bytes."""
    return b"|".join(rb"\x%02x.{%d}" % (head, first + head - heads.start) for head in heads)


# The most values that one match of the pattern counts.
_STRETCH = 64

# The head of one MessagePack value, with its content unless that consists of further values: small numbers, heads of
# maps and arrays, nil and booleans; larger numbers and heads; strings; bytes. It excludes strings and bytes of 256
# bytes and more.
_VALUES = re.compile(
    rb"(?s)(?:[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]|[\xcd\xd1\xdc\xde]..|[\xca\xce\xd2\xdd\xdf].{4}|[\xcc\xd0].|"
    rb"[\xcb\xcf\xd3].{8}|%s|[\xd9\xc4](?:%s)){1,%d}+" % (_sized(range(0xA1, 0xC0), 1), _sized(range(256), 0), _STRETCH)
)
_LONG = {0xDA: 2, 0xDB: 4, 0xC5: 2, 0xC6: 4}  # heads of long strings and bytes -> the bytes of their length


def _check_values(frame: bytes | memoryview) -> None:
    """Refuse a frame with more values than a message may have, before building any.

    An empty array takes one byte in the frame and eighty in memory. MessagePack writes each head before its content, so
    a regular expression (compiled code) can count the values.
    """
    size = len(frame)
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
        # a match that ends early (at a long string) counts as a full one, or as its bytes if these are fewer
        count += min(_STRETCH, at - start)
        if count > limit:
            raise ProtocolError(f"a message of {size} bytes holds more than {limit} values, which is the limit for it")


class BadMessage(ProtocolError):
    """A well-formed frame with invalid content; the error reply can name the request."""

    def __init__(self, message: str, request_id: int = 0) -> None:
        super().__init__(message)
        self.request_id = request_id


class UnknownKind(BadMessage):
    """A message of a kind that this process does not know. A request is refused, a notification ignored."""

    def __init__(self, kind: str, request_id: int) -> None:
        super().__init__(
            f"message {kind[:512]!r} refused: it is not one that protocol {shown(PROTOCOL_VERSION)} has here; if its "
            "sender is newer, upgrade this process (`refitctl docs operate`)",
            request_id,
        )


K = TypeVar("K")
D = TypeVar("D")

# While a thread computes, the loop waits this long for the interpreter. With Python's default of 5 ms, a few of the
# loop's system calls would take a tenth of a second.
_SWITCH_S = 0.001

# Larger frames are decoded on the thread, because decoding takes 10 ms or more.
LARGE_FRAME = 128 << 10


class BackgroundThread(Generic[K]):
    """One background thread. Its owning loop calls `submit`, and `collect` after each `tell`."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        """`tell` is called on the background thread when a result can be collected."""
        self._name = name
        self._tell = tell
        self._todo: queue.SimpleQueue[tuple[K, Callable[[], object]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[K, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, key: K, work: Callable[[], object]) -> None:
        """Call `work` on the thread; `collect` returns its result with `key`."""
        self._todo.put((key, work))
        if self._thread is None:
            sys.setswitchinterval(_SWITCH_S)
            # a daemon thread: the process may end without waiting for it
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def __len__(self) -> int:
        """Return the number of calls that have not begun."""
        return self._todo.qsize()

    def collect(self) -> Iterator[tuple[K, Any]]:
        """Yield key and result, or exception, of finished calls."""
        while True:
            try:
                yield self._done.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """End the thread once it has finished the submitted calls; their results are lost."""
        if self._thread is not None:
            self._todo.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, after `close`."""
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            if (todo := self._todo.get()) is None:
                return
            key, work = todo
            result: object
            try:
                result = work()
            except Exception as exc:
                result = exc
            self._done.put((key, result))
            del todo, work, result  # free the decoded frame
            self._tell()


class OrderedDecoder(Generic[D]):
    """Decodes one peer's large messages on the thread; later messages wait for them, to preserve the order."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        """`tell` is as in BackgroundThread."""
        self._reader = BackgroundThread[None](name, tell)
        self._waiting: deque[tuple[bool, Any]] = deque()  # (is being decoded, else the message)

    def read(self, work: Callable[[], D]) -> None:
        """Decode a message on the thread; `collect` yields it, or the exception."""
        self._waiting.append((True, None))
        self._reader.submit(None, work)

    def __len__(self) -> int:
        """Return the number of waiting messages, decoded or not."""
        return len(self._waiting)

    def holds(self, message: D) -> bool:
        """Whether a message must wait for earlier ones; `collect` then yields it."""
        if self._waiting:
            self._waiting.append((False, message))
        return bool(self._waiting)

    def collect(self) -> Iterator[D | Exception]:
        """Yield decoded messages, and the messages that waited for them."""
        for _, read in self._reader.collect():
            self._waiting.popleft()
            yield read
            while self._waiting and not self._waiting[0][0]:
                yield cast("D", self._waiting.popleft()[1])
