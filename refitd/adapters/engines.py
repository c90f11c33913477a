"""What adapters of engines share: learned layouts and their checks, weights in one arena, retries of followers."""

from __future__ import annotations

import difflib
import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import refitd
from refitd import LoaderTrace, RefusedError
from refitd.adapters.derived import (
    LANDING,
    Hook,
    Packed,
    Recomputed,
    check_computed,
    declared,
    derived_after_loading,
    derived_by_loader,
    derived_by_packing,
    landings_for,
    unpacked,
)
from refitd.adapters.places import views_of, without_views
from refitd.adapters.streams import Shapes

log = logging.getLogger("refitd.adapters")

Weights = Iterable[tuple[str, torch.Tensor]]


def adopt(client: refitd.Client, learned: Learned, timeout: float) -> str:
    """Move the weights that will be registered, and no others: a flip exchanges the whole arena.

    Do not use the weights during this call. The tensor objects stay valid; their addresses change. Views move with
    their weights.

    Args:
        client: registers the weights afterwards.
        learned: the engine's weights.
        timeout: seconds to allocate the memory.

    Returns:
        "" if all weights are now in the client's arenas; else why they were not moved, and versions are copied.
    """
    if not all(tensor.is_cpu for tensor in learned.weights.values()):
        return "not all of them lie in main memory (captured graphs of GPUs keep addresses)"
    gc.collect()  # reference cycles of the trace would count as holders of the memory
    module = torch.nn.Module()
    for name, tensor in learned.weights.items():  # not register_parameter, which takes no names with dots
        if isinstance(tensor, torch.nn.Parameter):
            module._parameters[name] = tensor
        else:
            module._buffers[name] = tensor
    for name, tensor in views_of(learned.model, learned.weights).items():
        module._buffers[f"view of {name}"] = tensor
        module._non_persistent_buffers_set.add(f"view of {name}")
    try:
        client.adopt(module, timeout=timeout)
    except (refitd.RefusedError, refitd.ArenaError, refitd.DeadlineExceeded) as exc:
        return str(exc)
    return ""


@dataclass(frozen=True)
class Learned:
    """How versions get into an engine.

    Attributes:
        model: the engine's model.
        trace: how its loader maps the trainer's tensors to weights.
        weights: the tensors that versions are written into by the name that they are registered under: weights of the
            engine, and landings.
        metadata: their descriptions.
        recomputed: the tensors that the engine's own code recomputes in each commit.
    """

    model: torch.nn.Module
    trace: LoaderTrace
    weights: dict[str, torch.Tensor]
    metadata: list[refitd.ParameterMetadata]
    recomputed: list[Recomputed]

    def registration(self) -> dict[str, Any]:
        """Return the arguments of `register_target`."""
        weights = {name: tensor.data for name, tensor in self.weights.items()}
        return {"module_or_tensors": weights, "metadata": self.metadata, "derived": declared(self.recomputed)}


