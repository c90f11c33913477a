"""Imported by every Python that has this folder in PYTHONPATH, to use another version of the protocol.

TESTED_MINOR is "newer", "older" or "same"; TESTED_MAJOR is the major version.

newer: every message and each nested value gets unknown fields, and daemon and coordinator send a notification of an
unknown kind after each message.

older: fields with their default are omitted, as by a sender that does not have the field.
"""

from __future__ import annotations

import os
from typing import Any

import msgpack
import msgspec
import xxhash
from minors import newer, older

from refitd.protocol import base

_WRITES = {"newer": newer, "same": lambda plain, _: plain, "older": older}[os.environ.get("TESTED_MINOR", "same")]
_MINOR = {"newer": 501, "same": 500, "older": 499}[os.environ.get("TESTED_MINOR", "same")]
base.PROTOCOL_VERSION = 1000 * int(os.environ.get("TESTED_MAJOR", str(base.PROTOCOL_VERSION // 1000))) + _MINOR

from refitd.protocol import base  # noqa: E402  # it reads the version


def _plain(value: msgspec.Struct) -> Any:
    return _WRITES(msgspec.to_builtins(value, builtin_types=(bytes,)), value)


base.encode = lambda request_id, message: msgpack.packb([request_id, _plain(message)])
base.pack = lambda value: base.zlib.compress(msgpack.packb(_plain(value)), 1)
base.digest_of = lambda value: xxhash.xxh3_128_hexdigest(msgpack.packb(_plain(value)))

from refitd.protocol import channel  # noqa: E402  # it takes `encode` from there


def _notifying(end: type) -> None:
    """Send a notification of an unknown kind after each message."""
    send_frame = end.send_frame

    def send_two(self: Any, *words: Any) -> bool:
        sent: bool = send_frame(self, *words)
        send_frame(self, *words[:-1], msgpack.packb([0, {"type": "OfANewerVersion", "member": "m"}]))
        return sent

    end.send_frame = send_two


if _MINOR > 500:
    _notifying(channel.Router)
    _notifying(channel.Dealer)
