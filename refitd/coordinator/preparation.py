"""Prepare a swap for staging: a plan on every node, an epoch between nodes, sources compared and equal.

An epoch (epochs.py) is a number and a key for the nodes between which a plan moves bytes. The regions that several
source ranks hold are compared by digests, until they are found equal; they are compared again once a source rank
registers again or provides other tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from refitd.clusters import ClusterSpeeds
from refitd.commit import swap_events
from refitd.commit.decision import Phase
from refitd.coordinator.actions import Answer, MakePlan, Planned, Waiter
from refitd.coordinator.eligibility import unoffered
from refitd.coordinator.epochs import GPU_SERVICES, HOST_SERVICE, RELAYING_SERVICES, new_epoch
from refitd.coordinator.fleet import ModelState, PlanRequest, RegionComparison, Running, Turn
from refitd.coordinator.members import Member, Membership
from refitd.coordinator.paths import Wiring, abilities_of
from refitd.coordinator.plan_reports import plan_answer
from refitd.coordinator.plans import GPU_ONLY, LoadedPlan
from refitd.coordinator.schedule import gave_way, no_plan, without_unread
from refitd.errors import PlanError, RefitdError
from refitd.protocol import cluster, local
from refitd.states import SwapCause

# Share of a comparison's timeout given to nodes: their errors, which name the late process, must arrive first.
NODE_SHARE = 0.9


def begin(turn: Turn, state: ModelState, running: Running) -> None:
    """Prepare the swap of a model that has just begun."""
    if running.flips_back:  # no bytes move, so it needs no plan
        turn.post(running.swap.swap, _ready(running))
        return
    is_of_all = running.membership is state.membership
    relayed = is_of_all and state.plan is not None and state.plan.routed.relays.paths
    if relayed and state.plan is not None and not _is_in_order(turn, state.membership, state.plan):
        members_changed(turn, state)
    if is_of_all and state.plan is not None:
        _plan_ready(turn, running, state.plan)
    else:
        # only the present members: a rank that joins while the plan is made is caught up afterwards
        running.membership = running.membership.only({replica for replica, _ in running.membership.targets})
        event = _ask(turn, running.membership, running.swap.swap)
        if event is not None:
            planned(turn, event)


def planned(turn: Turn, event: Planned) -> None:
    """Handle a finished plan; the swap that waits for it continues, or aborts with the reason."""
    found = _receive(turn, event)
    if found is None:
        return
    running, plan = found
    if isinstance(plan, str):
        no_plan(running.membership)
        text = f"the plan was refused: {'; '.join(plan.splitlines())}"
        turn.post(running.swap.swap, swap_events.AbortAsked(text, SwapCause.PLAN))
    else:
        _plan_ready(turn, running, plan)


def go_on(turn: Turn, running: Running) -> None:
    """Continue a swap that has its plan, and whose sources could not be compared before they had published."""
    if running.swap.phase is Phase.IDLE and running.plan is not None and running.comparison is None:
        _plan_ready(turn, running, running.plan)


def _plan_ready(turn: Turn, running: Running, plan: LoadedPlan) -> None:
    if plan.has_regions and not _sources_are_equal(turn, running, plan):
        return
    if running.membership.seeds:
        without_unread(running, plan)
    membership = running.membership
    senders = [member for _, member in sorted(membership.sources.items()) if plan.members[member.id] in plan.senders]
    if gone := [m for m in senders if running.version not in {*m.source.versions, m.source.begun}]:
        reason = f"{gone[0].describe()}: version {running.version} was replaced by newer ones before it was read"
        turn.post(running.swap.swap, swap_events.AbortAsked(reason, SwapCause.OVERTAKEN))
        return
    if plan.moves_between and plan.epoch is None:
        try:
            plan.epoch, plan.gpu_of = new_epoch(turn, plan, membership)
        except PlanError as exc:
            turn.post(running.swap.swap, swap_events.AbortAsked(str(exc), SwapCause.PLAN))
            return
    running.plan = plan
    turn.post(running.swap.swap, _ready(running))


def _ready(running: Running) -> swap_events.PlanReady:
    """Return the event that begins the transfer with the swap's plan, or the exchange of arenas without one."""
    targets, plan = running.membership.targets.values(), running.plan
    ranks = {m.id: m.node for m in targets}
    nodes = frozenset(ranks.values())
    nbytes, loaded = 0, nodes
    if plan is not None:
        nodes |= frozenset(plan.epoch.nodes if plan.epoch is not None else ())  # some have no targets
        nbytes = plan.nbytes + sum(m.added.converted_bytes for m in targets)
        loaded = nodes & plan.loaded_on
    pausing = [c for c in running.controllers if c.added.pauses]
    written = {m.added.replica for m in targets if m.added.in_place}
    return swap_events.PlanReady(
        members=ranks | {c.id: c.node for c in running.controllers},
        nodes=nodes,
        bytes_total=nbytes,
        asked=frozenset(c.id for c in pausing),
        halts=frozenset(c.id for c in pausing if c.added.replica in written),
        in_place=frozenset(m.id for m in targets if m.added.in_place),
        loaded=loaded,
        publishing=running.membership.writing(running.version),
    )


