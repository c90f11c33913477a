"""The replica controllers among this node's clients: passes on the coordinator's requests and their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from refitd.daemon.actions import Instruction, ToClient
from refitd.daemon.coordinator_link import CoordinatorLink
from refitd.daemon.members import member_id
from refitd.daemon.pending import ControllerIntroduced
from refitd.daemon.sessions import ClientSession
from refitd.errors import RefusedError
from refitd.events import Log
from refitd.protocol import control, local
from refitd.protocol.base import Message


@dataclass(slots=True)
class LocalController:
    """One controller. `busy` is the swap for which its engine stands still, or may."""

    id: str
    session: int
    pid: int
    asked: control.RegisterController
    busy: str = ""


class LocalControllers:
    """This node's controllers. Instructions go to `out`."""

    def __init__(self, node: str, link: CoordinatorLink, out: Callable[[Instruction], None]) -> None:
        self._node = node
        self._link = link
        self._out = out
        self._all: dict[str, LocalController] = {}

    def register(self, session: ClientSession, request: int, asked: control.RegisterController) -> None:
        """Announce a controller to the coordinator, then answer the client."""
        self._link.check()
        number = self._link.next_number()
        name = member_id(asked.model, f"{asked.replica}:controller", self._node, number)
        found = LocalController(name, session.id, session.pid, asked)
        self._all[found.id] = found
        session.controllers.add(found.id)
        self._announce(session.id, request, found)

    def introduced(
        self, session: ClientSession | None, request: int, about: ControllerIntroduced, reply: Message
    ) -> None:
        """Handle the coordinator's answer about a controller."""
        if isinstance(reply, local.Failure):
            if not request:
                self._out(Log("not-readmitted", {"member": about.member, "reason": reply.message}))
                return
            self._all.pop(about.member, None)
            if session is not None:
                session.controllers.discard(about.member)
                self._out(ToClient(session.id, request, reply))
        elif request and session is not None:
            self._out(ToClient(session.id, request, control.ControllerRegistered(member=about.member)))

    def readmit(self) -> None:
        """Announce every controller to a coordinator that does not know this node."""
        for found in self._all.values():
            self._announce(0, 0, found)

    def _announce(self, session: int, request: int, found: LocalController) -> None:
        message = control.AddController(
            member=found.id,
            model=found.asked.model,
            replica=found.asked.replica,
            pid=found.pid,
            pauses=found.asked.pauses,
            busy=found.busy,
        )
        self._link.ask(session, request, message, ControllerIntroduced(found.id))

    def __contains__(self, member: str) -> bool:
        """Whether this is the id of a controller of this node."""
        return member in self._all

    def remove(self, session: ClientSession, member: str, reason: str) -> None:
        """End a controller's registration."""
        self._own(session, member)
        del self._all[member]
        session.controllers.discard(member)
        self._link.say(control.RemoveController(member=member, reason=reason))

    def told(self, message: control.Control) -> None:
        """Pass the coordinator's request on to a controller."""
        found = self._all.get(message.member)
        if found is not None:
            found.busy = "" if message.what == "resume" else message.swap
            self._out(ToClient(found.session, 0, message))

    def said(self, session: ClientSession, message: control.Controlled) -> None:
        """Pass a controller's answer on to the coordinator."""
        self._own(session, message.member)
        self._link.say(message)

    def _own(self, session: ClientSession, member: str) -> LocalController:
        found = self._all.get(member)
        if found is None or found.session != session.id:
            raise RefusedError(f"{member!r} is not a controller of this session; register again")
        return found
