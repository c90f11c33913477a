"""Refit SGLang engines in place, driven by a trainer through a custom weight loader, or following as a plugin.

    python -m sglang.launch_server --model-path MODEL --custom-weight-loader refitd.adapters.sglang.take_over
    REFITD_SGLANG='{"replica": "a"}' python -m sglang.launch_server --model-path MODEL --disable-radix-cache

Written against SGLang 0.5.23, but never run with an SGLang server: docs/sglang.md.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

import refitd
from refitd.adapters.driving import CATCH_UP_S, live_version, swap_and_drive
from refitd.adapters.engines import Learner, Retries

log = logging.getLogger("refitd.sglang")

LOADER = "refitd.adapters.sglang.take_over"
SETTINGS = "REFITD_SGLANG"
WRITTEN_AGAINST = "0.5."


@dataclass(frozen=True)
class Settings:
    """Where an engine registers.

    Attributes:
        model: the model's name in refitd.
        replica: this engine's name; "" is its host. Data-parallel engines add their rank.
        runtime_dir: the daemon's directory; "" is this user's default one.
        checkpoint: the folder of safetensors that the engine loaded at its start, to check the layout.
        check: compare the engine's weights with the checkpoint before using the layout.
        timeout_s: seconds to wait for the trainer's tensors, and for each version.
    """

    model: str = "policy"
    replica: str = ""
    runtime_dir: str = ""
    checkpoint: str = ""
    check: bool = True
    timeout_s: float = 120.0

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """Return settings from JSON.

        Raises:
            RefusedError: a setting is unknown; the error names it and the known settings.
        """
        known = sorted(field.name for field in fields(cls))
        if unknown := sorted(given.keys() - set(known)):
            raise refitd.RefusedError(f"unknown settings {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**given)


class SchedulerRank:
    """One scheduler process's rank of a replica."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        """Check SGLang's version (RefusedError if it differs); `bind` registers later."""
        _check_version()
        self._settings = settings
        self._client: refitd.Client | None = None
        self._lifeline: refitd.Lifeline | None = None  # of the server that started this scheduler
        self._target: refitd.Target | None = None
        self._is_new = False
        load: Any = model.load_weights
        checkpoint = partial(_tensors, settings.checkpoint) if settings.check else None
        self._learner = Learner(model, load, checkpoint)

    def bind(self) -> refitd.Target:
        """Return the registration; the first time, learn the layout from the model's loader, check and register it.

        Raises:
            RefusedError: some weights are not plain copies of the trainer's tensors, or the engine repacks them.
            DeadlineExceeded: no trainer has registered.
            TransportError: no daemon is running.
        """
        if self._target is not None and isinstance(self._target.error, refitd.PeerLost):
            self.let_go()  # its daemon is lost
        if self._target is None:
            if self._lifeline is None and multiprocessing.parent_process() is not None:
                self._lifeline = refitd.Lifeline.of_parent("SGLang's server")
            self._client = refitd.connect(
                self._settings.runtime_dir or None, reconnect=False, lives_with=self._lifeline
            )
            try:
                self._target, self._is_new = self._register(self._client), True
            except BaseException:
                self.let_go()
                raise
        return self._target

    def let_go(self) -> None:
        """End the registration; the engine keeps serving its version, and may register again."""
        client, self._client, self._target = self._client, None, None
        if client is not None:
            client.close()

    def catch_up(self) -> None:
        """Commit a decided version, in a new engine the live one: left pending, it would delay the next swap."""
        target = self.bind()
        assert self._client is not None
        version = live_version(self._client, target.model) if self._is_new else target.pending
        self._is_new = False
        if version is not None:
            try:
                target.wait(version, timeout=CATCH_UP_S)
            except refitd.DeadlineExceeded as exc:
                log.warning("refitd: this engine serves what it has until the next version: %s", exc)

    def wait(self, version: int) -> None:
        """Return once a version is live here."""
        self.bind().wait(version, timeout=self._settings.timeout_s)

    def _register(self, client: refitd.Client) -> refitd.Target:
        from sglang.srt.runtime_context import get_parallel

        settings, parallel = self._settings, get_parallel()
        rank, world_size = parallel.world_group.rank_in_group, parallel.world_group.world_size
        replica = settings.replica or socket.gethostname()
        if parallel.dp_rank is not None:
            replica = f"{replica}-dp{parallel.dp_rank}"
        offered = client.tensors(settings.model, timeout=settings.timeout_s)
        learned = self._learner.learn(offered, rank)
        log.info("refitd: layout of %d tensors: %s", len(learned.trace.metadata), learned.trace.proof or "not proven")
        return client.register_target(
            settings.model,
            **learned.registration(),
            replica=replica,
            rank=rank,
            world_size=world_size,
            timeout=settings.timeout_s,
        )


# --- driven by a trainer: `update_weights_from_tensor(load_format=LOADER)` ---------------------------------


def take_over(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Commit a version; SGLang calls this in each scheduler process, with the tensors that `drive` sent.

    Raises:
        RefusedError: other tensors were sent, or the engine cannot be refitted.
        CommitError, DeadlineExceeded: the version is not live here.
    """
    sent = dict(named_tensors)
    if sent.keys() != {"refitd.settings", "refitd.version"}:
        raise refitd.RefusedError(f"{LOADER} takes what refitd.adapters.sglang.drive sends, not {sorted(sent)[:5]}")
    # the model exists as long as the engine, so store the registration there
    engine = model.__dict__.get("_refitd")
    if engine is None:
        engine = SchedulerRank(model, Settings.of(json.loads(bytes(sent["refitd.settings"].tolist()))))
    engine.bind()
    model.__dict__["_refitd"] = engine
    engine.catch_up()
    if (version := int(sent["refitd.version"].item())) >= 0:
        engine.wait(version)


