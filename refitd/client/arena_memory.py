"""A client's memory: arenas that hold tensors of trainers and engines, and how models get into them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import name_of
from refitd.buffers.windows import WindowedArena
from refitd.client.arguments import flag, seconds, text, whole
from refitd.errors import RefitdError, RefusedError, needing_torch
from refitd.protocol import local
from refitd.protocol.shards import Place
from refitd.text import shown

if TYPE_CHECKING:
    import torch

    from refitd.client.adopt import Adopted
    from refitd.client.controller import ReplicaController
    from refitd.client.devices import Arena, Home
    from refitd.client.flip import ArenaPair, Contents
    from refitd.client.memory_block import Placed
    from refitd.client.mxfp8 import TargetTensors
    from refitd.client.reconnect import Give, Line
    from refitd.client.source import Source
    from refitd.client.streamed import StreamedSource
    from refitd.client.target import Target
    from refitd.client.tensors import TensorSet

REQUEST_S = 30.0
M = TypeVar("M", bound="torch.nn.Module | Sequence[torch.nn.Module]")


class ArenaMemory:
    """The arenas of a client: the base of `Client`."""

    def __init__(self, line: Line) -> None:
        self._connection = line
        self._arenas: dict[int, Home] = {}
        self._contents: dict[int, Contents] = {}  # by arena: where which tensor was placed
        self._estranged: set[int] = set()  # arenas whose file here differs from the daemon's
        self._registered: list[Source | StreamedSource | Target | ReplicaController] = []

    @needing_torch("Client.allocate")
    def allocate(
        self,
        wanted: Mapping[str, tuple[Sequence[int], torch.dtype]],
        *,
        device: str | torch.device = "cpu",
        timeout: float = 60.0,
    ) -> dict[str, torch.Tensor]:
        """Return uninitialised tensors of these shapes and dtypes inside an arena that the daemon owns.

        Sources made of them are never copied; the workers write targets made of them. They are shared memory: a forked
        child writes to the memory that its parent serves. `device` is "cpu", or a GPU as torch numbers it in this
        process ("cuda:0").

        Raises:
            ArenaError: there is not enough memory, or the GPU is absent, or its memory cannot be shared.
        """
        from refitd.client.arena_copies import packed_bytes, tensors_in
        from refitd.client.devices import number_of
        from refitd.client.given import checked_wanted
        from refitd.describe.memory import HOST

        wanted, timeout = checked_wanted(wanted), seconds("timeout", timeout)
        gpu = number_of(device)
        name = "" if gpu == HOST else name_of(gpu)
        with self._new_arena(packed_bytes(wanted), name, timeout) as (number, arena):
            found = tensors_in(arena, wanted)
            self._contents[number] = {
                name: (tensor.data_ptr() - arena.address, tensor.numel() * tensor.element_size())
                for name, tensor in found.items()
                if tensor.numel()
            }
        return found

    @contextlib.contextmanager
    def _new_arena(self, nbytes: int, device: str, timeout: float) -> Iterator[tuple[int, Arena]]:
        """Yield the number of a new arena, and the arena; it is freed if the block raises."""
        message = local.CreateArena(nbytes=nbytes, label="tensors", device=device, timeout_s=timeout)
        connection = self._connection.steady(timeout)
        number = connection.request(message, local.ArenaCreated, timeout).arena
        try:
            arena = connection.map_arena(number, write=True)
            yield number, arena
            self._connection.check(connection)
        except BaseException:
            with contextlib.suppress(RefitdError):
                connection.request(local.FreeArena(arena=number), local.Done, REQUEST_S)
            raise
        self._arenas[number] = arena

    @needing_torch("Client.adopt")
    def adopt(
        self,
        module: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        only: Sequence[str] | None = None,
        keep_addresses: bool = False,
        timeout: float = 60.0,
    ) -> Adopted:
        """Move what registrations take of a module, its parameters and persistent buffers, into one arena.

        Parameter objects, ties, views, strides, attributes, gradients and optimizers stay; addresses change, so adopt
        before CUDA graphs are captured. Buffers that state_dict does not save stay where they are. The old memory is
        free afterwards. A target of this module flips, and a source lends it without a copy. Nobody may use the module
        meanwhile, and memory for a second copy is needed.

        Args:
            module: a module, or a list of modules, as it will be registered. It must not be registered yet. What a
                client that is closed has adopted moves again.
            only: the names of the parameters and buffers to adopt ("*" matches anything), as the module calls them.
                The others stay where they are; a target that flips must keep them (`keeps`), or not register them.
            keep_addresses: the arena's pages are put under the tensors' addresses, which graphs or pointers may have
                captured (main memory only). Beginnings and ends that share a page with other memory, and small
                tensors, are copied at each commit. The memory is not freed before `close` or `free`, which give it
                private pages with the live bytes again. Views of it that others hold show each version. A source of
                such a module copies it.
            timeout: seconds for the memory.

        Raises:
            RefusedError: tensors cannot be moved; names them, and says why. Nothing has been moved.
            ArenaError: there is not enough memory. Nothing has been moved.
        """
        from refitd.client.adopt import Adopted, Adoption
        from refitd.client.adopt_windows import WindowedAdoption
        from refitd.client.arguments import names_or_none
        from refitd.client.memory_block import check_outside
        from refitd.describe.memory import HOST

        check_outside("client.adopt()")
        timeout, only = seconds("timeout", timeout), names_or_none("only", only)
        copied = 0
        if flag("keep_addresses", keep_addresses):
            adoption: Adoption = (windowed := WindowedAdoption(module, self._arenas, only=only))
            if adoption.nbytes:
                with self._new_arena(adoption.nbytes, "", timeout) as (number, arena):
                    assert isinstance(arena, MappedArena)
                    shown = windowed.show(arena)
                self._arenas[number], self._contents[number] = shown, adoption.contents
                copied = shown.edge_bytes
            return Adopted(adoption.tensors, adoption.nbytes, adoption.left, copied)
        adoption = Adoption(module, self._arenas, only=only)
        if adoption.nbytes:
            device = "" if adoption.gpu == HOST else name_of(adoption.gpu)
            with self._new_arena(adoption.nbytes, device, timeout) as (number, arena):
                adoption.perform(arena)
                self._contents[number] = adoption.contents
        return Adopted(adoption.tensors, adoption.nbytes, adoption.left)

    def build(self, make: Callable[[], M], *, timeout: float = 60.0) -> M:
        """Return the module that `make()` builds, its parameters and persistent buffers in one arena from the start.

        `make` is called twice, first on torch's meta device, where nothing takes memory, to learn the sizes. In the
        second call every parameter moves into the arena when it is registered, before its module initialises it: the
        model is never in memory twice, and its values are those of `make()`. The arena lies in main memory.

        Args:
            make: builds a module (or a list of modules) and returns it, the same each time.
            timeout: seconds for the memory.

        Raises:
            RefusedError: the two modules differ, or a tensor cannot be moved (see `adopt`).
            ArenaError: there is not enough memory.
        """
        from refitd.client.build import Draft
        from refitd.client.memory_block import check_outside

        check_outside("client.build()")
        timeout = seconds("timeout", timeout)
        if not callable(make):
            raise RefusedError(f"make is {shown(make)}, expected a function that builds a module")
        draft = Draft(make)
        if not draft.nbytes:
            return make()
        with self._new_arena(draft.nbytes, "", timeout) as (number, arena):
            module = draft.build_in(arena)
            self._contents[number] = draft.contents
        return module

    @contextlib.contextmanager
    def memory(
        self, model: str, nbytes: int | None = None, *, device: str | torch.device = "cpu", timeout: float = 60.0
    ) -> Iterator[Placed]:
        """Place the parameters and persistent buffers of what a `with` block builds or loads into one arena.

        With `nbytes`, the arena is there from the start, and each parameter or buffer that is registered in a module
        moves there at once: the model is never in memory twice. What cannot move yet (a state dict holds it, there is
        no room) or changes later (`.to(dtype)`, a replaced parameter) moves when the block ends. Without `nbytes`, all
        of it moves then, as by `adopt`, and memory for a second copy is needed for that moment.

        Only what the thread that has entered registers counts, and only modules that still exist at the end: keep the
        model in a variable, and no other modules. If the block raises, nothing stays in an arena. As for `adopt`, state
        dicts and views that share the memory must be gone at the end.

        Args:
            model: the model's name, for errors.
            nbytes: bytes that are enough for all parameters and persistent buffers at the end, each rounded up to 256.
                What is left over is taken too, also for staging.
            device: where these bytes lie, and the block builds the model: "cpu", or a GPU as torch numbers it in this
                process ("cuda:0"). Without `nbytes` the arena lies where the model does.
            timeout: seconds for the memory.

        Yields:
            How much was placed, once the block has ended.

        Raises:
            RefusedError: `nbytes` is too little; the error names what found no room, and how much is needed. A tensor
                cannot be moved (see `adopt`). Nothing was registered. This thread is in such a block already.
            ArenaError: there is not enough memory.
        """
        from refitd.buffers.layout import packed_offsets
        from refitd.client.devices import number_of
        from refitd.client.memory_block import MemoryBlock, Placed, Space, check_outside
        from refitd.describe.memory import HOST

        block = MemoryBlock(text("model", model))
        check_outside(block.called)
        timeout, gpu, placed = seconds("timeout", timeout), number_of(device), Placed()
        if nbytes is None:
            with block:
                yield placed
            adopted = self.adopt(block.roots(), timeout=timeout)
            placed.tensors, placed.nbytes, placed.left = adopted.tensors, adopted.nbytes, adopted.left
            return
        name, size = "" if gpu == HOST else name_of(gpu), packed_offsets([whole("nbytes", nbytes, 1)])[1]
        with self._new_arena(size, name, timeout) as (number, arena):
            block.space = Space(arena, block.called)
            try:
                with block:
                    yield placed
                adoption = block.space.adopt(block.roots(), self._arenas)
            except BaseException:
                block.space.put_back()
                raise
            self._contents[number] = adoption.contents
            placed.tensors, placed.nbytes, placed.left = adoption.tensors, adoption.nbytes, adoption.left

    def free(self, tensors: torch.Tensor | Mapping[str, torch.Tensor], *, timeout: float = 60.0) -> None:
        """Free the whole arenas that hold these tensors.

        The daemon's memory is free once this returns; this process's mapping goes with the last tensor in it, and
        tensors adopted with `keep_addresses` have private memory again. Tensors without elements are ignored.

        Raises:
            RefusedError: a tensor lies in none of this client's arenas, or a registration still uses one (close that
                first). Nothing has been freed.
        """
        from refitd.client.arena_copies import arena_of

        timeout = seconds("timeout", timeout)
        connection = self._connection.steady(timeout)
        named = tensors if isinstance(tensors, Mapping) else {"tensors": tensors}
        arenas = {arena_of(name, tensor, self._arenas) for name, tensor in named.items()} - {None}
        for registered in self._registered:
            if used := registered.arenas() & arenas:
                raise RefusedError(
                    f"arena {min(used)} holds tensors that are registered as {registered.member}; close that first"
                )
        for arena in sorted(arena for arena in arenas if arena is not None):
            if arena >= 0:  # otherwise it was never given back to the daemon
                connection.request(local.FreeArena(arena=arena), local.Done, timeout)
            freed = self._arenas.pop(arena, None)
            if isinstance(freed, MappedArena | WindowedArena):
                self._connection.files.drop(freed.address)
            if isinstance(freed, WindowedArena):
                freed.leave()
            self._contents.pop(arena, None)

    def _leave_arenas(self) -> None:
        """Forget all arenas; tensors in them keep the memory mapped."""
        for arena in self._arenas.values():
            if isinstance(arena, MappedArena | WindowedArena):
                arena.leave()
        self._arenas = {}

    def _give_back(self, give: Give) -> dict[int, int]:
        """Give all arenas to a daemon that has been restarted; return its numbers for them, by the old ones.

        Arenas that it does not get, on a GPU for instance, have a number below 0 from then on: what lies there stays as
        it is, and is ordinary memory.
        """
        numbers: dict[int, int] = {}
        lowest = min(self._arenas, default=0)
        for number, arena in self._arenas.items():
            is_known = isinstance(arena, MappedArena | WindowedArena) and number not in self._estranged
            given = give(arena.address, arena.nbytes) if is_known else None
            if given is None:  # each daemon counts from 1: the number without its sign may be taken
                given = number if number < 0 else (lowest := min(lowest, 0) - 1)
            numbers[number] = given
        self._arenas = {numbers[number]: arena for number, arena in self._arenas.items()}
        self._contents = {numbers[number]: contents for number, contents in self._contents.items()}
        self._estranged = {number for number in numbers.values() if number < 0}
        known = {old: number for old, number in numbers.items() if number >= 0}
        for one in self._registered:
            one.renumber(known)
        return known

    def _live(self, tensors: TensorSet, *, may_flip: bool) -> tuple[Place, ...]:
        """Return the tensors' places in arenas; none if they lie elsewhere, or in arenas that a target exchanges.

        Arenas that a target has exchanged without the daemon's knowledge hold ordinary memory from then on, and arenas
        under addresses that were there before unless a target `may_flip`: only an exchange keeps their edges right.
        """
        switched = {a for one in self._registered if getattr(one, "flips", False) for a in one.arenas()}
        switched |= self._estranged
        if not may_flip:
            switched |= {number for number, arena in self._arenas.items() if isinstance(arena, WindowedArena)}
        tensors.arena_places = tensors.places({n: arena for n, arena in self._arenas.items() if n not in switched})
        return tensors.arena_places

    def _is_windowed(self, live: tuple[Place, ...]) -> bool:
        return any(isinstance(self._arenas[place.arena], WindowedArena) for place in live)

    def _may_flip(
        self, tensors: TargetTensors, live: tuple[Place, ...], device: str | torch.device | None, *, must: bool
    ) -> bool:
        """Return whether versions can go live by exchanging arenas; raise RefusedError if they `must` and cannot.

        A rank without elements has no memory to exchange, and takes part in the exchanges of its replica.
        """
        from refitd.client.devices import number_of
        from refitd.client.flip import obstacle

        if not any(tensor.numel() for tensor in tensors.tensors):
            return False
        found = obstacle(tensors, live, self._contents, None if device is None else number_of(device))
        if not found and any(one.arenas() & {live[0].arena} for one in self._registered):
            found = "its arena holds tensors of another registration, which an exchange would take from it"
        if found and must:
            raise RefusedError(f"mode='flip' is impossible: {found}; leave mode out to have versions copied")
        return not found

    def _paired(self, live: tuple[Place, ...], staging: Arena | None) -> ArenaPair:
        from refitd.client.flip import ArenaPair

        assert staging is not None
        return ArenaPair(self._arenas[live[0].arena], staging)
