"""Prove a learned layout: run the real loader on made-up checkpoints, and compare every tensor bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from refitd.describe.metadata import ParameterMetadata
from refitd.errors import PlanError, RefusedError
from refitd.tracing.comparison import bytes_of, differing
from refitd.tracing.held_bytes import storage_key
from refitd.tracing.isolation import Isolation
from refitd.tracing.memory import Written
from refitd.tracing.probe_values import Probe, Shapes
from refitd.tracing.reused import Reused
from refitd.tracing.threads import Following
from refitd.tracing.values import site_of

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

PROBES = 3


@dataclass(frozen=True, slots=True)
class Proof:
    """How a layout was proven.

    Attributes:
        probes: checkpoints of made-up values that the real loader was run on.
        seconds: the time that this took, with the copies of the engine's tensors.
        memory_bytes: main memory for the probes' values: random elements, and the two largest canonical tensors. The
            copies of the engine's tensors are counted in `LoaderTrace.held`.
        without_values: the engine's tensors on the meta device, which have no values to compare.
    """

    probes: int
    seconds: float
    memory_bytes: int
    without_values: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a phrase for logs."""
        return f"proven on {self.probes} probes in {self.seconds:.2f} s, {self.memory_bytes / 1e6:.0f} MB"


@dataclass(frozen=True, slots=True)
class Refuted:
    """A tensor of the engine for which loader and layout differ.

    Attributes:
        source: the canonical tensor at which they differ; "" where the layout says a constant.
        probe: the probe's number, from 1.
    """

    source: str
    probe: int


def prove(
    metadata: Mapping[str, ParameterMetadata],
    untouched: Iterable[str],
    written: Mapping[int, Sequence[Written]],
    others: Iterable[int],
    isolation: Isolation,
    load_fn: Load,
    shapes: Shapes,
) -> tuple[Proof | None, dict[str, Refuted]]:
    """Run a loader on probes, in the engine's own tensors, which are as they were afterwards, also on error.

    Args:
        metadata: the layout, by the engine's names.
        untouched: tensors that hold no element of a canonical tensor.
        written: the writes that the trace has recorded, by storage; those on the meta device are passed over.
        others: further storages that the loader was seen to write.
        isolation: the engine as it was before the trace.
        load_fn: the loader.
        shapes: shape and dtype of every canonical tensor.

    Returns:
        The proof, None if no tensor has values, and the tensors that differ from the layout on some probe.

    Raises:
        PlanError: the loader writes other tensors, or replaces them; by name.
        RefusedError: the loader raises on every kind of values, with its line; or there is no room for copies.
    """
    began = time.perf_counter()
    ones = [one for found in written.values() for one in found if one.tensor.device.type != "meta"]
    held = {one.name: one.tensor for one in ones}
    mine = {name: meta for name, meta in metadata.items() if name in held}
    constant = {one.name for one in ones if one.writes} & {*untouched}
    seen = {key for key, found in written.items() if any(one.writes or one.is_computed for one in found)} | {*others}
    left = [one for one in ones if not one.writes and not one.is_computed and storage_key(one.tensor) in seen]
    without = tuple(name for name in metadata if name not in held)
    refuted: dict[str, Refuted] = {}
    if not held:
        return None, refuted
    isolation.check_room()
    before = {one.name: bytes_of(one.tensor).clone() for one in left}
    first: dict[str, torch.Tensor] = {}
    most, reused = 0, Reused()
    changed: list[str] = []
    try:
        for number in range(PROBES):
            probe = _run(isolation, mine, held, load_fn, Probe(number, shapes, reused=reused), seen)
            changed += [name for name, content in before.items() if not torch.equal(bytes_of(held[name]), content)]
            wanted = ((name, probe.expected(name)) for name in shapes)
            found, _ = differing({n: m for n, m in mine.items() if n not in refuted}, held, wanted)
            refuted |= {name: Refuted(source, number + 1) for name, source in found.items()}
            for name in constant:
                content = bytes_of(held[name]).clone()
                if not torch.equal(first.setdefault(name, content), content):
                    refuted.setdefault(name, Refuted("", number + 1))
            most = max(most, probe.nbytes())
            if number + 1 < PROBES:
                isolation.put_back(seen, mine, is_last=False).check_memory()
    finally:
        changes = isolation.put_back(seen, mine)
    changes.check_memory()
    if changed := list(dict.fromkeys((*changed, *changes.written))):
        raise PlanError(
            f"{', '.join(changed[:5])}: the loader writes {len(changed)} tensors that it did not write when its layout "
            "was learned: it decides by values, or by what it has loaded before; put back"
        )
    return Proof(PROBES, time.perf_counter() - began, most, without), refuted


def _run(
    isolation: Isolation,
    metadata: Mapping[str, ParameterMetadata],
    held: Mapping[str, torch.Tensor],
    load_fn: Load,
    probe: Probe,
    seen: Container[int],
) -> Probe:
    """Load one probe into the engine's tensors; with less unusual values where the loader raises on others."""
    error: Exception | None = None
    for mildness in range(3):
        probe = replace(probe, mildness=mildness)
        with torch.no_grad():
            for name in metadata:
                held[name].detach().copy_(probe.content(held[name].dtype).to(held[name].device))
            try:
                with Following(_Unfollowed(seen), {}).run():
                    load_fn(iter(probe))
                return probe
            except PlanError:
                raise
            except Exception as exc:
                error = exc
        isolation.put_back(seen, metadata, is_last=False)
    assert error is not None
    raise RefusedError(
        f"the loader raises on probe {probe.number + 1} of {PROBES}, whose values are made up, and did not when its "
        f"layout was learned, at {site_of(error)}: {type(error).__name__}: {error}{_cause(error)}"
    ) from error


def _cause(error: Exception) -> str:
    """Return the cause of an error that torch raises for tensors without values: a probe has none of these."""
    if isinstance(error, NotImplementedError) and "meta tensor" in str(error):
        return (
            ". The loader keeps tensors of an earlier load, outside of the engine; let it forget these, then load again"
        )
    return ""


class _Unfollowed:
    """Runs operators without a tracer; `Following` waits for the threads."""

    functions: TorchFunctionMode | None = None
    is_for_threads = True

    def __init__(self, written: Container[int]) -> None:
        self._written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory of the engine."""
        return storage_key(tensor) in self._written
