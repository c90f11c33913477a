"""SGLang: engines that take versions over in place, driven through a custom weight loader or by nobody, as a plugin.

    python -m sglang.launch_server --model-path MODEL --custom-weight-loader refitd.adapters.sglang.take_over
    REFITD_SGLANG='{"replica": "a"}' python -m sglang.launch_server --model-path MODEL --disable-radix-cache

Written against SGLang 0.5.23, and never run with a server of it: docs/sglang.md.
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
from pathlib import Path
from typing import Any

import torch

import refitd
from refitd.adapters.driving import swap_and_drive
from refitd.adapters.engine_checks import Offered, check_covered, check_shapes
from refitd.adapters.said import Said

log = logging.getLogger("refitd.sglang")

LOADER = "refitd.adapters.sglang.take_over"
SETTINGS = "REFITD_SGLANG"
WRITTEN_AGAINST = "0.5."

# How long an engine that nobody drives waits between two tries to find its trainer, and after a refusal: another
# trainer may come, and the engine that has its name may go.
TRY_AGAIN_S = 2.0
REFUSED_AGAIN_S = 10.0


@dataclass(frozen=True)
class Settings:
    """Where an engine registers.

    Attributes:
        model: the model's name in refitd.
        replica: this engine's name; "" is its host. Data-parallel engines add their rank.
        directory: the daemon's directory; "" is this user's default one.
        checkpoint: the folder of safetensors that the engine was started with, to check the layout against.
        check: compare what the engine holds with the checkpoint before the layout is trusted.
        timeout_s: seconds for the trainer's tensors to be known, and for one version to be taken over.
    """

    model: str = "policy"
    replica: str = ""
    directory: str = ""
    checkpoint: str = ""
    check: bool = True
    timeout_s: float = 120.0

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """Return settings from JSON.

        Raises:
            RefusedError: names what is unknown, and what is known.
        """
        known = sorted(field.name for field in fields(cls))
        if unknown := sorted(given.keys() - set(known)):
            raise refitd.RefusedError(f"unknown settings {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**given)


class SchedulerRank:
    """One scheduler process's rank of a replica."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        """Register nothing yet; raises RefusedError for another SGLang."""
        _check_version()
        self._model, self._settings = model, settings
        self._client: refitd.Client | None = None
        self._lifeline: refitd.Lifeline | None = None  # of the server that started this scheduler
        self._target: refitd.Target | None = None
        self._own: Offered = {}  # what the checkpoint has, once the engine was compared with it

    def bind(self) -> refitd.Target:
        """Return its registration; if it has none, learn the layout from the model's own loader, check it, register it.

        Raises:
            RefusedError: the layout is no plain copy of what the trainer offers, or not what the engine computes with.
            DeadlineExceeded: there is no trainer.
            TransportError: there is no daemon.
        """
        if self._target is not None and isinstance(self._target.error, refitd.PeerLost):
            self.let_go()  # its daemon has gone
        if self._target is None:
            if self._lifeline is None and multiprocessing.parent_process() is not None:
                self._lifeline = refitd.Lifeline.of_parent("SGLang's server")
            self._client = refitd.connect(self._settings.directory or None, reconnect=False, lives_with=self._lifeline)
            try:
                self._target = self._register(self._client)
            except BaseException:
                self.let_go()
                raise
        return self._target

    def let_go(self) -> None:
        """End the registration; the engine serves on with what it has, and may register again."""
        client, self._client, self._target = self._client, None, None
        if client is not None:
            client.close()

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
        params = dict(self._model.named_parameters())
        held = {**{name: held for name, _, _, held in refitd.named_persistent_buffers(self._model)}, **params}
        load: Any = self._model.load_weights
        offered = client.tensors(settings.model, timeout=settings.timeout_s)
        own = self._own
        if settings.check:
            own = own or {name: (tuple(t.shape), t.dtype) for name, t in _tensors(settings.checkpoint)}
            check_shapes(own, offered)
        trace = refitd.trace_loader(held, load, offered, owner_rank=rank)
        check_covered(trace, params, own)
        log.info("refitd: layout of %d tensors: %s", len(trace.metadata), trace.proof or "not proven")
        if settings.check and not self._own:  # later the engine holds other versions than its checkpoint's
            checked = trace if own == offered else refitd.trace_loader(held, load, own)
            refitd.check_layout(checked, held, _tensors(settings.checkpoint))
        self._own = own
        return client.register_target(
            settings.model,
            {name: held[name].data for name in trace.metadata},
            replica=replica,
            rank=rank,
            world_size=world_size,
            metadata=[*trace.metadata.values()],
            timeout=settings.timeout_s,
        )


