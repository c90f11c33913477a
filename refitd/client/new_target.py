"""The registration of a target, step by step: check, describe, own, register, map, restore."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from refitd.buffers.permits import Permit
from refitd.client.arenas import Arena
from refitd.client.calls import Layout, flag, seconds
from refitd.client.connection import Connection
from refitd.client.given import NONE, Keeps, checked_part, offered_by
from refitd.client.ownership import Owned, check_shared, registering, sharing
from refitd.client.take_over import ArenaPair
from refitd.client.target import Target
from refitd.client.target_tensors import Derived, TargetTensors
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.protocol.shards import Place, SharedTensor, shard_of
from refitd.text import called, shown

if TYPE_CHECKING:
    from refitd.client.client import Client

_log = logging.getLogger("refitd.client")

MODES = ("shadow", "flip", "copy", "in-place")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine receives its versions; see `Client.register_target`.

    Attributes:
        observes: the replica is not an engine (`save_checkpoint`): it receives versions only by catch-up.
    """

    convert_on_send: bool = False
    cast: bool | str | torch.dtype = False
    derived: Mapping[str, Derived] | None = None
    keeps: bool | Sequence[str] = False
    shared: Mapping[str, Target] | None = None
    mode: str = "shadow"
    device: str | torch.device | None = None
    observes: bool = False
    controlled: bool = False
    timeout: float = 60.0

    @property
    def tries_flips(self) -> bool:
        """Whether versions flip, provided that the tensors allow it."""
        return self.mode in ("shadow", "flip")

    def checked(self, replica: str) -> EngineOptions:
        """Return a copy with plain values; raises RefusedError for invalid ones."""
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise RefusedError(
                f"replica {replica!r}: mode is {shown(self.mode)}, expected 'shadow' or 'in-place', or 'flip' or 'copy'"
            )
        return replace(
            self,
            convert_on_send=flag("convert_on_send", self.convert_on_send),
            keeps=checked_part("keeps", self.keeps),
            controlled=flag("controlled", self.controlled) or self.mode == "in-place",
            timeout=seconds("timeout", self.timeout),
        )


@dataclass(frozen=True, slots=True)
class NewTarget:
    """A target that is being registered: its names, its tensors, and the owners of its shared tensors."""

    model: str
    replica: str
    layout: Layout
    options: EngineOptions
    tensors: TargetTensors
    keeps: Keeps
    owners: Mapping[str, Owned]
    shares: tuple[SharedTensor, ...]


def register(
    client: Client, model: str, module_or_tensors: Any, replica: str, layout: Layout, options: EngineOptions
) -> Target:
    """Register a target; raises as `Client.register_target`."""
    layout, options = layout.checked(), options.checked(replica)
    new = _described(client, model, module_or_tensors, replica, layout, options)
    connection = client._connection.steady(options.timeout)
    owned = Owned(os.getpid(), str(connection.directory), model, replica, layout.rank, new.tensors, new.owners)
    with registering(owned):
        message = _message(client, new)
        registered = connection.request(message, local.Registered, options.timeout)
        if registered.not_restored:
            _log.warning("member=%s %s", called(registered.member), registered.not_restored)
        with client._given_back(connection, registered.member):
            staging, pair = _mapped(client, connection, message, registered)
            if staging is not None and registered.restores:
                _restore(connection, new, registered, staging, pair)
            permit = Permit(connection.permit_page(), registered.permit_slot, registered.permit_token)
        target = Target(
            client._connection,
            connection,
            message,
            new.tensors,
            registered,
            None if pair is not None else staging,
            permit,
            client._forget,
            pair,
            new.owners,
        )
    client._add(target, connection)
    return target


