"""The coordinator's messages to a daemon, and the daemon's heartbeats to it."""

from __future__ import annotations

from refitd.daemon.coordinator_link import COORDINATOR_SILENCE_S
from refitd.daemon.parts import Parts
from refitd.daemon.target_state import Step
from refitd.protocol import cluster, control, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.traces import CollectTrace


class CoordinatorOrders:
    """Routes the coordinator's messages to the parts of the state, says hello, and sends heartbeats."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._live: dict[str, cluster.LiveClaim] = {}  # by model: its latest claims
        self._boot = ""  # of the one that has welcomed this node last
        self._refusal = ""  # why it refuses this node, as last logged

    def said(self, request: int, message: cluster.CoordinatorMessage) -> None:
        """Handle a message of the coordinator."""
        parts = self._parts
        parts.link.heard()
        match message:
            case cluster.HeartbeatAnswer(clock_s):
                parts.clock.heard(request, clock_s, parts.now)
                parts.permits.answered(request)
            case cluster.NodeWelcome(_, boot, lease_s, clock_s):
                self._refusal = ""
                parts.permits.granted(boot, lease_s)
                self._welcomed(boot)
                parts.clock.heard(request, clock_s, parts.now)
                parts.permits.answered(request)
            case local.Failure(code, _) if code == "unknown-node":
                parts.link.boot = ""
                parts.link.fail_all(
                    "the coordinator has restarted, and does not know of this request; `refitctl history` says what "
                    "became of a swap; try again"
                )
                self._hello()
            case local.Failure(code, text) if code == cluster.LEAVES:
                parts.log("coordinator-left", reason=text)
                parts.link.left(text)
            case _ if parts.link.waits_for(request):
                parts.link.reply(request, message)
            case local.Failure(_, text):
                parts.link.unreachable(text)
                if text != self._refusal:  # it is asked every second
                    self._refusal = text
                    parts.log("coordinator-refused", reason=text)
            case cluster.LoadPlan() | cluster.LoadShare():
                parts.plans.load(message)
            case cluster.DropPlan(plan):
                parts.arenas.free(parts.plans.drop(plan))
                parts.cable_tests.drop(plan)
            case cluster.MeasureCable():
                parts.cable_tests.begin(message)
            case cluster.EpochValue():
                parts.epochs.value(message)
            case cluster.LiveIs(live):
                self._live[live.model] = live
            case cluster.MayDrop(member, versions, reason):
                if member in parts.members:
                    parts.publishing.may_drop(parts.members[member], versions, reason)
            case cluster.FenceMember(member, reason):
                if member in parts.members:
                    parts.commits.fence_behind(parts.members[member], reason)
            case cluster.Pause(swap, version, members):
                parts.commits.pause(swap, version, members)
            case cluster.Stage():
                parts.swaps.stage(message)
            case cluster.StageSpare():
                parts.spares.stage(message)
            case CollectTrace():
                parts.link.say(parts.timeline.part(message, parts.node, parts.host, parts.now))
            case cluster.CheckMembers():
                parts.proofs.check(message, parts.now)
            case cluster.DigestRegions():
                parts.regions.begin(message, parts.now)
            case cluster.CommitStaged(swap, version, _, controlled):
                parts.commits.begin(swap, version, controlled)
            case control.Control():
                parts.controllers.told(message)
            case cluster.FlipMember(swap, member, step, origin):
                parts.commits.in_step(member, local.FlipAt(swap, member, step, origin))
            case cluster.PassMember(swap, member):
                parts.commits.in_step(member, local.PassPoll(swap, member))
            case cluster.Abort(swap, reason):
                self._abort(swap, reason)
            case cluster.EvictMember(member, reason):
                self._evict(member, reason)
            case cluster.ForgetRetained(model):
                parts.arenas.free(parts.retained.forget(model))
            case cluster.EndSwap(swap, version, members):
                parts.publishing.release(parts.members.values(), swap)
                parts.publishing.end_unread((parts.members[m] for m in members if m in parts.members), version)
            case _:
                pass  # the reply to a request whose client has gone

    def _evict(self, member_id: str, reason: str) -> None:
        """Remove an evicted target, or a detached source, and tell its client.

        Ignored for a source whose client is connected.
        """
        parts = self._parts
        member = parts.members.get(member_id)
        if member is None or (member.is_source and member.session is not None):
            return
        parts.log("evicted", member=member_id, reason=reason)
        if member.session is not None:
            told = local.Evicted(member=member_id, reason=reason, exchanged=member.exchanged)
            parts.reply(member.session, 0, told)
        parts.drop_member(member, reason, tell=False)

    def _welcomed(self, boot: str) -> None:
        parts = self._parts
        known, parts.link.boot = parts.link.boot, boot
        if known == boot:
            return
        parts.log("coordinator" if self._boot in ("", boot) else "coordinator-changed", boot=boot)
        self._boot = boot
        parts.clock.forget()
        # this coordinator has aborted every undecided swap, but its messages about that may have been lost
        states = [member.state for member in parts.members.values()]
        halted = {state.swap for state in states if state.step in (Step.HALTING, Step.HALTED)}
        begun = parts.swaps.staging() | parts.spares.staging()
        for swap in sorted(begun | {swap for swap in halted if swap is not None}):
            self._abort(swap, "the coordinator was out of reach")
        parts.regions.stop()
        # staged swaps may have been decided and stay staged, but they read their sources no more
        for swap in sorted({swap for member in parts.members.values() for swap in member.read_by()}):
            parts.publishing.release(parts.members.values(), swap)
        parts.arenas.free(parts.plans.drop_all())
        parts.cable_tests.drop_all()
        parts.registrations.readmit()
        parts.controllers.readmit()

    def _abort(self, swap: str, reason: str) -> None:
        parts = self._parts
        parts.spares.abort(swap)
        parts.swaps.abort(swap, reason)
        parts.regions.forget(swap)
        parts.publishing.release(parts.members.values(), swap)

    def _hello(self) -> None:
        live = tuple(self._live.values())
        hello = cluster.NodeHello(protocol=PROTOCOL_VERSION, status=self._parts.status(), live=live, keeps_parts=True)
        self._beat(hello)

    def _beat(self, message: cluster.NodeHello | cluster.NodeUpdate) -> None:
        """Send a heartbeat; its answer renews this node's permits."""
        parts = self._parts
        number = parts.link.next_number()
        parts.permits.sent(number, parts.now)
        parts.clock.sent(number, parts.now)
        parts.link.say(message, number)

    def tick(self) -> None:
        """Send a heartbeat, or say hello; fail what waits for a coordinator that is silent."""
        parts = self._parts
        if parts.link.boot:
            self._beat(parts.update())
            parts.registrations.readmit_refused()
        else:
            self._hello()
        if parts.link.boot and parts.link.is_silent:
            parts.log("coordinator-silent", seconds=parts.link.unheard_s)
            parts.link.boot = ""
            parts.link.fail_all(f"the coordinator has said nothing for {COORDINATOR_SILENCE_S:.0f} s")
