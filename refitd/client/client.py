"""The client API that trainers, engines and operators call."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from refitd.buffers.cuda import name_of
from refitd.client.arena_memory import REQUEST_S, ArenaMemory
from refitd.client.arguments import MAX_SMALL, flag, hook, seconds, text, whole
from refitd.client.connection import Connection, close_all
from refitd.client.lifeline import Lifeline
from refitd.client.operations import Operations
from refitd.client.reconnect import REGISTER_S, Give, Line
from refitd.config import default_runtime_dir
from refitd.errors import ConfigError, Orphaned, RefitdError, RefusedError, TransportError, needing_torch
from refitd.logs import Escaped
from refitd.protocol import control, local
from refitd.protocol.shards import shard_of
from refitd.text import shown, unprintable

if TYPE_CHECKING:
    import torch

    from refitd.client.callbacks import Commit
    from refitd.client.controller import ReplicaController
    from refitd.client.derived import Derived
    from refitd.client.given import Tensors
    from refitd.client.kept import Keeps
    from refitd.client.mxfp8 import MXFP8Offer
    from refitd.client.slots import SourceSlots
    from refitd.client.source import Source
    from refitd.client.streamed import StreamedSource
    from refitd.client.target import Target
    from refitd.client.tensors import TensorSet
    from refitd.describe.metadata import ParameterMetadata
    from refitd.describe.renames import Names

    Registered: TypeAlias = Source | StreamedSource | Target | ReplicaController

# The client's log lines go to the application's handlers and contain names and reasons from other processes.
_log = logging.getLogger("refitd.client")
_log.addFilter(Escaped())


class Client(ArenaMemory, Operations):
    """A session with this node's daemon, made by `refitd.connect`. Close it, or use it as a context manager."""

    def __init__(self, line: Line, lives_with: Lifeline | None = None) -> None:
        super().__init__(line)
        line.start(self._register_again)
        _open.add(self)
        self._lives_with = lives_with  # kept: it ends with its last client
        if lives_with is not None:
            lives_with.on_end(self._orphan)

    @property
    def node(self) -> str:
        """The daemon's node."""
        return self._connection.current.welcome.node

    @needing_torch("Client.register_source")
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
        names: Names | None = None,
        slots: int = 2,
        pull: bool | None = None,
        cast: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
        mxfp8: MXFP8Offer | None = None,
        partial: bool | Sequence[str] = False,
        device: str | torch.device | None = None,
        timeout: float = 60.0,
    ) -> Source:
        """Offer this rank's tensors of `model`.

        Args:
            model: the name that trainers and engines share.
            module_or_tensors: a module, a list of modules (virtual pipeline chunks), or {name: tensor}. It is read
                again for every version: a dict's current values count. A state_dict keeps the tensors it was made of.
            rank: this process's position among the trainer's `world_size` ranks; group lists use the same numbers.
            world_size: the number of source ranks.
            metadata: for a dict, how each tensor is split; without it, every tensor is whole.
            pg_collection: the parallel groups, if the module has none of its own.
            num_experts: the number of experts in the whole model.
            names: canonical names for the module's own, if engines have others: {pattern: name, names.Fused or
                names.Padded}, such as `refitd.names.megatron_to_hf(config)`. Every tensor needs one.
            slots: the number of versions to keep; each slot takes one shard's size of this node's memory.
            pull: how lent tensors outside arenas travel. True: the workers read this process's memory. False: this
                process copies them once. None: the faster way, by a measurement at the first lend.
            cast: the type that floating tensors may be offered as: float32 as "bfloat16" or "float16", or these as
                "float32". They are converted when a version is published (round to nearest even), and never lent.
                Tensors that some target needs unrounded, because it holds another type, are offered as they are from
                the next version on, and workers convert them for the other targets. float64 and float8 stay as they
                are; bfloat16 as "float16", or the reverse, is refused. {name: type} ("*" matches anything, and "*"
                alone comes last) is an order: a tensor is offered as its name says, whatever targets hold.
            mxfp8: tensors that are also, or only, offered in MXFP8, which halves the bytes for targets that take it.
                They are converted when a version is published, and never lent.
            partial: all source ranks together offer only a part of what targets hold (frozen weights are left out).
                True: what is registered is that part. Names ("*" matches anything): only these tensors of it are
                offered, on some ranks perhaps none. All ranks must be partial, or none. Targets say what they keep
                (`register_target(keeps=)`).
            device: where the slots lie: "cuda:N", "cpu", or None for the tensors' own device.
            timeout: seconds for allocating the slots and being admitted.

        Raises:
            RefusedError: the rank is taken, or the descriptions are invalid.
            PlanError: a tensor cannot be described, or has no canonical name in `names`.
            ArenaError: there is not enough memory for the slots.
        """
        from refitd.client.kept import NONE, Keeps, checked_part
        from refitd.client.mxfp8 import MXFP8Offer, SourceTensors
        from refitd.client.source import Source, check_slots
        from refitd.client.source_casts import SourceCasts

        model, timeout = text("model", model), seconds("timeout", timeout)
        rank, world_size, num_experts = _ranks(rank, world_size, num_experts)
        slots = check_slots(slots)
        pull = None if pull is None else flag("pull", pull)
        if mxfp8 is not None and not isinstance(mxfp8, MXFP8Offer):
            raise RefusedError(f"mxfp8 is {shown(mxfp8)}, expected an MXFP8Offer")
        part = checked_part("partial", partial)
        left_out = NONE if isinstance(part, bool) else Keeps(part, all_but=True, elsewhere=world_size > 1)
        casts = SourceCasts(cast, elsewhere=world_size > 1)
        tensors = SourceTensors(
            module_or_tensors,
            rank,
            metadata,
            pg_collection,
            num_experts,
            mxfp8,
            left_out,
            names,
            casts,
            elsewhere=world_size > 1,
        )
        if tensors.is_converted and pull:
            raise RefusedError(f"model {model!r}: tensors that are offered in another type cannot be pulled; omit pull")
        live = () if tensors.is_converted else self._live(tensors, may_flip=False)
        message = local.RegisterSource(
            model=model,
            rank=rank,
            world_size=world_size,
            shard=shard_of(tensors.wire, is_partial=part is not False),
            slots=slots,
            live=live,
            device=_gpu_name(device, tensors),
            timeout_s=timeout,
        )
        connection = self._connection.steady(timeout)
        registered, made = self._slots(connection, message, timeout)
        source = Source(self._connection, connection, model, tensors, registered, made, pull, self._forget)
        self._add(source, connection)
        return source

    @needing_torch("Client.declare_source")
    def declare_source(
        self,
        model: str,
        shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
        *,
        rank: int = 0,
        world_size: int = 1,
        metadata: Sequence[ParameterMetadata] | None = None,
        names: Names | None = None,
        cast: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
        slots: int = 2,
        partial: bool = False,
        device: str | torch.device = "cpu",
        origin: str = "",
        timeout: float = 60.0,
    ) -> StreamedSource:
        """Offer tensors of `model` that this rank produces one after the other and never holds all at once.

        Args:
            model: the name that trainers and engines share.
            shapes: shape and dtype of each tensor, by name.
            rank: as in `register_source`.
            world_size: as in `register_source`.
            metadata: how each tensor is split; without it, every tensor is whole.
            names: as in `register_source`. `publish_from` takes the module's own names.
            cast: as in `register_source`. `publish_from` takes tensors of the declared dtypes, and converts them.
            slots: as in `register_source`.
            partial: what is declared is a part; see `register_source`.
            device: where the slots lie: "cpu" or "cuda:N".
            origin: identifies the checkpoint of which this rank publishes a part, in at most 512 characters. Ranks of
                one model that are attached at the same time must have the same.
            timeout: seconds for allocating the slots and being admitted.

        Raises:
            RefusedError: the rank is taken, its origin differs from that of another rank, or the descriptions are
                invalid.
            ArenaError: there is not enough memory for the slots.
        """
        from refitd.client.devices import number_of
        from refitd.client.source import check_slots
        from refitd.client.source_casts import SourceCasts
        from refitd.client.streamed import StreamedSource, declared
        from refitd.describe.memory import HOST

        model, timeout = text("model", model), seconds("timeout", timeout)
        rank, world_size, _ = _ranks(rank, world_size, None)
        held = declared(shapes, metadata, rank, names)
        casts = SourceCasts(cast, elsewhere=world_size > 1)
        wire = casts.offered(held)
        gpu = number_of(device)
        message = local.RegisterSource(
            model=model,
            rank=rank,
            world_size=world_size,
            shard=shard_of(wire, is_partial=flag("partial", partial)),
            slots=check_slots(slots),
            live=(),
            device="" if gpu == HOST else name_of(gpu),
            timeout_s=timeout,
            origin=text("origin", origin, least=0),
        )
        connection = self._connection.steady(timeout)
        registered, made = self._slots(connection, message, timeout)
        source = StreamedSource(self._connection, connection, model, held, casts, registered, made, self._forget)
        self._add(source, connection)
        return source

    def _slots(
        self, connection: Connection, message: local.RegisterSource, timeout: float
    ) -> tuple[local.SourceRegistered, SourceSlots]:
        from refitd.client.slots import SourceSlots

        registered = connection.request(message, local.SourceRegistered, timeout)
        with self._given_back(connection, registered.member):
            mapped = tuple(connection.map_arena(arena, write=True) for arena in registered.slots)
        return registered, SourceSlots(message, registered, mapped)

    @needing_torch("Client.register_target")
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
        names: Names | None = None,
        on_commit: Callable[[Commit], object] | None = None,
        on_pause: Callable[[int], object] | None = None,
        on_resume: Callable[[int | None], object] | None = None,
        agree: Callable[[int], int] | None = None,
        convert_on_send: bool = False,
        cast: bool | str | torch.dtype = False,
        derived: Mapping[str, Derived] | None = None,
        keeps: bool | Sequence[str] = False,
        shared: Mapping[str, Target] | None = None,
        mode: Literal["shadow", "flip", "copy", "in-place"] = "shadow",
        device: str | torch.device | None = None,
        observes: bool = False,
        controlled: bool = False,
        timeout: float = 60.0,
    ) -> Target:
        """Register this rank's tensors of `model` to receive versions. Swaps keep the tensors' storage.

        Args:
            model: the name that trainers and engines share.
            module_or_tensors: as in `register_source`.
            replica: the engine's name; its ranks share it.
            rank: this process's position among the replica's `world_size` ranks.
            world_size: the number of ranks in the replica.
            metadata: as in `register_source`.
            pg_collection: as in `register_source`.
            num_experts: as in `register_source`.
            names: as in `register_source`, if sources have other names than this module.
            on_commit: called on a thread of the client when a version is decided; without it, call `poll` or `wait`.
            on_pause: called on that thread with the version before it is decided; it must return once this rank
                stands still. The decision waits for that, and the client then commits by itself. A pause longer than
                the coordinator's `deadlines.pause_s` aborts the swap; `on_resume` is called once `on_pause` returns.
            on_resume: called when the rank may go on, with the version to serve, or None if it must serve nothing.
            agree: how the ranks of a replica agree on the poll in which they commit (see `Target.poll`). Without it
                they commit before the same step, by `poll(step=n)` or by count: the ranks must poll equally often.
            convert_on_send: receive tensors held in MXFP8 (dict values that are `MXFP8Buffer`) as sources offer them;
                otherwise bfloat16 arrives and the workers convert it.
            cast: receive tensors of another floating type than these have, and convert each element (round to nearest
                even), as `ParameterMetadata.cast_from` declares for one tensor. A dtype ("float32") names the type that
                sources offer; True waits, up to `timeout`, until the sources have registered and say it themselves.
            derived: tensors computed from the weights, by name; their hooks are called inside every commit.
            keeps: what this rank keeps of its own where sources offer only a part of the model (`partial=True`). It is
                neither staged, written nor verified, and part of no version. Names as registered ("*" matches
                anything), or True: every tensor of which the sources offer nothing. True waits, up to `timeout`, until
                the sources have registered; the replica must then take all that they offer.
            shared: tensors whose memory a target of another model in this process has registered (a draft that uses
                its policy's embedding): {name as registered here: that target}. This model's swaps leave them alone.
                The other model's write them, so they are refused unless this model is swapped with it
                (`swap_together`).
            mode: "shadow": a version is staged beside the live tensors and taken over whole: by "flip" where the
                tensors are all of one arena (`allocate`, `adopt`), else by "copy". "flip": the live and the staging
                memory are exchanged under the tensors' addresses, in microseconds whatever their size; refused where
                that is impossible. "copy": staged bytes are copied into the live tensors. "in-place": the workers write
                the live tensors (from `allocate`) while this rank stands still (`on_pause`); no staging memory is
                needed, but after a failed swap nothing can be served until one succeeds.
            device: where the staging arena lies and conversions run: "cuda:N", "cpu", or None for the tensors' own
                device. "cpu" saves one shard of GPU memory and makes commits (and MXFP8) slower.
            observes: this is not an engine (it saves a checkpoint, say). It is caught up to the live version like a
                joining replica, and takes part in no other swap: none waits for it or fails with it.
            controlled: commit only when the replica's controller (`control_replica`) calls for it: the ranks of the
                replica need no lockstep, and no swap begins while the replica has no controller.
            timeout: seconds for allocating the staging arena and being admitted.

        Raises:
            RefusedError: the rank is taken, or the descriptions are invalid.
            ArenaError: there is not enough memory for staging.
            DeadlineExceeded: with `cast=True` or `keeps=True`, the sources have not registered in time.
        """
        from refitd.buffers.permits import Permit
        from refitd.client.kept import checked_part
        from refitd.client.mxfp8 import TargetTensors
        from refitd.client.ownership import Owned, check_shared, registering, sharing
        from refitd.client.target import Target

        model, replica, timeout = text("model", model), text("replica", replica), seconds("timeout", timeout)
        rank, world_size, num_experts = _ranks(rank, world_size, num_experts)
        convert_on_send = flag("convert_on_send", convert_on_send)
        hooks = {"on_commit": on_commit, "on_pause": on_pause, "on_resume": on_resume, "agree": agree}
        for what, given in hooks.items():
            hook(what, given)
        if not isinstance(mode, str) or mode not in ("shadow", "flip", "copy", "in-place"):
            raise RefusedError(
                f"replica {replica!r}: mode is {shown(mode)}, expected 'shadow' or 'in-place', or 'flip' or 'copy'"
            )
        if on_pause is not None and on_commit is not None:
            raise RefusedError(f"replica {replica!r}: give on_commit or on_pause; with on_pause the stub commits")
        if flag("controlled", controlled) and (
            mode == "in-place" or any(given is not None for given in hooks.values())
        ):
            raise RefusedError(
                f"replica {replica!r}: its controller says when a controlled rank commits; leave out on_commit, "
                "on_pause, on_resume, agree and mode='in-place'"
            )
        shared_with = sharing(model, shared)
        kept = self._keeps(model, checked_part("keeps", keeps), world_size, timeout)
        kept = replace(kept, shared=frozenset(shared_with))
        tensors = TargetTensors(
            module_or_tensors, rank, metadata, pg_collection, num_experts, convert_on_send, derived, kept, names
        )
        if tensors.kept and not tensors.wire and world_size == 1:
            raise RefusedError(
                f"replica {replica!r}: it would keep all that it registers ({tensors.kept[0].name}, ...) and take "
                f"nothing that the sources of {model!r} offer; do the names differ?"
            )
        shares = check_shared(tensors, shared_with)
        if cast is True:
            tensors.take_cast({name: dtype for name, (_, dtype) in self.tensors(model, timeout=timeout).items()})
        elif cast is not False:
            tensors.take_cast(cast)
        connection = self._connection.steady(timeout)
        with registering(Owned(os.getpid(), str(connection.directory), model, replica, rank, tensors, shared_with)):
            live = self._live(tensors, may_flip=mode in ("shadow", "flip"))
            flips = mode in ("shadow", "flip") and self._may_flip(tensors, live, device, must=mode == "flip")
            if not flips:
                live = self._live(tensors, may_flip=False)
            message = local.RegisterTarget(
                model=model,
                replica=replica,
                rank=rank,
                world_size=world_size,
                shard=shard_of(tensors.wire, kept=tensors.kept_here(), keeps_rest=kept.offered is not None),
                live=live,
                in_place=mode == "in-place",
                held=tensors.held,
                conversions=tensors.conversions,
                derived=tensors.derived,
                pauses=on_pause is not None,
                observes=flag("observes", observes),
                lockstep=world_size > 1 and on_commit is None and on_pause is None and agree is None and not controlled,
                controlled=controlled,
                shares=shares,
                flips=flips,
                reads_live=flips and self._is_windowed(live),
                device=_gpu_name(device, tensors),
                timeout_s=timeout,
            )
            registered = connection.request(message, local.TargetRegistered, timeout)
            if registered.not_restored:
                _log.warning("member=%s %s", registered.member, registered.not_restored)
            with self._given_back(connection, registered.member):
                permit = Permit(connection.permit_page(), registered.permit_slot, registered.permit_token)
                staging, pair = None, None
                if mode != "in-place":
                    staging = connection.map_arena(registered.staging, write=flips)
                if flips:
                    pair = self._paired(live, staging)
                if staging is not None and registered.restores:
                    # nothing is staged into the arena until Restored says that its old content has been copied
                    if pair is not None:
                        pair.restore(tensors.spans_in(registered.content, staging.nbytes))
                        tensors.refresh()
                    else:
                        tensors.restore(staging)
                    connection.request(local.Restored(member=registered.member), local.Done, timeout)
            target = Target(
                self._connection,
                connection,
                message,
                tensors,
                registered,
                None if live else staging,
                permit,
                on_commit,
                on_pause,
                on_resume,
                agree,
                self._forget,
                pair,
                shared_with,
            )
        self._add(target, connection)
        return target

    def control_replica(
        self,
        model: str,
        replica: str,
        *,
        pause: Callable[[int], object] | None = None,
        commit: Callable[[int], object],
        resume: Callable[[int | None], object] | None = None,
        timeout: float = 60.0,
    ) -> ReplicaController:
        """Commit versions for all ranks of a replica at once, from one process that can reach the engine.

        The hooks are called one after the other on a thread of the client, for every swap of the replica, catch-ups
        included. A controller that comes while ranks have a decided version pending is called for that first.

        Args:
            model: the model's name.
            replica: the engine's name, as its ranks registered it.
            pause: called with the version before it is decided; it returns once the whole engine stands still. An
                exception, or more than `deadlines.pause_s`, aborts the swap.
            commit: called with the decided version once all ranks know of it: it makes every rank call
                `target.poll()` (or `wait(version)`), by whatever reaches them, and returns when they have. After an
                exception it is called again, after 3, 6 and 9 s, while ranks still have the version pending.
            resume: called when no rank has the version pending any more, or the swap has been aborted; with the version
                that the replica serves, or None if it must serve nothing (no version yet, or its ranks differ).
            timeout: seconds for being admitted.

        Raises:
            RefusedError: the replica has a controller already.
        """
        from refitd.client.controller import ReplicaController

        model, replica, timeout = text("model", model), text("replica", replica), seconds("timeout", timeout)
        for what, given in {"pause": pause, "resume": resume}.items():
            hook(what, given)
        if not callable(commit):
            raise RefusedError(f"commit is {shown(commit)}, expected a function that takes the version")
        message = control.RegisterController(model=model, replica=replica, pauses=pause is not None)
        connection = self._connection.steady(timeout)
        registered = connection.request(message, control.ControllerRegistered, timeout)
        controller = ReplicaController(
            self._connection, connection, message, registered.member, pause, commit, resume, self._forget
        )
        self._add(controller, connection)
        return controller

    def _add(self, one: Registered, connection: Connection) -> None:
        """Take in what was registered over this connection; raises PeerLost if the daemon has ended meanwhile."""
        self._registered.append(one)
        try:
            self._connection.check(connection)
        except BaseException:
            one.close()
            raise

    def _register_again(self, connection: Connection, give: Give) -> None:
        """Register everything over a new connection.

        What is refused there has failed for good, and says so.

        Raises:
            TransportError: the daemon or the coordinator has gone again.
        """
        self._give_back(give)
        for one in list(self._registered):
            try:
                one.register_again(connection, give, REGISTER_S)
            except TransportError:
                raise
            except RefitdError as exc:
                text = f"{one.member} could not be registered again with the daemon: {exc}; register it anew"
                _log.error("%s", text)
                one.give_up(local.Failure(code=exc.code, message=text))
                self._forget(one)
                continue
            if one not in self._registered:  # it was closed meanwhile
                self._connection.deregister(connection, one.member)

    def close(self) -> None:
        """Send queued messages, then end the session and every registration made in it.

        It may be called repeatedly, by any thread, in a callback and in a signal handler. Requests in other threads
        raise PeerLost. In a forked child it does nothing. Open clients are closed when the interpreter exits.
        """
        self._close(goodbye=True)

    def _orphan(self, error: Orphaned) -> None:
        """Serve nothing, and give the names back: a process that this one serves for has ended."""
        if self._connection.current.is_foreign:
            return
        _log.error("%s", error)
        failure = local.Failure(code=error.code, message=str(error))
        for one in list(self._registered):
            one.give_up(failure)
        self._connection.orphan(error)
        self._close(goodbye=True)

    def _close(self, *, goodbye: bool) -> None:
        if self._connection.current.is_foreign:
            return
        registered, self._registered = self._registered, []
        for one in registered:
            one.release()
        self._leave_arenas()
        self._connection.close(goodbye=goodbye)

    @contextlib.contextmanager
    def _given_back(self, connection: Connection, member: str) -> Iterator[None]:
        """Deregister `member` if the block raises, for instance because an arena cannot be mapped."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RefitdError):
                connection.request(local.Deregister(member=member), local.Done, REQUEST_S)
            raise

    def _forget(self, registered: Registered) -> None:
        """Drop a closed registration, and with it its tensors."""
        if getattr(registered, "is_estranged", False):
            self._estranged |= registered.arenas()
        self._registered = [kept for kept in self._registered if kept is not registered]
        self._connection.files.drop_unmapped()

    def _keeps(self, model: str, keeps: bool | tuple[str, ...], world_size: int, timeout: float) -> Keeps:
        """Return which tensors a target keeps; True asks what the sources offer."""
        from refitd.client.kept import NONE, Keeps, offered_by

        if not isinstance(keeps, bool):
            return Keeps(keeps, elsewhere=world_size > 1)
        rosters, is_partial = self._sources(model, timeout) if keeps else ([], False)
        return Keeps(offered=offered_by(rosters)) if is_partial else NONE

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _gpu_name(device: str | torch.device | None, tensors: TensorSet) -> str:
    """Return the name of the GPU for these tensors' arenas, "" for main memory; None means the tensors' own device."""
    from refitd.client.devices import common_gpu, number_of
    from refitd.describe.memory import HOST

    gpu = common_gpu(tensors.names, tensors.tensors) if device is None else number_of(device)
    return "" if gpu == HOST else name_of(gpu)


_open: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """Close open clients; say goodbye unless an exception ends the process, which may then be restarted."""
    goodbye = getattr(sys, "last_value", None) is None
    for client in list(_open):
        client._close(goodbye=goodbye)
    close_all(goodbye=goodbye)  # connections of clients that were garbage-collected


def _ranks(rank: int, world_size: int, num_experts: int | None) -> tuple[int, int, int | None]:
    """Return the numbers of a registration as ints."""
    return (
        whole("rank", rank, 0, MAX_SMALL),
        whole("world_size", world_size, 0, MAX_SMALL),
        None if num_experts is None else whole("num_experts", num_experts, 0, MAX_SMALL),
    )


def connect(
    address: str | Path | None = None,
    *,
    name: str = "",
    timeout: float = 10.0,
    uid: int | None = None,
    reconnect: bool = True,
    lives_with: Lifeline | None = None,
) -> Client:
    """Connect to the daemon of this node.

    Args:
        address: the daemon's runtime directory; None: REFITD_RUNTIME_DIR, else $XDG_RUNTIME_DIR/refitd, else
            /tmp/refitd-UID.
        name: this client's name in logs and status.
        timeout: seconds to wait for the daemon's answer.
        uid: the user id that the daemon must have; None: REFITD_DAEMON_UID, else this user or root.
        reconnect: when the daemon ends, wait for the next one and register everything with it again: sources with the
            versions that they hold, targets with the version that they serve, with their arenas. Engines serve on
            until their permit ends. Calls wait for it within their timeouts, 60 s at most. Without, calls raise
            PeerLost at once, and nothing comes back.
        lives_with: the processes that this one serves for, an engine's server for instance. Once one of them has ended,
            the client closes its registrations, so that the server's successor gets the name; every target's `version`
            becomes None, and calls raise Orphaned.

    Raises:
        TransportError: no daemon runs there, or it does not answer.
        ConfigError: the address is not a valid path.
        RefusedError: the daemon belongs to another user, or does not admit this one.
        Orphaned: a process of `lives_with` has ended.
    """
    if lives_with is not None:
        if not isinstance(lives_with, Lifeline):
            raise RefusedError(f"lives_with is {shown(lives_with)}, expected a refitd.Lifeline")
        lives_with.check()
    try:
        directory = Path(address) if address is not None else default_runtime_dir()
    except TypeError:
        raise RefusedError(f"address is {shown(address)}, expected the directory of a daemon") from None
    if found := unprintable(str(directory)):
        raise ConfigError(f"address {str(address)!r} {found}; give the daemon's runtime directory")
    is_named = address is not None or bool(os.environ.get("REFITD_RUNTIME_DIR"))
    name, timeout = text("name", name, least=0), seconds("timeout", timeout)
    reconnect = flag("reconnect", reconnect)

    def dial(within_s: float) -> Connection:
        return Connection(directory, name, within_s, uid, may_be_link=is_named)

    return Client(Line(dial, timeout, reconnect=reconnect), lives_with)