class Learner:
    """Learns from a model's own loader which elements of the trainer's tensors the engine's weights are.

    The first layout is checked: the weights must equal the checkpoint that the engine loaded at its start. Later the
    engine serves other versions.

    Attributes:
        own: {name: (shape, dtype)} of that checkpoint; empty if it is not known.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
        checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None,
        hooks: Callable[[], Iterable[Hook]] = tuple,
        packed: Callable[[], Iterable[Packed]] = tuple,
        names: Callable[[Shapes], OnDisk | None] = lambda _: None,
    ) -> None:
        """Store the arguments.

        Args:
            model: the engine's model.
            load: the model's loader.
            checkpoint: returns the tensors that the engine loaded at its start; None: do not check.
            hooks: returns the engine's code that runs after loading, and may run again.
            packed: returns the modules whose weights the engine has packed.
            names: returns the conversion to the checkpoint's names, if the trainer offers other ones.
        """
        self._model, self._load, self._checkpoint = model, load, checkpoint
        self._hooks, self._packed, self._names = hooks, packed, names
        self.own: Shapes = {}
        self._is_checked = False

    def learn(self, offered: Shapes, rank: int) -> Learned:
        """Return the layout, the engine's weights by name, and the recomputed tensors.

        Args:
            offered: {canonical name: (shape, dtype)} of the trainer's tensors.
            rank: this engine's rank.

        Raises:
            RefusedError: some weights are neither copies of the trainer's tensors nor recomputed by the engine's code.
        """
        packed = list(self._packed())
        with unpacked(packed):
            learned, own, held = self._traced(offered, rank)
        for one in packed:
            learned.recomputed.append(derived_by_packing(one, learned.weights))
        for hook in self._hooks():
            if (found := derived_after_loading(hook, learned.weights)) is not None:
                learned.recomputed.append(found)
        made = {name for group in learned.recomputed for name in group.tensors}
        params = {name: one for name, one in held.items() if isinstance(one, torch.nn.Parameter) and name not in made}
        check_covered(learned.trace, params, self.own)
        if self._checkpoint is not None and not self._is_checked:
            refitd.check_layout(own, held, self._checkpoint())
            self._is_checked = True
        return learned

    def _traced(self, offered: Shapes, rank: int) -> tuple[Learned, LoaderTrace, dict[str, torch.Tensor]]:
        """Return two traces of the loader, of the trainer's and the checkpoint's tensors; and the engine's tensors."""
        params = without_views(dict(self._model.named_parameters()))
        # buffers that are in no checkpoint (tables of experts or rotations) are not refitted; the loader may read them
        held = {**{name: held for name, _, _, held in refitd.named_persistent_buffers(self._model)}, **params}
        if self._checkpoint is not None:
            self.own = self.own or {name: (tuple(t.shape), t.dtype) for name, t in self._checkpoint()}
        load = self._load
        if offered.keys() - self.own.keys() and (convert := self._names(offered)) is not None:
            load = functools.partial(_converted, self._load, convert)
            check_shapes(self.own, convert.shapes)
        else:
            check_shapes(self.own, offered)
        trace = refitd.trace_loader(held, load, offered, owner_rank=rank)
        check = self._checkpoint if not self._is_checked else None
        own = trace if check is None or self.own == offered else refitd.trace_loader(held, self._load, self.own)
        learned = Learned(
            self._model, trace, {name: held[name] for name in trace.metadata}, [*trace.metadata.values()], []
        )
        computed = {name: trace.computed[name] for name in trace.computed if name in params}
        if computed and all(computed.values()):
            landings = landings_for(computed, offered, params)
            learned.recomputed.append(derived_by_loader(load, computed, params, landings))
            learned.weights.update({f"{LANDING}{name}": tensor for name, tensor in landings.items()})
            learned.metadata.extend(_landing(name, tensor, rank) for name, tensor in landings.items())
            given = [*landings.items()]
            if check is None:
                check_computed(load, computed, params, given, is_checkpoint=False)
            else:
                sources = {source for name in computed for source in own.computed.get(name, ())}
                given = [(name, tensor) for name, tensor in check() if name in sources]
                check_computed(self._load, computed, params, given, is_checkpoint=True)
        return learned, own, held


def _converted(load: Callable[[Weights], Any], convert: OnDisk, weights: Weights) -> None:
    load(convert(weights))


def _landing(name: str, tensor: torch.Tensor, rank: int) -> refitd.ParameterMetadata:
    return refitd.ParameterMetadata(
        name=f"{LANDING}{name}",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        element_size=tensor.element_size(),
        owner_rank=rank,
        resolved_name=name,
    )


def check_shapes(own: Shapes, offered: Shapes) -> None:
    """Refuse another revision of the model: loaders silently use the first rows of a tensor that is too large.

    Args:
        own: {name: (shape, dtype)} of the checkpoint that the engine loaded at its start.
        offered: {canonical name: (shape, dtype)} of the trainer's tensors.

    Raises:
        RefusedError: a tensor's shape differs; the error names it.
    """
    differ = [name for name, (shape, _) in offered.items() if name in own and tuple(own[name][0]) != tuple(shape)]
    if differ:
        raise RefusedError(
            f"{differ[0]}: the trainer offers {list(offered[differ[0]][0])}, the checkpoint that this engine was "
            f"started with has {list(own[differ[0]][0])} ({len(differ)} tensors differ in shape): it is another "
            "revision of the model; start the engine with a checkpoint of the trainer's"
        )


