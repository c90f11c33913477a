"""Tensors that an engine derives from its weights: the engine's own code recomputes them in the memory that they have.

loaded    a version arrives in it: the learned layout covers it
view      memory of a loaded tensor, seen otherwise: it always has the version
derived   computed from loaded tensors by code that runs after loading, or by the loader itself
landing   a tensor of the trainer, in its dtype, from which the loader computes a derived one
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import refitd
from refitd import RefusedError
from refitd.adapters.places import (
    Memory,
    Place,
    Tensors,
    has_memory,
    place_in_memory,
    places_of,
    put_back,
    restore,
    span_of,
)

# Prefix of the names under which landings are registered.
LANDING = "refitd.landing."

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Hook:
    """The engine's code for one module that runs after its weights are loaded; it may run again.

    Attributes:
        name: the module's name.
        module: the module. Its tensors, and tensors of plain objects in it, may be derived.
        run: runs the code.
    """

    name: str
    module: torch.nn.Module
    run: Callable[[], object]


@dataclass(frozen=True)
class Packed:
    """A module whose weights the engine has packed after loading.

    Attributes:
        name: the module's name.
        module: the module.
        before: its weights as the loader writes them, by their names in the module. Versions land in them.
        run: packs the module's present weights.
    """

    name: str
    module: torch.nn.Module
    before: dict[str, torch.nn.Parameter]
    run: Callable[[], object]

    def landings(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights as the loader writes them, by their names in the model."""
        return {f"{self.name}.{key}" if self.name else key: tensor for key, tensor in self.before.items()}


@contextlib.contextmanager
def unpacked(modules: Iterable[Packed]) -> Iterator[None]:
    """Give modules the weights that the loader writes; the packed ones return at the end."""
    live = [(one.module, key, one.module._parameters[key]) for one in modules for key in one.before]
    try:
        for one in modules:
            one.module._parameters.update(one.before)
        yield
    finally:
        for module, key, tensor in live:
            module._parameters[key] = tensor


@dataclass(frozen=True)
class Recomputed:
    """Derived tensors that one run of the engine's code recomputes.

    Attributes:
        what: names the code, for errors.
        sources: registered names of the tensors that it reads.
        tensors: the derived tensors by name.
        run: recomputes them in their memory.
    """

    what: str
    sources: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    run: Callable[[], None]


def declared(groups: Iterable[Recomputed]) -> dict[str, refitd.Derived]:
    """Return the derived tensors as `register_target` takes them: the first one of a group recomputes all of it."""
    found = {}
    for group in groups:
        for index, (name, tensor) in enumerate(group.tensors.items()):
            refresh = _kept if index else lambda _, run=group.run: run()
            found[name] = refitd.Derived(tensor.detach(), group.sources, refresh)
    return found


def _kept(tensor: torch.Tensor) -> None:
    """Leave a tensor as it is: an earlier one of its group has recomputed it."""


def seconds_of(groups: Iterable[Recomputed]) -> float:
    """Recompute all tensors once; return the seconds that each commit will take for it. All values stay."""
    seconds = 0.0
    with torch.no_grad():
        for group in groups:
            saved = {name: tensor.detach().clone() for name, tensor in group.tensors.items()}
            began = time.perf_counter()
            group.run()  # landings have no version yet
            seconds += time.perf_counter() - began
            for name, was in saved.items():
                group.tensors[name].detach().copy_(was)
    return seconds


# --- code that runs after loading -------------------------------------------------------------------------


class _Watched(TorchDispatchMode):
    """Notes the weights that operators read, and the bytes of the watched tensors before operators write them."""

    def __init__(self, places: Iterable[Place], weights: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[str] = set()
        self.before: dict[str, torch.Tensor] = {}
        self._places = [(*span_of(place.alias), place) for place in places]
        self._weights = Memory(weights)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        for argument, value in [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments)]:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if not isinstance(tensor, torch.Tensor) or not has_memory(tensor):
                    continue
                self.read.update(self._weights.owners(tensor))
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save(*span_of(tensor))
        return func(*args, **kwargs)

    def _save(self, start: int, end: int) -> None:
        for first, last, place in self._places:
            if first < end and start < last and place.name not in self.before:
                self.before[place.name] = place.alias.clone()


def derived_after_loading(hook: Hook, weights: Tensors) -> Recomputed | None:
    """Run a module's code again, and return what it derives from weights; None if it derives no new memory.

    Its result must be what the engine has, twice, and must follow changed weights. The engine is unchanged afterwards.

    Args:
        hook: the code.
        weights: the loaded tensors by registered name.

    Raises:
        RefusedError: the code gives other values than the engine has, does not follow changed weights, or rewrites
            weights; the error names the tensor.
    """
    places = [*places_of(hook.name, hook.module)]
    watched, memory = _Watched(places, weights), Memory(weights)
    with torch.no_grad(), watched:
        hook.run()
    changed = [
        place
        for place in places
        if place.name in watched.before
        or place.holder.get(place.key) is not place.tensor
        or place_in_memory(place.tensor) != place_in_memory(place.alias)
    ]
    first = {place.name: watched.before.get(place.name, place.alias).clone() for place in changed}
    derived = [place for place in changed if not memory.owners(place.alias)]
    read = [weights[name] for name in sorted(watched.read)]

    def again() -> None:
        hook.run()
        put_back(derived)  # a new view has the weight's memory, too

    try:
        if not derived or not read:  # constants, which a running engine may have changed
            restore(changed, first)
            return None
        put_back(changed)
        _compare(hook, changed, first)
        with torch.no_grad():
            again()
            _compare(hook, derived, first)
            _check_follows(hook, again, derived, first, read)
            again()
            _compare(hook, derived, first)
    except BaseException:
        restore(changed, first)
        raise
    return Recomputed(hook.name, tuple(sorted(watched.read)), {place.name: place.alias for place in derived}, again)


