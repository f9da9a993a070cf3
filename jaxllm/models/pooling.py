"""Pooling models: a backbone with a vector for an answer. Any family of encoders or decoders can be the backbone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.core_types import PoolingInfo
from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.pooling import Dense
from jaxllm.models.bert import BERT, CAMEMBERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from jaxllm.models.build import ModelDef, abstract, checkpoint_dims, ignored_names, shard
from jaxllm.models.decoder import Decoder
from jaxllm.models.family import Family, change_attend, change_attention
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.modernbert import MODERNBERT
from jaxllm.models.nomic import NOMIC
from jaxllm.models.pooling_heads import Head, decoder_head, encoder_head, label_names, layer_rules
from jaxllm.models.registry import FAMILIES
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec, OutputActivation, PoolingKind, PoolingSpec
from jaxllm.weights.rules import Rule, bind_rules
from jaxllm.weights.sentence_transformers import SentenceModules

_ENCODERS = {
    family.architecture.removesuffix("Model"): family for family in (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, MODERNBERT, NOMIC)
}
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForProcessRewardModel", "ForRewardModel")
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_KINDS: dict[str, PoolingKind] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
_POOLER_KEYS = ("pooling_type", "seq_pooling_type", "use_activation", "normalize")


def split_architecture(hf_config: Mapping[str, Any]) -> tuple[str, str]:
    """The model's name and what it is for: ("Bert", "ForSequenceClassification"). Both may be empty."""
    name = str((hf_config.get("architectures") or [""])[0])
    match = re.fullmatch(rf"(.*?)({'|'.join((*_CLASSIFIERS, *_GENERATORS, 'ForMaskedLM', 'TextModel', 'Model'))})", name)
    return (match[1], match[2]) if match else (name, "")


def is_for_pooling(hf_config: Mapping[str, Any], modules: SentenceModules | None) -> bool:
    """Whether a model was made to be pooled rather than to generate."""
    _, suffix = split_architecture(hf_config)
    return modules is not None or (suffix != "" and suffix not in _GENERATORS)


class PoolingModel(nnx.Module):
    """A backbone and the layers behind the pooling."""

    def __init__(self, spec: PoolingSpec, dtype: DTypeLike):
        widths = [spec.backbone.width * len(spec.kinds), *(layer.width for layer in spec.dense)]
        self.backbone = Decoder(spec.backbone, dtype)
        self.dense = nnx.List([Dense(layer, width, dtype) for layer, width in zip(spec.dense, widths, strict=False)])

    def head(self, x: jax.Array) -> jax.Array:
        """Pooled or hidden states [N, in] to answers [N, width] float32, before the last activation."""
        for layer in self.dense:
            x = layer(x)
        return x.astype(jnp.float32)


@dataclass(frozen=True, eq=False)
class PoolingDef(ModelDef):
    """A pooling model without its weights. `spec` is the backbone, `default_len` the longest input where the user says nothing."""

    pooling: PoolingSpec
    info: PoolingInfo
    default_len: int


def define_pooling(
    hf_config: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    convert: str = "auto",
    modules: SentenceModules | None = None,
    pooler_config: Mapping[str, Any] | None = None,
    token_ids: Sequence[int] | None = None,
) -> PoolingDef:
    """Build the abstract pooling model of a config; takes no memory for weights.

    Args:
        hf_config, dtype, tensor_parallel_size, max_model_len: as of `define_model`.
        convert: "embed" or "classify"; "auto" is what the architecture says.
        modules: what sentence-transformers' files say, where there are any.
        pooler_config: what the user says over that.
        token_ids: of the tokens that `classifier_from_token` names.

    Raises:
        ModelLoadError: an unsupported architecture, or a config that is not fully understood.
        ConfigError: options that the model cannot have.
    """
    stem, suffix = split_architecture(hf_config)
    family, encodes = _find(stem)
    if jnp.dtype(dtype) == jnp.float16 and not family.float16:
        raise ConfigError(f"dtype float16: activations of {family.architecture} pass its range; use bfloat16 or float32")
    config = HFConfig(hf_config)
    logical = family.to_spec(config, max_model_len)
    _check_attention(logical, f"{stem}{suffix}")
    logical = _seeing_ahead(logical, config)
    classifies = suffix in _CLASSIFIERS if convert == "auto" else convert == "classify"
    if classifies and suffix not in _CLASSIFIERS and token_ids is None:
        raise ConfigError(
            f"convert='classify': {stem}{suffix} has no classifier; name one of its heads with hf_overrides (architectures), or"
            " make one of tokens (classifier_from_token)"
        )
    # Their ids are what it comes to.
    config.get("classifier_from_token")
    tied, ids = logical.tied_head, None if token_ids is None else tuple(token_ids)
    if not classifies:
        head = Head("last" if not encodes else "mean" if stem == "NomicBert" else "cls")
    elif encodes:
        head = encoder_head(stem, config, logical.width, per_token=suffix == "ForTokenClassification")
    else:
        source = next(rule for rule in family.rules if rule.param == ("embed.weight" if tied else "head.weight")).sources[0].name
        head = decoder_head(config, suffix, logical.width, source, ids)
    backbone = replace(shard(logical, tensor_parallel_size), tied_head=True, head_bias=False)
    spec, dense_rules = _pooling_spec(backbone, head, config, modules if not classifies else None, pooler_config or {})
    info = _info(config, spec, pairs=encodes, lower_case=modules is not None and modules.lower_case)
    config.refuse_unread(family.architecture, family.harmless_keys)

    module = abstract(lambda: PoolingModel(spec, dtype), "backbone.")
    heads = [rule for rule in family.rules if rule.param in ("head.weight", "head_bias")]
    unused = [*(re.escape(source.name) for rule in heads for source in rule.sources), r"(score|v_head)\..*"]
    rules = bind_rules(
        [*(rule for rule in family.rules if rule not in heads), *dense_rules],
        module["shapes"],
        checkpoint_dims(logical, backbone),
        prefix=family.prefix,
        ignored=(*ignored_names(family, backbone), *unused),
        renamed=family.renamed,
    )
    longest = modules.max_length if modules and modules.max_length else logical.max_positions
    return PoolingDef(
        architecture=f"{stem}{suffix}",
        spec=backbone,
        rules=rules,
        cache_layers=(),
        pooling=spec,
        info=info,
        default_len=min(longest, logical.max_positions),
        **module,
    )