def check_covered(trace: LoaderTrace, params: Mapping[str, torch.Tensor], own: Shapes | None = None) -> None:
    """Refuse an engine if versions would not update some of its weights; warn if they would round some.

    Args:
        trace: how the engine's loader maps the trainer's tensors to weights.
        params: the engine's parameters, {name: tensor}.
        own: as in `check_shapes`; None if it is unknown.

    Raises:
        RefusedError: the loader computes some weights from the trainer's tensors, or leaves some unwritten.
    """
    computed = [name for name in trace.computed if name in params]
    untouched = [name for name in trace.untouched if name in params and params[name].numel()]
    if computed:
        raise RefusedError(
            f"{len(computed)} weights are no copies of what the trainer offers (quantised or packed by the engine): "
            f"{', '.join(computed[:5])}, computed from {', '.join(trace.computed[computed[0]][:3]) or 'other ones'}; "
            "serve the model unquantised, without plugins that change its loader"
        )
    if untouched:
        close = difflib.get_close_matches(untouched[0], trace.unused, 5, cutoff=0.3) or trace.unused[:5]
        left = f"nothing of (nearest first) {', '.join(close)}" if close else "all"
        raise RefusedError(
            f"nothing that the trainer offers goes to {len(untouched)} weights of the engine: "
            f"{', '.join(untouched[:5])}; of what it offers, the engine takes {left}; offer these tensors, by the "
            "names in the engine's checkpoint, or serve a checkpoint of the trainer's model"
        )
    if (narrower := _narrower(trace, own or {})) and (m := trace.metadata[narrower[0][0]]):
        name, source = narrower[0]
        log.warning(
            "refitd: the trainer offers %s in %s, and this engine keeps it in %s (%s), as the checkpoint that it was "
            "started with (%d such tensors): versions are less exact than that checkpoint; where the trainer holds "
            "these tensors in %s, offer them so",
            source,
            m.cast_from,
            _name(m.dtype),
            name,
            len(narrower),
            _name(m.dtype),
        )


def _narrower(trace: LoaderTrace, own: Shapes) -> list[tuple[str, str]]:
    """Return (engine's name, canonical name) of tensors offered with fewer bits than engine and checkpoint use."""
    found = []
    for name, m in trace.metadata.items():
        bits = m.element_size if m.cast_from is None else getattr(torch, m.cast_from).itemsize
        for source in {tile.tensor for tile in m.tiles} if m.tiles else {m.resolved_name or name}:
            if bits < m.element_size and source in own and bits < own[source][1].itemsize:
                found.append((name, source))
    return sorted(found)


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


class Retries:
    """How long a following engine waits after an error, and what it logs: it may wait for its trainer for days.

    Attributes:
        again_s: seconds before it looks for its trainer again.
        refused_s: seconds before it retries after a refusal; another trainer may start, or the engine that uses its
            name may stop.
    """

    again_s = 2.0
    refused_s = 10.0

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._last = log, ""

    def after(self, exc: refitd.RefitdError) -> float:
        """Log an error, unless it repeats the last one; return the seconds until the next try."""
        match exc:
            case refitd.DeadlineExceeded():
                self._say(logging.INFO, f"refitd: waiting for a trainer: {exc}")
            case refitd.TransportError():  # PeerLost is one
                self._say(logging.WARNING, f"refitd: {exc}; this engine serves what it has, and tries again")
            case _:
                text = f"refitd: this engine is not refitted: {exc}; it serves what it has, and tries again"
                self._say(logging.ERROR, text)
                return self.refused_s
        return self.again_s

    def succeeded(self) -> None:
        """Log the next error even if it repeats the last one."""
        self._last = ""

    def _say(self, level: int, text: str) -> None:
        if text != self._last:
            self._log.log(level, "%s", text, stacklevel=3)
        self._last = text


Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class OnDisk:
    """Converts tensors under transformers' names to those in its checkpoints, by transformers' own rules, as they come.

    A tensor that others complete waits for the last one.

    Attributes:
        shapes: {name on disk: (shape, dtype)} of all tensors.
    """

    def __init__(self, revert: Revert, offered: Shapes) -> None:
        """Find out which tensors are converted one by one.

        Args:
            revert: returns tensors by their names on disk.
            offered: {name in memory: (shape, dtype)}.
        """
        made = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in offered.items()}
        self._revert = revert
        self.shapes: Shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in revert(dict(made)).items()}
        self._alone = {
            name
            for name, tensor in made.items()
            if all(self.shapes.get(n) == (tuple(t.shape), t.dtype) for n, t in revert({name: tensor}).items())
        }

    def __call__(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by their names on disk."""
        together: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in self._alone:
                yield from self._revert({name: tensor}).items()
            else:
                together[name] = tensor
        if together:
            yield from self._revert(together).items()


def on_disk(config: Any, offered: Shapes) -> OnDisk | None:
    """Return the conversion for a model of transformers; None if this transformers has none that changes names.

    Args:
        config: the model's configuration; its first architecture names the class.
        offered: {name in memory: (shape, dtype)}.
    """
    try:
        import transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, revert_weight_conversion

        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
        rules = [
            rule for rule in get_model_conversion_mapping(model, add_legacy=False) if type(rule) is not PrefixChange
        ]
        if not rules:
            return None
        model._weight_conversions = rules
        found = OnDisk(lambda tensors: revert_weight_conversion(model, tensors), offered)
    except (ImportError, AttributeError, TypeError, ValueError, KeyError):
        return None  # an older transformers, or an architecture of other code
    return found if found.shapes.keys() != offered.keys() else None
