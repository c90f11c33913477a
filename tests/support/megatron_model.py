"""Megatron-Core's GPTModel on CPUs: built from a Hugging Face config, filled with numbers, run over a pipeline by hand.

Megatron uses CUDA in a few places that do not affect these tests; `without_cuda` replaces them.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional


def without_cuda(*, grouped: bool) -> None:
    """Make Megatron-Core run on CPUs."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment, misc]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment, method-assign]
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    tracker = random.get_cuda_rng_tracker()
    tracker.fork = contextlib.nullcontext
    # names that are undefined, or are not types, without Transformer Engine
    moe_utils.te_general_gemm = None
    multi_latent_attention.TELinear = type("TELinear", (), {})
    made = DotProductAttention.__init__

    def without_channels(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        made(
            self, *args, **kwargs
        )  # latent attention passes channels for Transformer Engine only; config.kv_channels has them

    DotProductAttention.__init__ = without_channels
    if grouped:
        grouped_gemm_util.grouped_gemm, grouped_gemm_util.ops = _GroupedGemm, _GroupedGemm


class _GroupedGemm:
    """The one function of the package grouped_gemm (CUDA only) that GroupedMLP calls."""

    @staticmethod
    def gmm(given: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
        parts = given.split([int(n) for n in counts])
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def start(job: dict[str, Any], rank: int, rendezvous: str) -> None:
    """Join the job's process group and make Megatron's groups."""
    world = job["world_size"]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    from megatron.core import parallel_state

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.get("tp", 1),
        pipeline_model_parallel_size=job.get("pp", 1),
        virtual_pipeline_model_parallel_size=job.get("vpp"),
        expert_model_parallel_size=job.get("ep", 1),
        expert_tensor_parallel_size=job.get("etp"),
    )


def build(job: dict[str, Any], hf: Any) -> list[torch.nn.Module]:
    """Return this rank's chunks of the model that a Hugging Face config describes, of random numbers."""
    without_cuda(grouped=job.get("grouped", False))
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    config = _config(job, hf)
    chunks = []
    for stage in range(job.get("vpp") or 1):
        virtual = stage if job.get("vpp") else None
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual
            )
        else:
            spec = get_gpt_layer_local_spec(
                normalization="RMSNorm",
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=config.multi_latent_attention,
            )
        chunks.append(
            GPTModel(
                config,
                spec,
                vocab_size=job["padded_vocab"],
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
                parallel_output=False,
                share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
                position_embedding_type="rope",
                rotary_base=int(hf.rope_parameters["rope_theta"]),
                vp_stage=virtual,
            ).eval()
        )
    fill(chunks, job.get("seed", 0))
    for module in (m for chunk in chunks for m in chunk.modules()):
        if type(module).__name__ == "GroupedMLP":
            module.config.bf16 = True  # type: ignore[union-attr] # it asserts that, and computes in any type
    return chunks


def _config(job: dict[str, Any], hf: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = hf.model_type
    said: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind in ("qwen3", "qwen3_moe", "deepseek_v3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": job.get("tp", 1),
        "pipeline_model_parallel_size": job.get("pp", 1),
        "virtual_pipeline_model_parallel_size": job.get("vpp"),
        "expert_model_parallel_size": job.get("ep", 1),
        "expert_tensor_parallel_size": job.get("etp"),
    }
    said["kv_channels"] = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if kind == "deepseek_v3":
        said["kv_channels"] = hf.v_head_dim
    experts = getattr(hf, "num_experts", None) or getattr(hf, "n_routed_experts", None)
    experts = experts or getattr(hf, "num_local_experts", None)
    if experts:
        said |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": kind == "deepseek_v3",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": job.get("grouped", False),
        }
    if kind == "gpt_oss":
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        said |= {
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
        }
    if kind != "deepseek_v3":
        return TransformerConfig(**said)
    said |= {
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "rope",
        "rotary_base": int(hf.rope_parameters["rope_theta"]),
        "moe_layer_freq": [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
    }
    return MLATransformerConfig(**said)


def fill(chunks: list[torch.nn.Module], seed: int) -> None:
    """Fill every tensor with numbers that differ wherever the tensors of two ranks are other parts of the model."""
    from megatron.core import parallel_state as groups

    for number, chunk in enumerate(chunks):
        named = {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}
        for name, tensor in named.items():
            if not tensor.is_floating_point() or name.endswith(("inv_freq", "tokens_per_expert")):
                continue
            is_shared = name in ("embedding.word_embeddings.weight", "output_layer.weight") and getattr(
                tensor, "shared_embedding", False
            )
            is_split = getattr(tensor, "tensor_model_parallel", False) or name.endswith("softmax_offset")
            is_expert = ".experts." in name
            place = (
                "tied" if is_shared else f"{name} {groups.get_pipeline_model_parallel_rank()} {number}",
                (groups.get_expert_tensor_parallel_rank() if is_expert else groups.get_tensor_model_parallel_rank())
                if is_split
                else 0,
                groups.get_expert_model_parallel_rank() if is_expert else 0,
                seed,
            )
            generator = torch.Generator().manual_seed(zlib.crc32(str(place).encode()))
            noise = torch.randn(tensor.shape, generator=generator)
            with torch.no_grad():
                tensor.copy_(1 + 0.1 * noise if "layernorm" in name and tensor.dim() == 1 else 0.2 * noise)


@torch.no_grad()
def logits(chunks: list[torch.nn.Module], tokens: torch.Tensor) -> torch.Tensor | None:
    """Return the logits [batch, length, padded vocabulary] on ranks of the last stage, None on others. Collective."""
    from megatron.core import parallel_state as groups

    stage, stages = groups.get_pipeline_model_parallel_rank(), groups.get_pipeline_model_parallel_world_size()
    batch, length = tokens.shape
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    hidden, found = chunks[0].config.hidden_size, None  # type: ignore[union-attr]
    for number, chunk in enumerate(chunks):
        is_first, is_last = number == 0 and stage == 0, number == len(chunks) - 1 and stage == stages - 1
        if not is_first and stages > 1:
            given = torch.empty(length, batch, hidden)  # type: ignore[arg-type]
            dist.recv(given, groups.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor([given])  # type: ignore[operator]
        found = chunk(tokens, torch.arange(length).expand(batch, -1), mask)
        if not is_last and stages > 1:
            dist.send(found.contiguous(), groups.get_pipeline_model_parallel_next_rank())
            found = None
    return found