def _check_attention(spec: DecoderSpec, architecture: str) -> None:
    """Refuse attention that `ops/attention/segments.py` does not have."""

    def is_plain(block: BlockSpec) -> bool:
        mixer = block.mixer
        if not isinstance(mixer, AttentionSpec) or mixer.sinks or block.recurrent or block.cross:
            return False
        return not (mixer.attend.alibi or mixer.attend.chunked or mixer.attend.latent)

    if not all(map(is_plain, spec.blocks)):
        raise ModelLoadError(
            f"{architecture}: attention with ALiBi, sinks, chunks or latents, or to an encoder, and recurrent layers are not supported for"
            " pooling yet"
        )


def _seeing_ahead(spec: DecoderSpec, config: HFConfig) -> DecoderSpec:
    """The spec with attention to both sides, where the config of a decoder that became an encoder says so."""
    if config.flag("use_bidirectional_attention", False):
        # Gemma's windows are split between the sides, and have the token itself besides.
        def split(i: int, mixer: AttentionSpec) -> AttentionSpec:
            window = mixer.attend.window
            return replace(mixer, attend=replace(mixer.attend, window=window and window // 2 + 1))

        spec = change_attention(spec, split)
        return change_attend(spec, causal=False)
    return change_attend(spec, causal=False) if config.get("is_causal") is False else spec


def _find(stem: str) -> tuple[Family, bool]:
    """The family of an architecture's stem, and whether it is an encoder."""
    if stem in _ENCODERS:
        return _ENCODERS[stem], True
    for suffix in _GENERATORS:
        if f"{stem}{suffix}" in FAMILIES:
            return FAMILIES[f"{stem}{suffix}"], False
    known = [*_ENCODERS, *(re.sub("|".join(_GENERATORS), "", name) for name in FAMILIES)]
    raise ModelLoadError(
        f"{stem or 'a config.json without architectures'} is not supported as a pooling model; supported: {', '.join(known)}"
    )


def _pooling_spec(
    backbone: DecoderSpec, head: Head, config: HFConfig, modules: SentenceModules | None, pooler: Mapping[str, Any]
) -> tuple[PoolingSpec, tuple[Rule, ...]]:
    """The spec and the rules of its dense layers: what the user says, else modules, else the architecture."""
    unknown = set(pooler) - set(_POOLER_KEYS)
    if unknown:
        raise ConfigError(f"pooler_config: {', '.join(sorted(unknown))} is not offered; offered: {', '.join(_POOLER_KEYS)}")
    kinds: tuple[PoolingKind, ...] = (head.kind,)
    dense, rules = head.dense, head.rules
    classifies = bool(dense)
    activation: OutputActivation = _class_activation(config, dense[-1].width) if classifies else "normalize"
    if modules is not None:
        kinds, dense = modules.kinds, tuple(layer for layer, _ in modules.dense)
        rules = tuple(rule for i, (_, folder) in enumerate(modules.dense) for rule in layer_rules(i, f"{folder}.linear"))
        activation = "normalize" if modules.normalize else "identity"
    named = pooler.get("seq_pooling_type", pooler.get("pooling_type"))
    if named is not None:
        if named not in _KINDS:
            raise ConfigError(f"pooler_config: pooling_type must be one of {', '.join(_KINDS)}; got {named!r}")
        kinds = (_KINDS[named],)
    activates = pooler.get("use_activation", pooler.get("normalize"))
    if activates is not None and not isinstance(activates, bool):
        raise ConfigError(f"pooler_config: use_activation must be true or false, got {activates!r}")
    if activates is not None:
        activation = "identity" if not activates else activation if classifies else "normalize"
    return PoolingSpec(backbone, kinds, dense, "classify" if classifies else "embed", activation, head.per_token), rules


def _class_activation(config: HFConfig, classes: int) -> OutputActivation:
    """What a classifier's logits go through: as its training says, else sigmoid for one class and softmax for several."""
    by_count: OutputActivation = "sigmoid" if classes == 1 else "softmax"
    kinds = {"regression": "identity", "single_label_classification": by_count, "multi_label_classification": "sigmoid", "": by_count}
    activation = config.choice("problem_type", kinds, "")
    older = config.get("sbert_ce_default_activation_function")
    own = (config.get("sentence_transformers") or {}).get("activation_fn") or older
    if own is None:
        return activation
    names: dict[str, OutputActivation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh"}
    name = str(own).rsplit(".", 1)[-1]
    if name not in names:
        raise ModelLoadError(f"config.json: the activation {own!r} of a cross-encoder is not supported; supported: {', '.join(names)}")
    return names[name]


def _info(config: HFConfig, spec: PoolingSpec, *, pairs: bool, lower_case: bool) -> PoolingInfo:
    per_token = f"token_{spec.task}"
    return PoolingInfo(
        tasks=[per_token] if spec.per_token else [spec.task, per_token],
        width=spec.width,
        labels=label_names(config, spec.width) if spec.task == "classify" else [],
        pairs=pairs,
        matryoshka=config.get("matryoshka_dimensions") or config.flag("is_matryoshka", False),
        lower_case=lower_case,
    )
