"""The client API that trainers, engines and operators call."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from refitd.buffers.cuda import name_of
from refitd.client.arena_memory import REQUEST_S, ArenaMemory
from refitd.client.calls import Layout, flag, hook, seconds, text
from refitd.client.connection import Connection, close_all
from refitd.client.operations import Operations
from refitd.client.processes import Lifeline
from refitd.client.reconnect import REGISTER_S, Give, Line
from refitd.config import default_runtime_dir
from refitd.errors import ConfigError, Orphaned, RefitdError, RefusedError, TransportError, needing_torch
from refitd.logs import Escaped
from refitd.protocol import local
from refitd.text import called, shown, unprintable

if TYPE_CHECKING:
    import torch

    from refitd.client.controller import ReplicaController
    from refitd.client.given import Tensors
    from refitd.client.source import Source
    from refitd.client.source_tensors import MXFP8Offer
    from refitd.client.streamed import StreamedSource
    from refitd.client.target import Target
    from refitd.client.target_tensors import Derived
    from refitd.client.tensors import TensorSet
    from refitd.describe.metadata import ParameterMetadata
    from refitd.describe.renames import Names

    Registered: TypeAlias = Source | StreamedSource | Target | ReplicaController

# Between two attempts to reach a daemon that is starting.
CONNECT_PAUSE_S = 0.05

# Escape log lines: they go to the application's handlers and contain names and reasons from other processes.
_log = logging.getLogger("refitd.client")
_log.addFilter(Escaped())


class Client(ArenaMemory, Operations):
    """A session with this node's daemon; `refitd.connect` returns one. Close it, or use it as a context manager."""

    def __init__(self, line: Line, lives_with: Lifeline | None = None) -> None:
        super().__init__(line)
        line.start(self._register_again)
        _open.add(self)
        self._lives_with = lives_with  # keeps the lifeline alive as long as its last client
        if lives_with is not None:
            lives_with.on_end(self._orphan)

    @property
    def node(self) -> str:
        """The name of the daemon's node."""
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
                again for every version, with a dict's current values. A state_dict refers to the tensors that it was
                made from, even if the module replaces them.
            rank: this process's position among the trainer's `world_size` ranks; group lists use the same numbers.
            world_size: the number of source ranks.
            metadata: for a dict, how each tensor is split; without it, every tensor is whole.
            pg_collection: the parallel groups, if the module does not have them.
            num_experts: the number of experts in the whole model.
            names: map the module's names to canonical names, if engines use others: {pattern: name, names.Fused or
                names.Padded}, such as `refitd.names.megatron_to_hf(config)`. Every tensor needs a canonical name.
            slots: the number of versions to keep; each slot takes one shard's size of this node's memory.
            cast: offer floating tensors in this type: float32 as "bfloat16" or "float16", or these as "float32". Each
                version is converted when it is published (round to nearest even), so it is always a copy. If a target
                has another type and needs a tensor unrounded, that tensor is offered unconverted from the next version
                on, and workers convert it for the other targets. float64 and float8 are never converted; bfloat16 to
                "float16", or the reverse, is refused. With {name: type} ("*" matches anything, and "*" alone comes
                last), a tensor is always offered in the given type, also to targets of another type.
            mxfp8: also, or only, offer these tensors in MXFP8, which halves the bytes for targets that accept it. They
                are converted when a version is published, so it is always a copy.
            partial: all source ranks together offer only a part of the targets' tensors (not the frozen weights, for
                instance). True: offer all registered tensors. Names ("*" matches anything): offer only these; on some
                ranks there may be none. Either all ranks are partial, or no rank is. Targets choose the tensors that
                they keep (`register_target(keeps=)`).
            device: the device of the slots: "cuda:N", "cpu", or None for the tensors' own device.
            timeout: seconds to wait until the slots are allocated and this rank is admitted.

        Raises:
            RefusedError: the rank is taken, or the descriptions are invalid.
            PlanError: a tensor cannot be described, or has no canonical name in `names`.
            ArenaError: there is not enough memory for the slots.
        """
        from refitd.client.slot_source import Slotted
        from refitd.client.source import register

        layout = Layout(rank, world_size, metadata, pg_collection, num_experts, names)
        slotted = Slotted(text("model", model), slots, cast, device, seconds("timeout", timeout))
        return register(self, module_or_tensors, layout, slotted, mxfp8, partial)

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
        """Offer tensors of `model` that this rank produces one after the other, never all at the same time.

        Args:
            model: the name that trainers and engines share.
            shapes: shape and dtype of each tensor, by name.
            rank: as in `register_source`.
            world_size: as in `register_source`.
            metadata: how each tensor is split; without it, every tensor is whole.
            names: as in `register_source`. `publish_from` expects the module's own names.
            cast: as in `register_source`. `publish_from` expects tensors of the declared dtypes, and converts them.
            slots: as in `register_source`.
            partial: the declared tensors are only a part of the targets' tensors; see `register_source`.
            device: the device of the slots: "cpu" or "cuda:N".
            origin: identifies the checkpoint that this rank publishes a part of, in at most 512 characters. Ranks of
                one model that are attached at the same time must have equal origins.
            timeout: seconds to wait until the slots are allocated and this rank is admitted.

        Raises:
            RefusedError: the rank is taken, its origin differs from that of another rank, or the descriptions are
                invalid.
            ArenaError: there is not enough memory for the slots.
        """
        from refitd.client.slot_source import Slotted
        from refitd.client.streamed import declare

        layout = Layout(rank, world_size, metadata, names=names)
        slotted = Slotted(text("model", model), slots, cast, device, seconds("timeout", timeout))
        return declare(self, shapes, layout, slotted, flag("partial", partial), text("origin", origin, least=0))

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
        convert_on_send: bool = False,
        cast: bool | str | torch.dtype = False,
        derived: Mapping[str, Derived] | None = None,
        keeps: bool | Sequence[str] = False,
        shared: Mapping[str, Target] | None = None,
        mode: Literal["shadow", "flip", "copy", "in-place"] = "shadow",
        device: str | torch.device | None = None,
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
            names: as in `register_source`, if sources use other names than this module.
            convert_on_send: receive quantized tensors (dict values that are `MXFP8Buffer` or `FP8Buffer`) as such, half
                the bytes. Sources may split them only between blocks of 32, or tiles of 128 x 128. Otherwise bfloat16
                arrives and is converted.
            cast: receive another floating type than these tensors have, and convert each element (round to nearest
                even), as `ParameterMetadata.cast_from` declares for one tensor. A dtype ("float32") names the type that
                sources offer. True waits, up to `timeout`, until the sources have registered, and uses their types.
            derived: tensors computed from the weights, by name; their hooks are called inside every commit.
            keeps: the tensors that this rank keeps unchanged if sources offer only a part of the model
                (`partial=True`). They are not staged, written or verified, and belong to no version. Give names as
                registered ("*" matches anything), or True for every tensor that the sources do not offer. True waits,
                up to `timeout`, until the sources have registered; the replica must then accept all that they offer.
            shared: tensors whose memory a target of another model in this process has registered (a draft that uses
                its policy's embedding): {name as registered here: that target}. This model's swaps do not write them.
                The other model's swaps write them, so these are refused unless both models are swapped together
                (`swap_together`).
            mode: "shadow": each version is staged beside the live tensors. Commits use "flip" if the tensors are all in
                one arena (`allocate`, `adopt`), otherwise "copy". "flip": a commit exchanges the live and the staging
                memory under the tensors' addresses, in microseconds for any size; the registration is refused if that
                is impossible. "copy": a commit copies staged bytes into the live tensors. "in-place": the workers write
                the live tensors (from `allocate`) while the replica's controller keeps it paused. This needs no staging
                memory, but after a failed swap the replica cannot serve until a swap succeeds.
            device: the device of the staging arena and of conversions: "cuda:N", "cpu", or None for the tensors' own
                device. "cpu" saves one shard of GPU memory and makes commits (and MXFP8) slower.
            controlled: commit only when the replica's controller (`control_replica`) requests it. The ranks of the
                replica then need no lockstep, and no swap begins while the replica has no controller. It is implied by
                mode="in-place", which needs a controller with a `pause` hook.
            timeout: seconds to wait until the staging arena is allocated and this rank is admitted.

        Raises:
            RefusedError: the rank is taken, or the descriptions are invalid.
            ArenaError: there is not enough memory for staging.
            DeadlineExceeded: with `cast=True` or `keeps=True`, the sources have not registered in time.
        """
        from refitd.client.new_target import EngineOptions, register

        model, replica = text("model", model), text("replica", replica)
        layout = Layout(rank, world_size, metadata, pg_collection, num_experts, names)
        options = EngineOptions(
            convert_on_send=convert_on_send,
            cast=cast,
            derived=derived,
            keeps=keeps,
            shared=shared,
            mode=mode,
            device=device,
            controlled=controlled,
            timeout=timeout,
        )
        return register(self, model, module_or_tensors, replica, layout, options)

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
        """Commit versions on all ranks of a replica together, from one process that controls the engine.

        A thread of the client calls the hooks, one after the other, for every swap of the replica, including
        catch-ups. If ranks have a decided version pending when the controller registers, that version comes first.

        Args:
            model: the model's name.
            replica: the engine's name, as its ranks registered it.
            pause: called with the version before it is decided; it returns once the whole engine has paused. An
                exception, or more than `deadlines.pause_s`, aborts the swap. A replica with mode="in-place" is paused
                before the workers write its tensors.
            commit: called with the decided version once all ranks know the decision. It must make every rank call
                `target.poll()` (or `wait(version)`), for instance by an RPC of the engine, and return when all have. If
                it raises, it is called again after 3, 6 and 9 s, while ranks still have the version pending.
            resume: called when the version is no longer pending on any rank, or the swap has been aborted. The argument
                is the version that the replica serves, or None if it must not serve (no version yet, or its ranks have
                different versions).
            timeout: seconds to wait until the controller is admitted.

        Raises:
            RefusedError: the replica has a controller already.
        """
        from refitd.client.controller import ReplicaController

        model, replica, timeout = text("model", model), text("replica", replica), seconds("timeout", timeout)
        for what, given in {"pause": pause, "resume": resume}.items():
            hook(what, given)
        if not callable(commit):
            raise RefusedError(f"commit is {shown(commit)}, expected a function that takes the version")
        message = local.RegisterController(model=model, replica=replica, pauses=pause is not None)
        connection = self._connection.steady(timeout)
        registered = connection.request(message, local.Registered, timeout)
        controller = ReplicaController(
            self._connection, connection, message, registered.member, pause, commit, resume, self._forget
        )
        self._add(controller, connection)
        return controller

    def _add(self, one: Registered, connection: Connection) -> None:
        """Store a new registration of this connection.

        Raises:
            PeerLost: the daemon has ended since the registration.
        """
        self._registered.append(one)
        try:
            self._connection.check(connection)
        except BaseException:
            one.close()
            raise

    def _register_again(self, connection: Connection, give: Give) -> None:
        """Register everything over a new connection.

        If the daemon refuses a registration, that registration fails for good and the error is logged.

        Raises:
            TransportError: the daemon or the coordinator has ended again.
        """
        self._give_back(give)
        for one in list(self._registered):
            try:
                one.register_again(connection, give, REGISTER_S)
            except TransportError:
                raise
            except RefitdError as exc:
                text = f"{called(one.member)} could not be registered again with the daemon: {exc}; register it anew"
                _log.error("%s", text)
                one.give_up(local.Failure(code=exc.code, message=text))
                self._forget(one)
                continue
            if one not in self._registered:  # it was closed during register_again
                self._connection.deregister(connection, one.member)

    def close(self) -> None:
        """Send queued messages, then end the session and every registration made in it.

        It may be called repeatedly, by any thread, in a callback and in a signal handler. Requests in other threads
        raise PeerLost. A call in a forked child has no effect. Open clients are closed when the interpreter exits.
        """
        self._close(goodbye=True)

    def _orphan(self, error: Orphaned) -> None:
        """Stop serving and end all registrations, because a process that this one serves for has ended."""
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
        """Drop a closed registration and its references to tensors."""
        if getattr(registered, "is_estranged", False):
            self._estranged |= registered.arenas()
        self._registered = [kept for kept in self._registered if kept is not registered]
        self._connection.files.drop_unmapped()

    @staticmethod
    def _gpu_name(device: str | torch.device | None, tensors: TensorSet) -> str:
        """Return the GPU of these tensors' arenas, "" for main memory; `device` None means the tensors' own device."""
        from refitd.client.arenas import common_gpu, number_of
        from refitd.describe.memory import HOST

        gpu = common_gpu(tensors.names, tensors.tensors) if device is None else number_of(device)
        return "" if gpu == HOST else name_of(gpu)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """Close open clients. Skip the goodbye if an exception ends the process, because it may be restarted."""
    goodbye = getattr(sys, "last_value", None) is None
    for client in list(_open):
        client._close(goodbye=goodbye)
    close_all(goodbye=goodbye)  # connections of clients that were garbage-collected


