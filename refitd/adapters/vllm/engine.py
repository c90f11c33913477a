"""The engine side, in each of vLLM's workers: learns what its loader does, registers, and takes versions over."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import refitd
from refitd.adapters.engine_checks import Offered, check_covered, check_shapes
from refitd.adapters.engine_memory import adopt
from refitd.adapters.said import Said
from refitd.adapters.vllm.ends import live_with_server
from refitd.adapters.vllm.lora import HeldAdapter
from refitd.adapters.vllm.seams import check_version, is_one_of_many, rest_between_looks

# vLLM writes its own loggers' lines, with its level and its prefixes; of others Python writes warnings alone
log = logging.getLogger("vllm.refitd")

# How long an engine that follows by itself waits between two tries to find its trainer, after a refusal (another
# trainer may come, and the engine that has its name may go), and to find an idle moment; and how often it looks whether
# its daemon is there.
TRY_AGAIN_S = 2.0
REFUSED_AGAIN_S = 10.0
IDLE_S = 0.005
LOOK_S = 1.0

# How long an engine that is driven waits for the version that the others serve, when it registers.
CATCH_UP_S = 20.0


@dataclass
class RefitdInitInfo(WeightTransferInitInfo):
    """Where to register; also `--additional-config '{"refitd": {...}}'`, which `init_weight_transfer_engine` overrides.

    Attributes:
        model: the model's name in refitd.
        replica: this engine's name; "" is its host and vLLM's instance id. Data-parallel engines of a dense model add
            their index.
        directory: the daemon's directory; "" is this user's default one.
        follow: take every decided version over between two steps; nobody drives the engine.
        check: compare what the engine holds with the checkpoint that it was started with before the layout is trusted.
        lora: the folder of a LoRA adapter, as requests name it. Versions of `model` are then this adapter's tensors,
            and the engine's own weights stay.
        adopt: move weights that lie in main memory into an arena, so that versions flip instead of being copied.
        keep_prefix_cache: follow although cached prefixes were computed by older versions.
        timeout_s: seconds for the trainer's tensors to be known, and for one version to be taken over.
    """

    model: str = "policy"
    replica: str = ""
    directory: str = ""
    follow: bool = False
    check: bool = True
    adopt: bool = True
    lora: str = ""
    keep_prefix_cache: bool = False
    timeout_s: float = 120.0


@dataclass
class RefitdUpdateInfo(WeightTransferUpdateInfo):
    """The version that is to be live when `update_weights` returns."""

    version: int = 0


class RefitdEngine(WeightTransferEngine[RefitdInitInfo, RefitdUpdateInfo]):
    """vLLM's lifecycle: init binds, update takes over a version that is decided; finish has nothing to do."""

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
        self._is_checked = False
        self._own: Offered = {}  # what the checkpoint has that this engine was started with
        self._torn = ""  # why the weights may be parts of two versions
        self._stopped = threading.Event()
        self._follower: threading.Thread | None = None
        given = vllm_config.additional_config
        self._given = dict(given.get("refitd", {})) if isinstance(given, dict) else {}
        info = self.parse_init_info({})
        if info.follow:
            self._follow(info)

    def parse_init_info(self, init_dict: dict[str, Any]) -> RefitdInitInfo:
        """Return the settings: those of the command line, overridden by these.

        Raises:
            ValueError: one is unknown, or of another type ("false" would be taken for true).
        """
        known = {field.name for field in fields(RefitdInitInfo)}
        if unknown := sorted((self._given.keys() | init_dict.keys()) - known):
            raise ValueError(f"refitd: unknown settings {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        settings = {**self._given, **init_dict}
        for field in fields(RefitdInitInfo):
            value, kind = settings.get(field.name, field.default), type(field.default)
            if type(value) is not kind and not (kind is float and type(value) is int):
                wanted = {bool: "true or false", str: "a text", float: "a number"}[kind]
                raise ValueError(f"refitd: {field.name} is {value!r} ({type(value).__name__}), expected {wanted}")
        return RefitdInitInfo(**settings)

    # --- driven by a trainer ------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: RefitdInitInfo) -> None:
        """Register this rank: afterwards swaps reach it."""
        if self._follower is not None:
            raise refitd.RefusedError("this engine follows by itself (follow = true); nobody needs to drive it")
        if self._target is not None and isinstance(self._target.error, refitd.PeerLost):
            self._let_go()  # its daemon has gone
        if self._target is None:
            self._bind(init_info)
            self._catch_up()

    def _catch_up(self) -> None:
        """Take over what the other replicas serve: a commit that nobody drives would hold up the next swap."""
        assert self._client is not None
        target = self._bound()
        live = next((m.live for m in self._client.status().models if m.model == target.model), None)
        if live is not None:
            self._take_over(live, CATCH_UP_S)

    def _take_over(self, version: int, timeout_s: float) -> None:
        try:
            with self._lock:
                self._wait(version, timeout_s)
        except refitd.DeadlineExceeded as exc:
            log.warning("refitd: this engine serves what it has until the next version: %s", exc)

    def start_weight_update(self) -> None:
        """Take over what was decided while nobody drove this engine. The next version is staged beside the live one."""
        if (late := self._bound().pending) is not None:
            self._take_over(late, CATCH_UP_S)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Wait until the version is live here."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RefitdUpdateInfo) -> None:
        """Take the version over, in place, as soon as it is decided."""
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
        self._torn = ""

    def finish_weight_update(self) -> None:
        """Nothing is left to do: the version is live."""

    def shutdown(self) -> None:
        """Take the registration back."""
        self._stopped.set()
        self._let_go()

    # --- driven by nobody ---------------------------------------------------------------------------------

    def _follow(self, info: RefitdInitInfo) -> None:
        if self.vllm_config.cache_config.enable_prefix_caching and not info.keep_prefix_cache:
            raise refitd.RefusedError(
                "an engine that follows by itself would answer from prefixes that older versions have computed: start "
                "it with --no-enable-prefix-caching, or say keep_prefix_cache"
            )
        self._follower = threading.Thread(target=self._run, args=(info,), name="refitd-follow", daemon=True)
        self._follower.start()

    def _run(self, info: RefitdInitInfo) -> None:
        """Register once there is a trainer, and commit while no forward pass comes by."""
        said = Said(log)
        while not self._stopped.is_set():
            pause_s = TRY_AGAIN_S
            try:
                if self._target is None:
                    self._bind(info)
                    said = Said(log)
                self._commit_when_idle()
            except refitd.DeadlineExceeded as exc:
                said.say(logging.INFO, f"refitd: waiting for a trainer: {exc}")
            except refitd.TransportError as exc:  # PeerLost is one
                said.say(logging.WARNING, f"refitd: {exc}; this engine serves what it has, and tries again")
                self._let_go()
            except refitd.CommitError as exc:
                log.error("refitd: %s", exc)
                self._torn = str(exc)  # until a version has been taken over whole
            except refitd.RefitdError as exc:
                text = f"refitd: this engine is not refitted: {exc}; it serves what it has, and tries again"
                said.say(logging.ERROR, text)
                pause_s = REFUSED_AGAIN_S
                if self._target is not None:
                    self._let_go()  # evicted, say: it has to register anew
            self._stopped.wait(pause_s)

    def _commit_when_idle(self) -> None:
        """Return when the registration has ended."""
        target, looked = self._bound(), time.monotonic()
        while not self._stopped.wait(IDLE_S) and self._target is target:
            is_due = target.pending is not None or time.monotonic() - looked > LOOK_S
            if is_due and self._lock.acquire(timeout=IDLE_S):
                try:
                    # the next forward pass has this number, and waits for the lock: this rank stands before it
                    if target.poll(step=self._steps + 1, begin=False) is not None:
                        self._torn = ""
                finally:
                    self._lock.release()
                looked = time.monotonic()

    def _let_go(self) -> None:
        """Forget a registration whose daemon has gone; the follower registers again."""
        client, self._client, self._target = self._client, None, None
        if client is not None:
            client.close()

    @contextlib.contextmanager
    def refitd_step(self) -> Iterator[None]:
        """A commit point, then one forward pass, during which nothing is committed."""
        if self._lifeline is not None:
            self._lifeline.check()
        with self._lock:
            self._steps += 1
            target = self._target
            if self._follower is not None and target is not None:
                try:
                    if target.poll(step=self._steps) is not None:
                        self._torn = ""
                except refitd.CommitError as exc:
                    self._torn = str(exc)
                except refitd.RefitdError as exc:
                    log.warning("refitd: %s; this engine serves what it has", exc)
                    self._target = None
            if self._torn:
                raise refitd.CommitError(f"nothing may be computed with parts of two versions: {self._torn}")
            if self._adapter is not None and self._target is not None:
                self._adapter.serve(self._target.version)
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
            info.directory or None, reconnect=False, lives_with=self._lifeline
        )
        rank, world_size, replica = self._place(info)
        offered = client.tensors(info.model, timeout=min(info.timeout_s, 10.0) if info.follow else info.timeout_s)
        with self._lock:  # the model's loader and vLLM's configuration of the moment are nothing for two threads
            if info.lora:
                tensors, metadata = self._hold_adapter(info.lora, offered), None
            else:
                with self._if_quantised():
                    tensors, metadata = self._learn(client, info, offered, rank)
        target = client.register_target(
            info.model,
            tensors,
            replica=replica,
            rank=rank,
            world_size=world_size,
            metadata=metadata,
            cast=bool(info.lora),
            timeout=info.timeout_s,
        )
        self._info, self._target = info, target
        log.info(
            "refitd: %s rank %d of %d: %d tensors of %r registered in %.2f s; versions %s",
            replica,
            rank,
            world_size,
            len(tensors),
            info.model,
            time.perf_counter() - started,
            "flip" if target.flips else "are copied",
        )

    @contextlib.contextmanager
    def _if_quantised(self) -> Iterator[None]:
        """Say what remains where an engine's layout cannot be learned because it is quantised."""
        try:
            yield
        except (refitd.PlanError, refitd.RefusedError) as exc:
            if (how := self.model_config.quantization) is None:
                raise
            raise refitd.RefusedError(
                f"this engine is quantised ({how}), and vLLM has converted or packed what it loaded: {exc}; serve the "
                "model unquantised, or publish a LoRA adapter alone (`lora`), which leaves these weights as they are"
            ) from exc

    def _hold_adapter(self, folder: str, offered: Offered) -> dict[str, torch.Tensor]:
        """Return the tensors of the adapter that the engine loads from memory from now on."""
        if self._adapter is None:
            self._adapter = HeldAdapter(self.model, folder)
        self._adapter.check_offered(offered)
        return self._adapter.tensors

    def _learn(
        self, client: refitd.Client, info: RefitdInitInfo, offered: Offered, rank: int
    ) -> tuple[dict[str, torch.Tensor], list[refitd.ParameterMetadata]]:
        """Return the engine's weights, where versions flip if they can, and what its loader puts into them."""
        params = dict(self.model.named_parameters())
        # what no checkpoint holds (tables of experts, of rotations) is the engine's own, and its loader may read it
        held = {**{name: held for name, _, _, held in refitd.named_persistent_buffers(self.model)}, **params}
        has_checkpoint = info.check and self.vllm_config.load_config.load_format != "dummy"
        if has_checkpoint:
            self._own = self._own or {name: (tuple(weight.shape), weight.dtype) for name, weight in self._checkpoint()}
            check_shapes(self._own, offered)
        trace = refitd.trace_loader(held, self._load, offered, owner_rank=rank)
        log.info("refitd: layout of %d tensors: %s", len(trace.metadata), trace.proof or "not proven")
        self._check(trace, params)
        if has_checkpoint and not self._is_checked:
            self._check_held(held, trace if self._own == offered else None)
            self._is_checked = True  # later the engine holds other versions than its checkpoint's
        if info.adopt and (why := adopt(client, {n: held[n] for n in trace.metadata}, info.timeout_s)):
            log.warning("refitd: versions are copied into this engine's weights, and do not flip: %s", why)
        return {name: held[name].data for name in trace.metadata}, [*trace.metadata.values()]

    def _place(self, info: RefitdInitInfo) -> tuple[int, int, str]:
        """Return rank, world size and name of the replica that this worker is part of."""
        p = self.parallel_config
        replica = info.replica or f"{socket.gethostname()}-{self.vllm_config.instance_id}"
        if p.data_parallel_size > 1:  # a mixture of experts: each layer's lie on all of them, so they flip together
            return p.data_parallel_index * p.world_size + p.rank, p.data_parallel_size * p.world_size, replica
        if is_one_of_many(p):
            return p.rank, p.world_size, f"{replica}-dp{p.data_parallel_index}"
        return p.rank, p.world_size, replica

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.model.load_weights(weights)

    def _check(self, trace: refitd.LoaderTrace, params: dict[str, torch.Tensor]) -> None:
        """Refuse weights that no refit would keep up to date."""
        check_covered(trace, params, self._own)
        is_tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        if is_tied and (heads := [name for name in trace.unused if name.endswith("lm_head.weight")]):
            raise refitd.RefusedError(
                f"the trainer offers {heads[0]}, and this engine's output layer is tied to its embeddings "
                "(tie_word_embeddings): serve a checkpoint whose config unties them; if the trainer's are tied, "
                "too, register the module itself, which offers them once"
            )
        p = self.parallel_config
        if trace.unused and not (p.pipeline_parallel_size > 1 or p.enable_expert_parallel):  # there others load them
            log.warning(
                "refitd: this engine takes nothing of %d tensors that the trainer offers: %s",
                len(trace.unused),
                ", ".join(trace.unused[:5]),
            )

    def _check_held(self, held: dict[str, torch.Tensor], trace: refitd.LoaderTrace | None) -> None:
        """Check that the engine computes with what its loader copies: vLLM repacks some weights after loading."""
        trace = trace or refitd.trace_loader(held, self._load, self._own)
        refitd.check_layout(trace, held, self._checkpoint())

    def _checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the checkpoint that this engine was started with."""
        from vllm.model_executor.model_loader import get_model_loader

        yield from get_model_loader(self.vllm_config.load_config).get_all_weights(self.model_config, self.model)
