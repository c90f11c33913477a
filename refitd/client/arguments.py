"""Convert callers' arguments to the types of messages; if a conversion fails, the error names the argument."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from refitd.errors import RefitdError, RefusedError
from refitd.protocol.base import Message, encode
from refitd.protocol.roles import check_names
from refitd.text import mismatch, shown

if TYPE_CHECKING:
    from refitd.describe.metadata import ParameterMetadata
    from refitd.describe.renames import Names

MAX_COUNT = 1 << 62
MAX_SMALL = 1 << 20
MAX_PID = 1 << 22
MAX_SECONDS = 1e9
MAX_NAME = 512


def whole(what: str, value: Any, low: int = 0, high: int = MAX_COUNT) -> int:
    """Return a whole number (of Python, numpy, torch or an enumeration) as an int.

    Raises:
        RefusedError: the value is not a whole number, or not in low..high.
    """
    try:
        found = operator.index(value.value if isinstance(value, enum.Enum) else value)
    except Exception:
        raise RefusedError(f"{what} is {shown(value)}, expected a whole number in {low}..{high}") from None
    if not low <= found <= high:
        raise RefusedError(f"{what} is {found}, expected a whole number in {low}..{high}")
    return int(found)


def seconds(what: str, value: Any) -> float:
    """Return a number of seconds as a float.

    Raises:
        RefusedError: the value is not a number, negative, or above MAX_SECONDS: every wait must end.
    """
    found = math.nan
    if not isinstance(value, str | bytes | bytearray | bool) and value is not None:
        try:
            found = float(value)
        except Exception:
            found = math.nan
    if not 0.0 <= found <= MAX_SECONDS:
        raise RefusedError(f"{what} is {shown(value)}, expected seconds in 0..{MAX_SECONDS:.0e}: every wait has an end")
    return found


def text(what: str, value: Any, *, least: int = 1, most: int = MAX_NAME) -> str:
    """Return a name or text as a str.

    Raises:
        RefusedError: the value is not a text, is too short or too long, or is not valid Unicode.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if not isinstance(value, str):
        raise RefusedError(f"{what} is {shown(value)}, expected a text")
    found = str.__str__(value)
    if not least <= len(found) <= most:
        raise RefusedError(f"{what} has {len(found)} characters, expected {least}..{most}")
    try:
        found.encode()
    except UnicodeEncodeError as exc:
        raise RefusedError(f"{what} is {found[:60]!r}, which is not valid Unicode: {exc.reason}") from None
    return found


def flag(what: str, value: Any) -> bool:
    """Return a truth value (of Python, numpy or torch) as a bool.

    Raises:
        RefusedError: the value is not a truth value.
    """
    if not isinstance(value, bool):
        kind, dims = str(getattr(value, "dtype", "")), getattr(value, "ndim", None)
        if kind.removeprefix("torch.") != "bool" or dims != 0:
            raise RefusedError(f"{what} is {shown(value)}, expected True or False")
    return bool(value)


def hook(what: str, value: Callable[..., object] | None) -> None:
    """Raise RefusedError unless the value is None or callable."""
    if value is not None and not callable(value):
        raise RefusedError(f"{what} is {shown(value)}, expected a function")


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of a rank's tensors in the model; see `Client.register_source`."""

    rank: int = 0
    world_size: int = 1
    metadata: Sequence[ParameterMetadata] | None = None
    pg_collection: Any = None
    num_experts: int | None = None
    names: Names | None = None

    def checked(self) -> Layout:
        """Return a copy with Python ints; raises RefusedError for invalid numbers."""
        experts = self.num_experts
        return replace(
            self,
            rank=whole("rank", self.rank, 0, MAX_SMALL),
            world_size=whole("world_size", self.world_size, 0, MAX_SMALL),
            num_experts=None if experts is None else whole("num_experts", experts, 0, MAX_SMALL),
        )


def encoded(number: int, message: Message) -> bytes:
    """Return a message's frame, checked as the daemon will check it.

    Raises:
        RefusedError: a field's value is invalid.
        ProtocolError: the message is too large.
    """
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message), strict=True)
        return encode(number, message)
    except RefitdError:
        raise
    except Exception as exc:  # msgspec and Unicode each raise their own errors
        check_names(message)  # raises an error that names the field or tensor, if a name cannot be encoded
        place, said = mismatch(str(exc))
        raise RefusedError(f"{place or type(message).__name__}: {said}; correct the argument of that name") from exc
