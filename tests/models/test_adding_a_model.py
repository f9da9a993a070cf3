"""The example of docs/adding_a_model.md works as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.build import define_model
from jaxllm.models.registry import FAMILIES
from tests.golden.case import load_golden
from tests.golden.cases import CASES
from tests.golden.checking import check_tensors

DOCUMENT = (Path(__file__).parents[2] / "docs" / "adding_a_model.md").read_text()
CONFIG = {
    "architectures": ["HarbourForCausalLM"], "model_type": "harbour", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "embed_gain": 4.0, "branch_gain": 0.7,
    "logit_gain": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def harbour(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setitem(FAMILIES, "HarbourForCausalLM", names["HARBOUR"])


def test_the_family_computes_what_its_relative_does() -> None:
    tensors = CASES["granite_tied"].tensors()
    for i in range(2):
        q, k, v = (tensors.pop(f"model.layers.{i}.self_attn.{x}_proj.weight").reshape(2, -1, 8, 32) for x in "qkv")
        tensors[f"model.layers.{i}.mix.qkv.weight"] = np.concatenate([q, k, v], axis=1).reshape(-1, 32)
    own = {
        r"^model\.": "harbour.", r"\.layers\.": ".blocks.", "embed_tokens": "tokens", "input_layernorm": "norm_in",
        "post_attention_layernorm": "norm_mlp", r"self_attn\.o_proj": "mix.out", r"^harbour\.norm\.": "harbour.norm_out.",
    }  # fmt: skip
    for pattern, replacement in own.items():
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    check_tensors(load_golden("granite_tied"), CONFIG, tensors)


def test_a_key_that_the_family_does_not_read_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match=r"not understood for HarbourForCausalLM.*tide=3"):
        define_model(CONFIG | {"tide": 3}, dtype="float32")


def test_the_document_names_what_there_is() -> None:
    root = Path(__file__).parents[2]
    for path in re.findall(r"`((?:jaxllm|tests|scripts)/[\w/.]*)`", DOCUMENT):
        assert (root / path).exists(), path
