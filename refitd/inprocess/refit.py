"""The in-process API: every process of a group calls these functions together, and weights move between them.

    swap_model_weights(trainer_model, engine_model, "gloo")      both here, one of them, or neither (None)

    plan = build_centralized_reshard_plan(trainer_model, engine_model)
    execute_reshard_plan(plan, trainer_model, engine_model, service)      as often as wanted

Each call describes the modules as they are, so a layout that has changed never meets an old plan: the first call
makes a new one, the last refuses. Nothing is pickled, every wait has a deadline, tensors are written in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from refitd.caches import BoundedCache
from refitd.copy_services.exchange import ExchangeResult, ExchangeService
from refitd.copy_services.peers import Deadline, Group, Peers
from refitd.copy_services.registry import installed
from refitd.errors import ConfigError
from refitd.inprocess.agree import PlanCache, agree_on_plan
from refitd.inprocess.compare_regions import compare_regions
from refitd.inprocess.execute import execute
from refitd.inprocess.request import Request
from refitd.inprocess.reuse import AgreedPlan, agreed_plan, collect_for

if TYPE_CHECKING:
    import torch
    from torch import nn

    from refitd.describe.ties import Aliases
    from refitd.transforms.base import ReshardTransform

RefitBackendName = Literal["gloo", "nccl", "nvshmem"]
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RefitCaches:
    """What is kept between refits: plans by (group, digest of all layouts), services by (backend, group)."""

    plans: PlanCache = field(default_factory=lambda: BoundedCache(16))
    services: BoundedCache[tuple[str, Any], ExchangeService] = field(
        default_factory=lambda: BoundedCache(8, release=lambda service: service.close())
    )


# the one owner of caches in this module, which the clear_* functions are about
_caches = RefitCaches()


def build_centralized_reshard_plan(
    src_module: nn.Module | Sequence[nn.Module] | None,
    dst_module: nn.Module | Sequence[nn.Module] | None,
    num_experts: int | None = None,
    group: Group = None,
    *,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    casts: Mapping[str, torch.dtype] | None = None,
    aliases: Aliases | None = None,
    transform: ReshardTransform | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> AgreedPlan:
    """Describe both modules on every rank, plan on rank 0 for all, and return this rank's sends and receives.

    Collective over the group. `execute_reshard_plan` executes the plan, which remembers what it was asked for with.

    Args:
        src_module: what this rank can send; None on ranks that hold no source.
        dst_module: what this rank is to receive; None on ranks that hold no destination.
        num_experts: experts in the whole model; by default the modules' `config.num_moe_experts`.
        group: a torch process group of all ranks that take part; None is the default group.
        src_rank_offset: added to every rank in the source's parallel groups, where those number the ranks of a
            world of their own.
        dst_rank_offset: the same for the destination's.
        casts: canonical names (or patterns with "*") of tensors whose source values may be converted, and the
            dtype that the destination has. Other differences of dtype are refused.
        aliases: canonical name -> the other canonical names of the same weight, for ties that the modules do not
            show. Tied parameters and Megatron's shared embeddings are found without it.
        transform: what changes on the way for some parameters; only needed here where it changes the dtype that
            travels, and the default of every execution.
        timeout: seconds until every wait of this call ends.

    Raises:
        PlanError: on every rank with the same words: everything that stands in the way, on any rank.
        DeadlineExceeded, PeerLost: a rank did not take part.
    """
    offsets = src_rank_offset, dst_rank_offset
    request = Request(src_module, dst_module, num_experts, *offsets, casts, transform, aliases, is_plan_only=True)
    plan, tensors = agree_on_plan(request, Peers(group), Deadline.after(timeout), _caches.plans)
    return agreed_plan(plan, request, tensors.described)


def execute_reshard_plan(
    plan: AgreedPlan,
    src_module: nn.Module | Sequence[nn.Module] | None,
    dst_module: nn.Module | Sequence[nn.Module] | None,
    service: ExchangeService,
    group: Group = None,
    transform: ReshardTransform | None = None,
    *,
    aliases: Aliases | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
    check_replicas: bool = True,
) -> ExchangeResult:
    """Move the weights of `src_module` into `dst_module` as a plan says that was built before, in place.

    Collective over the group: each rank passes its own part of one plan. What holds for tensors, and for targets
    after an error, is as in `reshard_model_weights`. The modules may be others than those that the plan was built
    from, of the same layout: names, shapes, dtypes, placement and ties.

    Args:
        plan: from `build_centralized_reshard_plan`.
        src_module: what this rank sends; None where it had no source when the plan was built.
        dst_module: what this rank receives; None where it had no destination.
        service: from `get_or_create_service`, or one's own.
        group: the ranks that take part; None is the service's group.
        transform: what changes on the way for some parameters; None is the transform that the plan was built with.
        aliases: declared ties; None are those that the plan was built with.
        timeout: seconds until every wait of this call ends.
        verify: compare digests of what was read with what was written; the same on every rank.
        check_replicas: see `reshard_model_weights`.

    Returns:
        What this rank sent and received.

    Raises:
        PlanError: on every rank: a rank has another plan, or modules that the plan was not built for. Nothing has
            been written.
        RefusedError, TransportError, RefitFailed: see `reshard_model_weights`.
    """
    peers, deadline = _meeting(service, group), Deadline.after(timeout)
    given: dict[str, Any] = {"transform": transform, "aliases": aliases}
    changes = {name: value for name, value in given.items() if value is not None}
    changes |= {"source": src_module, "destination": dst_module, "check_replicas": check_replicas}
    tensors, compares = collect_for(plan, changes, peers, deadline)
    if compares:
        compare_regions(plan.part, tensors, peers, deadline)
    through = plan.transform if transform is None else transform
    return execute(plan.part, tensors, through, service, deadline, verify=verify)


def swap_model_weights(
    src_model: nn.Module | Sequence[nn.Module] | None,
    target_model: nn.Module | Sequence[nn.Module] | None,
    refit_method: RefitBackendName | ExchangeService,
    group: Group = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    *,
    num_experts: int | None = None,
    casts: Mapping[str, torch.dtype] | None = None,
    aliases: Aliases | None = None,
    transform: ReshardTransform | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
    check_replicas: bool = True,
) -> ExchangeResult:
    """Bring the weights of `src_model` into `target_model`, whatever the two layouts are.

    Collective over the group. `refit_method` is the name of a backend, whose service is kept for the next call,
    or a service. Everything else is as in `reshard_model_weights`.
    """
    service = refit_method if isinstance(refit_method, ExchangeService) else get_or_create_service(refit_method, group)
    return reshard_model_weights(
        src_model,
        target_model,
        service,
        group,
        src_rank_offset,
        dst_rank_offset,
        num_experts=num_experts,
        casts=casts,
        aliases=aliases,
        transform=transform,
        timeout=timeout,
        verify=verify,
        check_replicas=check_replicas,
    )


def reshard_model_weights(
    src_model: nn.Module | Sequence[nn.Module] | None,
    target_model: nn.Module | Sequence[nn.Module] | None,
    service: ExchangeService,
    group: Group = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    *,
    num_experts: int | None = None,
    casts: Mapping[str, torch.dtype] | None = None,
    aliases: Aliases | None = None,
    transform: ReshardTransform | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
    check_replicas: bool = True,
) -> ExchangeResult:
    """Copy every parameter and persistent buffer of `target_model` from `src_model`, in place, with a service.

    Tensors must be dense memory that can be read, and targets' written; two targets may share memory only where they
    are the same elements of one weight.

    Collective over the group: (source, target) where a rank has both, (source, None), (None, target), and
    (None, None) on ranks that only take part. Once it returns on any rank, every target on every rank holds the
    new weights. Sources must not change until it returns. After a TransportError, or a RefitFailed that a transform
    has caused, targets hold a mixture and must not be used before a refit has succeeded; after any other error they
    are as they were.

    Args:
        src_model: the module, or the list of chunks of a virtual pipeline stage, that is read.
        target_model: the one that is written; every data_ptr stays.
        service: from `get_or_create_service`, or one's own.
        group: the ranks that take part; None is the service's group.
        src_rank_offset: see `build_centralized_reshard_plan`.
        dst_rank_offset: see `build_centralized_reshard_plan`.
        num_experts: experts in the whole model; by default the modules' `config.num_moe_experts`.
        casts: declared conversions, see `build_centralized_reshard_plan`; the same on every rank.
        aliases: declared ties, see `build_centralized_reshard_plan`.
        transform: what changes on the way for some parameters.
        timeout: seconds until every wait of this call ends.
        verify: compare digests of what was read with what was written; the same on every rank.
        check_replicas: before the first exchange of a plan, compare what several source ranks describe as the same
            elements: values that differ are a wrong description, and refused. False on any rank leaves it out.

    Returns:
        What this rank sent and received.

    Raises:
        PlanError, RefusedError: nothing has been written.
        TransportError, RefitFailed: see above.
    """
    peers, deadline = _meeting(service, group), Deadline.after(timeout)
    offsets = src_rank_offset, dst_rank_offset
    request = Request(src_model, target_model, num_experts, *offsets, casts, transform, aliases, check_replicas)
    plan, tensors = agree_on_plan(request, peers, deadline, _caches.plans)
    if plan.check.is_due:
        compare_regions(plan, tensors, peers, deadline)
    return execute(plan, tensors, transform, service, deadline, verify=verify)


def _meeting(service: ExchangeService, group: Group) -> Peers:
    """Return the ranks that take part.

    Raises:
        ConfigError: `service` is no service, or exchanges between other ranks than the group's.
    """
    if not isinstance(service, ExchangeService):
        raise ConfigError(
            f"service is {service!r} ({type(service).__name__}), expected one of get_or_create_service(); "
            "swap_model_weights takes a backend's name"
        )
    peers = Peers(service.group if group is None else group)
    if set(peers.ranks) != set(service.ranks):
        raise ConfigError(
            f"the group has ranks {list(peers.ranks)}, the service exchanges between {list(service.ranks)}; use one "
            "group for both"
        )
    return peers


def get_or_create_service(backend: RefitBackendName | str, group: Group = None) -> ExchangeService:
    """Return the service of a backend for a group; the same one for the same group as long as it is usable.

    Raises:
        ConfigError: this is not the name of a backend for process groups, or what it needs is not installed.
    """
    make = installed().find(backend).over_group
    if make is None:
        raise ConfigError(f"copy service {backend!r} does not work over a process group; use 'gloo' or 'nccl'")
    key = backend, Peers(group).group
    service = _caches.services.get(key)
    if service is None or not service.is_usable:
        service = make(group)
        _caches.services.put(key, service)
    return service


def clear_service_cache() -> None:
    """Close and forget every service; the next call makes new ones. For when process groups are made anew."""
    _caches.services.clear()


def clear_plan_cache() -> None:
    """Forget every plan. Never needed for correctness; frees them and their groups."""
    _caches.plans.clear()


def clear_all_caches() -> None:
    """Forget services and plans."""
    clear_service_cache()
    clear_plan_cache()
