"""A client's arenas, and the methods that allocate tensors in them or move models into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import name_of
from refitd.buffers.windows import WindowedArena
from refitd.client.calls import flag, seconds, text, whole
from refitd.errors import RefitdError, RefusedError, needing_torch
from refitd.protocol import local
from refitd.protocol.shards import Place
from refitd.text import called

if TYPE_CHECKING:
    import torch

    from refitd.client.adopt import Adopted
    from refitd.client.arenas import Arena, Home
    from refitd.client.controller import ReplicaController
    from refitd.client.memory_block import Placed
    from refitd.client.reconnect import Give, Line
    from refitd.client.source import Source
    from refitd.client.streamed import StreamedSource
    from refitd.client.take_over import ArenaPair, Contents
    from refitd.client.target import Target
    from refitd.client.target_tensors import TargetTensors
    from refitd.client.tensors import TensorSet

REQUEST_S = 30.0
M = TypeVar("M", bound="torch.nn.Module | Sequence[torch.nn.Module]")


class ArenaMemory:
    """The part of `Client` that manages arenas."""

    def __init__(self, line: Line) -> None:
        self._connection = line
        self._arenas: dict[int, Home] = {}
        self._contents: dict[int, Contents] = {}  # by arena: the offset and size of each tensor in it
        self._estranged: set[int] = set()  # arenas that may be another file here than in the daemon
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

        A source that registers these tensors publishes without a copy. A target with them can flip, or be updated in
        place.
        The tensors are shared memory: a forked child writes to the memory that its parent serves. `device` is "cpu", or
        a GPU as torch numbers it in this process ("cuda:0").

        Raises:
            ArenaError: there is not enough memory, the GPU does not exist, or its memory cannot be shared.
        """
        from refitd.client.arenas import number_of, packed_bytes, tensors_in
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
        """Yield the number of a new arena, and the arena; free it if the block raises."""
        message = local.CreateArena(nbytes=nbytes, label="tensors", device=device, timeout_s=timeout)
        connection = self._connection.steady(timeout)
        number = connection.request(message, local.ArenaDescriptor, timeout).arena
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
        keep_addresses: bool = False,
        timeout: float = 60.0,
    ) -> Adopted:
        """Move a module's parameters and persistent buffers, which registrations use, into one arena.

        Afterwards a target of this module flips, and a source publishes it without a copy. Parameter objects, ties,
        views, strides, attributes, gradients and optimizers do not change. Addresses change, so adopt before you
        capture CUDA graphs. Buffers that state_dict does not save are not moved. The old memory is freed. Do not use
        the module during this call, which needs memory for a second copy.

        Args:
            module: a module, or a list of modules. It must not be registered yet. Tensors that a closed client has
                adopted move again. If it is a part of the module that will be registered, a target that flips must
                keep the other tensors (`keeps`), or not register them.
            keep_addresses: map the arena's pages at the tensors' current addresses, which graphs or pointers may have
                captured (main memory only). Each commit copies small tensors, and the first and last bytes that share
                a page with other memory. `close` and `free` replace the arena's pages by private ones with the live
                bytes; the memory is not freed earlier. Views of the tensors outside the module show each new version.
                A source of such a module copies it to publish.
            timeout: seconds to wait for the memory.

        Raises:
            RefusedError: some tensors cannot be moved; the error names each with its reason. No tensor has moved.
            ArenaError: there is not enough memory. No tensor has moved.
        """
        from refitd.client.adopt import Adopted, Adoption, WindowedAdoption
        from refitd.client.memory_block import check_outside
        from refitd.describe.memory import HOST

        check_outside("client.adopt()")
        timeout = seconds("timeout", timeout)
        copied = 0
        if flag("keep_addresses", keep_addresses):
            adoption: Adoption = (windowed := WindowedAdoption(module, self._arenas))
            if adoption.nbytes:
                with self._new_arena(adoption.nbytes, "", timeout) as (number, arena):
                    assert isinstance(arena, MappedArena)
                    shown = windowed.show(arena)
                self._arenas[number], self._contents[number] = shown, adoption.contents
                copied = shown.edge_bytes
            return Adopted(adoption.tensors, adoption.nbytes, adoption.left, copied)
        adoption = Adoption(module, self._arenas)
        if adoption.nbytes:
            device = "" if adoption.gpu == HOST else name_of(adoption.gpu)
            with self._new_arena(adoption.nbytes, device, timeout) as (number, arena):
                adoption.perform(arena)
                self._contents[number] = adoption.contents
        return Adopted(adoption.tensors, adoption.nbytes, adoption.left)

    @contextlib.contextmanager
    def memory(
        self, model: str, nbytes: int | None = None, *, device: str | torch.device = "cpu", timeout: float = 60.0
    ) -> Iterator[Placed]:
        """Place the parameters and persistent buffers of a model that a `with` block builds or loads into one arena.

        With `nbytes`, the arena exists from the start, and each parameter or buffer moves into it when a module
        registers it: the model is never in memory twice. A tensor that cannot move yet (a state dict uses it, or the
        arena is full) or that changes later (`.to(dtype)`, a replaced parameter) moves when the block ends. Without
        `nbytes`, all tensors move when the block ends, as with `adopt`; this needs memory for a second copy.

        Only modules that the entering thread builds are placed, and only if they still exist at the end: keep the model
        in a variable, and no other modules. If the block raises, no tensor stays in an arena. As for `adopt`, drop
        state dicts and views that share the memory before the block ends.

        Args:
            model: the model's name, for errors.
            nbytes: bytes for all parameters and persistent buffers at the end, each rounded up to 256. The arena has
                this size even if the model needs less, and so has the staging arena.
            device: the device of the arena and of the model that the block builds: "cpu", or a GPU as torch numbers it
                in this process ("cuda:0"). Without `nbytes` the arena is on the model's device.
            timeout: seconds to wait for the memory.

        Yields:
            The number and size of the placed tensors; filled in when the block has ended.

        Raises:
            RefusedError: `nbytes` is too small (the error names the tensors that did not fit, and the size needed); a
                tensor cannot be moved (see `adopt`); the block registered no tensor; or this thread is in such a block
                already.
            ArenaError: there is not enough memory.
        """
        from refitd.buffers.layout import packed_offsets
        from refitd.client.arenas import number_of
        from refitd.client.memory_block import MemoryBlock, Placed, Space, check_outside
        from refitd.describe.memory import HOST

        called = f"client.memory({text('model', model)!r})"
        check_outside(called)
        timeout, gpu, placed = seconds("timeout", timeout), number_of(device), Placed()
        if nbytes is None:
            with (block := MemoryBlock(called)):
                yield placed
            adopted = self.adopt(block.roots(), timeout=timeout)
            placed.tensors, placed.nbytes, placed.left = adopted.tensors, adopted.nbytes, adopted.left
            return
        name, size = "" if gpu == HOST else name_of(gpu), packed_offsets([whole("nbytes", nbytes, 1)])[1]
        with self._new_arena(size, name, timeout) as (number, arena):
            block = MemoryBlock(called, space := Space(arena, called))
            try:
                with block:
                    yield placed
                adoption = space.adopt(block.roots(), self._arenas)
            except BaseException:
                space.put_back()
                raise
            self._contents[number] = adoption.contents
            placed.tensors, placed.nbytes, placed.left = adoption.tensors, adoption.nbytes, adoption.left

    def free(self, tensors: torch.Tensor | Mapping[str, torch.Tensor], *, timeout: float = 60.0) -> None:
        """Free the whole arenas that hold these tensors.

        When this returns, the daemon has freed the memory. This process unmaps an arena when its last tensor is
        deleted; tensors adopted with `keep_addresses` get private memory again. Tensors without elements are ignored.

        Raises:
            RefusedError: a tensor is in none of this client's arenas, or a registration still uses one of the arenas
                (close the registration first). No arena has been freed.
        """
        from refitd.client.arenas import arena_of

        timeout = seconds("timeout", timeout)
        connection = self._connection.steady(timeout)
        named = tensors if isinstance(tensors, Mapping) else {"tensors": tensors}
        arenas = {arena_of(name, tensor, self._arenas) for name, tensor in named.items()} - {None}
        for registered in self._registered:
            if used := registered.arenas() & arenas:
                raise RefusedError(
                    f"arena {min(used)} holds tensors of {called(registered.member)}; close that registration first"
                )
        for arena in sorted(arena for arena in arenas if arena is not None):
            if arena >= 0:  # below 0: the daemon does not have this arena
                connection.request(local.FreeArena(arena=arena), local.Done, timeout)
            freed = self._arenas.pop(arena, None)
            if isinstance(freed, MappedArena | WindowedArena):
                self._connection.files.drop(freed.address)
            if isinstance(freed, WindowedArena):
                freed.leave()
            self._contents.pop(arena, None)

    def _leave_arenas(self) -> None:
        """Drop all arenas; an arena's memory stays mapped while tensors use it."""
        for arena in self._arenas.values():
            if isinstance(arena, MappedArena | WindowedArena):
                arena.leave()
        self._arenas = {}

    def _give_back(self, give: Give) -> dict[int, int]:
        """Return all arenas to a restarted daemon; return {old number: its new number} of those it has adopted.

        An arena that cannot be returned, on a GPU for instance, gets a number below 0. Its tensors stay unchanged, and
        from then on it is ordinary memory.
        """
        numbers: dict[int, int] = {}
        lowest = min(self._arenas, default=0)
        for number, arena in self._arenas.items():
            is_known = isinstance(arena, MappedArena | WindowedArena) and number not in self._estranged
            given = give(arena.address, arena.nbytes) if is_known else None
            if given is None:  # each daemon counts from 1, so -number may be in use already
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
        """Return the tensors' places in arenas; () unless all are in arenas that workers may use.

        Workers must not use an arena whose target flips, or has flipped without the daemon's knowledge. They may use an
        arena adopted with `keep_addresses` only if the tensors `may_flip`: only a flip keeps its edges correct.
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
        """Return whether versions can go live by exchanging arenas (a flip).

        A rank without elements has no memory to exchange; it still takes part in its replica's flips.

        Raises:
            RefusedError: versions `must` flip, and cannot.
        """
        from refitd.client.arenas import number_of
        from refitd.client.take_over import flip_obstacle

        if not any(tensor.numel() for tensor in tensors.tensors):
            return False
        found = flip_obstacle(tensors, live, self._contents, None if device is None else number_of(device))
        if not found and any(one.arenas() & {live[0].arena} for one in self._registered):
            found = "its arena holds tensors of another registration, which an exchange would take from it"
        if found and must:
            raise RefusedError(f"mode='flip' is impossible: {found}; leave mode out to have versions copied")
        return not found

    def _paired(self, live: tuple[Place, ...], staging: Arena | None) -> ArenaPair:
        from refitd.client.take_over import ArenaPair

        assert staging is not None
        return ArenaPair(self._arenas[live[0].arena], staging)
