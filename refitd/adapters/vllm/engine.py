"""Refit one vLLM worker: learn the layout from its loader, register, and commit versions."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine

import refitd
from refitd.adapters.derived import Hook, Packed, seconds_of
from refitd.adapters.driving import CATCH_UP_S, live_version, tied_names
from refitd.adapters.engines import Learned, Learner, OnDisk, Retries, adopt, on_disk
from refitd.adapters.streams import Shapes
from refitd.adapters.vllm import versions
from refitd.adapters.vllm.kept_weights import packed_modules
from refitd.adapters.vllm.lora import HeldAdapter
from refitd.adapters.vllm.seams import (
    check_version,
    is_deferred_attention,
    is_one_of_many,
    live_with_server,
    rest_between_looks,
)
from refitd.adapters.vllm.settings import RefitdInitInfo, RefitdUpdateInfo, parsed

# below "vllm", so lines get vLLM's level and prefixes; from other loggers Python writes only warnings
log = logging.getLogger("vllm.refitd")

# How long a following engine waits between two tries to commit while idle, and how often it checks that its daemon is
# running.
IDLE_S = 0.005
LOOK_S = 1.0

# The end of an output layer's canonical name.
HEAD = "lm_head.weight"


class RefitdEngine(WeightTransferEngine[RefitdInitInfo, RefitdUpdateInfo]):
    """vLLM's lifecycle: init registers, update commits a decided version, finish does no work."""

    init_info_cls = RefitdInitInfo
    update_info_cls = RefitdUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        check_version()
        if device.type == "cpu":
            rest_between_looks()
        self._lifeline = live_with_server()
        self._lock = threading.Lock()  # a forward pass, or a commit
        self._steps = 0
        self._client: refitd.Client | None = None
        self._target: refitd.Target | None = None
        self._adapter: HeldAdapter | None = None
        self._learner: Learner | None = None
        self._torn = ""  # why the weights may be parts of two versions
        self._versions = versions.of(vllm_config)
        self._stopped = threading.Event()
        self._follower: threading.Thread | None = None
        given = vllm_config.additional_config
        self._given = dict(given.get("refitd", {})) if isinstance(given, dict) else {}
        info = self.parse_init_info({})
        if info.follow:
            self._follow(info)

    def parse_init_info(self, init_dict: dict[str, Any]) -> RefitdInitInfo:
        """Return the command line's settings, overridden by `init_dict`; raises ValueError as `parsed`."""
        return parsed({**self._given, **init_dict})

    # --- driven by a trainer ------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: RefitdInitInfo) -> None:
        """Register this rank; afterwards swaps include it."""
        if self._follower is not None:
            raise refitd.RefusedError("this engine follows by itself (follow = true); nobody needs to drive it")
        if self._target is not None and isinstance(self._target.error, refitd.PeerLost):
            self._let_go()  # its daemon is lost
        if self._target is None:
            if self._keeps_prefixes() and not init_info.keep_prefix_cache:
                log.warning(
                    "refitd: this vLLM keeps cached prefixes of older versions: call reset_prefix_cache after each "
                    "update, or start it with --no-enable-prefix-caching"
                )
            try:
                self._bind(init_info)
            except refitd.PeerLost:
                self._let_go()  # the next call connects again
                raise
            self._catch_up()

    def _catch_up(self) -> None:
        """Commit the version that the other replicas serve: left pending, it would delay the next swap."""
        assert self._client is not None
        target = self._bound()
        if (live := live_version(self._client, target.model)) is not None:
            self._take_over(live, CATCH_UP_S)

    def _take_over(self, version: int, timeout_s: float) -> None:
        try:
            with self._lock:
                self._wait(version, timeout_s)
        except refitd.DeadlineExceeded as exc:
            log.warning("refitd: this engine serves what it has until the next version: %s", exc)

    def start_weight_update(self) -> None:
        """Commit a version that was decided since the last update; the next one is staged beside it."""
        if (late := self._bound().pending) is not None:
            self._take_over(late, CATCH_UP_S)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Wait until the version is live here."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RefitdUpdateInfo) -> None:
        """Commit the version in place, as soon as it is decided."""
        with self._lock:
            self._wait(update_info.version, self._info.timeout_s)

    def _wait(self, version: int, timeout_s: float) -> None:
        """Commit up to a version, under the lock."""
        target = self._bound()
        try:
            target.wait(version, timeout=timeout_s)
        except refitd.CommitError as exc:
            self._torn = str(exc)
            raise
        self._committed(target.version)

    def _committed(self, version: int | None) -> None:
        """Note the version of the weights, and tell EngineCore."""
        self._torn = ""
        if self._versions is not None and version is not None and self.parallel_config.rank == 0:
            self._versions.committed(version)

    def finish_weight_update(self) -> None:
        """Return: the version is already live."""

    def shutdown(self) -> None:
        """End the registration."""
        self._stopped.set()
        self._let_go()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Raise RefusedError: vLLM 0.27 declares it for backends that send tensors from here."""
        raise refitd.RefusedError("trainer_send_weights is not used: `publish` the tensors, and `swap`")

    # --- following by itself ------------------------------------------------------------------------------

    def _follow(self, info: RefitdInitInfo) -> None:
        if self._keeps_prefixes() and not info.keep_prefix_cache:
            raise refitd.RefusedError(
                "an engine that follows by itself would answer from prefixes that older versions have computed: this "
                "vLLM's prefix cache cannot be reset. Start it with --no-enable-prefix-caching, or set "
                "keep_prefix_cache"
            )
        self._follower = threading.Thread(target=self._run, args=(info,), name="refitd-follow", daemon=True)
        self._follower.start()

    def _keeps_prefixes(self) -> bool:
        """Whether prefixes that older versions have computed stay in vLLM's cache."""
        return bool(self.vllm_config.cache_config.enable_prefix_caching) and self._versions is None

    def _run(self, info: RefitdInitInfo) -> None:
        """Register once a trainer has, and commit while no forward pass runs."""
        retries = Retries(log)
        while not self._stopped.is_set():
            pause_s = retries.again_s
            try:
                if self._target is None:
                    self._bind(info)
                    retries.succeeded()
                self._commit_when_idle()
            except refitd.CommitError as exc:
                log.error("refitd: %s", exc)
                self._torn = str(exc)  # until a full version is committed
            except refitd.RefitdError as exc:
                pause_s = retries.after(exc)
                if self._target is not None or isinstance(exc, refitd.PeerLost):
                    self._let_go()  # an evicted engine, for example, has to register again
            self._stopped.wait(pause_s)

    def _commit_when_idle(self) -> None:
        """Commit while no forward pass runs; return when the registration has ended."""
        target, looked = self._bound(), time.monotonic()
        while not self._stopped.wait(IDLE_S) and self._target is target:
            is_due = target.pending is not None or time.monotonic() - looked > LOOK_S
            if is_due and self._lock.acquire(timeout=IDLE_S):
                try:
                    # the next forward pass has this number and waits for the lock: this rank is paused before it
                    if (version := target.poll(step=self._steps + 1, begin=False)) is not None:
                        self._committed(version)
                finally:
                    self._lock.release()
                looked = time.monotonic()

    def _let_go(self) -> None:
        """Drop the registration; the follower registers again."""
        client, self._client, self._target = self._client, None, None
        if client is not None:
            client.close()

    @contextlib.contextmanager
    def refitd_step(self, batch: int | None = None) -> Iterator[None]:
        """Offer a commit point, then run one forward pass without commits; `batch` is EngineCore's number for it."""
        if self._lifeline is not None:
            self._lifeline.check()
        with self._lock:
            self._steps += 1
            target = self._target
            if self._follower is not None and target is not None:
                try:
                    if (version := target.poll(step=self._steps)) is not None:
                        self._committed(version)
                except refitd.CommitError as exc:
                    self._torn = str(exc)
                except refitd.RefitdError as exc:
                    log.warning("refitd: %s; this engine serves what it has", exc)
                    self._target = None
            if self._torn:
                raise refitd.CommitError(f"nothing may be computed with parts of two versions: {self._torn}")
            if self._adapter is not None and self._target is not None:
                self._adapter.serve(self._target.version)
            if self._versions is not None and batch is not None and self.parallel_config.rank == 0:
                self._versions.note(batch)
            yield

    # --- registration -------------------------------------------------------------------------------------

    def _bound(self) -> refitd.Target:
        if self._target is None:
            raise refitd.RefusedError("this engine is not registered: call init_weight_transfer_engine first")
        return self._target

    def _bind(self, info: RefitdInitInfo) -> None:
        """Learn the layout from the model's own loader, check it, and register it; or register an adapter."""
        started = time.perf_counter()
        client = self._client = self._client or refitd.connect(
            info.runtime_dir or None, reconnect=False, lives_with=self._lifeline
        )
        rank, world_size, replica = self._place(info)
        offered = self._offered(client, info)
        # under the lock, because the model's loader and vLLM's current configuration are not thread-safe, and a
        # registration restores the version of an engine that was restarted
        with self._lock:
            if info.lora:
                given: dict[str, Any] = {"module_or_tensors": self._hold_adapter(info.lora, offered)}
            else:
                with self._if_quantised(offered):
                    given = self._learn(client, info, offered, rank).registration()
            target = client.register_target(
                info.model,
                **given,
                replica=replica,
                rank=rank,
                world_size=world_size,
                cast=bool(info.lora),
                timeout=info.timeout_s,
            )
        self._info, self._target = info, target
        log.info(
            "refitd: %s rank %d of %d: %d tensors of %r registered in %.2f s; versions %s",
            replica,
            rank,
            world_size,
            len(given["module_or_tensors"]),
            info.model,
            time.perf_counter() - started,
            "flip" if target.flips else "are copied",
        )

    def _offered(self, client: refitd.Client, info: RefitdInitInfo) -> Shapes:
        """Return the trainer's tensors, without an output layer that is tied to its embeddings, as the engine's is."""
        offered = client.tensors(info.model, timeout=min(info.timeout_s, 10.0) if info.follow else info.timeout_s)
        heads = [name for name in offered if name.endswith(HEAD)] if self._is_tied() else []
        tied = tied_names(client, info.model) if heads else set()
        return {name: one for name, one in offered.items() if name not in heads or name not in tied}

    def _is_tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    @contextlib.contextmanager
    def _if_quantised(self, offered: Shapes) -> Iterator[None]:
        """Name the tensors of both sides and the alternatives if quantisation prevents learning the layout."""
        try:
            yield
        except (refitd.PlanError, refitd.RefusedError) as exc:
            if (how := self.model_config.quantization) is None:
                raise
            own = {} if self._learner is None else self._learner.own
            sides = [sorted(one)[:1] for one in (own.keys() - offered.keys(), offered.keys() - own.keys())]
            has, offers = (f"{one[0]}" if one else "no other" for one in sides)
            raise refitd.RefusedError(
                f"this engine is quantised ({how}): its checkpoint has {has}, the trainer offers {offers}. Serve the "
                "trainer's checkpoint, unquantised or with vLLM's online quantisation (--quantization "
                "int8_per_channel_weight_only, for example), or publish a LoRA adapter alone (`lora`). "
                f"vLLM's loader: {exc}"
            ) from exc

    def _hold_adapter(self, folder: str, offered: Shapes) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors; from now on the engine loads the adapter from memory."""
        if self._adapter is None:
            self._adapter = HeldAdapter(self.model, folder)
        self._adapter.check_offered(offered)
        return self._adapter.tensors

    def _learn(self, client: refitd.Client, info: RefitdInitInfo, offered: Shapes, rank: int) -> Learned:
        """Return the engine's weights (in an arena if versions can flip) and their layout, from its loader."""
        if self._learner is None:
            has_checkpoint = info.check and self.vllm_config.load_config.load_format != "dummy"
            checkpoint = self._checkpoint if has_checkpoint else None
            load = functools.partial(self._configured, self.model.load_weights)
            self._learner = Learner(self.model, load, checkpoint, self._hooks, self._packed, self._on_disk)
        learned = self._learner.learn(offered, rank)
        trace, recomputed = learned.trace, learned.recomputed
        log.info("refitd: layout of %d tensors: %s", len(trace.metadata), trace.proof or "not proven")
        self._check_unused(trace.unused)
        if info.adopt and (why := adopt(client, learned, info.timeout_s)):
            log.warning("refitd: versions are copied into this engine's weights, and do not flip: %s", why)
        if recomputed:
            count = sum(len(group.tensors) for group in recomputed)
            log.info(
                "refitd: vLLM's own code recomputes %d tensors in each commit, in %.1f ms: %s",
                count,
                seconds_of(recomputed) * 1e3,
                ", ".join([name for group in recomputed for name in group.tensors][:3]),
            )
        return learned

    def _hooks(self) -> Iterator[Hook]:
        """Yield vLLM's code that runs after loading and may run again."""
        for name, module in self.model.named_modules():
            if is_deferred_attention(module):
                run = functools.partial(module.process_weights_after_loading, self.model_config.dtype)
                yield Hook(name, module, functools.partial(self._configured, run))

    def _packed(self) -> Iterator[Packed]:
        for packed in packed_modules(self.model):
            yield replace(packed, run=functools.partial(self._configured, packed.run))

    def _on_disk(self, offered: Shapes) -> OnDisk | None:
        with set_current_vllm_config(self.vllm_config):  # classes of transformers that vLLM compiles ask for it
            return on_disk(self.model_config.hf_config, offered)

    def _configured(self, run: Callable[..., Any], *given: Any) -> None:
        with set_current_vllm_config(self.vllm_config):
            run(*given)

    def _place(self, info: RefitdInitInfo) -> tuple[int, int, str]:
        """Return this worker's rank, and its replica's world size and name."""
        p = self.parallel_config
        replica = info.replica or f"{socket.gethostname()}-{self.vllm_config.instance_id}"
        if p.data_parallel_size > 1:  # a layer's experts are on all data-parallel ranks: these flip together
            return p.data_parallel_index * p.world_size + p.rank, p.data_parallel_size * p.world_size, replica
        if is_one_of_many(p):
            return p.rank, p.world_size, f"{replica}-dp{p.data_parallel_index}"
        return p.rank, p.world_size, replica

    def _check_unused(self, unused: tuple[str, ...]) -> None:
        """Refuse an output layer that the engine would drop; warn of other tensors that it takes nothing of."""
        if self._is_tied() and (heads := [name for name in unused if name.endswith(HEAD)]):
            raise refitd.RefusedError(
                f"the trainer offers {heads[0]}, and this engine's output layer is tied to its embeddings "
                "(tie_word_embeddings): serve a checkpoint whose config unties them; if the trainer's are tied, "
                "too, register the module itself, which offers them once"
            )
        p = self.parallel_config
        if unused and not (p.pipeline_parallel_size > 1 or p.enable_expert_parallel):  # else others load them
            log.warning(
                "refitd: this engine takes nothing of %d tensors that the trainer offers: %s",
                len(unused),
                ", ".join(unused[:5]),
            )

    def _checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the checkpoint that this engine loaded at its start."""
        from vllm.model_executor.model_loader import get_model_loader

        yield from get_model_loader(self.vllm_config.load_config).get_all_weights(self.model_config, self.model)