def _compare(hook: Hook, places: Iterable[Place], first: Tensors) -> None:
    for place in places:
        if not _same(place.alias, first[place.name]):
            raise RefusedError(
                f"{place.name}: the engine's code after loading ({hook.name}) gives other values when it runs again, "
                "so it cannot follow versions; serve the model without the quantisation or packing that it does"
            )


def _check_follows(
    hook: Hook, again: Callable[[], None], derived: list[Place], first: Tensors, read: list[torch.Tensor]
) -> None:
    """Raise RefusedError if the code's result stays the same although the weights that it reads change."""
    saved = [tensor.detach().clone() for tensor in read]
    try:
        for tensor, was in zip(read, saved, strict=True):
            tensor.detach().copy_(was.reshape(-1).roll(1).reshape(was.shape) * 2)
        is_changed = any(not _same(tensor, was) for tensor, was in zip(read, saved, strict=True))
        again()
        if is_changed and all(_same(place.alias, first[place.name]) for place in derived):
            most = max(derived, key=lambda place: place.alias.numel())
            raise RefusedError(
                f"{most.name}: the engine's code after loading ({hook.name}) does not follow changed weights: it "
                "keeps a copy of the old ones"
            )
    finally:
        for tensor, was in zip(read, saved, strict=True):
            tensor.detach().copy_(was)
        for place in derived:
            place.alias.copy_(first[place.name])


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    mine, theirs = tensor.detach().contiguous(), other.detach().contiguous()
    return torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


# --- weights that are packed after loading ----------------------------------------------------------------


def derived_by_packing(packed: Packed, weights: Tensors) -> Recomputed:
    """Return what packing derives from a module's landings: twice what the engine has.

    Args:
        packed: the module. Its landings have the engine's version.
        weights: the loaded tensors and landings by registered name.

    Raises:
        RefusedError: the result differs, or has another shape; the engine is unchanged.
    """
    memory = Memory(weights)
    places = [place for place in places_of(packed.name, packed.module) if not memory.owners(place.alias)]
    hook = Hook(packed.name, packed.module, packed.run)

    def again() -> None:
        for key, landing in packed.before.items():
            fresh = torch.nn.Parameter(landing.detach().clone(), requires_grad=False)
            fresh.__class__ = landing.__class__
            fresh.__dict__.update(landing.__dict__)
            packed.module._parameters[key] = fresh
        packed.run()
        put_back(places)

    first = {place.name: place.alias.clone() for place in places}
    try:
        with torch.no_grad():
            for _ in range(2):
                again()
                _compare(hook, places, first)
    except BaseException:
        restore(places, first)
        raise
    made = {f"{place.name} (packed)": place.alias for place in places}
    return Recomputed(packed.name, tuple(packed.landings()), made, again)


# --- weights that the loader computes ---------------------------------------------------------------------


def landings_for(
    computed: Mapping[str, tuple[str, ...]], offered: Mapping[str, tuple[tuple[int, ...], torch.dtype]], params: Tensors
) -> dict[str, torch.Tensor]:
    """Allocate a landing for each of the trainer's tensors that the loader computes with, by canonical name.

    Args:
        computed: as in `LoaderTrace`.
        offered: {canonical name: (shape, dtype)}.
        params: the engine's tensors by name.
    """
    device = {source: params[name].device for name, sources in computed.items() for source in sources}
    return {
        source: torch.nn.Parameter(torch.zeros(offered[source][0], dtype=offered[source][1], device=where), False)
        for source, where in sorted(device.items())
    }


def derived_by_loader(
    load: Callable[[Weights], object], computed: Mapping[str, tuple[str, ...]], params: Tensors, landings: Tensors
) -> Recomputed:
    """Return the weights that the loader computes from landings."""

    def run() -> None:
        load((name, tensor.detach()) for name, tensor in landings.items())

    sources = tuple(f"{LANDING}{name}" for name in landings)
    return Recomputed("the loader", sources, {name: params[name].detach() for name in computed}, run)


def check_computed(
    load: Callable[[Weights], object],
    computed: Iterable[str],
    params: Tensors,
    weights: list[tuple[str, torch.Tensor]],
    *,
    is_checkpoint: bool,
) -> None:
    """Run the loader twice: the results must be equal, and with the checkpoint's tensors be what the engine has.

    Args:
        load: the loader.
        computed: names of the weights that it computes.
        params: the engine's tensors by name; they have their values again afterwards.
        weights: the tensors that these are computed from.
        is_checkpoint: the engine was started with them.

    Raises:
        RefusedError: some values differ; the error names the tensor.
    """
    first = {name: params[name].detach().clone() for name in computed}
    wanted = first if is_checkpoint else {}
    try:
        with torch.no_grad():
            for _ in range(2):
                load(iter(weights))
                wanted = wanted or {name: params[name].detach().clone() for name in first}
                if differ := [name for name, was in wanted.items() if not _same(params[name], was)]:
                    raise RefusedError(
                        f"{differ[0]}: the loader computes it from {', '.join(name for name, _ in weights[:3])}, and "
                        f"gives other values than {'the engine has' if is_checkpoint else 'before'} ({len(differ)} "
                        "such weights): the engine rewrites them after loading, or was started with another "
                        "checkpoint; serve the model unquantised, or start it with the given checkpoint"
                    )
    finally:
        for name, was in first.items():
            params[name].detach().copy_(was)
