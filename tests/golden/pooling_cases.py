"""Pooling models whose answers transformers gave beforehand: one tiny random checkpoint a case.

`scripts/make_pooling_golden.py` (needs torch and transformers) writes `tests/golden/pooling.npz`; everything else needs numpy only.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).parent / "pooling.npz"
# Of the prompts: one token, few, more than a tile of attention, and than any window.
LENGTHS = (1, 9, 150)
# Positions of each prompt whose answers are kept, where each token has one.
NUM_POSITIONS = 6


@dataclass(frozen=True)
class PoolingCase:
    """A checkpoint by its config. `auto` is the transformers class that gives the answer: hidden states, or logits.

    `pairs`: the second half of each prompt is of token type 1. `token_ids`: of the two tokens whose logits are weighed. A reward model's
    layers behind the hidden states are torch's, since transformers has no such model.
    """

    name: str
    config: dict[str, Any]
    auto: str = "AutoModel"
    pairs: bool = False
    token_ids: tuple[int, int] | None = None

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    @property
    def rewards(self) -> bool:
        return self.architecture.endswith("RewardModel")

    @property
    def per_token(self) -> bool:
        return self.auto in ("AutoModel", "AutoModelForTokenClassification")

    def prompts(self) -> list[np.ndarray]:
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        return [generator.integers(5, self.config["vocab_size"], length) for length in LENGTHS]


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32: matrices N(0, 1.5 / sqrt(in)), embeddings N(0, 1), norms N(1, 0.2), biases N(0, 0.3); the same on every machine."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("bias"):
        values = 0.3 * values
    elif len(shape) == 1:
        values = 1 + 0.2 * values
    elif "embed" not in name:
        values = 1.5 * shape[1] ** -0.5 * values
    return values.astype(np.float32)


def kept(length: int) -> np.ndarray:
    """Positions of a prompt whose answers are kept."""
    return np.unique(np.linspace(0, length - 1, NUM_POSITIONS).astype(int))


_SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_LABELS = {"id2label": {"0": "sad", "1": "neutral", "2": "glad"}, "label2id": {"sad": 0, "neutral": 1, "glad": 2}}
_ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _bert(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": "bert", "max_position_embeddings": 160, **_SIZES, **changes}


def _roberta(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    kind = {"model_type": model_type, "max_position_embeddings": 162, "type_vocab_size": 1, "pad_token_id": 1}
    return {"architectures": [architecture], **kind, **_SIZES, **changes}


def _distilbert(architecture: str, **changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 160}
    return {"architectures": [architecture], "model_type": "distilbert", **sizes, **changes}


def _modernbert(architecture: str, **changes: Any) -> dict[str, Any]:
    kind = {"model_type": "modernbert", "local_attention": 16, "global_attn_every_n_layers": 3, "max_position_embeddings": 256}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return {"architectures": [architecture], **kind, **_SIZES, "num_hidden_layers": 4, **tokens, **changes}


def _nomic(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": "nomic_bert", "max_position_embeddings": 256, **_SIZES, **changes}


def _decoder(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    more = {
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return {"architectures": [architecture], "model_type": model_type, **_SIZES, **more, "pad_token_id": 0, **changes}


_CLASSIFY, _TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
_TOKENS_CLASSIFY = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
CASES = {
    case.name: case
    for case in (
        PoolingCase("bert", _bert("BertModel")),
        PoolingCase("bert_pair", _bert("BertModel", hidden_act="gelu_new"), pairs=True),
        PoolingCase("bert_classify", _bert("BertForSequenceClassification", **_LABELS), _CLASSIFY),
        PoolingCase("bert_cross_encoder", _bert("BertForSequenceClassification", **_ONE), _CLASSIFY, pairs=True),
        PoolingCase("bert_tokens", _bert("BertForTokenClassification", **_LABELS), _TOKENS),
        PoolingCase("roberta_classify", _roberta("RobertaForSequenceClassification", "roberta", **_LABELS), _CLASSIFY),
        PoolingCase("roberta", _roberta("RobertaModel", "roberta")),
        PoolingCase("camembert", _roberta("CamembertModel", "camembert")),
        PoolingCase("xlm_roberta_tokens", _roberta("XLMRobertaForTokenClassification", "xlm-roberta", **_LABELS), _TOKENS),
        PoolingCase("xlm_roberta", _roberta("XLMRobertaModel", "xlm-roberta")),
        PoolingCase("xlm_roberta_cross_encoder", _roberta("XLMRobertaForSequenceClassification", "xlm-roberta", **_ONE), _CLASSIFY),
        PoolingCase("distilbert", _distilbert("DistilBertModel")),
        PoolingCase("distilbert_classify", _distilbert("DistilBertForSequenceClassification", **_LABELS), _CLASSIFY),
        PoolingCase("modernbert", _modernbert("ModernBertModel")),
        PoolingCase(
            "modernbert_classify", _modernbert("ModernBertForSequenceClassification", classifier_pooling="mean", **_ONE), _CLASSIFY
        ),
        PoolingCase("modernbert_tokens", _modernbert("ModernBertForTokenClassification", norm_bias=True, **_LABELS), _TOKENS),
        PoolingCase("nomic", _nomic("NomicBertModel"), pairs=True),
        PoolingCase("nomic_classify", _nomic("NomicBertForSequenceClassification", **_LABELS), _CLASSIFY),
        PoolingCase("qwen3", _decoder("Qwen3ForCausalLM", "qwen3", head_dim=16)),
        PoolingCase("mistral_window", _decoder("MistralModel", "mistral", sliding_window=12)),
        PoolingCase(
            "gemma3_both_sides",
            _decoder(
                "Gemma3TextModel",
                "gemma3_text",
                head_dim=8,
                query_pre_attn_scalar=16,
                sliding_window=24,
                num_hidden_layers=3,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                rope_theta=1000000.0,
                rope_local_base_freq=10000.0,
                use_bidirectional_attention=True,
            ),
        ),
        PoolingCase("llama_classify", _decoder("LlamaForSequenceClassification", "llama", **_LABELS), _CLASSIFY),
        PoolingCase("qwen3_classify", _decoder("Qwen3ForSequenceClassification", "qwen3", head_dim=16, **_ONE), _CLASSIFY),
        PoolingCase(
            "qwen3_reranker",
            _decoder("Qwen3ForSequenceClassification", "qwen3", head_dim=16, tie_word_embeddings=False, **_TOKENS_CLASSIFY),
            "AutoModelForCausalLM",
            token_ids=(7, 11),
        ),
        PoolingCase("qwen2_reward", _decoder("Qwen2ForRewardModel", "qwen2")),
        PoolingCase("qwen2_process_reward", _decoder("Qwen2ForProcessRewardModel", "qwen2")),
        PoolingCase("qwen2_tokens", _decoder("Qwen2ForTokenClassification", "qwen2", **_LABELS), _TOKENS),
    )
}
