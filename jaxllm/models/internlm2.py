"""InternLM 2: Llama's mathematics under other names, with queries, keys and values fused by KV head."""

from __future__ import annotations

from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.specs import DecoderSpec
from jaxllm.weights.transforms import GROUPED_QKV


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("bias", True)
    return llama_like(config, max_model_len, default_positions=2048, qkv_bias=bias, out_bias=bias)


_RULES = decoder_rules(
    embed="tok_embeddings", attention_norm="attention_norm", qkv=("attention.wqkv",), fuse=GROUPED_QKV, out="attention.wo",
    mlp_norm="ffn_norm", gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2", head="output",
)  # fmt: skip

INTERNLM2 = Family("InternLM2ForCausalLM", _spec, _RULES, prefix="model.", ignored=IGNORED)
