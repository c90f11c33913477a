"""Mixtures of experts on CPUs, computed with the weights as the loader leaves them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def keep() -> None:
    """Have vLLM's unquantised CPU experts leave their weights in place, in engines that refitd refits.

    vLLM packs them for its grouped GEMM when the model has been loaded, and drops what the loader has written: nothing
    would be left to write to.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    Experts.process_weights_after_loading = _left(Experts.process_weights_after_loading)
    Experts.apply = _computed(Experts.apply)


def _left(process: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(process)
    def chosen(self: Any, layer: Any) -> None:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config().weight_transfer_config
        self.refitd_unpacked = config is not None and config.backend == "refitd"
        if not self.refitd_unpacked:
            process(self, layer)

    return chosen


def _computed(apply: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(apply)
    def chosen(self: Any, **given: Any) -> None:  # vLLM names all of them
        if getattr(self, "refitd_unpacked", False):
            _experts(self, **given)
        else:
            apply(self, **given)

    return chosen


def _experts(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    expert_map: Any,
    apply_router_weight_on_input: bool,
    **others: Any,
) -> None:
    """Write each token's weighted sum over its experts to `output`.

    Args:
        self: vLLM's experts.
        output: [tokens, hidden].
        hidden_states: [tokens, hidden].
        w1: [experts here, 2 * intermediate, hidden].
        w2: [experts here, hidden, intermediate].
        topk_weights: [tokens, k].
        topk_ids: [tokens, k], experts of the whole model.
        activation: vLLM's `MoEActivation`.
        expert_map: [experts of the whole model], the place here or -1; None: all are here.
        apply_router_weight_on_input: whether the tokens are weighted already.
        others: scales and workspaces, which have no meaning here.
    """
    import torch
    from torch.nn.functional import linear
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()]
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        up = linear(hidden_states[token], w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
        inner = up.new_empty(len(token), w2.shape[-1])
        apply_moe_activation(activation, inner, up)
        down = linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert]).float()
        if not apply_router_weight_on_input:
            down *= topk_weights[token, k, None].float()
        total.index_add_(0, token, down)
    output.copy_(total)