# --- driven by a trainer: `update_weights_from_tensor(load_format=LOADER)` ---------------------------------


def take_over(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Take a version over; SGLang calls this in each scheduler process, with what `drive` has sent.

    Raises:
        RefusedError: something else was sent, or the engine cannot be refitted.
        CommitError, DeadlineExceeded: the version is not live here.
    """
    sent = dict(named_tensors)
    if sent.keys() != {"refitd.settings", "refitd.version"}:
        raise refitd.RefusedError(f"{LOADER} takes what refitd.adapters.sglang.drive sends, not {sorted(sent)[:5]}")
    # the model is what lives as long as the engine
    engine = model.__dict__.get("_refitd")
    if engine is None:
        engine = SchedulerRank(model, Settings.of(json.loads(bytes(sent["refitd.settings"].tolist()))))
    engine.bind()
    model.__dict__["_refitd"] = engine
    if (version := int(sent["refitd.version"].item())) >= 0:
        engine.wait(version)


def drive(
    engine: Any, client: refitd.Client, version: int, *, wait: float = 60.0, **settings: Any
) -> refitd.SwapReport:
    """Make a published version live, in this engine too; the engine goes on until it is decided.

    Args:
        engine: an `sglang.Engine`, started with `custom_weight_loader=[LOADER]`.
        client: of the trainer.
        version: published by the trainer's ranks.
        wait: seconds for the other ranks to publish.
        settings: of `Settings`.

    Raises:
        RefusedError: SGLang or the engine refuses; its answer says why.
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

    call(-1)  # an engine that has just been started registers
    return swap_and_drive(client, known.model, version, lambda: call(version), wait=wait)


def _done(what: str, answer: tuple[bool, str]) -> None:
    succeeded, said = answer[0], answer[1]
    if not succeeded:
        raise refitd.RefusedError(f"SGLang: {what}: {said}")


# --- driven by nobody: a plugin ----------------------------------------------------------------------------


def register() -> None:
    """Give the scheduler a commit point before each batch; SGLang calls this where REFITD_SGLANG is set or not."""
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
    """Registers once there is a trainer, and takes over every decided version between two batches."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._steps = 0  # from the process's start: the same on all ranks
        self._engine: SchedulerRank | None = None
        self._target: refitd.Target | None = None
        self._next_try, self._said = float("-inf"), Said(log)

    def before_batch(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """Commit what is pending.

        CommitError ends the scheduler: its weights are parts of two versions. Orphaned ends it: its server has ended.
        """
        self._steps += 1
        self._attend(scheduler, self._steps, begin=True)

    def before_idle(self, scheduler: Any) -> None:
        """Likewise, while there is no batch."""
        self._attend(scheduler, self._steps + 1, begin=False)

    def _attend(self, scheduler: Any, step: int, *, begin: bool) -> None:
        if self._target is None and time.monotonic() < self._next_try:
            return
        pause_s = TRY_AGAIN_S
        try:
            if self._target is None:
                self._target = self._bound(scheduler)
            if self._target is not None:
                self._said = Said(log)
                self._target.poll(step=step, begin=begin)
                return
        except (refitd.CommitError, refitd.Orphaned):
            raise
        except refitd.TransportError as exc:  # PeerLost is one
            self._said.say(logging.WARNING, f"refitd: {exc}; this engine serves what it has, and tries again")
        except refitd.RefitdError as exc:
            text = f"refitd: this engine is not refitted: {exc}; it serves what it has, and tries again"
            self._said.say(logging.ERROR, text)
            pause_s = REFUSED_AGAIN_S
        self._target, self._next_try = None, time.monotonic() + pause_s
        if self._engine is not None:
            self._engine.let_go()  # evicted, say: it has to register anew

    def _bound(self, scheduler: Any) -> refitd.Target | None:
        """Return the registration, None while no trainer has registered: the scheduler must not wait for one."""
        settings = Settings.of({"checkpoint": scheduler.server_args.model_path, **self._given})
        if not scheduler.server_args.disable_radix_cache:
            raise refitd.RefusedError(
                "cached prefixes would be of older versions; start SGLang with --disable-radix-cache"
            )
        with refitd.connect(settings.directory or None) as client:
            found = next((m for m in client.status().models if m.model == settings.model), None)
            if found is None or not found.sources or len(found.sources) < found.source_world_size:
                return None
        self._engine = self._engine or SchedulerRank(scheduler.tp_worker.model_runner.model, settings)
        return self._engine.bind()


# --- what both need ----------------------------------------------------------------------------------------


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
