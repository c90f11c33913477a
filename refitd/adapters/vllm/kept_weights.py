"""Make vLLM keep weights where its loader writes them, or as it writes them, in engines that refitd refits.

After loading, vLLM packs weights for its kernels on CPUs and drops the originals, so versions could not be written to
them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from refitd.adapters.derived import Packed

if TYPE_CHECKING:
    import torch


def is_refitted(config: Any) -> bool:
    """Whether refitd refits the engine with this configuration."""
    return config.weight_transfer_config is not None and config.weight_transfer_config.backend == "refitd"


def open_seams(keep_experts: Callable[[], None]) -> None:
    """Patch vLLM's layers; `keep_experts` patches this version's mixtures of experts on CPUs."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _unpacked(utils.dispatch_cpu_unquantized_gemm)
    keep_experts()
    _keep_mla_weights()
    _keep_biases()


def _unpacked(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a dispatch to leave a linear layer's weight in place, for engines that refitd refits.

    On CPUs vLLM packs each weight for its GEMM kernels and drops the original, so versions could not be written to it.
    """

    @functools.wraps(dispatch)
    def chosen(layer: Any, remove_weight: bool) -> None:
        import torch
        from vllm.config import get_current_vllm_config

        if not is_refitted(get_current_vllm_config()):
            dispatch(layer, remove_weight)
        elif layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:  # kernels of convolutions take packed weights only
            before = layer.weight.data
            dispatch(layer, remove_weight)
            if layer.weight.data.data_ptr() != before.data_ptr():
                # vLLM's reloads and refitd's commits pack from other memory; Mamba2 computes with a view of the first
                kept = vars(layer).setdefault("refitd_before", {"weight": _as(layer.weight, before)})
                kept["weight"].data.copy_(before)

    return chosen


def _as(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter over a tensor's memory, with another parameter's class and attributes (its loader)."""
    import torch

    made = torch.nn.Parameter(tensor, requires_grad=False)
    made.__class__ = parameter.__class__
    made.__dict__.update(parameter.__dict__)
    return made


def packed_modules(model: torch.nn.Module) -> Iterator[Packed]:
    """Yield the modules whose weights vLLM has packed after loading, with the weights as the loader writes them."""
    for name, module in model.named_modules():
        if before := vars(module).get("refitd_before"):
            yield Packed(
                name, module, before, functools.partial(module.quant_method.process_weights_after_loading, module)
            )


def _keep_biases() -> None:
    """Make an output layer keep its bias: vLLM's loader for models of transformers registers another one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    register = ParallelLMHead._register_bias

    @functools.wraps(register)
    def once(self: Any) -> None:
        if getattr(self, "bias", None) is None:
            register(self)

    ParallelLMHead._register_bias = once


def keep_experts() -> None:
    """Make vLLM's unquantised CPU experts leave their weights in place, in engines that refitd refits.

    Once the model is loaded, vLLM packs the weights for its grouped GEMM and drops the originals, so versions could
    not be written to them.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    Experts.process_weights_after_loading = _left(Experts.process_weights_after_loading)
    Experts.apply = _computed(Experts.apply)


# vLLM 0.28 and 0.29 take these from the layer when they pack its weights
ROUTING = ("use_grouped_topk", "renormalize", "scoring_func", "custom_routing_function")


def _left(process: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(process)
    def chosen(self: Any, layer: Any) -> None:
        from vllm.config import get_current_vllm_config

        self.refitd_unpacked = is_refitted(get_current_vllm_config())
        if not self.refitd_unpacked:
            process(self, layer)
        for name in ROUTING:
            if hasattr(self, name) and hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    return chosen


def _computed(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def chosen(self: Any, *args: Any, **given: Any) -> Any:
        if not getattr(self, "refitd_unpacked", False):
            return apply(self, *args, **given)
        found = signature.bind(self, *args, **given).arguments
        return _routed(**found) if "router_logits" in found else _experts(**found)

    signature = inspect.signature(apply)
    return chosen


def _routed(self: Any, hidden_states: Any, router_logits: Any, **given: Any) -> Any:
    """Choose the experts and compute with them, as in vLLM 0.28 and 0.29."""
    import torch

    routing = ("num_expert_group", "topk_group", "e_score_correction_bias", "routed_scaling_factor")
    weights, ids = self._select_experts(hidden_states, router_logits, *(given.pop(name, None) for name in routing))
    if given["apply_router_weight_on_input"]:
        hidden_states = hidden_states * weights.to(hidden_states.dtype)
    output = torch.empty_like(hidden_states)
    _experts(self, output, hidden_states, topk_weights=weights, topk_ids=ids, **given)
    return output


def keep_layer_experts() -> None:
    """Make the CPU experts of vLLM 0.27 leave their weights in place, in engines that refitd refits."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    CPUFusedMOE.__init__ = _of_layer(CPUFusedMOE.__init__)


def _of_layer(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def chosen(self: Any, layer: Any) -> None:
        from vllm.config import get_current_vllm_config

        if is_refitted(get_current_vllm_config()):
            self.forward_method = functools.partial(_layer_experts, self)
        else:
            init(self, layer)

    return chosen


def _layer_experts(
    self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, activation: Any, _: int, is_weighted: bool
) -> Any:
    import torch

    self.w1_bias, self.w2_bias = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
    output = torch.empty_like(x)
    if is_weighted:
        x = x * topk_weights.to(x.dtype)
    weights, ids = (layer.w13_weight, layer.w2_weight), (topk_weights, topk_ids)
    _experts(self, output, x, *weights, *ids, activation, layer.expert_map, is_weighted)
    return output


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
        expert_map: [experts of the whole model], each expert's index on this rank or -1; None: all are on this rank.
        apply_router_weight_on_input: whether the tokens are weighted already.
        others: scales and workspaces, ignored.
    """
    import torch
    from torch.nn.functional import linear

    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()]
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        up = linear(hidden_states[token], w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
        inner = up.new_empty(len(token), w2.shape[-1])
        _activate(activation, inner, up)
        down = linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert]).float()
        if not apply_router_weight_on_input:
            down *= topk_weights[token, k, None].float()
        total.index_add_(0, token, down)
    output.copy_(total)


def _activate(activation: Any, output: Any, given: Any) -> None:
    """Write vLLM's activation function of `given` [tokens, 2 * intermediate] to `output` [tokens, intermediate]."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    if getattr(activation, "value", "") == "swigluoai":  # gpt-oss; vLLM's CPU build has it only inside its packed GEMM
        gate, up = given[:, ::2].clamp(max=7.0), given[:, 1::2].clamp(-7.0, 7.0)
        output.copy_((up + 1) * gate * torch.sigmoid(gate * 1.702))
    else:
        apply_moe_activation(activation, output, given)


def _keep_mla_weights() -> None:
    """Make MLA layers with AMX kernels keep `kv_b_proj`, from which they pack W_UK and W_UV, in engines of refitd."""
    from vllm.model_executor.layers.attention import MLAAttention

    MLAAttention.process_weights_after_loading = _kept(MLAAttention.process_weights_after_loading)


def _kept(process: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(process)
    def chosen(self: Any, *given: Any) -> None:
        from vllm.config import get_current_vllm_config

        weight = getattr(self.kv_b_proj, "weight", None)  # quantised ones have other names
        process(self, *given)
        if weight is not None and not self.kv_b_proj.weight.numel() and is_refitted(get_current_vllm_config()):
            self.kv_b_proj.weight = weight

    return chosen
