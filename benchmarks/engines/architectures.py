"""Tiny configurations of the architectures that vLLM loads."""

from __future__ import annotations

from typing import Any

# settings of most of them
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA = {"intermediate_size": 256, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 8}
MAMBA2 = {
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "num_heads": 16,
    "n_groups": 1,
    "head_dim": 16,
    "intermediate_size": 256,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
NEOX = {"num_key_value_heads": 4}

# model_type -> (family, differences from COMMON; ...: without this setting)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # dense
    "llama": ("dense", {}),
    "qwen2": ("tied", {"tie_word_embeddings": True}),
    "qwen3": ("dense", {}),
    "mistral": ("dense", {}),
    "ministral3": ("dense", {}),
    "phi": ("dense", NEOX),
    "phi3": ("dense", {}),
    "gemma": ("tied", {}),
    "gemma2": ("tied", {}),
    "gemma3_text": ("tied", {}),
    "gemma4_text": ("tied", {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "vaultgemma": ("tied", {}),
    "olmo": ("dense", {}),
    "olmo2": ("dense", {}),
    "olmo3": ("dense", {}),
    "glm": ("dense", {}),
    "glm4": ("dense", {}),
    "apertus": ("dense", {}),
    "arcee": ("dense", {}),
    "bloom": ("tied", {}),
    "cohere": ("tied", {}),
    "cohere2": ("tied", {}),
    "cwm": ("dense", {}),
    "ernie4_5": ("tied", {}),
    "exaone4": ("dense", {}),
    "falcon": ("tied", {"head_dim": ..., "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": ("tied", {}),
    "gpt_bigcode": ("tied", {"num_key_value_heads": 1, "multi_query": True}),
    "gpt_neox": ("dense", NEOX),
    "gptj": ("dense", {"rotary_dim": 16}),
    "granite": ("dense", {}),
    "hunyuan_v1_dense": ("dense", {}),
    "hyperclovax": ("dense", {}),
    "jais2": ("dense", {}),
    "nemotron": ("dense", {}),
    "opt": ("tied", {"word_embed_proj_dim": 128, "ffn_dim": 128}),
    "seed_oss": ("dense", {}),
    "smollm3": ("tied", {}),
    "stablelm": ("dense", NEOX),
    "starcoder2": ("tied", {}),
    # mixtures of experts
    "mixtral": ("moe", EXPERTS),
    "qwen2_moe": ("moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("moe", EXPERTS),
    "olmoe": ("moe", EXPERTS),
    "granitemoe": ("moe", EXPERTS),
    "granitemoeshared": ("moe", {**EXPERTS, "shared_intermediate_size": 64}),
    "ernie4_5_moe": ("moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "afmoe": (
        "moe",
        {**SHARED, "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "num_dense_layers": 1},
    ),
    "dbrx": (
        "moe",
        {
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "d_model": 128,
            "n_heads": 4,
        },
    ),
    "exaone_moe": ("moe", SHARED),
    "flex_olmo": ("moe", EXPERTS),
    "glm4_moe": ("moe", {**SHARED, "n_group": 1, "topk_group": 1}),
    "gpt_oss": ("moe", EXPERTS),
    "hunyuan_v1_moe": ("moe", {**EXPERTS, "moe_topk": 2, "num_shared_expert": 1}),
    "llama4_text": (
        "moe",
        {**EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 1},
    ),
    "minimax_m2": ("moe", {**EXPERTS, "rotary_dim": 32, "scoring_func": "sigmoid"}),
    "mimo_v2_flash": ("moe", SHARED),
    # latent attention
    "deepseek_v2": ("mla", {**MLA, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("mla", {**MLA, "topk_method": "noaux_tc"}),
    "glm4_moe_lite": ("mla", {**MLA, "topk_method": "noaux_tc"}),
    "axk1": ("mla", {**MLA, "topk_method": "noaux_tc"}),
    "minicpm3": ("mla", {**MLA, "kv_lora_rank": 64}),
    "longcat_flash": ("mla", {**MLA, "expert_ffn_hidden_size": 64, "ffn_hidden_size": 128, "moe_topk": 2}),
    # state spaces and hybrids
    "mamba": ("mamba", MAMBA),
    "mamba2": ("mamba", MAMBA2),
    "falcon_mamba": ("mamba", MAMBA),
    "falcon_h1": (
        "hybrid",
        {"mamba_d_ssm": 256, "mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16},
    ),
    "jamba": (
        "hybrid",
        {**EXPERTS, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    ),
    "granitemoehybrid": (
        "hybrid",
        {
            **EXPERTS,
            "mamba_n_heads": 16,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 64,
        },
    ),
    "lfm2": ("hybrid", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("hybrid", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "nemotron_h": (
        "hybrid",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 16,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
    "qwen3_next": ("hybrid", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 64}),
    "qwen3_5_text": ("hybrid", LINEAR),
    "qwen3_5_moe_text": ("hybrid", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 64}),
    "olmo_hybrid": ("hybrid", LINEAR),
    "zamba2": (
        "hybrid",
        {
            "attention_hidden_size": 256,
            "attention_head_dim": 64,
            "n_mamba_heads": 16,
            "mamba_headdim": 16,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
    ),
}