# Nodes that are sent their plan in one turn: 0.2 ms each.
LOADS_PER_TURN = 64


def send_plans(turn: Turn) -> None:
    """Send the next nodes their plans. The swap of a plan may have ended since."""
    unsent = turn.fleet.unsent
    for _ in range(min(len(unsent), LOADS_PER_TURN)):
        swap, node = unsent.popleft()
        state = turn.fleet.swapping.get(swap)
        if state is not None and (running := state.running) is not None and running.swap.phase is Phase.PLANNED:
            load(turn, running, node)


def load(turn: Turn, running: Running, node: str) -> None:
    """Send a node its share of the running swap's plan."""
    plan, known = running.plan, turn.fleet.nodes.get(node)
    if plan is not None and known is not None:
        seeds = [member.id for member in running.membership.seeds.values()]
        turn.to_node(node, plan.message(running.swap.model, seeds, node, known.held))


# --- requests for plans -----------------------------------------------------------------------------------


def show(turn: Turn, state: ModelState, viewer: Waiter) -> None:
    """Answer an operator's request once the plan exists.

    Raises:
        PlanError: targets want parts that no source offers.
    """
    if problems := unoffered(state.membership):
        raise PlanError(problems)
    if state.plan is not None:
        turn.effects.append(_answered(turn, viewer, state, state.membership, state.plan))
        return
    event = _ask(turn, state.membership.only({replica for replica, _ in state.membership.targets}), viewer)
    if event is not None:
        _receive(turn, event)


def _answered(turn: Turn, viewer: Waiter, state: ModelState, membership: Membership, plan: LoadedPlan) -> Answer:
    return plan_answer(viewer, membership, plan, wiring_of(turn, membership.members(), plan), state.last)


def wiring_of(turn: Turn, members: Iterable[Member], plan: LoadedPlan) -> Wiring:
    """Return what decides the paths of a plan for these members. Until its epoch is formed: services as configured."""
    fleet, on_gpus = turn.fleet, [m for m in members if m.added.device and m.id in plan.members]
    device_of = {plan.members[m.id]: m.added.device for m in on_gpus}
    here = {m.node: fleet.nodes[m.node].status for m in on_gpus if m.node in fleet.nodes}
    abilities = {node: abilities_of(status) for node, status in here.items()}
    epoch, service = plan.epoch, fleet.config.transport.service
    if epoch is not None:
        return Wiring(device_of, abilities, epoch.service, epoch.gpu_service, frozenset(plan.gpu_of))
    in_lanes = HOST_SERVICE if service in GPU_ONLY else service
    if service in GPU_SERVICES and not plan.routed.relays.paths:
        return Wiring(device_of, abilities, in_lanes, service, frozenset(device_of))
    return Wiring(device_of, abilities, in_lanes)


def _ask(turn: Turn, membership: Membership, who: str | Waiter) -> Planned | None:
    """Request a plan for these members from a background thread; return the result if it is cached, for `_receive`."""
    fleet, pools = turn.fleet, membership.pools()
    cached = fleet.plans.get(pools, fleet.speeds)
    ticket = fleet.number("plan")
    fleet.plan_requests[ticket] = PlanRequest(membership.name, who, membership, pools, fleet.speeds)
    if cached is not None and _is_in_order(turn, membership, cached):
        return Planned(ticket, cached)
    try:
        rosters = fleet.descriptions.reader.rosters(pools)
    except RefitdError as exc:  # an unreadable description: end the swap now, not at its deadline
        return Planned(ticket, None, exc)
    transport = fleet.config.transport
    may_relay = transport.relays and transport.service in RELAYING_SERVICES
    turn.effects.append(MakePlan(ticket, rosters, may_relay, _without_base(turn, membership), fleet.speeds))
    return None


def _is_in_order(turn: Turn, membership: Membership, plan: LoadedPlan) -> bool:
    """Return whether the nodes without a base come last on the relay paths of a plan for these members.

    The copies of a plan stay right, but nodes may lose their base after it was made.
    """
    relays = plan.routed.relays
    return not relays.paths or relays.puts_last(_without_base(turn, membership))


