"""Epochs: the services, lanes and keys of the workers between which a plan moves bytes, and where they listen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

from refitd.coordinator.fleet import Turn
from refitd.coordinator.members import Membership
from refitd.coordinator.plans import GPU_ONLY, LoadedPlan, groups_of
from refitd.errors import PlanError
from refitd.protocol import cluster
from refitd.protocol.base import Secret
from refitd.protocol.reports import NodeStatus

# services whose ranks may pass on what they receive (copy_services/windows.py)
RELAYING_SERVICES = frozenset({"gloo", "nixl"})
# configured service -> the services between GPUs, the first that all nodes have
GPU_SERVICES = {"nccl": ("nccl", "nvshmem"), "nvshmem": ("nvshmem", "nccl"), "nixl": ("nixl",)}
HOST_SERVICE = "gloo"
MAX_GROUP = 1024  # GPUs; each worker of a group connects to all others


def new_epoch(turn: Turn, plan: LoadedPlan, membership: Membership) -> tuple[cluster.EpochPlan, dict[int, str]]:
    """Return a new epoch of a plan's nodes, and plan-wide rank -> GPU of the ranks in its group of GPUs.

    The epoch is formed while the plan is loaded.

    Raises:
        PlanError: no service between nodes can run on all of them.
    """
    fleet, transport = turn.fleet, turn.fleet.config.transport
    nodes = tuple(sorted(plan.routed.links.nodes() & fleet.nodes.keys()))
    status = {name: fleet.nodes[name].status for name in nodes}
    lanes = min((len(s.workers) for s in status.values()), default=1)
    wanted = () if transport.service in GPU_ONLY else (transport.service,)
    service = _service_on(turn, (*wanted, HOST_SERVICE), status)
    among_gpus = GPU_SERVICES.get(transport.service, ())
    # relays pass on what they hold in main memory or on a GPU, so all of them are in the lanes
    gpu_of = _gpus_of(plan, membership) if among_gpus and not plan.routed.relays.paths else {}
    gpus = {name: set[str]() for name in nodes}
    gpu_of = {rank: gpu for rank, gpu in gpu_of.items() if plan.routed.node_of[rank] in gpus}
    for rank, gpu in gpu_of.items():
        gpus[plan.routed.node_of[rank]].add(gpu)
    gpu_service = ""
    if gpu_of:
        mine = {name: status[name] for name in nodes if gpus[name]}
        gpu_service = _service_on(turn, (*among_gpus, HOST_SERVICE), mine)
    if gpu_service not in among_gpus:
        gpu_service, gpu_of = "", {}
    gpus_of = tuple(tuple(sorted(gpus[name])) for name in nodes) if gpu_of else ()
    met = plan.routed.links.neighbours()
    if gpu_service in GPU_ONLY:
        _check_groups(met, gpus, gpu_service)
    beside = [sum(len(gpus[other]) for other in {name} | met[name] if other in gpus) for name in nodes]
    epoch = cluster.EpochPlan(
        id=f"{fleet.boot}.{fleet.number('epoch')}",
        service=service,
        nodes=nodes,
        hosts=tuple(s.host for s in status.values()),
        lanes=min(transport.lanes, lanes) if transport.lanes else lanes,
        staging_bytes=transport.staging_bytes,
        # shorter than the phase: the workers' errors, which name the missing one, must arrive first
        timeout_s=0.9 * fleet.config.deadlines.plan_s,
        key=Secret(fleet.ids.key()),
        gpu_service=gpu_service,
        gpus=gpus_of,
        doors=tuple(tuple(_door(s, lane) for lane in range(len(s.lanes))) for s in status.values()),
        gpu_doors=tuple(
            tuple(_door(s, _worker_of(s, gpu)) for gpu in on) for s, on in zip(status.values(), gpus_of, strict=False)
        ),
        hops=max((len(path.nodes) + 1 for path in plan.routed.relays.paths), default=1),
        peers=max((len(met[name]) for name in nodes), default=1),
        gpu_peers=max(1, *(count - 1 for count in beside)) if gpu_service not in GPU_ONLY else 0,
    )
    return epoch, gpu_of


def _door(status: NodeStatus, worker: int) -> str:
    """Return where a worker of a node listens; "" if its daemon does not tell."""
    port = status.lanes[worker].port if worker < len(status.lanes) else 0
    host = f"[{status.address}]" if ":" in status.address else status.address
    return f"{host}:{port}" if port else ""


def _worker_of(status: NodeStatus, gpu: str) -> int:
    """Return the worker of a GPU (refitd.daemon.jobs.WorkerArenas.home)."""
    known = [worker for worker, lane in enumerate(status.lanes) if lane.gpu == gpu]
    return known[0] if known else crc32(gpu.encode()) % max(1, len(status.workers))


def _check_groups(met: Mapping[str, set[str]], gpus: Mapping[str, set[str]], service: str) -> None:
    """Raise PlanError if GPUs that exchange, directly or through others, are too many for one group of a service."""
    for group in groups_of(met, [name for name, on in gpus.items() if on]):
        if (count := sum(len(gpus[name]) for name in group)) > MAX_GROUP:
            raise PlanError(
                [
                    f"{service} needs one group of the {count} GPUs of nodes {group[0]} to {group[-1]}, which exchange "
                    f"with each other or through others; a group may have {MAX_GROUP}, because each of its workers "
                    'connects to all others; set transport.service = "nixl" or "gloo"'
                ]
            )


def _service_on(turn: Turn, wanted: Sequence[str], status: Mapping[str, NodeStatus]) -> str:
    """Return the first of the wanted services that can run on all of these nodes.

    Raises:
        PlanError: none can; names the nodes and their services.
    """
    lacking = {
        service: [name for name, s in status.items() if s.services and service not in s.services]
        for service in dict.fromkeys(wanted)
    }
    for service, nodes in lacking.items():
        if not nodes:
            if service != wanted[0]:
                missing = ", ".join(lacking[wanted[0]])
                turn.log("service-missing", service=wanted[0], nodes=missing, instead=service)
            return service
    told = "; ".join(f"node {name}: {', '.join(status[name].services) or 'none'}" for name in sorted(status))
    raise PlanError(
        [
            f"transport.service is {turn.fleet.config.transport.service!r}, and no service between nodes can run on "
            f"all of them: expected one of {', '.join(lacking)}, found {told}; install one of these on each (`refitctl "
            "doctor` says how)"
        ]
    )


def _gpus_of(plan: LoadedPlan, membership: Membership) -> dict[int, str]:
    """Return plan-wide rank -> GPU; {} unless GPUs of different nodes send and receive.

    Only ranks whose arenas are all on one GPU count: the lanes move the rows of other ranks.
    """
    sends, receives = dict[int, str](), dict[int, str]()
    for member in membership.members():
        rank, gpu = plan.members.get(member.id, -1), member.added.device
        if gpu and rank in plan.senders:
            sends[rank] = gpu
        elif gpu and rank >= 0 and member.added.role == "target":
            receives[rank] = gpu
    node_of = plan.routed.node_of
    both = sends | receives
    return both if sends and receives and len({node_of[rank] for rank in both}) > 1 else {}
