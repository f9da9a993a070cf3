"""Which family serves which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.models.bart import BART
from jaxllm.models.bloom import BLOOM, MPT
from jaxllm.models.cohere import COHERE, COHERE2
from jaxllm.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from jaxllm.models.ernie_moe import ERNIE_MOE
from jaxllm.models.falcon import FALCON
from jaxllm.models.falcon_h1 import FALCON_H1
from jaxllm.models.family import Family
from jaxllm.models.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT_HALF
from jaxllm.models.gemma4 import GEMMA4, GEMMA4_TEXT_HALF
from jaxllm.models.generic import generic_family
from jaxllm.models.glm import GLM, GLM4
from jaxllm.models.gpt2 import GPT2, GPT_BIGCODE
from jaxllm.models.gpt_neox import GPT_NEOX, GPTJ
from jaxllm.models.gpt_oss import GPT_OSS
from jaxllm.models.granite_hybrid import GRANITE_HYBRID
from jaxllm.models.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from jaxllm.models.hunyuan import HUNYUAN, HUNYUAN_MOE
from jaxllm.models.internlm2 import INTERNLM2
from jaxllm.models.jamba import JAMBA
from jaxllm.models.layer_norm_kin import APERTUS, ARCEE, NEMOTRON, STABLELM, STARCODER2
from jaxllm.models.lfm2 import LFM2, LFM2_MOE
from jaxllm.models.llama import LLAMA
from jaxllm.models.llama4 import LLAMA4, LLAMA4_TEXT
from jaxllm.models.llama_kin import ERNIE, EXAONE4, GRANITE, HELIUM, INTERNLM3, SEED_OSS, SMOLLM3
from jaxllm.models.mamba import MAMBA, MAMBA2
from jaxllm.models.minicpm import MINICPM, MINICPM3
from jaxllm.models.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3_TEXT_HALF
from jaxllm.models.mixtral import MINIMAX_M2, MIXTRAL
from jaxllm.models.nemotron_h import NEMOTRON_H
from jaxllm.models.olmo import OLMO, OLMO2, OLMO3
from jaxllm.models.opt import OPT
from jaxllm.models.phi import PHI, PHI3
from jaxllm.models.phimoe import PHIMOE, PHIMOE_RESPELT
from jaxllm.models.qwen import QWEN2, QWEN3
from jaxllm.models.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT_HALF, QWEN3_5_TEXT_HALF, QWEN3_NEXT
from jaxllm.models.qwen_moe import OLMOE, QWEN2_MOE, QWEN3_MOE
from jaxllm.models.t5 import T5

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, MISTRAL3_TEXT_HALF, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT_HALF, GEMMA4,
        GEMMA4_TEXT_HALF, PHI, PHI3, OLMO, OLMO2, OLMO3, GRANITE, MINICPM, MINICPM3, COHERE, COHERE2, STABLELM, STARCODER2, GLM, GLM4,
        SMOLLM3, EXAONE4, SEED_OSS, NEMOTRON, ARCEE, APERTUS, ERNIE, HELIUM, INTERNLM2, INTERNLM3, GPT2, GPT_BIGCODE, GPTJ, GPT_NEOX,
        FALCON, OPT, BLOOM, MPT, MAMBA, MAMBA2, LFM2, QWEN3_5, QWEN3_5_TEXT_HALF, FALCON_H1, NEMOTRON_H,
        QWEN3_NEXT, QWEN3_5_MOE, QWEN3_5_MOE_TEXT_HALF, GRANITE_HYBRID, JAMBA, LFM2_MOE,
        HUNYUAN, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, PHIMOE, PHIMOE_RESPELT,
        GRANITE_MOE, GRANITE_MOE_SHARED, LLAMA4_TEXT, LLAMA4, MINIMAX_M2, HUNYUAN_MOE, ERNIE_MOE, T5, BART,
    )
}  # fmt: skip
# Other names in the first releases, and the same model.
SPELLINGS = {
    "LLaMAForCausalLM": "LlamaForCausalLM", "MPTForCausalLM": "MptForCausalLM", "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
}  # fmt: skip


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """The family of `architectures[0]`; for one that is not known but looks like Llama, a family that takes nothing for granted.

    Raises:
        ModelLoadError: no architecture, or one that is not supported.
    """
    architectures = hf_config.get("architectures") or [None]
    family = FAMILIES.get(SPELLINGS.get(architectures[0], architectures[0]))
    if family is None:
        given = f"architecture {architectures[0]}" if architectures[0] else "config.json without 'architectures'"
        refusal = f"{given} is not supported; supported: {', '.join(FAMILIES)}"
        kind = str(hf_config.get("model_type")).replace("_", "")
        kin = next((name for name in FAMILIES if name.removesuffix("ForCausalLM").replace("_", "").lower() == kind), LLAMA.architecture)
        if kin != LLAMA.architecture:
            # Some differ from Llama in nothing that a config shows.
            raise ModelLoadError(f"{refusal}; its model_type is that of {kin}: if it is one, say so with hf_overrides (architectures)")
        if str(architectures[0]).endswith("ForCausalLM") and "rms_norm_eps" in hf_config:
            return generic_family(architectures[0], refusal)
        raise ModelLoadError(refusal)
    return family
