"""Decoders with experts or latent attention, each with what is peculiar to it."""

from __future__ import annotations

from tests.golden.case import Case
from tests.golden.cases.dense import llama_like

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}


_MIXTRAL = {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
}  # fmt: skip
_DEEPSEEK = {
    **_MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
_MULTIPLIERS = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 0.5}
_LLAMA4 = {
    "head_dim": 8, "num_hidden_layers": 4, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts": 4,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.2,
    "no_rope_layer_interval": 2,
}  # fmt: skip

CASES = (
    Case("mixtral", llama_like("MixtralForCausalLM", "mixtral", **_MIXTRAL)),
    Case("mixtral_window", llama_like("MixtralForCausalLM", "mixtral", **_MIXTRAL, sliding_window=16)),
    Case(
        "qwen2_moe",
        llama_like(
            "Qwen2MoeForCausalLM", "qwen2_moe", **_QWEN, shared_expert_intermediate_size=40, num_hidden_layers=3, mlp_only_layers=[1]
        ),
    ),
    Case(
        "qwen2_moe_window",
        llama_like(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            **_QWEN,
            shared_expert_intermediate_size=40,
            num_hidden_layers=3,
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
            qkv_bias=False,
        ),
    ),
    Case(
        "qwen3_moe",
        llama_like(
            "Qwen3MoeForCausalLM", "qwen3_moe", **_QWEN, head_dim=8, norm_topk_prob=True, num_hidden_layers=4, decoder_sparse_step=2
        ),
    ),
    Case("olmoe", llama_like("OlmoeForCausalLM", "olmoe", intermediate_size=24, num_experts=8, num_experts_per_tok=3, clip_qkv=0.9)),
    Case(
        "gpt_oss",
        llama_like(
            "GptOssForCausalLM",
            "gpt_oss",
            head_dim=8,
            intermediate_size=24,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=16,
            num_hidden_layers=4,
            attention_bias=True,
            rope_theta=None,
            swiglu_limit=1.5,
            rope_parameters={**_YARN, "rope_theta": 10000.0, "truncate": False},
        ),
    ),
    Case("deepseek_v2", llama_like("DeepseekV2ForCausalLM", "deepseek_v2", **_DEEPSEEK, topk_method="group_limited_greedy")),
    Case(
        "deepseek_v2_lite",
        llama_like(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            **{**_DEEPSEEK, "n_group": 1, "topk_group": 1},
            topk_method="greedy",
            rope_theta=None,
            rope_parameters={**_YARN, "rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        )
        | {"q_lora_rank": None},
    ),
    Case(
        "deepseek_v3",
        llama_like(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            **_DEEPSEEK,
            rope_theta=None,
            rope_parameters={**_YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
    Case(
        "glm4_moe",
        llama_like(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            **{k: v for k, v in _DEEPSEEK.items() if k not in _MLA},
            head_dim=8,
            attention_bias=True,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
        ),
    ),
    Case(
        "phimoe",
        llama_like("PhiMoEForCausalLM", "phimoe", **_MIXTRAL, attention_bias=True, lm_head_bias=True, router_jitter_noise=0.1),
    ),
    Case(
        "phimoe_longrope",
        llama_like(
            "PhimoeForCausalLM",
            "phimoe",
            **_MIXTRAL,
            rope_theta=None,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.6],
                "long_factor": [1.2, 2.0, 4.0, 7.0],
                "short_mscale": 1.1,
                "long_mscale": 1.25,
                "original_max_position_embeddings": 64,
            },
        ),
        # Past the original context, transformers changes the magnitude and keeps the short factors, which the model was not trained with.
        max_model_len=64,
        prompt_len=32,
    ),
    Case("granite_moe", llama_like("GraniteMoeForCausalLM", "granitemoe", **_MIXTRAL, **_MULTIPLIERS, tie_word_embeddings=True)),
    Case(
        "granite_moe_shared",
        llama_like("GraniteMoeSharedForCausalLM", "granitemoeshared", **_MIXTRAL, **_MULTIPLIERS, shared_intermediate_size=40),
    ),
    Case("llama4", llama_like("Llama4ForCausalLM", "llama4_text", **_LLAMA4)),
    Case(
        "llama4_plain",
        llama_like(
            "Llama4ForCausalLM",
            "llama4_text",
            **{**_LLAMA4, "interleave_moe_layer_step": 1},
            use_qk_norm=False,
            attn_temperature_tuning=False,
        ),
    ),
    Case(
        "minimax_m2",
        llama_like(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            head_dim=16,
            intermediate_size=24,
            num_local_experts=8,
            num_experts_per_tok=3,
            rope_theta=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
    ),
    Case("hunyuan", llama_like("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", head_dim=8)),
    Case(
        "hunyuan_alpha",
        llama_like(
            "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", head_dim=8, rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0}
        ),
        spellings=(
            llama_like(
                "HunYuanDenseV1ForCausalLM",
                "hunyuan_v1_dense",
                head_dim=8,
                rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
                # As in the first release.
                attention_head_dim=8,
                norm_type="rms",
                use_rotary_pos_emb=True,
                class_num=0,
                dense_list=[4096, 0],
                use_cla=False,
                cla_share_factor=2,
                vit_patch=1,
                im_start_id=5,
                pool_type="last",
            ),
        ),
    ),
    Case(
        "hunyuan_moe", llama_like("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", head_dim=8, num_experts=6, moe_topk=2, intermediate_size=24)
    ),
    Case(
        "ernie_moe",
        llama_like(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            head_dim=8,
            num_hidden_layers=3,
            moe_intermediate_size=24,
            moe_k=3,
            moe_num_experts=8,
            moe_num_shared_experts=2,
        ),
    ),
)
