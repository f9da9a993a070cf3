"""`jaxllm plan`: the command around the arithmetic and the compiler, both of which run in processes of their own."""

from __future__ import annotations

import json

import jax
import pytest

from jaxllm.cli import plan
from jaxllm.cli.main import main
from pallas_kernels.aot import AotError, missing_compiler
from tests.checkpoints import tiny_config

STEP = {
    "seconds": 1.5,
    "temp_bytes": 2**20,
    "alias_bytes": 5,
    "cache_bytes": 5,
    "num_layers": 2,
    "collectives": [{"kind": "all-reduce", "in_layers": True, "count": 4, "bytes": 4 * 1024}],
}


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config(num_hidden_layers=4)))
    return str(file)


def test_a_plan_is_printed_with_what_the_compiler_found(config, capsys, monkeypatch):
    requests = []
    monkeypatch.setattr(plan, "compile_isolated", lambda module, request, timeout_s: requests.append(request) or STEP)
    assert main(["plan", config, "--target", "v6e:2x2", "-tp", "2", "--max-num-seqs", "16", "--layers", "2"]) == 0
    out = capsys.readouterr().out
    for text in (
        "LlamaForCausalLM",
        "v6e:2x2: 4 chip(s), 4 device(s) of 32.0 GiB",
        "tensor_parallel_size 2, attention: tpu",
        "fits: yes",
        "requests of 256 tokens at once",
        "compiled: 16 tokens in 16 rows (decodes) in 1.5 s; 2 of 4 layers",
        "temporaries 1.0 MiB",
        "pages are updated in place",
        "all-reduce: 2 a layer, 1 KiB each",
    ):
        assert text in out
    assert [(r["num_tokens"], r["num_rows"]) for r in requests] == [(16, 16), (2048, 16)]
    assert requests[0]["num_layers"] == 2


@pytest.mark.skipif(missing_compiler("gpu") is not None or jax.__version_info__ < (0, 12), reason="needs jax 0.12 and jaxllm[plan-gpu]")
def test_a_plan_compiles_its_steps(config, capsys):
    options = ["--dtype", "bfloat16", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    assert main(["plan", config, "--target", "a100:2", *options, "--json"]) == 0
    decode, mixed = json.loads(capsys.readouterr().out)["steps"]
    assert (decode["num_tokens"], decode["num_rows"], mixed["num_tokens"], mixed["num_rows"]) == (8, 8, 64, 8)
    for step in (decode, mixed):
        assert step["alias_bytes"] >= step["cache_bytes"] > 0
        assert sum(c["count"] for c in step["collectives"] if c["in_layers"]) == 2 * step["num_layers"]


def test_without_a_compiler_the_arithmetic_is_printed_and_one_line_says_what_to_install(config, capsys, monkeypatch):
    def missing(*_, **__):
        raise AotError("the TPU compiler (libtpu) is not installed; pip install 'jaxllm[plan-tpu]'")

    monkeypatch.setattr(plan, "compile_isolated", missing)
    assert main(["plan", config, "--target", "v6e:2x2", "-tp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["steps"] == []
    assert found["not_compiled"].endswith("pip install 'jaxllm[plan-tpu]'")


def test_a_model_that_does_not_fit_ends_with_status_1_and_is_not_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "compile_isolated", None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config(hidden_size=65536, num_attention_heads=512, head_dim=128, intermediate_size=2**18)))
    assert main(["plan", str(file), "--target", "v5e:1x1", "--dtype", "bfloat16"]) == 1
    out = capsys.readouterr().out
    assert "fits: no" in out
    assert "would fit: " in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--target is needed: one of v4:2x2x1"),
        (["--target", "v6e:3x3"], "v6e comes as v6e:1x1"),
        (["--target", "h100:2", "-tp", "4"], "tensor_parallel_size=4, but h100:2 has 2"),
        (["--target", "v6e:4x4"], "tensor_parallel_size=16 does not divide this model"),
        (["--target", "v6e", "--quantization", "fp8"], "--quantization is not offered"),
    ],
)
def test_what_cannot_be_planned_is_one_line(config, argv, message, capsys):
    assert main(["plan", config, *argv]) == 2
    assert message in capsys.readouterr().err


def test_an_architecture_that_is_not_supported_is_refused_as_serve_would(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    assert main(["plan", str(file), "--target", "v6e"]) == 1
    assert "architecture NoSuchModel is not supported; supported: " in capsys.readouterr().err
