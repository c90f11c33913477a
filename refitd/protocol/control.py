"""Messages about replica controllers: one process that pauses, commits and resumes an engine for all of its ranks."""

from __future__ import annotations

from typing import Literal

import msgspec

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Text, clipped


class RegisterController(Message, frozen=True):
    """Client to daemon: control a replica of `model`. Reply: ControllerRegistered. `pauses`: it has a pause hook."""

    model: Name
    replica: Name
    pauses: bool = False


class ControllerRegistered(Message, frozen=True):
    """Daemon to client: the controller's id."""

    member: Name


class AddController(Message, frozen=True):
    """Daemon to coordinator: a client controls this replica. Reply: Done, or Failure, which undoes the registration.

    `busy` is the swap for which its engine stands still, if the daemon announces it to a restarted coordinator.
    """

    member: Name
    model: Name
    replica: Name
    pid: Count
    pauses: bool = False
    busy: Label = ""


class RemoveController(Message, frozen=True):
    """Daemon to coordinator: the controller has left or died."""

    member: Name
    reason: Text


class Control(Message, frozen=True):
    """Coordinator to daemon to client: pause the engine, let all its ranks commit, or resume it.

    `version` is the version that will be live ("pause", "commit"), or that the replica serves ("resume"; None: it must
    serve nothing).
    """

    member: Name
    swap: Name
    what: Literal["pause", "commit", "resume"]
    version: Count | None = None


class Controlled(Message, frozen=True):
    """Client to daemon to coordinator: a "pause" or "commit" has returned; with a `reason` it has failed."""

    member: Name
    swap: Name
    what: Literal["pause", "commit"]
    paused_s: Seconds = 0.0
    reason: Text = ""

    def __post_init__(self) -> None:
        # the reason quotes the engine's errors; a too long one would be refused, and the failure lost
        msgspec.structs.force_setattr(self, "reason", clipped(self.reason))
