"""The client stub: what trainers, engines and operators call."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import environ
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from refitd.buffers.cuda import name_of
from refitd.client.arguments import MAX_SMALL, flag, hook, seconds, text, whole
from refitd.client.connection import Connection, close_all
from refitd.config import default_runtime_dir
from refitd.errors import ConfigError, DeadlineExceeded, RefitdError, RefusedError
from refitd.logs import Escaped
from refitd.protocol import local
from refitd.protocol.base import MAX_TEXT_BYTES
from refitd.protocol.reports import (
    EvictReport,
    HistoryReport,
    ModelDescription,
    PlanReport,
    StatusReport,
    SwapFailed,
    SwapProgress,
    SwapReport,
    VerifyReport,
)
from refitd.protocol.shards import Place, shard_of
from refitd.states import SwapOutcome
from refitd.text import shown, unprintable

if TYPE_CHECKING:
    import torch

    from refitd.client.derived import Derived
    from refitd.client.devices import Arena
    from refitd.client.given import Tensors
    from refitd.client.mxfp8 import MXFP8Offer
    from refitd.client.source import Source
    from refitd.client.streamed import StreamedSource
    from refitd.client.target import Commit, Target
    from refitd.client.tensors import TensorSet
    from refitd.describe.metadata import ParameterMetadata

# What the stub logs goes to the application's handlers, and holds names and reasons of others.
logging.getLogger("refitd.client").addFilter(Escaped())

REQUEST_S = 30.0
# The coordinator answers within the time that was given; one that does not answer at all is given up so much later.
MARGIN_S = 1.0
# A swap without a timeout of its own ends at the coordinator's deadlines; this is beyond all sensible ones.
SWAP_S = 3600.0
SHORTEST_S = 0.001
POLL_S = 0.2  # how often it is asked whether others have registered


class Client:
    """A session with this node's daemon. Made by `refitd.connect`; close it, or use it as a context manager."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._arenas: dict[int, Arena] = {}
        self._registered: list[Source | StreamedSource | Target] = []
        _open.add(self)

    @property
    def node(self) -> str:
        """The daemon's node."""
        return self._connection.welcome.node

    def register_source(
        self,
        model: str,
        module_or_tensors: Tensors,
        *,
        rank: int = 0,
        world_size: int = 1,
        metadata: Sequence[ParameterMetadata] | None = None,
        pg_collection: Any = None,
        num_experts: int | None = None,
        slots: int = 2,
        pull: bool | None = None,
        mxfp8: MXFP8Offer | None = None,
        device: str | torch.device | None = None,
        timeout: float = 60.0,
    ) -> Source:
        """Offer this rank's tensors of `model`.

        Args:
            model: the name that trainers and engines share.
            module_or_tensors: a module, a list of modules (virtual pipeline chunks), or {name: tensor}. It is read
                again for every version; a dict is what it holds then (a state_dict keeps the tensors it was made of).
            rank: this process among the trainer's `world_size` ranks; group lists use the same numbers.
            world_size: how many source ranks there are.
            metadata: with a dict, how each tensor is cut; without it, every tensor is whole.
            pg_collection: the parallel groups, where the module has none of its own.
            num_experts: experts in the whole model.
            slots: versions that are kept; each takes the size of the shard on this node.
            pull: how lent tensors outside arenas travel: the workers read this process's memory (True), this process
                copies them once (False), or what is worthwhile by a measurement at the first lend (None).
            mxfp8: tensors that are also, or only, offered in MXFP8: half the bytes for targets that take them so. They
                are converted when a version is published, and never lent.
            device: where the slots lie: "cuda:N", "cpu", or (None) where the tensors do.
            timeout: seconds for allocating the slots and being admitted.

        Raises:
            RefusedError: the rank is taken, or descriptions are impossible.
            ArenaError: there is not enough memory for the slots.
        """
        from refitd.client.mxfp8 import MXFP8Offer, SourceTensors
        from refitd.client.source import Source, check_slots

        model, timeout = text("model", model), seconds("timeout", timeout)
        rank, world_size, num_experts = _ranks(rank, world_size, num_experts)
        slots = check_slots(slots)
        pull = None if pull is None else flag("pull", pull)
        if mxfp8 is not None and not isinstance(mxfp8, MXFP8Offer):
            raise RefusedError(f"mxfp8 is {shown(mxfp8)}, expected an MXFP8Offer")
        tensors = SourceTensors(module_or_tensors, rank, metadata, pg_collection, num_experts, mxfp8)
        if tensors.is_converted and pull:
            raise RefusedError(f"model {model!r}: tensors that are offered in MXFP8 cannot be pulled; leave pull out")
        live = () if tensors.is_converted else self._live(tensors)
        message = local.RegisterSource(
            model=model,
            rank=rank,
            world_size=world_size,
            shard=shard_of(tensors.wire),
            slots=slots,
            live=live,
            device=_gpu_name(device, tensors),
            timeout_s=timeout,
        )
        registered = self._connection.request(message, local.SourceRegistered, timeout)
        with self._given_back(registered.member):
            mapped = tuple(self._connection.map_arena(arena, write=True) for arena in registered.slots)
        source = Source(self._connection, model, tensors, registered, mapped, pull, world_size, self._forget)
        self._registered.append(source)
        return source

    def declare_source(
        self,
        model: str,
        shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
        *,
        rank: int = 0,
        world_size: int = 1,
        metadata: Sequence[ParameterMetadata] | None = None,
        slots: int = 2,
        device: str | torch.device = "cpu",
        timeout: float = 60.0,
    ) -> StreamedSource:
        """Offer tensors of `model` that this rank produces one after the other, and never holds all at once.

        Args:
            model: the name that trainers and engines share.
            shapes: shape and dtype of each tensor, by name.
            rank: as in `register_source`.
            world_size: as in `register_source`.
            metadata: how each tensor is cut; without it, every tensor is whole.
            slots: versions that are kept; each takes the size of the shard on this node.
            device: where the slots lie: "cpu" or "cuda:N".
            timeout: seconds for allocating the slots and being admitted.

        Raises:
            RefusedError: the rank is taken, or descriptions are impossible.
            ArenaError: there is not enough memory for the slots.
        """
        from refitd.client.devices import number_of
        from refitd.client.source import check_slots
        from refitd.client.streamed import StreamedSource, declared
        from refitd.describe.memory import HOST

        model, timeout = text("model", model), seconds("timeout", timeout)
        rank, world_size, _ = _ranks(rank, world_size, None)
        wire = declared(shapes, metadata, rank)
        gpu = number_of(device)
        message = local.RegisterSource(
            model=model,
            rank=rank,
            world_size=world_size,
            shard=shard_of(wire),
            slots=check_slots(slots),
            live=(),
            device="" if gpu == HOST else name_of(gpu),
            timeout_s=timeout,
        )
        registered = self._connection.request(message, local.SourceRegistered, timeout)
        with self._given_back(registered.member):
            mapped = tuple(self._connection.map_arena(arena, write=True) for arena in registered.slots)
        source = StreamedSource(self._connection, model, wire, registered, mapped, world_size, self._forget)
        self._registered.append(source)
        return source

    def register_target(
        self,
        model: str,
        module_or_tensors: Tensors,
        *,
        replica: str,
        rank: int = 0,
        world_size: int = 1,
        metadata: Sequence[ParameterMetadata] | None = None,
        pg_collection: Any = None,
        num_experts: int | None = None,
        on_commit: Callable[[Commit], object] | None = None,
        on_pause: Callable[[int], object] | None = None,
        on_resume: Callable[[int | None], object] | None = None,
        agree: Callable[[int], int] | None = None,
        convert_on_send: bool = False,
        cast: bool | str | torch.dtype = False,
        derived: Mapping[str, Derived] | None = None,
        mode: Literal["shadow", "in-place"] = "shadow",
        device: str | torch.device | None = None,
        observes: bool = False,
        timeout: float = 60.0,
    ) -> Target:
        """Want this rank's tensors of `model`. Their storage is kept by every swap.

        Args:
            model: the name that trainers and engines share.
            module_or_tensors: as in `register_source`.
            replica: the engine's name; its ranks share it.
            rank: this process among the replica's `world_size` ranks.
            world_size: how many ranks the replica has.
            metadata: as in `register_source`.
            pg_collection: as in `register_source`.
            num_experts: as in `register_source`.
            on_commit: called on a thread of the stub's when a version is decided; otherwise call `poll` or `wait`.
            on_pause: called on that thread with a version that is about to be decided: it returns once this rank
                stands still. Nothing is decided before; the stub then commits by itself. One that takes longer than
                the coordinator's `deadlines.pause_s` aborts the swap; `on_resume` is called once it has returned.
            on_resume: called when the rank may go on, with the version to serve; None: it must serve nothing.
            agree: how the ranks of a replica agree on the poll in which they flip (see `Target.poll`). Without it they
                flip before the same step, by `poll(step=n)` or by count: ranks in lock step poll equally often.
            convert_on_send: take tensors that are held in MXFP8 (values of a dict that are `MXFP8Buffer`) as sources
                offer them; otherwise bfloat16 arrives and the workers convert it.
            cast: take tensors of another floating type than these have, and convert each element (round to nearest
                even), as `ParameterMetadata.cast_from` says for one tensor. A dtype ("float32") is the one that sources
                offer; True waits, up to `timeout`, until the sources have registered and say it themselves.
            derived: tensors that are made of the weights, by name; their hooks are called inside every commit.
            mode: "shadow": a version is staged beside the live tensors, and taken over whole. "in-place": the workers
                write the live tensors (of `allocate`) while this rank stands still (`on_pause`), without memory for
                staging; a swap that fails then leaves nothing to serve until the next one has succeeded.
            device: where the staging arena lies, "cuda:N", "cpu", or (None) where the tensors do; what is converted is
                converted there. "cpu" saves a GPU the memory of one more shard, and makes commits (and MXFP8) slower.
            observes: this is no engine (it saves a checkpoint, say): it is brought to the live version as a replica
                that joins is, and takes part in no other swap, so that none waits for it or ends with it.
            timeout: seconds for allocating the staging arena and being admitted.

        Raises:
            RefusedError: the rank is taken, or descriptions are impossible.
            ArenaError: there is not enough memory for staging.
            DeadlineExceeded: with `cast=True`, the sources have not registered in time.
        """
        from refitd.buffers.permits import Permit
        from refitd.client.mxfp8 import TargetTensors
        from refitd.client.target import Target, registering

        model, replica, timeout = text("model", model), text("replica", replica), seconds("timeout", timeout)
        rank, world_size, num_experts = _ranks(rank, world_size, num_experts)
        convert_on_send = flag("convert_on_send", convert_on_send)
        hooks = {"on_commit": on_commit, "on_pause": on_pause, "on_resume": on_resume, "agree": agree}
        for what, given in hooks.items():
            hook(what, given)
        if not isinstance(mode, str) or mode not in ("shadow", "in-place"):
            raise RefusedError(f"replica {replica!r}: mode is {shown(mode)}, expected 'shadow' or 'in-place'")
        if on_pause is not None and on_commit is not None:
            raise RefusedError(f"replica {replica!r}: give on_commit or on_pause; with on_pause the stub commits")
        tensors = TargetTensors(module_or_tensors, rank, metadata, pg_collection, num_experts, convert_on_send, derived)
        if cast is True:
            tensors.take_cast({name: dtype for name, (_, dtype) in self.tensors(model, timeout=timeout).items()})
        elif cast is not False:
            tensors.take_cast(cast)
        with registering(tensors):
            live = self._live(tensors)
            message = local.RegisterTarget(
                model=model,
                replica=replica,
                rank=rank,
                world_size=world_size,
                shard=shard_of(tensors.wire),
                live=live,
                in_place=mode == "in-place",
                held=tensors.held,
                conversions=tensors.conversions,
                derived=tensors.derived,
                pauses=on_pause is not None,
                observes=flag("observes", observes),
                lockstep=world_size > 1 and on_commit is None and on_pause is None and agree is None,
                device=_gpu_name(device, tensors),
                timeout_s=timeout,
            )
            registered = self._connection.request(message, local.TargetRegistered, timeout)
            with self._given_back(registered.member):
                permit = Permit(self._connection.permit_page(), registered.permit_slot, registered.permit_token)
                staging = None
                if mode == "shadow":
                    staging = self._connection.map_arena(registered.staging, write=False)
                if staging is not None and registered.restores:
                    # nobody stages into it before it has been copied, and what was copied is what it holds
                    tensors.restore(staging)
                    self._connection.request(local.Restored(member=registered.member), local.Done, timeout)
            target = Target(
                self._connection,
                model,
                replica,
                tensors,
                registered,
                None if live else staging,
                permit,
                on_commit,
                on_pause,
                on_resume,
                agree,
                self._forget,
            )
        self._registered.append(target)
        return target

    def allocate(
        self,
        wanted: Mapping[str, tuple[Sequence[int], torch.dtype]],
        *,
        device: str | torch.device = "cpu",
        timeout: float = 60.0,
    ) -> dict[str, torch.Tensor]:
        """Return uninitialised tensors of these shapes and dtypes inside an arena that the daemon owns.

        Sources made of them are never copied; targets made of them are written by the workers. They are shared memory:
        a forked child writes to what its parent serves. `device` is "cpu" for main memory, or a GPU as torch numbers it
        in this process ("cuda:0").

        Raises:
            ArenaError: there is not so much memory left, or the GPU is not there, or its memory cannot be shared.
        """
        from refitd.client.arena_copies import packed_bytes, tensors_in
        from refitd.client.devices import number_of
        from refitd.client.given import checked_wanted
        from refitd.describe.memory import HOST

        wanted, timeout = checked_wanted(wanted), seconds("timeout", timeout)
        gpu = number_of(device)
        name = "" if gpu == HOST else name_of(gpu)
        message = local.CreateArena(nbytes=packed_bytes(wanted), label="tensors", device=name, timeout_s=timeout)
        created = self._connection.request(message, local.ArenaCreated, timeout)
        arena = self._connection.map_arena(created.arena, write=True)
        self._arenas[created.arena] = arena
        return tensors_in(arena, wanted)

    def free(self, tensors: torch.Tensor | Mapping[str, torch.Tensor], *, timeout: float = 60.0) -> None:
        """Give back what `allocate` gave: the arenas that these tensors lie in, whole.

        The daemon's memory is free once this returns; this process's mapping of it is, when the last tensor in it has
        gone. Tensors without elements lie nowhere and say nothing.

        Raises:
            RefusedError: a tensor is not of this client's arenas, or a registration has tensors in one (close that
                first). Nothing has been given back.
        """
        from refitd.client.arena_copies import arena_of

        timeout = seconds("timeout", timeout)
        named = tensors if isinstance(tensors, Mapping) else {"tensors": tensors}
        arenas = {arena_of(name, tensor, self._arenas) for name, tensor in named.items()} - {None}
        for registered in self._registered:
            if used := registered.arenas() & arenas:
                raise RefusedError(
                    f"arena {min(used)} holds tensors that are registered as {registered.member}; close that first"
                )
        for arena in sorted(arena for arena in arenas if arena is not None):
            self._connection.request(local.FreeArena(arena=arena), local.Done, timeout)
            self._arenas.pop(arena, None)

    def swap(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        queue: bool = False,
        wait: float = 0.0,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make a version (None: the newest complete one) live in every replica, or in none.

        With `queue` it waits for a swap of the model that is running, and is refused otherwise. `wait` is how many
        seconds it waits for what is still missing: source ranks that have not registered or published the version,
        ranks of a replica, the first replica. `timeout` is for the swap itself: what is not decided by then is
        aborted; what is decided goes on, and this raises with who is late.

        Raises:
            RefusedError: it could not start; the reason says what is missing.
            SwapFailed: it ended without being live everywhere, or its time is over (`report.outcome` is DECIDED);
                `report` and `causes` say who and why.
            DeadlineExceeded: its turn did not come in time; or nobody answers, and `history` says what was decided.
        """
        model, version, timeout = _swapped(model, version, timeout, on_progress)
        queue, within = flag("queue", queue), _on_the_wire(timeout)
        if wait:
            self._wait_for_all(model, version, seconds("wait", wait))
        message = local.StartSwap(model=model, version=version, timeout_s=within, queue=queue)
        return self._swap(message, timeout, on_progress)

    def _wait_for_all(self, model: str, version: int | None, wait: float) -> None:
        """Return when a swap could begin, or when the time is over: the swap then says what is missing."""
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            found = next((m for m in self.status().models if m.model == model), None)
            if found is not None and found.complete_versions and version in (None, *found.complete_versions):
                worlds = {target.replica: target.world_size for target in found.targets}
                there = collections.Counter(target.replica for target in found.targets)
                if worlds and all(there[replica] == size for replica, size in worlds.items()):
                    return
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))

    def rollback(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make an older version (None: the one before the live one) live again; every source rank must hold it still.

        Raises:
            RefusedError, SwapFailed, DeadlineExceeded: as in `swap`.
        """
        model, version, timeout = _swapped(model, version, timeout, on_progress)
        message = local.StartSwap(model=model, version=version, timeout_s=_on_the_wire(timeout), rollback=True)
        return self._swap(message, timeout, on_progress)

    def _swap(
        self, message: local.StartSwap, timeout: float | None, on_progress: Callable[[SwapProgress], None] | None
    ) -> SwapReport:
        wait = SWAP_S if timeout is None else timeout + MARGIN_S
        report = self._connection.request(message, SwapReport, wait, on_progress)
        if report.outcome != SwapOutcome.COMMITTED:
            causes = {f"{m.replica} rank {m.rank}": m.reason for m in report.members if m.reason}
            is_late = report.outcome == SwapOutcome.DECIDED
            how = "not complete yet" if is_late else f"{report.outcome} in phase {report.phase}"
            what = f"swap of {message.model!r} to version {report.version} {how}"
            raise SwapFailed(f"{what}: {report.reason}", causes, report)
        return report

    def status(self) -> StatusReport:
        """Return the cluster as the coordinator sees it."""
        return self._connection.request(local.GetStatus(), StatusReport, REQUEST_S)

    def history(self, model: str = "", limit: int = 20) -> HistoryReport:
        """Return the last swaps of a model ("": of all) from the coordinator's journal, the newest first."""
        message = local.GetHistory(model=text("model", model, least=0), limit=whole("limit", limit, 0, MAX_SMALL))
        return self._connection.request(message, HistoryReport, REQUEST_S)

    def plan(self, model: str) -> PlanReport:
        """Return what a swap of `model` would move; raises PlanError with everything that is wrong."""
        return self._connection.request(local.GetPlan(model=text("model", model)), PlanReport, 120.0)

    def describe(self, model: str) -> ModelDescription:
        """Return what every registered rank of `model` holds."""
        return self._connection.request(local.GetDescription(model=text("model", model)), ModelDescription, REQUEST_S)

    def tensors(self, model: str, *, timeout: float = 30.0) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of every tensor that the sources of `model` offer, whole, by canonical name.

        It waits until every source rank has registered.

        Raises:
            DeadlineExceeded: a source rank has not registered in time; says which.
            PlanError: the ranks' descriptions contradict each other.
        """
        import torch

        from refitd.describe.roster import Roster
        from refitd.plan.offered import offered_tensors
        from refitd.protocol.shards import metadata_of

        model, timeout = text("model", model), seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        while True:
            try:
                found = self.describe(model)
            except RefusedError as exc:
                missing = str(exc)
            else:
                sources = [member for member in found.members if member.role == "source"]
                ranks = {*range(sources[0].world_size)} - {m.rank for m in sources} if sources else {0}
                if not ranks:
                    break
                missing = f"source ranks {sorted(ranks)[:8]} have not registered"
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"model {model!r}: no tensors are offered after {timeout:.1f} s: {missing}")
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        rosters = [Roster(m.rank, source=metadata_of(found.shards[m.shard], m.rank)) for m in sources]
        return {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in offered_tensors(rosters).items()}

    def verify(self, model: str, *, timeout: float | None = None) -> VerifyReport:
        """Check the live weights of every replica of `model` against the digest of the version that it serves.

        It may be called at any time, and delays neither engines nor swaps by more than some milliseconds. Look at
        `outcome`: PROVEN, DIFFERS (with parameter, slice and rank) or UNKNOWN; nothing is raised for these.

        Raises:
            RefusedError: there is no such model, or it has no target.
        """
        model, timeout = text("model", model), None if timeout is None else seconds("timeout", timeout)
        wait = SWAP_S if timeout is None else timeout + MARGIN_S
        return self._connection.request(local.Verify(model=model, timeout_s=_on_the_wire(timeout)), VerifyReport, wait)

    def abort(self, model: str, reason: str = "") -> None:
        """Abort the running swap of `model` unless it is decided."""
        message = local.AbortSwap(
            model=text("model", model), reason=text("reason", reason, least=0, most=MAX_TEXT_BYTES)
        )
        self._connection.request(message, local.Done, REQUEST_S)

    def evict(self, model: str, replica: str, rank: int | None = None, reason: str = "") -> EvictReport:
        """Remove a replica of `model`, or one rank of it: an engine that hangs no longer keeps others from swapping.

        A running swap ends as if its process had died. As soon as the engine hears of it, it serves nothing (`version`
        is None, `poll` raises RefusedError); it takes part again once it has registered again.

        Raises:
            RefusedError: there is no such model, replica or rank.
        """
        message = local.Evict(model=model, replica=replica, rank=rank, reason=reason)
        return self._connection.request(message, EvictReport, REQUEST_S)

    def close(self) -> None:
        """End the session and every registration made in it: what was said is sent, then the daemon is told.

        It may be called again, by any thread, in a callback and in a signal handler; requests that other threads wait
        for raise PeerLost. In a forked child it does nothing. Clients that are open when the interpreter ends are
        closed then.
        """
        self._close(goodbye=True)

    def _close(self, *, goodbye: bool) -> None:
        if self._connection.is_foreign:
            return
        registered, self._registered = self._registered, []
        for one in registered:
            one.release()
        self._arenas = {}  # tensors that were allocated in them keep their memory
        self._connection.close(goodbye=goodbye)

    @contextlib.contextmanager
    def _given_back(self, member: str) -> Iterator[None]:
        """Take a registration back whose arenas this process cannot map."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RefitdError):
                self._connection.request(local.Deregister(member=member), local.Done, REQUEST_S)
            raise

    def _forget(self, registered: Source | StreamedSource | Target) -> None:
        """Let go of a registration that has been closed, and of its tensors with it."""
        self._registered = [kept for kept in self._registered if kept is not registered]

    def _live(self, tensors: TensorSet) -> tuple[Place, ...]:
        tensors.arena_places = tensors.places(self._arenas)
        return tensors.arena_places

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _gpu_name(device: str | torch.device | None, tensors: TensorSet) -> str:
    """Return the name of the GPU that arenas for these tensors go to, "" for main memory; see `device` above."""
    from refitd.client.devices import common_gpu, number_of
    from refitd.describe.memory import HOST

    gpu = common_gpu(tensors.names, tensors.tensors) if device is None else number_of(device)
    return "" if gpu == HOST else name_of(gpu)


_open: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """Close what is open, as the process ends in order. One that an exception ends has crashed, and may come back."""
    goodbye = getattr(sys, "last_value", None) is None
    for client in list(_open):
        client._close(goodbye=goodbye)
    close_all(goodbye=goodbye)  # of clients that nobody holds any more


def _ranks(rank: int, world_size: int, num_experts: int | None) -> tuple[int, int, int | None]:
    """Return the numbers of a registration as ints."""
    return (
        whole("rank", rank, 0, MAX_SMALL),
        whole("world_size", world_size, 0, MAX_SMALL),
        None if num_experts is None else whole("num_experts", num_experts, 0, MAX_SMALL),
    )


def _swapped(
    model: str, version: int | None, timeout: float | None, on_progress: Callable[[SwapProgress], None] | None
) -> tuple[str, int | None, float | None]:
    """Return what a swap is asked for with, in plain types."""
    hook("on_progress", on_progress)
    return (
        text("model", model),
        None if version is None else whole("version", version),
        None if timeout is None else seconds("timeout", timeout),
    )


def _on_the_wire(timeout: float | None) -> float:
    """Return a timeout as messages have it: 0 is none there, and a caller's 0 is over at once."""
    return 0.0 if timeout is None else max(timeout, SHORTEST_S)


def connect(
    address: str | Path | None = None, *, name: str = "", timeout: float = 10.0, uid: int | None = None
) -> Client:
    """Connect to the daemon of this node.

    Args:
        address: its runtime directory; None: REFITD_RUNTIME_DIR, else $XDG_RUNTIME_DIR/refitd, else /tmp/refitd-UID.
        name: what logs and status call this client.
        timeout: seconds to wait for its answer.
        uid: whose daemon it must be; None: REFITD_DAEMON_UID, else this user's own, or root's.

    Raises:
        TransportError: no daemon runs there, or it does not answer.
        ConfigError: the address can be no path.
        RefusedError: the daemon there is another user's, or does not let this one in.
    """
    try:
        directory = Path(address) if address is not None else default_runtime_dir()
    except TypeError:
        raise RefusedError(f"address is {shown(address)}, expected the directory of a daemon") from None
    if found := unprintable(str(directory)):
        raise ConfigError(f"address {str(address)!r} {found}; give the daemon's runtime directory")
    is_named = address is not None or bool(environ.get("REFITD_RUNTIME_DIR"))
    name, timeout = text("name", name, least=0), seconds("timeout", timeout)
    return Client(Connection(directory, name, timeout, uid, may_be_link=is_named))
