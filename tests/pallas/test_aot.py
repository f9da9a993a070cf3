"""Real TPU programs, compiled without a TPU: the kernel at real models' shapes, and the whole step of a small one."""

import pytest

from pallas_kernels.aot import AotError, compile_isolated, missing_tpu_compiler

KERNEL = "pallas_kernels.ragged_paged_attention.aot"
STEP = "jaxllm.runner.aot"
LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
QWEN3_600M = {"heads": 16, "kv_heads": 8, "head_dim": 128}
PAGES = {"dtype": "bfloat16", "page_size": 128, "pages_per_row": 64, "num_pages": 513}
SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
MIB = 2**20

needs_tpu_compiler = pytest.mark.skipif(missing_tpu_compiler() is not None, reason=str(missing_tpu_compiler()))


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (LLAMA_8B, 64),
        pytest.param(QWEN3_600M, 64, marks=pytest.mark.heavy),
        pytest.param(LLAMA_8B, 512, marks=pytest.mark.heavy),
        pytest.param(QWEN3_600M, 512, marks=pytest.mark.heavy),
    ],
    ids=["8B decode", "0.6B decode", "8B mixed", "0.6B mixed"],
)
def test_the_kernel_compiles_for_v6e_and_updates_pages_in_place(model, tokens):
    found = compile_isolated(KERNEL, {"target": "v6e:1x1", **PAGES, **model, "tokens": tokens, "rows": 64}, timeout_s=300)
    assert found["alias_bytes"] >= found["cache_bytes"]
    assert found["temp_bytes"] < 8 * MIB


@needs_tpu_compiler
@pytest.mark.heavy
@pytest.mark.parametrize("tokens", [16, 256], ids=["decode", "mixed"])
@pytest.mark.parametrize(("target", "chips"), [("v6e:1x1", 1), ("v6e:2x2", 4)])
def test_the_whole_step_compiles_and_copies_no_pages(target, chips, tokens):
    request = {"target": target, "hf_config": SMALL_LLAMA, "dtype": "bfloat16", "num_tokens": tokens, "num_rows": 16}
    found = compile_isolated(STEP, request | {"page_size": 128, "max_model_len": 2048, "num_pages": 257}, timeout_s=300)

    layers = SMALL_LLAMA["num_hidden_layers"]
    assert found["cache_bytes"] == layers * 257 * 4 // chips * 128 * 128 * 4  # pages x KV heads x positions x lanes of words
    assert found["alias_bytes"] >= found["cache_bytes"]
    assert found["temp_bytes"] < 16 * MIB < found["cache_bytes"]
    # Two a layer, and one for the embedding, which is split by vocabulary.
    assert found["all_reduces"] == (0 if chips == 1 else 2 * layers + 1)
    assert found["kernels"] == layers * (1 if tokens == 16 else 3)


@needs_tpu_compiler
def test_a_compilation_that_takes_too_long_is_ended():
    with pytest.raises(AotError, match=r"was not compiled in 0 s"):
        compile_isolated(KERNEL, {"target": "v6e:1x1"}, timeout_s=0.2)


@needs_tpu_compiler
def test_a_failed_compilation_says_what_the_compiler_said():
    with pytest.raises(AotError, match="v6e:9x9"):
        compile_isolated(KERNEL, {"target": "v6e:9x9"}, timeout_s=120)


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AotError, match=r"pip install 'jaxllm\[plan-tpu\]'"):
        compile_isolated(KERNEL, {"target": "v6e:1x1"}, timeout_s=1)
