"""Convert the names of transformers' modules to names in their checkpoints, by transformers' own rules.

    in memory  model.layers.0.mlp.experts.gate_up_proj          [experts, 2 * intermediate, hidden]
    on disk    model.layers.0.mlp.experts.0.gate_proj.weight    [intermediate, hidden], and so on for each expert

Engines load checkpoints. transformers 5 has the rules for saving (`revert_weight_conversion`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from refitd.adapters.streams import Shapes

Weights = Iterable[tuple[str, torch.Tensor]]
Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class OnDisk:
    """Converts a trainer's tensors as they come; a tensor that others complete waits for the last one.

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
