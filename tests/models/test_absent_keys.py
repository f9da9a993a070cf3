"""A key that a config leaves out means what transformers takes for it, or is asked for; nothing is guessed otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from jaxllm.errors import ModelLoadError
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.registry import FAMILIES, find_family
from jaxllm.specs import DecoderSpec
from tests.golden.case import Case
from tests.golden.cases import BY_ARCHITECTURE

# Sizes of tensors, or which there are: a checkpoint with others does not load.
LOUD = {"num_key_value_heads", "head_dim", "first_k_dense_replace", "shared_intermediate_size", "vocab_size_per_layer_input"}
# transformers has them all in one place.
ROPE = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rope_parameters"}
# These change no answer; the context bounds what may be asked for.
OTHER = {"architectures", "model_type", "dtype", "max_position_embeddings"}


def spec_of(config: dict[str, Any]) -> DecoderSpec | None:
    """None where the config is refused."""
    family, read = find_family(config), HFConfig(config)
    try:
        spec = family.to_spec(read, None)
        read.refuse_unread(family.architecture, family.harmless_keys)
    except ModelLoadError:
        return None
    return spec


def absent(case: Case) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(key, the config without it, the config with what transformers takes in its place)."""
    reference = CONFIG_MAPPING[case.config["model_type"]]
    for key in case.config.keys() - LOUD - OTHER:
        rest = {name: value for name, value in case.config.items() if name != key}
        try:
            config = reference.from_dict(dict(rest))
        except Exception:  # what is left contradicts itself: the error has several types
            continue
        if key in ROPE:
            yield key, rest, {name: value for name, value in rest.items() if name not in ROPE} | {"rope_parameters": config.rope_parameters}
        elif hasattr(config, key):
            value = getattr(config, key)
            yield key, rest, rest | {key: value.to_dict() if hasattr(value, "to_dict") else value}


@pytest.mark.parametrize("case", [c for c in BY_ARCHITECTURE.values() if c.config["model_type"] in CONFIG_MAPPING], ids=lambda c: c.name)
def test_an_absent_key_means_what_the_reference_takes(case: Case) -> None:
    for key, rest, told in absent(case):
        ours = spec_of(rest)
        assert ours is None or ours == spec_of(told), f"{key}: {told}"


def test_no_architecture_of_the_reference_is_taken_for_a_llama_by_its_config() -> None:
    """But for one that has tensors which Llama has not."""
    taken = set()
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        architecture = names if isinstance(names, str) else names[0]
        if architecture in FAMILIES or kind not in CONFIG_MAPPING:
            continue
        try:
            config = CONFIG_MAPPING[kind]().to_dict() | {"architectures": [architecture]}
            taken |= {architecture} if spec_of(config) else set()
        except Exception:  # no family, or defaults that contradict themselves
            continue
    assert taken == {"BitNetForCausalLM"}
