"""Pooling models from configs: what they are for, what their answers go through, and the spellings of configs and checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.models.pooling import define_pooling, is_for_pooling
from jaxllm.specs import DenseSpec
from jaxllm.weights.rules import load_params
from jaxllm.weights.sentence_transformers import SentenceModules
from tests.checkpoints import MemoryCheckpoint, tiny_config
from tests.golden.pooling_cases import CASES
from tests.runner.pooling import random_checkpoint

BERT, CLASSIFIER, ONE = (CASES[name].config for name in ("bert", "bert_classify", "bert_cross_encoder"))


def define(config: dict[str, Any], **options: Any):
    return define_pooling(config, dtype="float32", **options)


@pytest.mark.parametrize(
    ("architecture", "pools"),
    [
        ("LlamaForCausalLM", False), ("GPT2LMHeadModel", False), ("BertModel", True), ("MistralModel", True), ("BertForMaskedLM", True),
        ("Qwen3ForSequenceClassification", True), ("Qwen2ForRewardModel", True), ("Gemma3TextModel", True),
    ],
)  # fmt: skip
def test_the_architecture_says_whether_a_model_is_pooled(architecture: str, pools: bool) -> None:
    assert is_for_pooling({"architectures": [architecture]}, None) is pools
    assert is_for_pooling({"architectures": [architecture]}, SentenceModules(("last",), (), True, None, False))


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        (CLASSIFIER, "softmax"),
        (ONE, "sigmoid"),
        (CLASSIFIER | {"problem_type": "multi_label_classification"}, "sigmoid"),
        (ONE | {"problem_type": "regression"}, "identity"),
        (ONE | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        (ONE | {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "tanh"),
        (
            ONE
            | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"}}
            | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "identity",
        ),
        (BERT, "normalize"),
    ],
)
def test_answers_go_through_what_the_model_was_trained_with(config: dict[str, Any], activation: str) -> None:
    assert define(config).pooling.activation == activation


def test_the_user_goes_before_modules_and_modules_before_the_architecture() -> None:
    modules = SentenceModules(("mean",), ((DenseSpec(8, activation="tanh"), "2_Dense"),), False, 50, True)
    model = define(BERT, modules=modules)
    assert (model.pooling.kinds, model.pooling.activation, model.info.width, model.default_len) == (("mean",), "identity", 8, 50)
    assert model.info.lower_case
    asked = define(BERT, modules=modules, pooler_config={"pooling_type": "CLS", "use_activation": True}).pooling
    assert (asked.kinds, asked.activation) == (("cls",), "normalize")
    assert define(BERT).pooling.kinds == ("cls",)
    assert define(CASES["qwen3"].config).pooling.kinds == ("last",)


def test_a_generator_embeds_and_a_classifier_may() -> None:
    assert define(tiny_config()).info.tasks == ["embed", "token_embed"]
    assert define(CLASSIFIER, convert="embed").info.tasks == ["embed", "token_embed"]
    assert define(CASES["bert_tokens"].config).info.tasks == ["token_classify"]
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no classifier"):
        define(tiny_config(), convert="classify")


def test_one_token_can_be_a_classifier_and_two_can_be_weighed() -> None:
    reranker = {key: value for key, value in CASES["qwen3_reranker"].config.items() if key != "is_original_qwen3_reranker"}
    assert define(reranker, token_ids=[7]).info.width == 1
    assert define(reranker, token_ids=[7, 11]).info.width == 2
    assert define(reranker | {"method": "from_2_way_softmax"}, token_ids=[7, 11]).info.width == 1
    with pytest.raises(ModelLoadError, match="needs two tokens"):
        define(reranker | {"method": "from_2_way_softmax"}, token_ids=[7])


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (BERT | {"is_decoder": True}, "is_decoder"),
        (BERT | {"position_embedding_type": "relative_key"}, "relative_key"),
        (BERT | {"surprise": 3}, "surprise=3"),
        (BERT | {"architectures": ["DebertaModel"]}, "Deberta is not supported as a pooling model"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        define(config)


def test_the_first_config_of_nomic_means_the_same() -> None:
    old = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_inner": 48, "n_positions": 256, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "prenorm": False, "causal": False, "use_rms_norm": False, "parallel_block": False, "type_vocab_size": 2, "embd_pdrop": 0.1,
    }  # fmt: skip
    assert define(old).pooling == define(CASES["nomic"].config).pooling
    with pytest.raises(ModelLoadError, match="moe_every_n_layers=2"):
        define(old | {"moe_every_n_layers": 2})


def test_names_of_the_first_conversions_are_read() -> None:
    model = define(BERT)
    checkpoint = random_checkpoint(model)
    parts = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = checkpoint.arrays
    for new, first in parts:
        old = {name.replace(new, first): tensor for name, tensor in old.items()}
    assert old.keys() != checkpoint.tensors.keys()
    params = [load_params(model, source, lambda name, array: array) for source in (checkpoint, MemoryCheckpoint(old))]
    assert all(np.array_equal(one, other) for one, other in zip(*params, strict=True))
