"""The in-process API: all processes of a group call these functions together, and weights move between them.

    swap_model_weights(trainer_model, engine_model, "gloo")      pass None for a model that this rank does not have

    plan = build_centralized_reshard_plan(trainer_model, engine_model)
    execute_reshard_plan(plan, trainer_model, engine_model, service)      any number of times

Each call describes the modules again. If the layout has changed, `swap_model_weights` makes a new plan, and
`execute_reshard_plan` refuses. No message is pickled, every wait has a deadline, tensors are written in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from refitd.caches import BoundedCache
from refitd.copy_services import ExchangeResult, ExchangeService
from refitd.copy_services.peers import Group, Peers
from refitd.copy_services.registry import installed
from refitd.copy_services.waits import Deadline
from refitd.errors import ConfigError
from refitd.inprocess.agree import AgreedPlan, PlanCache, agree_on_plan, agreed_plan, collect_for, compare_regions
from refitd.inprocess.execute import execute
from refitd.inprocess.request import Request

if TYPE_CHECKING:
    import torch
    from torch import nn

    from refitd.describe.names import Aliases
    from refitd.describe.renames import Names
    from refitd.transforms import ReshardTransform

RefitBackendName = Literal["gloo", "nccl", "nvshmem"]
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RefitCaches:
    """Caches between refits: plans by (group, digest of all layouts), services by (backend, group)."""

    plans: PlanCache = field(default_factory=lambda: BoundedCache(16))
    services: BoundedCache[tuple[str, Any], ExchangeService] = field(
        default_factory=lambda: BoundedCache(8, release=lambda service: service.close())
    )


# this module's only caches; the clear_* functions clear them
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
    names: Names | None = None,
    transform: ReshardTransform | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> AgreedPlan:
    """Describe both modules on every rank, plan on rank 0 for all, and return this rank's sends and receives.

    Collective over the group. The plan keeps these arguments, except the modules, for `execute_reshard_plan`.

    Args:
        src_module: the module that this rank can send; None on ranks without a source.
        dst_module: the module that this rank receives; None on ranks without a destination.
        num_experts: the number of experts in the whole model; by default the modules' `config.num_moe_experts`.
        group: a torch process group of all participating ranks; None is the default group.
        src_rank_offset: added to every rank in the source's parallel groups, if their numbers begin at 0.
        dst_rank_offset: as `src_rank_offset`, for the destination's groups.
        casts: {canonical name or pattern with "*": the destination's dtype} for tensors to convert. All other
            differences of dtype are refused.
        aliases: {canonical name: other canonical names of its weight}, for ties that the modules do not show. Tied
            parameters and Megatron's shared embeddings are found without it.
        names: canonical names for the source's own, if destinations have others: {pattern: name, names.Fused or
            names.Padded}, such as `refitd.names.megatron_to_hf(config)`. Every source tensor needs one. Pass equal
            names on every rank with a source.
        transform: converts some parameters on the way. It is needed here only if it changes the dtype that travels, and
            is the default of every execution.
        timeout: seconds until every wait of this call ends.

    Raises:
        PlanError: on every rank, with one text; lists the problems of all ranks.
        DeadlineExceeded, PeerLost: a rank did not take part.
    """
    offsets = src_rank_offset, dst_rank_offset
    given = num_experts, *offsets, casts, transform, aliases, names
    request = Request(src_module, dst_module, *given, is_plan_only=True)
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
    """Move the weights of `src_module` into `dst_module` by an existing plan, in place.

    Collective over the group: each rank passes its own part of one plan. Requirements on tensors, and the targets'
    state after an error, are as in `reshard_model_weights`. The modules need not be the plan's modules, but must have
    its layout: names, shapes, dtypes, placement and ties.

    Args:
        plan: from `build_centralized_reshard_plan`.
        src_module: the module that this rank sends; None if it had no source when the plan was built.
        dst_module: the module that this rank receives; None if it had no destination.
        service: from `get_or_create_service`, or your own.
        group: the participating ranks; None is the service's group.
        transform: converts some parameters on the way; None is the plan's transform.
        aliases: declared ties; None are the plan's.
        timeout: seconds until every wait of this call ends.
        verify: compare digests of the bytes read and written; the same on every rank.
        check_replicas: see `reshard_model_weights`.

    Returns:
        What this rank sent and received.

    Raises:
        PlanError: on every rank: a rank has another plan, or modules that do not fit it. No tensor has been written.
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
    names: Names | None = None,
    transform: ReshardTransform | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
    check_replicas: bool = True,
) -> ExchangeResult:
    """Copy the weights of `src_model` into `target_model`, from any layout to any layout.

    Collective over the group. `refit_method` is a service, or a backend's name; then the service is cached for the next
    call. Everything else is as in `reshard_model_weights`.
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
        names=names,
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
    names: Names | None = None,
    transform: ReshardTransform | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
    check_replicas: bool = True,
) -> ExchangeResult:
    """Copy every parameter and persistent buffer of `target_model` from `src_model`, in place, with a service.

    Tensors must be dense and readable, and targets writable; two targets may share memory only if they hold the same
    elements of one weight.

    Collective over the group: ranks pass None for a model that they do not have; ranks with neither also call. Once it
    returns on any rank, every target on every rank holds the new weights. Sources must not change until it returns.
    After a TransportError, or a RefitFailed caused by a transform, targets hold a mixture of weights and must not be
    used until a refit succeeds; after any other error they are unchanged.

    Args:
        src_model: the module to read, or the list of chunks of a virtual pipeline stage.
        target_model: the module to write, or its list of chunks; no data_ptr changes.
        service: from `get_or_create_service`, or your own.
        group: the participating ranks; None is the service's group.
        src_rank_offset: see `build_centralized_reshard_plan`.
        dst_rank_offset: see `build_centralized_reshard_plan`.
        num_experts: the number of experts in the whole model; by default the modules' `config.num_moe_experts`.
        casts: declared conversions, see `build_centralized_reshard_plan`; the same on every rank.
        aliases: declared ties, see `build_centralized_reshard_plan`.
        names: canonical names for the source's own, see `build_centralized_reshard_plan`.
        transform: converts some parameters on the way.
        timeout: seconds until every wait of this call ends.
        verify: compare digests of the bytes read and written; the same on every rank.
        check_replicas: before a plan's first exchange, compare the elements that several source ranks describe as the
            same, and refuse different values: they mean a wrong description. False on any rank skips this.

    Returns:
        What this rank sent and received.

    Raises:
        PlanError, RefusedError: no tensor has been written.
        TransportError, RefitFailed: see above.
    """
    peers, deadline = _meeting(service, group), Deadline.after(timeout)
    offsets = src_rank_offset, dst_rank_offset
    request = Request(src_model, target_model, num_experts, *offsets, casts, transform, aliases, names, check_replicas)
    plan, tensors = agree_on_plan(request, peers, deadline, _caches.plans)
    if plan.check.is_due:
        compare_regions(plan, tensors, peers, deadline)
    return execute(plan, tensors, transform, service, deadline, verify=verify)


def _meeting(service: ExchangeService, group: Group) -> Peers:
    """Return the participating ranks.

    Raises:
        ConfigError: `service` is not a service, or its ranks are not the group's.
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
    """Return the service of a backend for a group; it is cached as long as it is usable.

    Raises:
        ConfigError: the backend is unknown, does not work over process groups, or is not installed.
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
    """Close and drop every cached service. Call it when process groups are recreated."""
    _caches.services.clear()


def clear_plan_cache() -> None:
    """Drop every cached plan, to free them and their groups. Never needed for correctness."""
    _caches.plans.clear()


def clear_all_caches() -> None:
    """Drop all cached services and plans."""
    clear_service_cache()
    clear_plan_cache()
