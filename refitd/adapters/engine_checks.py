"""What an engine refuses before it trusts a layout that was learned from its loader."""

from __future__ import annotations

import torch

from refitd import RefusedError

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
