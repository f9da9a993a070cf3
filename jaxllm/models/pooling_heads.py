"""What stands behind the backbone of classifiers and reward models, and what checkpoints call it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import ACTIVATIONS
from jaxllm.models.hf_config import HFConfig
from jaxllm.specs import DenseSpec, NormSpec, PoolingKind
from jaxllm.weights.rules import Rule, rule
from jaxllm.weights.transforms import PickRows


@dataclass(frozen=True)
class Head:
    """How hidden states become one vector, the layers behind, and the rules that load them. `per_token`: it scores tokens, not texts."""

    kind: PoolingKind
    dense: tuple[DenseSpec, ...] = ()
    rules: tuple[Rule, ...] = ()
    per_token: bool = False


def layer_rules(number: int, name: str, norm: str | None = None) -> tuple[Rule, ...]:
    """The rules of dense layer `number`, which a checkpoint calls `name`, with its norm."""
    parts = [(f"dense.{number}", name), *([(f"dense.{number}.norm", norm)] if norm else ())]
    return tuple(rule(f"{param}.{kind}", f"{source}.{kind}") for param, source in parts for kind in ("weight", "bias"))


def num_labels(config: HFConfig) -> int:
    """Classes of a classifier; transformers' default is two."""
    labels = config.get("id2label")
    return len(labels) if labels else config.size("num_labels", 2)


def label_names(config: HFConfig, count: int) -> list[str]:
    """The names of `count` classes, in order."""
    labels = {str(key): str(value) for key, value in (config.get("id2label") or {}).items()}
    return [labels.get(str(i), f"LABEL_{i}") for i in range(count)]


# Of encoders that classify a text by its first token: the layer before the classifier, its activation, the classifier.
_BEFORE_CLASSIFIER = {
    "Bert": ("bert.pooler.dense", "tanh", "classifier"),
    "NomicBert": ("nomic_bert.pooler.dense", "tanh", "classifier"),
    "Roberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "XLMRoberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "Camembert": ("classifier.dense", "tanh", "classifier.out_proj"),
    "DistilBert": ("pre_classifier", "relu", "classifier"),
}


def encoder_head(stem: str, config: HFConfig, width: int, *, per_token: bool) -> Head:
    """The head of an encoder's ForSequenceClassification or (`per_token`) ForTokenClassification."""
    last = DenseSpec(num_labels(config))
    if stem == "ModernBert":
        norm = NormSpec("layer", config.number("norm_eps", 1e-5), bias=config.flag("norm_bias", False))
        activation = config.choice("classifier_activation", ACTIVATIONS, "gelu")
        first = DenseSpec(width, config.flag("classifier_bias", False), activation, norm)
        rules = (*layer_rules(0, "head.dense", "head.norm"), *layer_rules(1, "classifier"))
        kind: PoolingKind = config.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
        return Head(kind, (first, last), rules, per_token)
    if per_token:
        return Head("cls", (last,), layer_rules(0, "classifier"), per_token)
    before, act, classifier = _BEFORE_CLASSIFIER[stem]
    return Head("cls", (DenseSpec(width, activation=act), last), (*layer_rules(0, before), *layer_rules(1, classifier)))  # type: ignore[arg-type]


def decoder_head(config: HFConfig, suffix: str, width: int, token_head: str, token_ids: tuple[int, ...] | None) -> Head:
    """The head of a decoder that classifies or rewards.

    Args:
        suffix: of the architecture.
        token_head: the checkpoint's name of its output embedding.
        token_ids: those that `classifier_from_token` names: their rows of the output embedding are the classifier.

    Raises:
        ModelLoadError: a way to make a classifier of tokens that is not known, or that wants other tokens.
    """
    if token_ids is not None:
        ways = {"from_2_way_softmax": True, "no_post_processing": False}
        default = "from_2_way_softmax" if config.flag("is_original_qwen3_reranker", False) else "no_post_processing"
        difference = config.choice("method", ways, default)
        if difference and len(token_ids) != 2:
            raise ModelLoadError(f"config.json: from_2_way_softmax needs two tokens in classifier_from_token, got {len(token_ids)}")
        dense = DenseSpec(1 if difference else len(token_ids), bias=False)
        return Head("last", (dense,), (rule("dense.0.weight", token_head, transform=PickRows(token_ids, difference)),))
    if suffix in ("ForRewardModel", "ForProcessRewardModel"):
        last = DenseSpec(config.size("num_labels", 1 if suffix == "ForRewardModel" else 2))
        return Head("last", (DenseSpec(width, activation="relu"), last), (*layer_rules(0, "score.0"), *layer_rules(1, "score.2")), True)
    if suffix == "ForTokenClassification":
        bias = config.flag("token_classification_bias", True)
        return Head("last", (DenseSpec(num_labels(config), bias),), layer_rules(0, "score"), True)
    return Head("last", (DenseSpec(num_labels(config), bias=False),), layer_rules(0, "score"))
