"""MiniCPM 1 and 2 (Llama with multipliers), and MiniCPM 3 (with latent attention)."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.deepseek import MLA_RULES, mla_spec
from jaxllm.models.family import Family, change_blocks
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.rope import LayerRopes, RopeParameters
from jaxllm.specs import DecoderSpec


def _spec(config: HFConfig, max_model_len: int | None, ropes: LayerRopes | None = None) -> DecoderSpec:
    spec = llama_like(config, max_model_len, default_positions=2048, ropes=ropes, tied=True)
    scale = config.number("scale_depth", 1.0) / len(spec.blocks) ** 0.5
    return replace(
        change_blocks(spec, lambda i, block: replace(block, residual_scale=scale)),
        embedding_scale=config.number("scale_emb", 1.0),
        logit_scale=config.number("dim_model_base", 1.0) / spec.width,
    )


def _minicpm3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # Absent, the reference takes the numbers of its 4B release: better said than guessed.
    for key in ("scale_emb", "scale_depth", "dim_model_base"):
        config.need(key)
    config.expect("head_dim", config.size("qk_rope_head_dim"))
    default_value_dim = config.size("hidden_size") // config.size("num_attention_heads")
    mixer = mla_spec(config, max_model_len, default_positions=32768, interleaved=False, default_value_dim=default_value_dim)
    # Its own rotation, of heads of another size, is all there is.
    positions = config.size("max_position_embeddings", 32768)
    plain = RopeParameters("default", 10000.0, {}, positions, positions)
    return change_blocks(_spec(config, max_model_len, LayerRopes(plain, plain)), lambda i, block: replace(block, mixer=mixer))


MINICPM = Family("MiniCPMForCausalLM", _spec, RULES, prefix="model.", ignored=IGNORED)
MINICPM3 = Family("MiniCPM3ForCausalLM", _minicpm3_spec, MLA_RULES, prefix="model.", ignored=IGNORED, harmless_keys=("qk_head_dim",))