def _without_base(turn: Turn, membership: Membership) -> frozenset[str]:
    """Return the nodes with a target that can use no delta.

    It does not serve the live version, its daemon distrusts its base, or it is written in place.
    """
    state = turn.fleet.models.get(membership.name)
    live = None if state is None else state.live
    return frozenset(
        m.node
        for m in membership.targets.values()
        if m.added.in_place or m.arenas.lacks_base or (live is not None and not live.is_at(m.version, m.run))
    )


def _receive(turn: Turn, event: Planned) -> tuple[Running, LoadedPlan | str] | None:
    """Cache a requested plan, and answer an operator.

    Returns:
        (swap, plan or the reason for its refusal) if a running swap requested it, else None.
    """
    fleet = turn.fleet
    asked = fleet.plan_requests.pop(event.ticket)
    who, membership, plan = asked.who, asked.membership, event.plan
    state = fleet.models.get(asked.model)
    if plan is not None and state is not None:
        fleet.plans.put(asked.pools, asked.speeds, plan)
        plan, ranks = plan.unloaded(), membership.ranks()
        plan.belongs_to(membership.name, ranks)
        is_all = membership is state.membership or ranks == state.membership.ranks()
        if is_all and not membership.seeds and asked.speeds == fleet.speeds:
            state.plan = plan
    error = str(event.error) if event.error else ""  # one reason per line
    if not isinstance(who, str):
        if plan is None or state is None:
            turn.send(who, local.Failure(code=PlanError.code, message=error or "the model has left"))
        else:
            turn.effects.append(_answered(turn, who, state, membership, plan))
        return None
    if state is None or state.running is None or state.running.swap.swap != who:
        return None
    return state.running, error if plan is None else plan


# --- what nodes say about plans ---------------------------------------------------------------------------


def loaded(turn: Turn, node: str, message: cluster.PlanLoaded) -> None:
    """Note that a node has a plan and its epoch."""
    for running, plan in _using(turn, message.plan, message.epoch, node):
        plan.loaded_on.add(node)
        # a swap that gives way ends once its epoch is formed, before anything is copied
        ends = running.gives_way and running.swap.waiting <= {node}
        turn.post(running.swap.swap, gave_way() if ends else swap_events.NodeLoaded(node))


def lacks_parts(turn: Turn, node: str, message: cluster.PlanLoaded) -> None:
    """Send a plan again with all of its parts: the node lost some, or never got them."""
    plan, epoch, missing = message.plan, message.epoch, message.missing
    turn.log("plan-parts-missing", plan=plan, node=node, missing=missing)
    known = turn.fleet.nodes.get(node)
    if known is None:
        return
    known.held.forget()
    for running, used in _using(turn, plan, epoch, node):
        if node in used.given_whole:
            reason = f"it lacks {missing} parts of the plan, which was sent with all of them"
            lost(turn, node, plan, epoch, f"node {node}", reason)
            return
        used.given_whole.add(node)
        load(turn, running, node)


def lost(turn: Turn, node: str, plan: str, epoch: str, where: str, reason: str) -> None:
    """Abort the swaps that use a plan or epoch which a node lost; the next swap loads it again."""
    turn.log("plan-lost", plan=plan, epoch=epoch, node=node, where=where, reason=reason)
    for running, _ in _using(turn, plan, epoch, node):
        turn.post(running.swap.swap, swap_events.PlanLost(node, where, reason))
    for state in turn.fleet.models.values():
        of_model = state.plan
        if of_model is not None and of_model.id == plan and of_model.epoch is not None and of_model.epoch.id == epoch:
            _drop(turn, of_model)


def members_changed(turn: Turn, state: ModelState) -> None:
    """Drop the plan: the next swap needs a new one. A running swap keeps its own."""
    plan, state.plan = state.plan, None
    if plan is not None and (state.running is None or state.running.plan is not plan):
        _drop(turn, plan)


def use_speeds(turn: Turn, speeds: ClusterSpeeds | None) -> None:
    """Use these cable speeds in plans from the next swap on; None: all cables are equally fast."""
    if speeds != turn.fleet.speeds:
        turn.fleet.speeds = speeds
        for state in turn.fleet.models.values():
            members_changed(turn, state)


