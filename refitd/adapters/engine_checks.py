"""What an engine refuses before it trusts a layout that was learned from its loader."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch

from refitd import LoaderTrace, RefusedError

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


def check_covered(trace: LoaderTrace, params: Mapping[str, torch.Tensor]) -> None:
    """Refuse an engine of which versions would leave weights as they are.

    Args:
        trace: what the engine's loader does with the trainer's tensors.
        params: the engine's parameters, {name: tensor}.

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
