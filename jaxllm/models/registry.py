"""Which family serves which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import Family
from jaxllm.models.gemma import GEMMA3
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.llama import LLAMA
from jaxllm.models.mistral import MISTRAL
from jaxllm.models.qwen import QWEN2, QWEN3

FAMILIES = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, GPT2)}


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """The family of `architectures[0]`.

    Raises:
        ModelLoadError: no architecture, or one that is not supported.
    """
    architectures = hf_config.get("architectures") or [None]
    family = FAMILIES.get(architectures[0])
    if family is None:
        given = f"architecture {architectures[0]}" if architectures[0] else "config.json without 'architectures'"
        raise ModelLoadError(f"{given} is not supported; supported: {', '.join(FAMILIES)}")
    return family
