"""Leader election among coordinators: a key in etcd, bound to its owner's lease, whose revision fences writes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable

from refitd.config import EtcdPlace
from refitd.coordinator.journals.base import LeadLost
from refitd.coordinator.journals.gateway import Gateway, Json, NotReached, Refused, decoded, encoded, number
from refitd.errors import CommitError
from refitd.text import brief, printable

# How long a leader that etcd does not hear remains leader; etcd grants at least 2 s. A leader that cannot renew its
# lease stops before etcd lets another one lead.
LEASE_S = 5

# How often the lease is renewed, and how long the coordinator's loop waits for that.
RENEW_S, RENEWING_S = 1.0, 0.9

# How often a standby tries to take the lead, and how long it waits for the answers.
LOOK_S, LOOKING_S = 0.5, 2.0


def boot_clock() -> float:
    """Return seconds that no clock adjustment changes and that go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lead:
    """The right to write one journal. It is tried for until `attempt` returns "", and kept by `renew`.

    Attributes:
        gateway: the way to etcd.
        key: the leader's key in etcd.
        revision: the revision at which this process took the lead, which every write is compared with; 0 before.
    """

    def __init__(
        self, gateway: Gateway, place: EtcdPlace, endpoint: str, clock: Callable[[], float] = boot_clock
    ) -> None:
        """`endpoint` is where this coordinator will listen, for people."""
        self.gateway, self.key, self.revision = gateway, f"{place.prefix}/leader".encode(), 0
        self._clock = clock
        me = {"endpoint": endpoint, "host": socket.gethostname(), "pid": os.getpid()}
        self._value = json.dumps(me).encode()
        self._lease = 0
        self._until = self._renewed = 0.0

    def attempt(self) -> str:
        """Take the lead if nobody has it; return who else leads, "" if this process does now.

        Raises:
            NotReached: etcd does not answer; try again.
            Refused: etcd refuses, for a reason that does not pass by itself.
        """
        found = self.gateway.ask("kv/range", {"key": encoded(self.key)}, LOOKING_S).get("kvs")
        if found and not self._is_mine(found[0]):
            return _named(found[0])
        if found:  # an attempt whose answer was lost
            self.revision = number(found[0].get("create_revision"))
        else:
            asked = self._clock()
            granted = self.gateway.ask("lease/grant", {"TTL": str(LEASE_S)}, LOOKING_S)
            self._lease, self._until = number(granted.get("ID")), asked + LEASE_S
            if other := self._take():
                return other
        self._renewed = -RENEW_S
        self.renew()
        return ""

    def _take(self) -> str:
        key, value = encoded(self.key), encoded(self._value)
        body = {
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": value, "lease": str(self._lease)}}],
            "failure": [{"request_range": {"key": key}}],
        }
        answer = self.gateway.ask("kv/txn", body, LOOKING_S)
        if answer.get("succeeded"):
            self.revision = number(answer["header"]["revision"])
            return ""
        found = ranged(answer, 0)
        if found is None:
            return "nobody yet"  # the key was removed between comparing and reading
        if not self._is_mine(found):
            return _named(found)
        self.revision = number(found.get("create_revision"))
        return ""

    def _is_mine(self, found: Json) -> bool:
        return bool(self._lease) and number(found.get("lease")) == self._lease

    def renew(self) -> None:
        """Renew the lease if that is due; call it each second.

        Raises:
            LeadLost: the lease has run out, or will before it can be renewed.
        """
        self.check()
        now = self._clock()
        if now - self._renewed < RENEW_S:
            return
        self._renewed = now
        try:
            answer = self.gateway.ask("lease/keepalive", {"ID": str(self._lease)}, RENEWING_S)
        except (NotReached, Refused):
            self.check()
            return
        if not number(answer.get("TTL")):
            raise LeadLost("etcd has let this coordinator's lease run out; another one may lead")
        self._until = now + LEASE_S  # etcd's count starts later
        self.check()

    def check(self) -> None:
        """Raise LeadLost if the lease may have run out."""
        if (late_s := self._clock() - self._until) >= 0:
            raise LeadLost(
                f"this coordinator's lease in etcd ran out {late_s:.1f} s ago: it was stopped, or cut off from etcd; "
                "another one may lead"
            )

    def release(self) -> None:
        """Let another one lead at once, if etcd answers."""
        if self._lease:
            with contextlib.suppress(CommitError):  # the lease expires by itself
                self.gateway.ask("lease/revoke", {"ID": str(self._lease)}, RENEWING_S)
            self._lease = 0


def ranged(answer: Json, index: int) -> Json | None:
    """Return the key that the `index`-th read of a transaction has found, if any."""
    responses = answer.get("responses") or []
    found = responses[index].get("response_range", {}).get("kvs") if index < len(responses) else None
    return found[0] if found else None


def _named(found: Json) -> str:
    try:
        who = json.loads(decoded(found.get("value")))
        return brief(printable(f"{who['endpoint']} (host {who['host']}, pid {who['pid']})"))
    except (ValueError, KeyError, TypeError):
        return "a process that does not say who it is"
