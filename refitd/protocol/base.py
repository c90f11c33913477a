"""Define the base types of messages, bounded numbers and names, limits, and versions of the protocol."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from refitd.errors import ProtocolError

# 1,000 x major + minor. docs/operate.md says which change raises which number; `check_version` compares.
PROTOCOL_VERSION = 4_000

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
            "must be the same; install a refitd with the same one at both ends (docs/operate.md)"
        )