def ended(turn: Turn, state: ModelState, running: Running) -> None:
    """Release what was prepared for a swap that is over. An epoch does not outlive a failed one."""
    plan, of_model, is_aborted = running.plan, state.plan, running.swap.phase is Phase.ABORTED
    if is_aborted and plan is not None and plan.epoch is not None:
        # workers that still copy are replaced, and every epoch that they are in ends with them
        if of_model is not None and of_model is not plan and of_model.epoch is not None:
            _drop(turn, of_model)
        _drop(turn, plan)
    elif plan is not None and plan is not of_model:
        _drop(turn, plan)
    if is_aborted and running.comparison is not None:
        for node in running.comparison.nodes:  # nodes stop digesting and release the versions
            turn.to_node(node, cluster.Abort(swap=running.swap.swap, reason=running.swap.reason))


def _using(turn: Turn, plan: str, epoch: str, node: str) -> list[tuple[Running, LoadedPlan]]:
    """Return the running swaps that use this plan, in the epoch that this node reports."""
    return [
        (running, used)
        for state in turn.fleet.models.values()
        if (running := state.running) is not None
        and (used := running.plan) is not None
        and used.id == plan
        and used.epoch_of(node) == epoch
    ]


def _drop(turn: Turn, plan: LoadedPlan) -> None:
    """Tell every node to drop a plan. If it is used again, it is loaded again with a new epoch."""
    nodes = plan.loaded_on | set(plan.epoch.nodes if plan.epoch is not None else ())
    plan.loaded_on, plan.given_whole, plan.epoch = set(), set(), None
    for name in sorted(nodes):
        turn.to_node(name, cluster.DropPlan(plan=plan.id))


# --- comparison of sources --------------------------------------------------------------------------------


def _sources_are_equal(turn: Turn, running: Running, plan: LoadedPlan) -> bool:
    """Return whether the regions that several sources hold are known to be equal; if not, request digests."""
    membership, swap, regions = running.membership, running.swap, plan.regions
    is_compared = running.comparison is not None  # for this swap
    # the bytes of seeds were compared when the version went live
    if is_compared or not membership.check_replicas or membership.seeds:
        return True
    # a rank that is not read may have dropped the version; a later swap compares it
    held = [
        member
        for rank, member in sorted(membership.sources.items())
        if rank in regions.holder_of and swap.version in {*member.source.versions, member.source.begun}
    ]
    content = [regions.digest, *(f"{member.id} {member.source.contents}" for member in held)]
    key = xxhash.xxh3_128_hexdigest("\0".join(content).encode())
    late = membership.writing(swap.version) & {member.id for member in held}
    if not held or membership.compared.get(key):
        running.compared_before = bool(late)
        return True
    if late:  # compared once it is complete
        running.plan = plan
        return False
    timeout_s = NODE_SHARE * (swap.deadline - turn.now)
    comparison = RegionComparison(key, regions, held, turn.now + timeout_s)
    turn.log("comparing", swap=swap.swap, regions=len(regions), nodes=", ".join(comparison.nodes))
    running.plan, running.comparison = plan, comparison
    for node, request in comparison.requests(swap.swap, swap.version, running.run, NODE_SHARE * timeout_s):
        turn.to_node(node, request)
    return False


def digested(turn: Turn, node: str, message: cluster.RegionsDigested) -> None:
    """Handle a node's digests; after the last the swap continues with its plan, or aborts naming the differences."""
    state = turn.fleet.swapping.get(message.swap)
    running = None if state is None else state.running
    comparison = None if running is None else running.comparison
    if running is None or comparison is None or not comparison.waiting:
        return  # the swap has ended
    problem = ""
    if message.reason:
        problem = f"comparing the sources of {running.swap.model!r}: {message.reason}"
    elif not comparison.answered(node, message.digests):
        return
    elif problems := comparison.problems():
        advice = f"[models.{running.swap.model}] check_replicas = false at the coordinator swaps all the same"
        problem = f"{'; '.join(problems)} ({advice})"
    if problem:
        turn.post(running.swap.swap, swap_events.AbortAsked(problem, SwapCause.SOURCES_DIFFER))
        return
    running.membership.compared.put(comparison.key, True)
    if running.plan is not None:
        _plan_ready(turn, running, running.plan)


def tick(turn: Turn, running: Running) -> None:
    """Abort a swap whose sources have not been compared in time."""
    comparison, swap = running.comparison, running.swap
    if comparison is None or not comparison.waiting or turn.now < comparison.deadline:
        return
    late = (
        f"nodes {', '.join(sorted(comparison.waiting))}: what several sources hold is not compared after "
        f"{turn.now - swap.entered[swap.phase]:.1f} s (look at their workers, allow more time, or set "
        f"[models.{swap.model}] check_replicas = false at the coordinator)"
    )
    turn.post(swap.swap, swap_events.AbortAsked(late, SwapCause.DEADLINE))
