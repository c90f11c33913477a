"""Versions of the protocol: who understands whom, and what is said to those who do not."""

from __future__ import annotations

from refitd.errors import ProtocolError
from refitd.protocol.base import PROTOCOL_VERSION

_MINORS = 1000  # a version is 1,000 x major + minor


def shown(version: int) -> str:
    """Return a version as text: "3.1"."""
    major, minor = divmod(version, _MINORS)
    return f"{major}.{minor}" if major else str(version)


def check(theirs: int, peer: str, me: str) -> None:
    """Check that a peer has this process's major version; who has which minor version does not matter.

    Raises:
        ProtocolError: names both ends with their versions, and what to do.
    """
    if theirs // _MINORS != PROTOCOL_VERSION // _MINORS:
        raise ProtocolError(
            f"{peer} speaks protocol {shown(theirs)}, {me} {shown(PROTOCOL_VERSION)}: the numbers before the point "
            "must be the same; install a refitd with the same one at both ends (docs/upgrades.md)"
        )
