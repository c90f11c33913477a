"""Implement verl's checkpoint engine (0.9), chosen with `checkpoint_engine.backend=refitd`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=refitd
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=refitd.adapters.verl

Importing this module registers the backend. The trainer's rank 0 publishes the tensors that verl yields. Each rollout
worker is a replica of one rank; its target is a buffer that verl's server adapter reads. See docs/verl.md.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import refitd
from refitd.adapters.streams import FirstStream, ReceivedTensors, Shapes, Weights

log = logging.getLogger("refitd.verl")

PREFIX = "verl-"  # of rollout workers' replica names
POLL_S = 0.01  # interval between a rollout worker's checks for the version
LOOK_S = 0.5  # interval between status requests about the other side


@CheckpointEngineRegistry.register("refitd")
class RefitdCheckpointEngine(CheckpointEngine):
    """One worker's side of updates. verl calls prepare, init_process_group, send or receive_weights, finalize."""

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        model: str = "policy",
        runtime_dir: str = "",
        timeout: float = 600.0,
        slots: int = 2,
        device: str = "cpu",
        keep_buffers: bool = True,
    ) -> None:
        """Store the settings, without connecting. verl passes the first two; the others are `engine_kwargs.refitd`.

        Args:
            bucket_size: verl's bucket size in bytes. Larger tensors are yielded on the GPU, if there is one.
            is_master: whether this is the trainer's rank 0.
            model: the model's name in refitd.
            runtime_dir: the daemon's directory; "": this user's default.
            timeout: seconds for each wait. A rollout worker's wait for a version lasts from the trainer's first gather
                to the commit.
            slots: the number of versions that the trainer's node stores.
            device: the device of slots and buffers, "cpu" or "cuda:N".
            keep_buffers: keep slots and buffers between updates. False: `finalize` frees them.
        """
        self.bucket_size, self.is_master = bucket_size, is_master
        self._model, self._runtime_dir, self._timeout = model, runtime_dir, float(timeout)
        self._slots, self._device, self._keeps = slots, device, keep_buffers
        self._name = f"{PREFIX}{socket.gethostname()[:40]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._client: refitd.Client | None = None
        self._update: dict[str, Any] | None = None
        self._sending: dict[str, Any] | None = None
        # the trainer's rank 0
        self._source: refitd.StreamedSource | None = None
        self._announcer: refitd.StreamedSource | None = None
        self._shapes: Shapes | None = None
        # a rollout worker
        self._received: ReceivedTensors | None = None

    def prepare(self) -> dict[str, Any]:
        """Return this worker's entry for `build_topology`; the trainer's rank 0 adds the next version's number.

        The trainer registers as two source ranks. Rank 1 has no tensors and registers now, before shapes are known:
        rollout workers then notice immediately if the trainer fails or dies.
        """
        self._update = None
        if not self.is_master:
            return {"model": self._model, "name": self._name}
        client = self._connected()
        if self._sending is not None:  # verl abandoned that update
            self._sending = None
            self._withdraw()
        if self._announcer is None:
            self._announcer = self._declared(client, {}, rank=1)
        first = max(source.next_version for source in (self._announcer, self._source or self._announcer))
        return {"model": self._model, "name": self._name, "first": first, "run": self._announcer.run}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for each worker: its role and the update.

        Raises:
            RefusedError: the trainer's rank 0 is not the master, or workers have different models.
        """
        if len(metadata) != actor_wg_world_size + rollout_world_size or not metadata or "first" not in metadata[0]:
            raise refitd.RefusedError(
                f"{len(metadata)} workers have prepared, expected {actor_wg_world_size} of the trainer, the first of "
                f"them with is_master=True, and {rollout_world_size} of the rollout"
            )
        if len(models := {one["model"] for one in metadata}) > 1:
            raise refitd.RefusedError(f"workers name different models: {sorted(models)}; set engine_kwargs.refitd")
        rollout = [one["name"] for one in metadata[actor_wg_world_size:]]
        update = {"first": metadata[0]["first"], "run": metadata[0]["run"]}
        idle = actor_wg_world_size - 1
        actors: dict[str, list[Any]] = {"role": ["sender", *["walker"] * idle]}
        actors["update"] = [{**update, "replicas": rollout}, *[update] * idle]
        return actors, {"role": ["receiver"] * rollout_world_size, "update": [update] * rollout_world_size}

    def init_process_group(self, *, role: str, update: dict[str, Any]) -> None:
        """Set this worker's role in the next update. A rollout worker connects to its node's daemon."""
        if role == "receiver":
            self._connected()
        self._update = {"role": role, **update}

    def finalize(self) -> None:
        """End the update; with `keep_buffers=False`, free slots and buffers."""
        self._update = None
        if not self._keeps:
            self._withdraw()
            self._release()

    def close(self) -> None:
        """Withdraw the trainer's versions, free all memory and disconnect. verl does not call this."""
        self._update = None
        self._withdraw()
        self._release()
        self._disconnect()

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._source = self._announcer = self._received = None
        if client is not None:
            client.close()

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, float]:
        """Publish the tensors of `weights` and make them live in every rollout worker. Ranks above 0 only iterate.

        Each tensor is gathered collectively by the trainer's ranks, so every rank iterates to the end, even after an
        error of refitd. In the first update rank 0 copies all tensors into main memory to learn their shapes.

        Raises:
            RefusedError, SwapFailed, PeerLost, DeadlineExceeded: no rollout worker gets this version, except those
                listed in `SwapFailed.report`. The source is withdrawn, which ends the other workers' waits.
        """
        update = self._begun("sender", "walker")
        walk = _walked(weights)
        if update["role"] == "walker":
            collections.deque(walk, maxlen=0)
            return {}
        self._sending = update
        version = _version(update, global_steps)
        began = time.monotonic()
        try:
            client = self._connected()
            there = self._registered(client)
            self._publish(client, version, walk)
            published = time.monotonic()
            await self._assembled(client, update, there)
            await asyncio.to_thread(client.swap, self._model, version, timeout=self._timeout, queue=True)
        except BaseException as exc:
            if self._sending is update:
                self._withdraw()
            if isinstance(exc, Exception):
                with contextlib.suppress(Exception):  # the first error is more useful
                    collections.deque(walk, maxlen=0)
            raise
        finally:
            if self._sending is update:
                self._sending = None
        swap_s = time.monotonic() - published
        return {"refitd/version": version, "refitd/publish_s": published - began, "refitd/swap_s": swap_s}

    def _publish(self, client: refitd.Client, version: int, walk: Weights) -> None:
        """Publish on this thread, because the iterator's gathers depend on it (current CUDA device, collectives)."""
        stream, shapes = walk, self._shapes
        if self._announcer is None:
            raise refitd.RefusedError(f"model {self._model!r}: the daemon has ended since prepare; update again")
        if shapes is None:
            first = FirstStream(walk)
            stream, shapes = first.drained(), first.shapes
        if self._source is None:
            self._source = self._declared(client, shapes, rank=0)
        self._source.publish_from(version, stream, timeout=self._timeout)
        self._announcer.publish_from(version, (), timeout=self._timeout)
        self._shapes = shapes  # later updates must have the same tensors

    def _declared(self, client: refitd.Client, shapes: Shapes, rank: int) -> refitd.StreamedSource:
        return client.declare_source(
            self._model, shapes, rank=rank, world_size=2, slots=self._slots, device=self._device, timeout=self._timeout
        )

    async def _assembled(self, client: refitd.Client, update: dict[str, Any], there: set[str]) -> None:
        """Wait until all rollout workers are registered (`there`: those before the update); evict any others."""
        wanted = {_replica(name, update["run"]) for name in update["replicas"]}
        deadline = time.monotonic() + self._timeout
        while True:
            found = await asyncio.to_thread(self._registered, client)
            if self._sending is not update:
                raise refitd.RefusedError(f"model {self._model!r}: verl has begun another update")
            for replica in sorted(one for one in found if one.rpartition(".")[0] not in update["replicas"]):
                with contextlib.suppress(refitd.RefusedError):  # it has already left
                    client.evict(self._model, replica, reason="this rollout worker is not in verl's update")
            missing = sorted(wanted - found)
            if not missing:
                return
            if lost := sorted(there.intersection(missing)):
                raise refitd.PeerLost(f"model {self._model!r}: rollout workers {lost[:4]} have gone during the update")
            if time.monotonic() >= deadline:
                late = f"{len(missing)} of {len(wanted)} rollout workers have not registered: {missing[:4]}"
                raise refitd.DeadlineExceeded(f"model {self._model!r}: after {self._timeout:.0f} s {late}")
            await asyncio.sleep(LOOK_S / 5)

    def _registered(self, client: refitd.Client) -> set[str]:
        """Return the replicas that are rollout workers. Other engines may take part, but are not waited for."""
        found = _model(client, self._model)
        return {one.replica for one in found.targets if one.replica.startswith(PREFIX)} if found is not None else set()

    def _withdraw(self) -> None:
        """Close both source ranks, which withdraws their versions. Waiting rollout workers notice it and stop."""
        sources = [source for source in (self._source, self._announcer) if source is not None]
        self._source = self._announcer = None
        for source in sources:
            try:
                source.close()
            except refitd.RefitdError as exc:
                log.warning("model=%s the source is not withdrawn: %s", self._model, exc)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of this update's version, as views of this worker's buffer.

        Tensors are yielded once the whole version has arrived and is decided for every rollout worker. The buffer does
        not change before the next update, nor while this generator is open.

        Raises:
            PeerLost: the trainer withdrew the version, or is lost; the error includes the last swap's failure.
            DeadlineExceeded: the version did not arrive in time.
        """
        update = self._begun("receiver")
        version = _version(update, global_steps)
        received = await self._arrived(version, update["run"])
        with received.reading():
            for name, tensor in received.tensors.items():
                # verl's vLLM adapter copies small tensors into a bucket, and shares larger ones through GPU memory
                is_shared = tensor.nbytes > self.bucket_size > 0 and torch.cuda.is_available()
                yield name, tensor.to("cuda") if is_shared else tensor

    async def _arrived(self, version: int, run: str) -> ReceivedTensors:
        """Wait until the buffer holds `version`; it does not change until it has been read."""
        client = self._connected()
        began = time.monotonic()
        looked = began - LOOK_S
        registered = False
        while True:
            received = self._received
            if registered and received is not None and received.begin_to_read(partial(_holds, received, version)):
                return received
            now = time.monotonic()
            if now - looked >= LOOK_S:
                found = await asyncio.to_thread(_model, client, self._model)
                if found is None or not any(one.attached and one.run == run for one in found.sources):
                    reason = getattr(found and found.last_swap, "reason", "")
                    how = f"; the last swap failed: {reason}" if reason else ""
                    raise refitd.PeerLost(f"model {self._model!r}: version {version} is withdrawn by the trainer{how}")
                here = {one.replica for one in found.targets}
                is_registered = received is not None and received.is_registered
                registered = is_registered and _replica(self._name, run) in here
                if not registered and version in found.complete_versions:
                    await asyncio.to_thread(self._register, client, run)
                    registered = True
                looked = time.monotonic()
            if now - began >= self._timeout:
                state = "the trainer has published nothing" if self._received is None else self._received.state
                raise refitd.DeadlineExceeded(
                    f"model {self._model!r}: version {version} has not come within {self._timeout:.0f} s ({state})"
                )
            await asyncio.sleep(POLL_S)

    def _register(self, client: refitd.Client, run: str) -> None:
        """Register a buffer for the tensors of this run of the trainer; reuse the old buffer if it fits."""
        shapes = client.tensors(self._model, timeout=self._timeout)
        if self._received is None or self._received.shapes != shapes:
            self._release()
            self._received = ReceivedTensors(client, shapes, device=self._device, timeout=self._timeout)
        self._received.register(self._model, _replica(self._name, run))

    def _release(self) -> None:
        """Close the registration and free the buffer."""
        received, self._received = self._received, None
        if received is not None:
            received.free()

    def _begun(self, *roles: str) -> dict[str, Any]:
        update = self._update or {"role": "none"}
        if update["role"] not in roles:
            role = f"{update['role']}, expected {' or '.join(roles)}"
            raise refitd.RefusedError(f"this worker's role is {role}: init_process_group gives it")
        return update

    def _connected(self) -> refitd.Client:
        """Return a client whose daemon answers. If the daemon has ended, drop all registrations and connect again."""
        if self._client is not None:
            try:
                self._client.status()
            except refitd.PeerLost as exc:
                log.warning("model=%s connecting again: %s", self._model, exc)
                self._update = None
                self._disconnect()
            else:
                return self._client
        self._client = refitd.connect(self._runtime_dir or None, name="verl", reconnect=False)
        return self._client


def _walked(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator that can continue after its consumer failed. It ends if `weights` itself fails."""
    yield from weights


def _holds(received: ReceivedTensors, version: int) -> bool:
    return received.version == version


def _version(update: dict[str, Any], global_steps: int | None) -> int:
    """Return the version's number, the larger of verl's step and the first free number; both sides compute it."""
    return max(int(update["first"]), int(global_steps or 0))


def _replica(name: str, run: str) -> str:
    """Return a rollout worker's replica name. It includes the trainer's run, as other runs may have other tensors."""
    return f"{name}.{run}"


def _model(client: refitd.Client, model: str) -> Any:
    return next((one for one in client.status().models if one.model == model), None)
