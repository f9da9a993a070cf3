"""The other dense decoders, each with what is peculiar to it."""

from __future__ import annotations

from typing import Any

from tests.golden.case import Case

_COMMON = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip


def llama_like(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json under Llama's keys; None removes a key."""
    config = {"architectures": [architecture], "model_type": model_type, **_COMMON, **changes}
    return {key: value for key, value in config.items() if value is not None}


def gpt_like(architecture: str, model_type: str, **values: Any) -> dict[str, Any]:
    """A config.json with few keys in common with others."""
    common = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32"}
    return {"architectures": [architecture], "model_type": model_type, **common, **values}


def _layer_norm(architecture: str, model_type: str, eps: str = "layer_norm_eps", **changes: Any) -> dict[str, Any]:
    return llama_like(architecture, model_type, **{"rms_norm_eps": None, eps: 1e-5, **changes})


_SLIDING, _FULL = "sliding_attention", "full_attention"
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.0, 4.0],
}  # fmt: skip
_GEMMA = {"head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GEMMA2 = {**_GEMMA, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 16}
_GEMMA4 = {
    "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": None, "head_dim": 8, "global_head_dim": 16,
    "sliding_window": 16, "tie_word_embeddings": True, "num_hidden_layers": 6, "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 128, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100000.0},
        _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
_FALCON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}  # fmt: skip
_OPT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 256, "pad_token_id": 1,
    "word_embed_proj_dim": 32,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}