def _described(
    client: Client, model: str, module_or_tensors: Any, replica: str, layout: Layout, options: EngineOptions
) -> NewTarget:
    """Describe the tensors. With `cast=True` or `keeps=True` this waits for the sources."""
    owners = sharing(model, options.shared)
    keeps = replace(_keeps(client, model, layout, options), shared=frozenset(owners))
    tensors = TargetTensors(
        module_or_tensors,
        layout.rank,
        layout.metadata,
        layout.pg_collection,
        layout.num_experts,
        options.convert_on_send,
        options.derived,
        keeps,
        layout.names,
    )
    if tensors.kept and not tensors.wire and layout.world_size == 1:
        raise RefusedError(
            f"replica {replica!r}: it would keep all that it registers ({tensors.kept[0].name}, ...) and take "
            f"nothing that the sources of {model!r} offer; do the names differ?"
        )
    shares = check_shared(tensors, owners)
    _take_cast(client, model, tensors, options)
    return NewTarget(model, replica, layout, options, tensors, keeps, owners, shares)


def _keeps(client: Client, model: str, layout: Layout, options: EngineOptions) -> Keeps:
    """Return which tensors the target keeps; for `keeps=True`, ask the sources for their tensors."""
    keeps = options.keeps
    if not isinstance(keeps, bool):
        return Keeps(tuple(keeps), elsewhere=layout.world_size > 1)
    rosters, is_partial = client._sources(model, options.timeout) if keeps else ([], False)
    return Keeps(offered=offered_by(rosters)) if is_partial else NONE


def _take_cast(client: Client, model: str, tensors: TargetTensors, options: EngineOptions) -> None:
    if options.cast is True:
        offered = client.tensors(model, timeout=options.timeout)
        tensors.take_cast({name: dtype for name, (_, dtype) in offered.items()})
    elif options.cast is not False:
        tensors.take_cast(options.cast)


def _message(client: Client, new: NewTarget) -> local.RegisterTarget:
    """Return the request; its `flips` depends on the tensors' places in arenas."""
    options, tensors = new.options, new.tensors
    live, flips = _places(client, new)
    return local.RegisterTarget(
        model=new.model,
        replica=new.replica,
        rank=new.layout.rank,
        world_size=new.layout.world_size,
        shard=shard_of(tensors.wire, kept=tensors.kept_here(), keeps_rest=new.keeps.offered is not None),
        live=live,
        in_place=options.mode == "in-place",
        held=tensors.held,
        conversions=tensors.conversions,
        derived=tensors.derived,
        observes=options.observes,
        controlled=options.controlled,
        shares=new.shares,
        flips=flips,
        reads_live=flips and client._is_windowed(live),
        device=client._gpu_name(options.device, tensors),
        timeout_s=options.timeout,
    )


def _places(client: Client, new: NewTarget) -> tuple[tuple[Place, ...], bool]:
    """Return the tensors' places in arenas, and whether versions flip there."""
    options, tensors = new.options, new.tensors
    if options.tries_flips:
        live = client._live(tensors, may_flip=True)
        if client._may_flip(tensors, live, options.device, must=options.mode == "flip"):
            return live, True
    return client._live(tensors, may_flip=False), False


def _mapped(
    client: Client, connection: Connection, message: local.RegisterTarget, registered: local.Registered
) -> tuple[Arena | None, ArenaPair | None]:
    """Map the staging arena, and pair it with the live one of a target that flips."""
    if message.in_place:
        return None, None
    staging = connection.map_arena(registered.staging, write=message.flips)
    return staging, client._paired(message.live, staging) if message.flips else None


def _restore(
    connection: Connection,
    new: NewTarget,
    registered: local.Registered,
    staging: Arena,
    pair: ArenaPair | None,
) -> None:
    """Restore the version of an earlier process of this rank; staging begins after the message Restored."""
    if pair is not None:
        pair.restore(new.tensors.spans_in(registered.content, staging.nbytes))
        new.tensors.refresh()
    else:
        new.tensors.restore(staging)
    connection.request(local.Restored(member=registered.member), local.Done, new.options.timeout)