def drive(
    engine: Any, client: refitd.Client, version: int, *, wait: float = 60.0, **settings: Any
) -> refitd.SwapReport:
    """Make a published version live, also in this engine; the engine keeps running until the decision.

    Args:
        engine: an `sglang.Engine`, started with `custom_weight_loader=[LOADER]`.
        client: the trainer's client.
        version: published by the trainer's ranks.
        wait: seconds for the other ranks to publish.
        settings: fields of `Settings`.

    Raises:
        RefusedError: SGLang or the engine refuses, with the reason.
        SwapFailed: the version is not live everywhere.
    """
    known = Settings.of(settings)

    def call(number: int) -> None:
        sent = {
            "refitd.settings": torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8),
            "refitd.version": torch.tensor([number]),
        }
        _done("begin_weight_update", engine.begin_weight_update())
        try:
            _done(LOADER, engine.update_weights_from_tensor([*sent.items()], load_format=LOADER))
        finally:
            _done("end_weight_update", engine.end_weight_update())

    call(-1)  # registers an engine that has just started, and commits a version that it has missed
    return swap_and_drive(client, known.model, version, lambda: call(version), wait=wait)


def _done(what: str, answer: tuple[bool, str]) -> None:
    succeeded, said = answer[0], answer[1]
    if not succeeded:
        raise refitd.RefusedError(f"SGLang: {what}: {said}")


# --- following, as a plugin --------------------------------------------------------------------------------


def register() -> None:
    """Add a commit point before each batch if REFITD_SGLANG is set; SGLang always calls this."""
    given = os.environ.get(SETTINGS)
    if given is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _check_version()
    follower = Follower(json.loads(given))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", follower.before_batch, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.on_idle", follower.before_idle, HookType.BEFORE)


class Follower:
    """Register once a trainer has, and commit every decided version between two batches."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._steps = 0  # from the process's start: the same on all ranks
        self._engine: SchedulerRank | None = None
        self._target: refitd.Target | None = None
        self._next_try, self._retries = float("-inf"), Retries(log)

    def before_batch(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """Commit a pending version.

        CommitError ends the scheduler: its weights are parts of two versions. Orphaned ends it: its server has ended.
        """
        self._steps += 1
        self._attend(scheduler, self._steps, begin=True)

    def before_idle(self, scheduler: Any) -> None:
        """Commit a pending version while no batch runs."""
        self._attend(scheduler, self._steps + 1, begin=False)

    def _attend(self, scheduler: Any, step: int, *, begin: bool) -> None:
        if self._target is None and time.monotonic() < self._next_try:
            return
        try:
            if self._target is None:
                self._target = self._bound(scheduler)
            if self._target is not None:
                self._retries.succeeded()
                self._target.poll(step=step, begin=begin)
                return
            pause_s = self._retries.again_s
        except (refitd.CommitError, refitd.Orphaned):
            raise
        except refitd.RefitdError as exc:
            pause_s = self._retries.after(exc)
        self._target, self._next_try = None, time.monotonic() + pause_s
        if self._engine is not None:
            self._engine.let_go()  # an evicted engine, for example, has to register again

    def _bound(self, scheduler: Any) -> refitd.Target | None:
        """Return the registration; None if no trainer has registered, because the scheduler must not wait."""
        settings = Settings.of({"checkpoint": scheduler.server_args.model_path, **self._given})
        if not scheduler.server_args.disable_radix_cache:
            raise refitd.RefusedError(
                "cached prefixes would be of older versions; start SGLang with --disable-radix-cache"
            )
        with refitd.connect(settings.runtime_dir or None) as client:
            found = next((m for m in client.status().models if m.model == settings.model), None)
            if found is None or not found.sources or len(found.sources) < found.source_world_size:
                return None
        self._engine = self._engine or SchedulerRank(scheduler.tp_worker.model_runner.model, settings)
        return self._engine.bind()


# --- shared ------------------------------------------------------------------------------------------------


def _check_version() -> None:
    import sglang

    if not sglang.__version__.startswith(WRITTEN_AGAINST):
        raise refitd.RefusedError(
            f"SGLang {sglang.__version__} is not the version that this adapter was written against "
            f"({WRITTEN_AGAINST}x); install that one, or another refitd"
        )


def _tensors(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, one at a time."""
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors")) if folder else []
    if not files:
        raise refitd.RefusedError(
            f"checkpoint {folder!r} holds no .safetensors to check the layout against: name the folder that the engine "
            "was started with, or set check to false"
        )
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)