def connect(
    address: str | Path | None = None,
    *,
    name: str = "",
    timeout: float = 10.0,
    uid: int | None = None,
    reconnect: bool = True,
    lives_with: Lifeline | None = None,
    wait: float = 0.0,
) -> Client:
    """Connect to the daemon of this node.

    Args:
        address: the daemon's runtime directory; None: REFITD_RUNTIME_DIR, else $XDG_RUNTIME_DIR/refitd, else
            /tmp/refitd-UID.
        name: this client's name in logs and status.
        timeout: seconds to wait for the daemon's answer.
        uid: the user id that the daemon must have; None: REFITD_DAEMON_UID, else this user or root.
        reconnect: when the daemon ends, wait for the next one and register everything with it again: sources with
            their published versions, targets with the version that they serve, both with their arenas. Engines continue
            to serve until their permit ends. Calls wait for the next daemon within their timeouts, 60 s at most. If
            False, calls raise PeerLost as soon as the daemon ends, and the client does not recover.
        lives_with: the processes that this one serves for, an engine's server for instance. Once one of them has ended,
            the client closes its registrations, to let the server's successor register under the same names. Every
            target's `version` becomes None, and calls raise Orphaned.
        wait: seconds to wait for a daemon that is still starting.

    Raises:
        TransportError: no daemon runs there, or it does not answer.
        ConfigError: the address is not a valid path.
        RefusedError: the daemon belongs to another user, or does not admit this user.
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
    if re.match(r"[a-z]+://|[\w.-]+:\d+$", str(address)):
        raise ConfigError(
            f"address is {shown(address)}, expected the runtime directory of a daemon on this host; clients talk to it "
            "alone, and it connects to the coordinator (coordinator.endpoint in its configuration)"
        )
    if found := unprintable(str(directory)):
        raise ConfigError(f"address {str(address)!r} {found}; give the daemon's runtime directory")
    is_named = address is not None or bool(os.environ.get("REFITD_RUNTIME_DIR"))
    name, timeout = text("name", name, least=0), seconds("timeout", timeout)
    reconnect = flag("reconnect", reconnect)

    def dial(within_s: float) -> Connection:
        return Connection(directory, name, within_s, uid, may_be_link=is_named)

    deadline = time.monotonic() + seconds("wait", wait)
    while True:
        try:
            return Client(Line(dial, timeout, reconnect=reconnect), lives_with)
        except TransportError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(CONNECT_PAUSE_S)
