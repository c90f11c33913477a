"""The base type of messages, bounded numbers and names, and limits."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

# 1,000 x major + minor. docs/upgrades.md says which change raises which; `refitd.protocol.versions` compares.
PROTOCOL_VERSION = 3_004

# Fits the registration of a 100,000-tensor shard, or the plan of a 10,000-rank node, several times over.
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

    Fields that are unknown here are ignored: a newer minor version has them.
    """


class Secret(Value, frozen=True):
    """A key of 32 bytes that travels, and that no repr shows."""

    data: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        return "Secret(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """One message. Its class name travels as `type` and selects the handler."""
