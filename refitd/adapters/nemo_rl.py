"""Implement NeMo-RL's checkpoint engine (`policy.generation.refit_transport`), from policy workers to vLLM workers.

    policy.generation.refit_transport: "refitd.adapters.nemo_rl:RefitdTransport"
    policy.generation.refit_cfg: {"refitd.adapters.nemo_rl:RefitdTransport": {model: policy}}

`RefitdTransport` has the methods of NeMo-RL's `CheckpointEngine`. NeMo-RL creates one in each policy worker and one in
each vLLM worker, and its driver calls both sides at the same time. This module does not import NeMo-RL. See
docs/nemo_rl.md.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import refitd
from refitd.adapters.refit_room import GENERATION, TRAINER, SessionRoom
from refitd.adapters.streams import PublishedShare, ReceivedTensors, Shapes, Weights, copied

POLL_S = 0.1  # interval between checks for missing versions and ranks
BEAT_S = 0.25  # interval between checks for a failure of another rank


class RefitdTransport:
    """One rank's side of all refits: policy ranks publish, the first one swaps, generation ranks load.

    Every policy rank yields the same unsharded tensors in the same order and publishes its share of them. A generation
    rank has buffers for all tensors, and passes views of them to the engine once the version is decided.
    """

    shard_expert_weights = False  # generation ranks receive unsharded tensors

    def __init__(
        self,
        bucket_size: int,
        *,
        model: str = "policy",
        replica: str = "generation",
        runtime_dir: str = "",
        timeout_s: float = 600.0,
        slots: int = 2,
        release_after_refit: bool = False,
    ) -> None:
        """Store the settings of `refit_cfg`, without connecting.

        Args:
            bucket_size: the largest batch for the engine's loader, in bytes; a larger tensor forms its own batch.
            model: the model's name in refitd.
            replica: the prefix of the generation ranks' replica names. Each rank has all tensors and is a replica.
            runtime_dir: the daemon's directory; "": this user's default.
            timeout_s: seconds for one refit, counted on each rank from its start of the refit.
            slots: the number of versions that a policy rank's node stores.
            release_after_refit: read by NeMo-RL, which then finalizes after each refit and prepares before the next.
        """
        if bucket_size < 1 or timeout_s <= 0:
            raise refitd.RefusedError(
                f"bucket_size is {bucket_size} and timeout_s {timeout_s}, expected numbers above 0"
            )
        self._bucket_size, self._timeout, self._slots = bucket_size, timeout_s, slots
        self._model, self._replica, self._runtime_dir = model, replica, runtime_dir
        self._client: refitd.Client | None = None
        self._room: SessionRoom | None = None
        self._share: PublishedShare | None = None
        self._source: refitd.StreamedSource | None = None
        self._first_version = 0
        self._is_compared = False
        self._buffers: ReceivedTensors | None = None

    # --- NeMo-RL's lifecycle ------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Connect to this node's daemon; return a session. NeMo-RL passes the first policy rank's to all ranks."""
        self.finalize()
        self._client = refitd.connect(self._runtime_dir or None, name="nemo-rl", reconnect=False)
        return {"refitd": uuid.uuid4().hex[:12], "model": self._model}

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        """Return None: policy ranks send unsharded tensors."""
        return None

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Make this worker policy rank `worker_rank`."""
        self._enter(TRAINER, worker_rank, {TRAINER: train_world_size, GENERATION: rollout_world_size}, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Make this worker generation rank `rollout_rank`."""
        self._enter(GENERATION, rollout_rank, {TRAINER: train_world_size, GENERATION: rollout_world_size}, metadata)

    def finalize(self) -> None:
        """Free all memory and disconnect; `prepare` connects again."""
        self._let_go()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    async def send_weights(self, weights: Weights) -> None:
        """Publish this rank's share. The first rank returns once the version is live in every generation rank.

        In the first refit a rank stores its share in main memory until the iterator ends, because shapes are declared
        then. Later refits copy each tensor directly into a slot.

        Raises:
            RefusedError: names, shapes or dtypes differ from the first refit's or from other ranks'.
            RefitFailed: another rank failed; the error names it and the reason. SwapFailed (a subclass): the version is
                not live.
            PeerLost: a rank or the daemon is lost.
            DeadlineExceeded: some rank did not take part within `timeout_s`.
        """
        left = iter(weights)
        try:
            with self._refit(TRAINER) as room:
                version = self._publish(room, left)
                if room.rank == 0:
                    self._make_live(room, version)
        except Exception:
            with contextlib.suppress(Exception):  # other ranks may wait in the collectives that the iterator runs
                for _ in left:
                    pass
            raise

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """Wait for this refit's version and yield views of its tensors, each valid until the next batch is requested.

        Raises:
            RefitFailed, PeerLost, DeadlineExceeded: as in `send_weights`, before the first batch.
        """
        deadline = time.monotonic() + self._timeout
        try:
            with self._refit(GENERATION) as room:
                if self._buffers is None:
                    self._buffers = self._register(room, deadline)
                buffers = self._buffers
                self._take(buffers, room, deadline)
        except BaseException as exc:
            if not isinstance(exc, refitd.RefitFailed):  # after RefitFailed the next refit can use the buffers
                self._drop_buffers()
            raise
        with buffers.reading():
            tensors = {name: tensor for name, tensor in buffers.tensors.items() if name != room.mark}
            for batch in _batches(tensors, self._bucket_size):
                yield batch

    # --- both sides ---------------------------------------------------------------------------------------

    def _connected(self) -> refitd.Client:
        if self._client is None:
            raise refitd.RefusedError("this checkpoint engine is not connected; call prepare first")
        return self._client

    def _enter(self, side: str, rank: int, worlds: dict[str, int], metadata: list[Any]) -> None:
        client = self._connected()
        models = [m.get("model") if isinstance(m, dict) and "refitd" in m else None for m in metadata]
        if len(models) != sum(worlds.values()) or set(models) != {self._model}:
            raise refitd.RefusedError(
                f"metadata are of {len(models)} ranks and of models {sorted({str(m) for m in models})}, expected "
                f"{sum(worlds.values())} ranks of {self._model!r}; give every rank the same refit_cfg"
            )
        if not 0 <= rank < worlds[side]:
            raise refitd.RefusedError(f"{side} rank is {rank}, expected 0 to {worlds[side] - 1}")
        self._let_go()
        self._room = SessionRoom(client, self._model, metadata[0]["refitd"], side, rank, worlds)

    @contextlib.contextmanager
    def _refit(self, side: str) -> Iterator[SessionRoom]:
        """Begin the next refit, and report an exception of the block to all waiting ranks."""
        room = self._room
        if room is None or room.side != side:
            raise refitd.RefusedError(f"this is no {side} rank yet; init_*_process_group comes first")
        try:
            room.begin()
            yield room
        except BaseException as exc:
            room.fail(exc)
            raise

    def _let_go(self) -> None:
        """Close this rank's registrations and drop the tensors' names and shapes."""
        source, self._source = self._source, None
        self._share, self._is_compared = None, False
        with contextlib.suppress(refitd.RefitdError):  # the daemon may be lost
            if source is not None:
                source.close()
        self._drop_buffers()
        room, self._room = self._room, None
        if room is not None:
            room.leave()

    # --- policy ranks -------------------------------------------------------------------------------------

    def _publish(self, room: SessionRoom, weights: Iterator[tuple[str, torch.Tensor]]) -> int:
        """Publish this rank's share, and return the version's number, which every rank computes by itself."""
        mark = [(room.mark, torch.tensor([room.serial]))] if room.rank == 0 else []
        if self._share is None:
            share, held = PublishedShare(room.rank, room.worlds[TRAINER]), {}
            for name, tensor in share.first(weights):
                held[name] = copied(tensor)
            if held:
                shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in [*held.items(), *mark]}
                self._source = self._connected().declare_source(
                    self._model,
                    shapes,
                    rank=room.rank,
                    world_size=share.holders,
                    slots=self._slots,
                    timeout=self._timeout,
                )
                self._first_version = self._source.next_version
            self._share = share
            mine: Iterator[tuple[str, torch.Tensor]] = iter(held.items())
        else:
            mine = self._share.again(weights)
        version = self._first_version + room.serial - 1  # a failed refit also uses up its number
        if self._source is None:
            for _ in mine:  # this rank's share is empty, but the iterator's collectives need it
                pass
        else:
            self._source.publish_from(version, _chained(mine, mark), timeout=self._timeout)
        return version

    def _make_live(self, room: SessionRoom, version: int) -> None:
        """Swap to the version once every policy rank has published it and every generation rank wants it."""
        client, deadline = self._connected(), time.monotonic() + self._timeout
        replicas = {_replica(self._replica, rank): rank for rank in range(room.worlds[GENERATION])}
        while True:
            room.check()
            found = next((m for m in room.look().models if m.model == self._model), None)
            targets = [t for t in found.targets if t.replica in replicas] if found else []
            if found and version in found.complete_versions and len(targets) == room.worlds[GENERATION]:
                break
            if time.monotonic() > deadline:
                complete = found.complete_versions if found else ()
                raise refitd.DeadlineExceeded(
                    f"refit {room.serial} of {self._model!r}: after {self._timeout:.0f} s version {version} is "
                    f"{'complete' if version in complete else 'not complete'}, and {len(targets)} of "
                    f"{room.worlds[GENERATION]} generation ranks have registered"
                )
            time.sleep(POLL_S)
        if not self._is_compared:
            assert self._share is not None
            self._share.check_offered(client.tensors(self._model, timeout=self._timeout), room.mark)
            self._is_compared = True
        wanted = len(self._share.shapes) + 1 if self._share else 0
        if wrong := [replicas[t.replica] for t in targets if t.tensors != wanted]:
            raise refitd.RefusedError(
                f"generation ranks {wrong[:10]} do not want the {wanted} tensors that are offered; shut the weight "
                "synchronizer down, so that all ranks are prepared anew"
            )
        client.swap(self._model, version, timeout=max(1.0, deadline - time.monotonic()), queue=True)

    # --- generation ranks ---------------------------------------------------------------------------------

    def _wait_for_offer(self, room: SessionRoom, deadline: float) -> Shapes:
        """Return this session's tensors once all policy ranks have declared them."""
        client = self._connected()
        while True:
            room.check()
            room.look_at_times()
            with contextlib.suppress(
                refitd.DeadlineExceeded, refitd.PlanError
            ):  # ranks of an earlier trainer are still registered
                if room.mark in client.tensors(self._model, timeout=BEAT_S):
                    found = next((m for m in client.status().models if m.model == self._model), None)
                    if found and sum(s.attached for s in found.sources) == found.source_world_size:
                        return client.tensors(self._model, timeout=BEAT_S)
            if time.monotonic() > deadline:
                raise refitd.DeadlineExceeded(
                    f"refit {room.serial} of {self._model!r}: the trainer has not declared its tensors within "
                    f"{self._timeout:.0f} s"
                )
            time.sleep(POLL_S)

    def _register(self, room: SessionRoom, deadline: float) -> ReceivedTensors:
        """Allocate buffers for all tensors, and register them as a replica."""
        offered = self._wait_for_offer(room, deadline)
        buffers = ReceivedTensors(self._connected(), offered, timeout=self._timeout)
        try:
            buffers.register(self._model, _replica(self._replica, room.rank))
        except BaseException:
            buffers.free()
            raise
        return buffers

    def _take(self, buffers: ReceivedTensors, room: SessionRoom, deadline: float) -> None:
        """Return once the buffers hold this refit's version. They do not change until they have been read."""

        def is_there() -> bool:
            # a replica that joins first gets the live version, which may be of an earlier refit
            return buffers.version is not None and int(buffers.tensors[room.mark]) == room.serial

        while not buffers.begin_to_read(is_there, BEAT_S):
            room.check()
            room.look_at_times()
            if time.monotonic() > deadline:
                raise refitd.DeadlineExceeded(
                    f"refit {room.serial}: its version is not live here in time ({buffers.state}); look at "
                    "`refitctl status`"
                )

    def _drop_buffers(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.free()


def _batches(tensors: dict[str, torch.Tensor], most: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield all tensors, in batches of at most `most` bytes; a larger tensor forms its own batch."""
    batch: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in tensors.items():
        if batch and nbytes + tensor.nbytes > most:
            yield batch
            batch, nbytes = [], 0
        batch.append((name, tensor))
        nbytes += tensor.nbytes
    if batch:
        yield batch


def _replica(prefix: str, rank: int) -> str:
    return f"{prefix}-{rank}"


def _chained(*parts: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for part in parts:
        yield from part