CASES = (
    Case("gemma", llama_like("GemmaForCausalLM", "gemma", **_GEMMA)),
    Case("gemma_legacy_gelu", llama_like("GemmaForCausalLM", "gemma", **{**_GEMMA, "hidden_act": "gelu", "num_key_value_heads": 1})),
    Case(
        "gemma2",
        llama_like(
            "Gemma2ForCausalLM", "gemma2", **_GEMMA2, num_hidden_layers=4, attn_logit_softcapping=5.0, final_logit_softcapping=8.0
        ),
        num_steps=64,
    ),
    Case("ministral", llama_like("MinistralForCausalLM", "ministral", head_dim=8, sliding_window=16, layer_types=[_SLIDING, _FULL])),
    Case(
        "ministral3",
        llama_like(
            "Ministral3ForCausalLM", "ministral3", head_dim=16, rope_theta=None,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
            },
        ),
    ),
    Case("phi", _layer_norm("PhiForCausalLM", "phi", hidden_act="gelu_new", partial_rotary_factor=0.5, num_key_value_heads=4)),
    Case("phi_qk_norm", _layer_norm("PhiForCausalLM", "phi", hidden_act="gelu_new", partial_rotary_factor=0.5, qk_layernorm=True)),
    Case("phi3", llama_like("Phi3ForCausalLM", "phi3", sliding_window=16)),
    Case(
        "phi3_longrope_partial",
        llama_like(
            "Phi3ForCausalLM", "phi3", partial_rotary_factor=0.75, rope_scaling=_LONGROPE, original_max_position_embeddings=64,
            tie_word_embeddings=True,
        ),
        max_model_len=256,
        prompt_len=100,
    ),
    Case("olmo", llama_like("OlmoForCausalLM", "olmo", rms_norm_eps=None, clip_qkv=0.8)),
    Case("olmo2", llama_like("Olmo2ForCausalLM", "olmo2")),
    Case(
        "olmo3",
        llama_like(
            "Olmo3ForCausalLM", "olmo3", num_hidden_layers=4, sliding_window=16,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.1},
        ),
        num_steps=64,
    ),
    Case(
        "granite",
        llama_like(
            "GraniteForCausalLM", "granite", embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2,
            logits_scaling=2.0, attention_bias=True, mlp_bias=True,
        ),
    ),
    Case(
        "granite_tied",
        llama_like(
            "GraniteForCausalLM", "granite", embedding_multiplier=4.0, residual_multiplier=0.7, attention_multiplier=0.3535533905932738,
            logits_scaling=2.0, tie_word_embeddings=True,
        ),
    ),
    Case(
        "minicpm3",
        llama_like(
            "MiniCPM3ForCausalLM", "minicpm3", q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
            num_key_value_heads=4, scale_emb=3.0, scale_depth=1.2, dim_model_base=16, tie_word_embeddings=True,
        ),
    ),
    Case(
        "minicpm3_longrope",
        llama_like(
            "MiniCPM3ForCausalLM", "minicpm3", q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=6,
            num_key_value_heads=4, scale_emb=3.0, scale_depth=1.2, dim_model_base=16, tie_word_embeddings=True,
            rope_scaling={**_LONGROPE, "original_max_position_embeddings": 256},
        ),
        max_model_len=256,
    ),
    Case("cohere", _layer_norm("CohereForCausalLM", "cohere", logit_scale=0.25, tie_word_embeddings=True)),
    Case("cohere_qk_norm", _layer_norm("CohereForCausalLM", "cohere", logit_scale=0.5, use_qk_norm=True, tie_word_embeddings=True)),
    Case(
        "cohere2",
        _layer_norm(
            "Cohere2ForCausalLM", "cohere2", logit_scale=0.5, num_hidden_layers=4, sliding_window=16, tie_word_embeddings=True,
            layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL],
        ),
        spellings=(
            _layer_norm(
                "Cohere2ForCausalLM", "cohere2", logit_scale=0.5, num_hidden_layers=4, sliding_window=16, tie_word_embeddings=True,
                sliding_window_pattern=4, head_dim=8, layer_switch=4, rotary_pct=1.0, use_parallel_block=True,
                position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first",
            ),
        ),
        num_steps=64,
    ),
    Case("stablelm", _layer_norm("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.25, use_qkv_bias=True, num_key_value_heads=4)),
    Case(
        "stablelm_parallel_qk_norm",
        _layer_norm("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.5, qk_layernorm=True, use_parallel_residual=True),
    ),
    Case(
        "starcoder2",
        _layer_norm(
            "Starcoder2ForCausalLM", "starcoder2", "norm_epsilon", hidden_act="gelu_pytorch_tanh", sliding_window=16,
            tie_word_embeddings=True,
        ),
    ),
    Case("glm", llama_like("GlmForCausalLM", "glm", head_dim=16, partial_rotary_factor=0.5, attention_bias=True)),
    Case("glm4", llama_like("Glm4ForCausalLM", "glm4", head_dim=16, partial_rotary_factor=0.5)),
    Case("smollm3", llama_like("SmolLM3ForCausalLM", "smollm3", num_hidden_layers=4, no_rope_layer_interval=2, tie_word_embeddings=True)),
    Case(
        "smollm3_window",
        llama_like(
            "SmolLM3ForCausalLM", "smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=16
        ),
    ),
    Case(
        "exaone4",
        llama_like(
            "Exaone4ForCausalLM", "exaone4", num_hidden_layers=4, sliding_window=16, head_dim=8,
            rope_scaling={"rope_type": "llama3", **_LLAMA3}, layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL],
        ),
        spellings=(
            llama_like(
                "Exaone4ForCausalLM", "exaone4", num_hidden_layers=4, sliding_window=16, head_dim=8,
                rope_scaling={"rope_type": "llama3", **_LLAMA3}, sliding_window_pattern="LLLG",
            ),
        ),
    ),
    # Without windows, all layers rotate.
    Case("exaone4_full", llama_like("Exaone4ForCausalLM", "exaone4", head_dim=8, layer_types=[_FULL, _FULL]) | {"sliding_window": None}),
    Case(
        "seed_oss",
        llama_like("SeedOssForCausalLM", "seed_oss", head_dim=16, attention_bias=True, attention_out_bias=True, residual_dropout=0.1),
    ),
    Case(
        "nemotron",
        _layer_norm(
            "NemotronForCausalLM", "nemotron", "norm_eps", hidden_act="relu2", partial_rotary_factor=0.5, head_dim=16, mlp_bias=True
        ),
    ),
    Case("arcee", llama_like("ArceeForCausalLM", "arcee", hidden_act="relu2", head_dim=8)),
    Case(
        "apertus",
        llama_like(
            "ApertusForCausalLM", "apertus", hidden_act="xielu", rope_theta=None,
            rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **_LLAMA3},
        ),
    ),
    Case("ernie", llama_like("Ernie4_5ForCausalLM", "ernie4_5", head_dim=8, use_bias=True)),
    Case("helium", llama_like("HeliumForCausalLM", "helium", head_dim=8)),
    Case("gpt_bigcode", gpt_like("GPTBigCodeForCausalLM", "gpt_bigcode", **_GPT, activation_function="gelu_pytorch_tanh")),
    Case(
        "gpt_bigcode_multi_head",
        gpt_like("GPTBigCodeForCausalLM", "gpt_bigcode", **_GPT, activation_function="gelu", multi_query=False, tie_word_embeddings=False),
    ),
    Case("gptj", gpt_like("GPTJForCausalLM", "gptj", **_GPT, rotary_dim=4, tie_word_embeddings=False)),
    Case(
        "gpt_neox",
        _layer_norm(
            "GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu", num_key_value_heads=None, rope_theta=None, rotary_pct=0.25,
            rotary_emb_base=5000,
        ),
    ),
    Case(
        "gpt_neox_sequential",
        _layer_norm(
            "GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu_fast", num_key_value_heads=None, rope_theta=None, rotary_pct=1.0,
            use_parallel_residual=False, attention_bias=False,
        ),
    ),
    Case("falcon", gpt_like("FalconForCausalLM", "falcon", **_FALCON, multi_query=True, parallel_attn=True, bias=False)),
    Case("falcon_new", gpt_like("FalconForCausalLM", "falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True)),
    Case(
        "falcon_one_norm",
        gpt_like(
            "FalconForCausalLM", "falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=False,
            ffn_hidden_size=96, rope_theta=5000.0,
        ),
    ),
    Case(
        "falcon_alibi",
        gpt_like("FalconForCausalLM", "falcon", **_FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
        # The plain one adds the biases twice.
        attention="sdpa",
    ),
    Case("opt", gpt_like("OPTForCausalLM", "opt", **_OPT)),
    Case(
        "opt_post_norm",
        gpt_like(
            "OPTForCausalLM", "opt", **{**_OPT, "word_embed_proj_dim": 16}, do_layer_norm_before=False, activation_function="gelu",
        ),
    ),
    Case("opt_plain_norm", gpt_like("OPTForCausalLM", "opt", **_OPT, enable_bias=False, layer_norm_elementwise_affine=False)),
    Case("bloom", gpt_like("BloomForCausalLM", "bloom", hidden_size=32, n_layer=2, n_head=4)),
    Case("bloom_six_heads", gpt_like("BloomForCausalLM", "bloom", hidden_size=48, n_layer=2, n_head=6)),
    Case(
        "mpt",
        gpt_like("MptForCausalLM", "mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=256, attn_config={"alibi": True, "clip_qkv": 1.5}),
    ),
    Case(
        "mpt_six_heads",
        gpt_like("MptForCausalLM", "mpt", d_model=48, n_layers=2, n_heads=6, max_seq_len=256, attn_config={"softmax_scale": 0.5}),
    ),
    Case(
        "gemma4",
        llama_like(
            "Gemma4ForCausalLM", "gemma4_text", **_GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True,
            layer_types=[_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
        ),
        num_steps=64,
    ),
    Case(
        "gemma4_key_is_value",
        llama_like(
            "Gemma4ForCausalLM", "gemma4_text", **{**_GEMMA4, "hidden_size_per_layer_input": 0, "num_hidden_layers": 3},
            attention_k_eq_v=True, num_global_key_value_heads=1, layer_types=[_SLIDING, _FULL, _FULL],
        ),
    ),
    Case(
        "gemma4_experts",
        llama_like(
            "Gemma4ForCausalLM", "gemma4_text", **{**_GEMMA4, "hidden_size_per_layer_input": 0, "num_hidden_layers": 3},
            attention_k_eq_v=True, num_global_key_value_heads=1, layer_types=[_SLIDING, _FULL, _FULL], enable_moe_block=True,
            num_experts=6, top_k_experts=2, moe_intermediate_size=24,
        ),
    ),
)  # fmt: skip
