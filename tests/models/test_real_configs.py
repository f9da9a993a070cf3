"""Configs of released models build abstract models of the published size, in seconds and without memory for weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.models.build import define_model

# Parameters of the text decoder, as transformers counts them (with the corrections of routing, which are buffers there).
COUNTS = {
    "Qwen--Qwen3.5-27B": 26_895_998_464,
    "Qwen--Qwen3.5-35B-A3B": 34_660_610_688,
    "ipex-jamba": 895_707_928,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "nvidia--Nemotron-H-56B-Base-8K": 56_324_350_464,
    "transformers_defaults/qwen3_next": 79_674_391_296,
    "transformers_defaults/granitemoehybrid": 38_601_064_448,
}
# The defaults of a model type in transformers name no architecture.
ARCHITECTURES = {"qwen3_next": "Qwen3NextForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM"}


@pytest.mark.parametrize("name", COUNTS)
def test_models_have_the_published_number_of_parameters(conformance_data: Path, name: str) -> None:
    config = json.loads((conformance_data / "hf_configs" / f"{name}.json").read_text())
    if not config.get("architectures"):
        config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    assert define_model(config, dtype="bfloat16").num_params == COUNTS[name]
