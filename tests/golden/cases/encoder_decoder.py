"""Encoders with decoders that read them."""

from __future__ import annotations

from tests.golden.case import Case
from tests.golden.cases.dense import gpt_like

_T5 = {
    "is_encoder_decoder": True, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "n_positions": 256,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "is_encoder_decoder": True, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_layers": 3, "decoder_layers": 2, "max_position_embeddings": 256, "pad_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "num_labels": 3,
}  # fmt: skip

CASES = (
    # Of a quarter of the distances that it tells apart (16 by themselves), the encoder sees all.
    Case("t5", gpt_like("T5ForConditionalGeneration", "t5", **_T5), prompt_len=150),
    Case(
        "t5_gated",
        gpt_like(
            "T5ForConditionalGeneration",
            "t5",
            **_T5,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            num_decoder_layers=3,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
        ),
    ),
    Case("bart", gpt_like("BartForConditionalGeneration", "bart", **_BART), num_steps=24),
    Case(
        "bart_scaled",
        gpt_like("BartForConditionalGeneration", "bart", **_BART, scale_embedding=True, activation_function="gelu_new"),
        num_steps=24,
        seed=4,
    ),
)
