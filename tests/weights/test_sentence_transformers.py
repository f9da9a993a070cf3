"""The files of sentence-transformers beside a model: the layouts of its releases, and what is refused rather than ignored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.weights.sentence_transformers import read_modules


def write(directory: Path, kinds: list[str], settings: dict[str, Any] | None = None, **files: Any) -> Path:
    """modules.json with these modules, each in a folder of its own; `settings` by kind; `files` are written as JSON."""
    modules = []
    for i, kind in enumerate(kinds):
        path = "" if kind == "Transformer" else f"{i}_{kind}"
        modules.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (directory / path).mkdir(exist_ok=True)
        if path and kind in (settings or {}):
            (directory / path / "config.json").write_text(json.dumps((settings or {})[kind]))
    for name, content in {"modules": modules, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


DENSE = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}
POOLING = {"embedding_dimension": 8, "pooling_mode": "lasttoken"}


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert"])
def test_the_longest_input_is_read_whatever_kind_of_encoder_names_the_file(kind: str, tmp_path: Path) -> None:
    files = {f"sentence_{kind}_config": {"max_seq_length": 128, "do_lower_case": True}, "tokenizer_config": {"model_max_length": 512}}
    modules = read_modules(write(tmp_path, ["Transformer", "Pooling"], {"Pooling": POOLING}, **files))
    assert modules is not None
    assert (modules.kinds, modules.normalize, modules.max_length, modules.lower_case) == (("last",), False, 128, True)


def test_newer_releases_leave_the_longest_input_to_the_tokenizer(tmp_path: Path) -> None:
    files = {"sentence_bert_config": {"transformer_task": "feature-extraction"}, "tokenizer_config": {"model_max_length": 256}}
    modules = read_modules(write(tmp_path, ["Transformer", "Pooling", "Normalize"], **files))
    assert modules is not None
    assert (modules.normalize, modules.max_length) == (True, 256)


@pytest.mark.parametrize("kinds", [["Transformer"], ["Transformer", "LogitScore"]])
def test_a_cross_encoder_has_no_pooling_and_is_read_by_its_architecture(kinds: list[str], tmp_path: Path) -> None:
    assert read_modules(write(tmp_path, kinds, {"LogitScore": {"true_token_id": 1, "module_input_name": "causal_logits"}})) is None


@pytest.mark.parametrize(
    "kinds",
    [["Transformer", "Pooling", "Normalize", "Dense"], ["Transformer", "Dense", "Pooling"], ["Transformer", "Pooling", "Pooling"]],
)
def test_modules_in_another_order_are_refused(kinds: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="modules in the order"):
        read_modules(write(tmp_path, kinds, {"Dense": DENSE}))


@pytest.mark.parametrize("setting", [{"use_residual": True}, {"module_input_name": "token_embeddings"}])
def test_a_dense_layer_that_does_more_is_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    usual = {"use_residual": False, "module_input_name": "sentence_embedding", "module_output_name": None}
    kinds = ["Transformer", "Pooling", "Dropout", "Dense"]
    assert read_modules(write(tmp_path, kinds, {"Dense": DENSE | usual})) is not None
    with pytest.raises(ModelLoadError, match=r"Dense with .* is not supported"):
        read_modules(write(tmp_path, kinds, {"Dense": DENSE | setting}))


def test_a_prompt_that_would_be_added_by_default_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    with caplog.at_level(logging.WARNING):
        read_modules(write(tmp_path, ["Transformer", "Pooling"], config_sentence_transformers=prompts))
    assert "the prompt 'query'" in caplog.text
