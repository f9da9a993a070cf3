"""The families whose tensors `tests.checkpoints` lists itself: Llama, Mistral, Qwen, Gemma 3, GPT-2."""

from __future__ import annotations

from typing import Any

from tests.checkpoints import tiny_config
from tests.golden.case import Case


def _rope(name: str, scaling: dict[str, Any], **options: Any) -> Case:
    """A Llama with a rope scaling, and the spellings that mean the same: `type`, `rope_type`, and `rope_parameters` with theta inside."""
    changes = options.pop("changes", {})
    rest = {key: value for key, value in scaling.items() if key != "rope_type"}
    return Case(
        name,
        tiny_config(rope_scaling=scaling, **changes),
        spellings=(
            tiny_config(rope_scaling={"type": scaling["rope_type"], **rest}, **changes),
            tiny_config(rope_scaling={"type": scaling["rope_type"], **scaling}, **changes),
            tiny_config(rope_theta=None, rope_parameters={"rope_theta": 10000.0, **scaling}, **changes),
        ),
        **options,
    )


_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 4.0, 7.0],
    "factor": 4.0,
    "original_max_position_embeddings": 96,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_MISTRAL, _QWEN2, _QWEN3, _GEMMA, _GPT2 = (
    "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel",
)  # fmt: skip
_WINDOWED = {"use_sliding_window": True, "sliding_window": 16}
_GEMMA_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

CASES = (
    Case("llama", tiny_config()),
    Case("llama_tied", tiny_config(tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=1e-2)),
    Case("llama_mha_head_dim", tiny_config(num_key_value_heads=None, head_dim=16, num_hidden_layers=3)),
    Case("llama_biases", tiny_config(attention_bias=True, mlp_bias=True, hidden_act="gelu", rope_theta=500.0)),
    _rope("llama_rope_linear", {"rope_type": "linear", "factor": 2.0}),
    _rope("llama_rope_dynamic", {"rope_type": "dynamic", "factor": 2.0}, max_model_len=256),
    _rope(
        "llama_rope_dynamic_beyond",
        {"rope_type": "dynamic", "factor": 2.0},
        changes={"max_position_embeddings": 64},
        max_model_len=128,
        prompt_len=128,
        num_steps=0,
    ),
    _rope(
        "llama_rope_llama3",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    _rope("llama_rope_yarn", _YARN, changes={"head_dim": 16}),
    _rope(
        "llama_rope_yarn_options",
        {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        changes={"head_dim": 16},
    ),
    _rope("llama_rope_yarn_magnitude", {**_YARN, "attention_factor": 1.3}),
    _rope("llama_rope_longrope_short", _LONGROPE, max_model_len=96, prompt_len=64),
    _rope("llama_rope_longrope_long", _LONGROPE, max_model_len=256, prompt_len=100),
    Case("mistral", tiny_config(_MISTRAL)),
    Case("mistral_window", tiny_config(_MISTRAL, sliding_window=16, head_dim=16), num_steps=64),
    Case("qwen2", tiny_config(_QWEN2, use_sliding_window=False, sliding_window=16, max_window_layers=0)),
    Case("qwen2_window_layers", tiny_config(_QWEN2, **_WINDOWED, max_window_layers=1, tie_word_embeddings=True)),
    Case("qwen2_types_full", tiny_config(_QWEN2, use_sliding_window=True, sliding_window=8, layer_types=["full_attention"] * 2)),
    Case("qwen3", tiny_config(_QWEN3, head_dim=16, tie_word_embeddings=True)),
    Case("qwen3_bias", tiny_config(_QWEN3, attention_bias=True)),
    Case("qwen3_types_full", tiny_config(_QWEN3, use_sliding_window=True, sliding_window=8, layer_types=["full_attention"] * 2)),
    Case(
        "qwen3_types_mixed",
        tiny_config(_QWEN3, **_WINDOWED, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, max_window_layers=0),
    ),
    Case("gemma3", tiny_config(_GEMMA), num_steps=64),
    Case(
        "gemma3_types",
        tiny_config(
            _GEMMA,
            num_hidden_layers=4,
            layer_types=_GEMMA_TYPES,
            sliding_window_pattern=None,
            rope_theta=None,
            rope_local_base_freq=None,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            final_logit_softcapping=10.0,
        ),
        spellings=(
            tiny_config(
                _GEMMA,
                num_hidden_layers=4,
                layer_types=_GEMMA_TYPES,
                rope_theta=100000.0,
                rope_local_base_freq=5000.0,
                rope_scaling={"type": "linear", "factor": 8.0},
                final_logit_softcapping=10.0,
            ),
        ),
    ),
    Case("gemma3_untied_bias", tiny_config(_GEMMA, tie_word_embeddings=False, attention_bias=True, num_key_value_heads=4)),
    Case("gpt2", tiny_config(_GPT2)),
    Case("gpt2_untied", tiny_config(_GPT2, tie_word_embeddings=False, n_inner=48, activation_function="gelu")),
    Case("gpt2_layer_scale", tiny_config(_GPT2, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, n_layer=3)),
)
