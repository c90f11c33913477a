"""The client stub: what trainers, engines and operators call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from refitd.buffers.cuda import name_of
from refitd.client.connection import Connection
from refitd.config import default_runtime_dir
from refitd.errors import RefitdError, RefitFailed, RefusedError
from refitd.protocol import local
from refitd.protocol.reports import (
    HistoryReport,
    ModelDescription,
    PlanReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    VerifyReport,
)
from refitd.protocol.shards import Place, shard_of

if TYPE_CHECKING:
    import torch

    from refitd.client.derived import Derived
    from refitd.client.devices import Arena
    from refitd.client.mxfp8 import MXFP8Offer
    from refitd.client.source import Source
    from refitd.client.target import Commit, Target
    from refitd.client.tensors import Tensors, TensorSet
    from refitd.describe.metadata import ParameterMetadata

REQUEST_S = 30.0
# A swap without a timeout of its own ends at the coordinator's deadlines; this is beyond all sensible ones.
SWAP_S = 3600.0


class Client:
    """A session with this node's daemon. Made by `refitd.connect`; close it, or use it as a context manager."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._arenas: dict[int, Arena] = {}
        self._registered: list[Source | Target] = []

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
            module_or_tensors: a module, a list of modules (virtual pipeline chunks), or {name: tensor}.
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
        from refitd.client.mxfp8 import SourceTensors
        from refitd.client.source import Source, check_slots

        tensors = SourceTensors(module_or_tensors, rank, metadata, pg_collection, num_experts, mxfp8)
        if tensors.is_converted and pull:
            raise RefusedError(f"model {model!r}: tensors that are offered in MXFP8 cannot be pulled; leave pull out")
        live = () if tensors.is_converted else self._live(tensors)
        message = local.RegisterSource(
            model=model,
            rank=rank,
            world_size=world_size,
            shard=shard_of(tensors.wire),
            slots=check_slots(slots),
            live=live,
            device=_gpu_name(device, tensors),
        )
        registered = self._connection.request(message, local.SourceRegistered, timeout)
        with self._given_back(registered.member):
            mapped = tuple(self._connection.map_arena(arena, write=True) for arena in registered.slots)
        source = Source(self._connection, model, tensors, registered, mapped, pull)
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
        convert_on_send: bool = False,
        derived: Mapping[str, Derived] | None = None,
        mode: Literal["shadow", "in-place"] = "shadow",
        device: str | torch.device | None = None,
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
            convert_on_send: take tensors that are held in MXFP8 (values of a dict that are `MXFP8Buffer`) as sources
                offer them; otherwise bfloat16 arrives and the workers convert it.
            derived: tensors that are made of the weights, by name; their hooks are called inside every commit.
            mode: "shadow": a version is staged beside the live tensors, and taken over whole. "in-place": the workers
                write the live tensors (of `allocate`) while this rank stands still (`on_pause`), without memory for
                staging; a swap that fails then leaves nothing to serve until the next one has succeeded.
            device: where the staging arena lies, "cuda:N", "cpu", or (None) where the tensors do; what is converted is
                converted there. "cpu" saves a GPU the memory of one more shard, and makes commits (and MXFP8) slower.
            timeout: seconds for allocating the staging arena and being admitted.

        Raises:
            RefusedError: the rank is taken, or descriptions are impossible.
            ArenaError: there is not enough memory for staging.
        """
        from refitd.client.mxfp8 import TargetTensors
        from refitd.client.target import Target

        if mode not in ("shadow", "in-place"):
            raise RefusedError(f"replica {replica!r}: mode is {mode!r}, expected 'shadow' or 'in-place'")
        if on_pause is not None and on_commit is not None:
            raise RefusedError(f"replica {replica!r}: give on_commit or on_pause; with on_pause the stub commits")
        tensors = TargetTensors(module_or_tensors, rank, metadata, pg_collection, num_experts, convert_on_send, derived)
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
            device=_gpu_name(device, tensors),
        )
        registered = self._connection.request(message, local.TargetRegistered, timeout)
        with self._given_back(registered.member):
            staging = None
            if mode == "shadow":
                staging = self._connection.map_arena(registered.staging, write=False)
            if staging is not None and registered.version is not None:
                tensors.restore(staging)
        target = Target(
            self._connection,
            model,
            replica,
            tensors,
            registered,
            None if live else staging,
            on_commit,
            on_pause,
            on_resume,
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

        Sources made of them are never copied; targets made of them are written by the workers. `device` is "cpu" for
        main memory, or a GPU as torch numbers it in this process ("cuda:0").

        Raises:
            ArenaError: there is not so much memory left, or the GPU is not there, or its memory cannot be shared.
        """
        from refitd.client.devices import HOST, number_of
        from refitd.client.tensors import packed_bytes, tensors_in

        gpu = number_of(device)
        name = "" if gpu == HOST else name_of(gpu)
        message = local.CreateArena(nbytes=packed_bytes(wanted), label="tensors", device=name)
        created = self._connection.request(message, local.ArenaCreated, timeout)
        arena = self._connection.map_arena(created.arena, write=True)
        self._arenas[created.arena] = arena
        return tensors_in(arena, wanted)

    def swap(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        queue: bool = False,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make a version (None: the newest complete one) live in every replica, or in none.

        With `queue` it waits for a swap of the model that is running, and is refused otherwise.

        Raises:
            RefusedError: it could not start; the reason says what is missing.
            RefitFailed: it ended without being live everywhere; `report` and `causes` say who and why.
        """
        message = local.StartSwap(model=model, version=version, timeout_s=timeout or 0.0, queue=queue)
        return self._swap(message, timeout, on_progress)

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
            RefusedError, RefitFailed: as in `swap`.
        """
        message = local.StartSwap(model=model, version=version, timeout_s=timeout or 0.0, rollback=True)
        return self._swap(message, timeout, on_progress)

    def _swap(
        self, message: local.StartSwap, timeout: float | None, on_progress: Callable[[SwapProgress], None] | None
    ) -> SwapReport:
        # the coordinator ends a swap at its timeout plus the commit of what was decided; wait for its word
        wait = SWAP_S if timeout is None else timeout + 120.0
        report = self._connection.request(message, SwapReport, wait, on_progress)
        if report.outcome != "committed":
            causes = {f"{m.replica} rank {m.rank}": m.reason for m in report.members if m.reason}
            what = f"swap of {message.model!r} to version {report.version} {report.outcome} in phase {report.phase}"
            raise RefitFailed(f"{what}: {report.reason}", causes, report)
        return report

    def status(self) -> StatusReport:
        """Return the cluster as the coordinator sees it."""
        return self._connection.request(local.GetStatus(), StatusReport, REQUEST_S)

    def history(self, model: str = "", limit: int = 20) -> HistoryReport:
        """Return the last swaps of a model ("": of all) from the coordinator's journal, the newest first."""
        return self._connection.request(local.GetHistory(model=model, limit=limit), HistoryReport, REQUEST_S)

    def plan(self, model: str) -> PlanReport:
        """Return what a swap of `model` would move; raises PlanError with everything that is wrong."""
        return self._connection.request(local.GetPlan(model=model), PlanReport, 120.0)

    def describe(self, model: str) -> ModelDescription:
        """Return what every registered rank of `model` holds."""
        return self._connection.request(local.GetDescription(model=model), ModelDescription, REQUEST_S)

    def verify(self, model: str, *, timeout: float | None = None) -> VerifyReport:
        """Check the live weights of every replica of `model` against the digest of the version that it serves.

        It may be called at any time, and delays neither engines nor swaps by more than some milliseconds. Look at
        `outcome`: "proven", "differs" (with parameter, slice and rank) or "unknown"; nothing is raised for these.

        Raises:
            RefusedError: there is no such model, or it has no target.
        """
        wait = SWAP_S if timeout is None else timeout + REQUEST_S
        return self._connection.request(local.Verify(model=model, timeout_s=timeout or 0.0), VerifyReport, wait)

    def abort(self, model: str, reason: str = "") -> None:
        """Abort the running swap of `model` unless it is decided."""
        self._connection.request(local.AbortSwap(model=model, reason=reason), local.Done, REQUEST_S)

    def close(self) -> None:
        """End the session and every registration made in it."""
        for registered in self._registered:
            registered.release()
        self._registered.clear()
        self._arenas.clear()  # tensors that were allocated in them keep their memory
        self._connection.close()

    @contextlib.contextmanager
    def _given_back(self, member: str) -> Iterator[None]:
        """Take a registration back whose arenas this process cannot map."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RefitdError):
                self._connection.request(local.Deregister(member=member), local.Done, REQUEST_S)
            raise

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
    from refitd.client.devices import HOST, common_gpu, number_of

    gpu = common_gpu(tensors.names, tensors.tensors) if device is None else number_of(device)
    return "" if gpu == HOST else name_of(gpu)


def connect(address: str | Path | None = None, *, name: str = "", timeout: float = 10.0) -> Client:
    """Connect to the daemon of this node.

    Args:
        address: its runtime directory; None: REFITD_RUNTIME_DIR, else $XDG_RUNTIME_DIR/refitd, else /tmp/refitd-UID.
        name: what logs and status call this client.
        timeout: seconds to wait for its answer.

    Raises:
        TransportError: no daemon runs there, or it does not answer.
    """
    directory = Path(address) if address is not None else default_runtime_dir()
    return Client(Connection(directory, name, timeout))
