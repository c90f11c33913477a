"""What an engine refuses before it trusts a layout that was learned from its loader."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping

import torch

from refitd import LoaderTrace, RefusedError

log = logging.getLogger("refitd.adapters")

Offered = dict[str, tuple[tuple[int, ...], torch.dtype]]


def check_shapes(own: Offered, offered: Offered) -> None:
    """Refuse another revision of the model: of a tensor that is too large, loaders take the first rows in silence.

    Args:
        own: {name: (shape, dtype)} of the checkpoint that the engine was started with.
        offered: the same of the trainer's tensors, by canonical names.

    Raises:
        RefusedError: names one that differs in shape.
    """
    differ = [name for name, (shape, _) in offered.items() if name in own and tuple(own[name][0]) != tuple(shape)]
    if differ:
        raise RefusedError(
            f"{differ[0]}: the trainer offers {list(offered[differ[0]][0])}, the checkpoint that this engine was "
            f"started with has {list(own[differ[0]][0])} ({len(differ)} tensors differ in shape): it is another "
            "revision of the model; start the engine with a checkpoint of the trainer's"
        )


def check_covered(trace: LoaderTrace, params: Mapping[str, torch.Tensor], own: Offered | None = None) -> None:
    """Refuse an engine if versions would not update some of its weights; warn if they would round some.

    Args:
        trace: what the engine's loader does with the trainer's tensors.
        params: the engine's parameters, {name: tensor}.
        own: as in `check_shapes`; None if it is unknown.

    Raises:
        RefusedError: weights are computed from what the trainer offers, or nothing of it goes to them.
    """
    computed = [name for name in trace.computed if name in params]
    untouched = [name for name in trace.untouched if name in params and params[name].numel()]
    if computed:
        raise RefusedError(
            f"{len(computed)} weights are no copies of what the trainer offers (quantised or packed by the engine): "
            f"{', '.join(computed[:5])}; serve the model unquantised"
        )
    if untouched:
        close = difflib.get_close_matches(untouched[0], trace.unused, 5, cutoff=0.3) or trace.unused[:5]
        left = f"nothing of (nearest first) {', '.join(close)}" if close else "all"
        raise RefusedError(
            f"nothing that the trainer offers goes to {len(untouched)} weights of the engine: "
            f"{', '.join(untouched[:5])}; of what it offers, the engine takes {left}"
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


def _narrower(trace: LoaderTrace, own: Offered) -> list[tuple[str, str]]:
    """Return (engine's name, canonical name) of tensors whose offer has fewer bits than engine and checkpoint have."""
    found = []
    for name, m in trace.metadata.items():
        bits = m.element_size if m.cast_from is None else getattr(torch, m.cast_from).itemsize
        for source in {tile.tensor for tile in m.tiles} if m.tiles else {m.resolved_name or name}:
            if bits < m.element_size and source in own and bits < own[source][1].itemsize:
                found.append((name, source))
    return sorted(found)


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
