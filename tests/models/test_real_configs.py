"""Configs of released models build abstract models of the size that transformers gives them, in seconds and without memory for weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.build import ModelDef, define_model
from jaxllm.models.pooling import define_pooling, is_for_pooling
from tests.golden.cases import BY_ARCHITECTURE
from tests.golden.test_relatives import RELATIVES

# From scripts/count_parameters.py, by the names of the configs.
COUNTS: dict[str, int] = json.loads((Path(__file__).parent / "parameter_counts.json").read_text("utf-8"))
# Billions of parameters of the released models, tied heads counted once.
RELEASED = {
    "google--gemma-2-9b-it": 9.241705984,
    # From the config by hand: 2 * 100278 * 5120 of embeddings and head, 5120 of the last norm, and in each of 64 layers 5120 * (5120 + 2 *
    # 1024) + 5120 * 5120 of attention, 3 * 5120 * 27648 of the MLP, 6144 of head norms, 2 * 5120 of norms.
    "allenai--Olmo-3.1-32B-Instruct": 32.233522176,
    # By hand, its head tied: 65024 * 8192 of embeddings, 2 * 8192 of the last norm, and in each of 60 layers 8192 * (8192 + 2 * 512) +
    # 8192 * 8192 of attention, 8 * 8192 * 8192 of the MLP, 4 * 8192 of norms.
    "ipex-tiiuae_falcon-40b": 41.303293952,
    # By hand: 50432 * 4096 of embeddings, 4096 of the last norm, in each of 32 layers 12 * 4096 * 4096 of matrices, 2 * 4096 of norms.
    "ipex-mosaicml_mpt-7b": 6.649286656,
    # By hand, without the encoder of images: 262144 * 2816 of embeddings, 2816 of the last norm; in each of 30 layers 3 * 2816 * (2112 +
    # 128 * 704) of MLP and experts, 2816 * 128 + 2816 + 128 of the router, 7 * 2816 of norms, a scalar; in 25 of them 2816 * 256 * (2 * 16
    # + 2 * 8) + 2 * 256 of attention, in the others 2816 * 512 * (2 * 16 + 2) + 2 * 512.
    "google--gemma-4-26B-A4B": 25.23314179,
    "Qwen--Qwen2.5-7B-Instruct": 7.6156,
    "Qwen--Qwen3-0.6B": 0.59605,
    "Qwen--Qwen3-32B": 32.7621,
    "Qwen--Qwen3-8B": 8.19074,
    "meta-llama--Meta-Llama-3.1-70B": 70.5537,
    "meta-llama--Meta-Llama-3.1-8B": 8.03026,
    "mistralai--Mistral-7B-Instruct-v0.3": 7.24802,
    "xft-qwen2-0_5b": 0.46399,
    "MiniMaxAI--MiniMax-M2.5": 228.6898,
    "Qwen--Qwen3-235B-A22B": 235.0936,
    "Qwen--Qwen3-30B-A3B": 30.5321,
    "Qwen--Qwen3-30B-A3B-FP8": 30.5321,
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": 480.1549,
    # Without the layer that predicts further ahead.
    "deepseek-ai--DeepSeek-R1": 671.0264,
    "deepseek-ai--DeepSeek-V3": 671.0264,
    "rtp-glm45": 352.7978,
    # Without the encoder of images.
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": 107.7699,
    "mistralai--Mixtral-8x7B-v0.1": 46.7028,
    "moonshotai--Kimi-K2-Instruct": 1026.4082,
    "openai--gpt-oss-120b": 116.8292,
    "openai--gpt-oss-20b": 20.9148,
}
# The defaults of a model type name no architecture.
ARCHITECTURES = {case.config["model_type"]: case.architecture for case in BY_ARCHITECTURE.values()} | {
    "bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel", "modernbert": "ModernBertModel",
    "nomic_bert": "NomicBertModel", "gemma3": "Gemma3ForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
}  # fmt: skip
# transformers builds no model of these defaults, which leave out a size of heads.
NOT_COUNTED = {f"transformers_defaults/{name}" for name in ("hunyuan_v1_dense", "ministral", "nemotron")}
# Defaults that are no model: a number of heads that does not divide the width, and no number of experts for a token.
INCOMPLETE = {f"transformers_defaults/{name}" for name in ("glm4_moe", "deepseek_v2")}
# Read as a Llama, whose names its checkpoints do not have.
LIKE_LLAMA = {"ipex-baichuan"}


def real_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Every config of a model, by name, with an architecture where its model type has one."""
    found = {str(file.relative_to(folder).with_suffix("")): json.loads(file.read_text("utf-8")) for file in sorted(folder.rglob("*.json"))}
    configs = {name: config for name, config in found.items() if "model_type" in config and not name.endswith("generation_config")}
    for config in configs.values():
        config["architectures"] = config.get("architectures") or [ARCHITECTURES.get(config["model_type"], "")]
    return configs


def define(config: dict[str, Any]) -> ModelDef:
    return (define_pooling if is_for_pooling(config, None) else define_model)(config, dtype="bfloat16")


@pytest.mark.parametrize("name", RELEASED)
def test_the_table_has_the_published_numbers(name: str) -> None:
    assert COUNTS[name] / 1e9 == pytest.approx(RELEASED[name], rel=1e-4)


def test_every_real_config_gives_the_number_of_parameters_that_transformers_does_or_is_refused(conformance_data: Path) -> None:
    sizes, refused = {}, {}
    for name, config in real_configs(conformance_data / "hf_configs").items():
        try:
            sizes[name] = define(config).num_params
        except ModelLoadError as error:
            refused[name] = (config["architectures"][0], str(error))

    assert sizes.keys() - COUNTS.keys() == NOT_COUNTED | LIKE_LLAMA
    assert {name: size for name, size in sizes.items() if size != COUNTS.get(name, size)} == {}
    assert len(sizes) > 100
    supported = {*(case.architecture for case in BY_ARCHITECTURE.values()), *RELATIVES}
    assert {name for name, (architecture, _) in refused.items() if architecture in supported} == INCOMPLETE
    for name, (_, message) in refused.items():
        assert "\n" not in message
        assert name in INCOMPLETE or re.search(r"is not supported( as a pooling model)?; supported: ", message), name
