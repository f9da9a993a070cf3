"""Decoders with recurrent layers, alone and between others."""

from __future__ import annotations

from typing import Any

from tests.golden.case import Case

_COMMON = {"vocab_size": 128, "hidden_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "dtype": "float32"}


def _config(architecture: str, model_type: str, **values: Any) -> dict[str, Any]:
    """A config.json; None removes a key."""
    config = {"architectures": [architecture], "model_type": model_type, **_COMMON, **values}
    return {key: value for key, value in config.items() if value is not None}


_MAMBA = {"state_size": 8, "num_hidden_layers": 2, "conv_kernel": 4, "expand": 2, "tie_word_embeddings": True}
_MAMBA2 = {
    "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "num_hidden_layers": 2, "conv_kernel": 4, "expand": 2, "chunk_size": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
_LFM2 = {
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "conv_L_cache": 3, "block_multiple_of": 16, "tie_word_embeddings": False,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
_MROPE = {**_DELTA["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
_FALCON_H1 = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16, "tie_word_embeddings": False,
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.7, "mlp_multipliers": [0.8, 1.2], "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.7, 0.9, 1.1, 1.3, 0.5],
}  # fmt: skip
_NEMOTRON_H = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 256,
    "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
_GRANITE = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "tie_word_embeddings": False, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7,
    "attention_multiplier": 0.3, "shared_intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_JAMBA = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "tie_word_embeddings": False,
}  # fmt: skip

CASES = tuple(
    Case(name, config, num_steps=24)
    for name, config in {
        "mamba": _config("MambaForCausalLM", "mamba", **_MAMBA),
        "mamba_biases": _config("MambaForCausalLM", "mamba", **{**_MAMBA, "use_bias": True, "use_conv_bias": False, "time_step_rank": 5}),
        "mamba2": _config("Mamba2ForCausalLM", "mamba2", **_MAMBA2),
        "mamba2_one_group": _config("Mamba2ForCausalLM", "mamba2", **{**_MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False}),
        "lfm2": _config("Lfm2ForCausalLM", "lfm2", **_LFM2),
        "lfm2_biases": _config("Lfm2ForCausalLM", "lfm2", **{**_LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
        "qwen3_5": _config("Qwen3_5ForCausalLM", "qwen3_5_text", **{**_DELTA, "rope_parameters": _MROPE}),
        "falcon_h1": _config("FalconH1ForCausalLM", "falcon_h1", **_FALCON_H1),
        "falcon_h1_norm": _config("FalconH1ForCausalLM", "falcon_h1", **{**_FALCON_H1, "mamba_rms_norm": True}),
        "falcon_h1_norm_last": _config(
            "FalconH1ForCausalLM", "falcon_h1", **{**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        ),
        "nemotron_h": _config(
            "NemotronHForCausalLM",
            "nemotron_h",
            **{**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
        ),
        "nemotron_h_experts": _config(
            "NemotronHForCausalLM",
            "nemotron_h",
            **_NEMOTRON_H,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            routed_scaling_factor=1.5,
        ),
        "qwen3_next": _config("Qwen3NextForCausalLM", "qwen3_next", **_DELTA, **_QWEN_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
        "qwen3_5_moe": _config(
            "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **{**_DELTA, **_QWEN_EXPERTS, "intermediate_size": None, "rope_parameters": _MROPE}
        ),
        "granite_hybrid": _config("GraniteMoeHybridForCausalLM", "granitemoehybrid", **_GRANITE),
        "granite_hybrid_dense": _config(
            "GraniteMoeHybridForCausalLM", "granitemoehybrid", **{**_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"}
        ),
        "lfm2_experts": _config(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            **{**_LFM2, "block_multiple_of": None, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2},
            moe_intermediate_size=24,
            routed_scaling_factor=1.5,
        ),
        "jamba": _config("JambaForCausalLM", "jamba", **_JAMBA),
    }.items()
)
