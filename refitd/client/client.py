"""The client stub: what trainers, engines and operators call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from refitd.buffers.arena import MappedArena
from refitd.client.connection import Connection
from refitd.config import default_runtime_dir
from refitd.errors import RefitdError, RefitFailed
from refitd.protocol import local
from refitd.protocol.reports import ModelDescription, PlanReport, StatusReport, SwapProgress, SwapReport
from refitd.protocol.shards import Place, shard_of

if TYPE_CHECKING:
    import torch

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
        self._arenas: dict[int, MappedArena] = {}
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
            timeout: seconds for allocating the slots and being admitted.

        Raises:
            RefusedError: the rank is taken, or descriptions are impossible.
            ArenaError: there is not enough memory for the slots.
        """
        from refitd.client.source import Source, check_slots
        from refitd.client.tensors import TensorSet

        tensors = TensorSet(module_or_tensors, rank, metadata, pg_collection, num_experts)
        live = self._live(tensors)
        message = local.RegisterSource(
            model=model,
            rank=rank,
            world_size=world_size,
            shard=shard_of(tensors.metadata),
            slots=check_slots(slots),
            live=live,
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
            timeout: seconds for allocating the staging arena and being admitted.

        Raises:
            RefusedError: the rank is taken, or descriptions are impossible.
            ArenaError: there is not enough memory for staging.
        """
        from refitd.client.target import Target
        from refitd.client.tensors import TensorSet

        tensors = TensorSet(module_or_tensors, rank, metadata, pg_collection, num_experts)
        live = self._live(tensors)
        message = local.RegisterTarget(
            model=model,
            replica=replica,
            rank=rank,
            world_size=world_size,
            shard=shard_of(tensors.metadata),
            live=live,
        )
        registered = self._connection.request(message, local.TargetRegistered, timeout)
        with self._given_back(registered.member):
            staging = None if live else self._connection.map_arena(registered.staging, write=False)
        target = Target(self._connection, model, replica, tensors, registered, staging, on_commit)
        self._registered.append(target)
        return target

    def allocate(
        self, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]], *, timeout: float = 60.0
    ) -> dict[str, torch.Tensor]:
        """Return uninitialised (zero) tensors of these shapes and dtypes inside an arena that the daemon owns.

        Sources made of them are never copied; targets made of them are written by the workers.
        """
        from refitd.client.tensors import packed_bytes, tensors_in

        message = local.CreateArena(nbytes=packed_bytes(wanted), label="tensors")
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
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make a version (None: the newest complete one) live in every replica, or in none.

        Raises:
            RefusedError: it could not start; the reason says what is missing.
            RefitFailed: it ended without being live everywhere; `report` and `causes` say who and why.
        """
        message = local.StartSwap(model=model, version=version, timeout_s=timeout or 0.0)
        # the coordinator ends a swap at its timeout plus the commit of what was decided; wait for its word
        wait = SWAP_S if timeout is None else timeout + 120.0
        report = self._connection.request(message, SwapReport, wait, on_progress)
        if report.outcome != "committed":
            causes = {f"{m.replica} rank {m.rank}": m.reason for m in report.members if m.reason}
            what = f"swap of {model!r} to version {report.version} {report.outcome} in phase {report.phase}"
            raise RefitFailed(f"{what}: {report.reason}", causes, report)
        return report

    def status(self) -> StatusReport:
        """Return the cluster as the coordinator sees it."""
        return self._connection.request(local.GetStatus(), StatusReport, REQUEST_S)

    def plan(self, model: str) -> PlanReport:
        """Return what a swap of `model` would move; raises PlanError with everything that is wrong."""
        return self._connection.request(local.GetPlan(model=model), PlanReport, 120.0)

    def describe(self, model: str) -> ModelDescription:
        """Return what every registered rank of `model` holds."""
        return self._connection.request(local.GetDescription(model=model), ModelDescription, REQUEST_S)

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
