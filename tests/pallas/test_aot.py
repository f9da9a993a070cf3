"""Real programs for TPUs and GPUs, compiled without them: the kernels at real models' shapes, and the whole step of a small one."""

from functools import partial

import jax
import pytest

from pallas_kernels.aot import AotError, compile_isolated, missing_compiler
from tests.golden.ahead_of_time import attention_backend, encoder_request, pooling_request, step_request
from tests.golden.cases import CASES
from tests.golden.pooling_cases import CASES as POOLING_CASES

KERNEL = "pallas_kernels.ragged_paged_attention.aot"
PRODUCTS = "pallas_kernels.quantized_matmul.aot"
GROUPED = "tests.pallas.grouped_products"
STEP = "jaxllm.runner.aot"
LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
GEMMA3_4B = {"heads": 8, "kv_heads": 4, "head_dim": 256, "window": 1024}
# An eighth of 128 heads, and all of them.
DEEPSEEK_V3_TP8 = {"heads": 16, "kv_heads": 1, "head_dim": 576, "latent": 512}
DEEPSEEK_V3 = DEEPSEEK_V3_TP8 | {"heads": 128}
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
SMALL_MIXTURE = SMALL_LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MIB = 2**20

needs_tpu_compiler = pytest.mark.skipif(missing_compiler("tpu") is not None, reason=str(missing_compiler("tpu")))
needs_gpu_compiler = pytest.mark.skipif(
    missing_compiler("gpu") is not None or jax.__version_info__ < (0, 11),
    reason=missing_compiler("gpu") or "this jax has an older Mosaic GPU",
)


@pytest.fixture(autouse=True)
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs as they are served."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (LLAMA_8B, 64),
        (LLAMA_8B | {"kv_dtype": "float8_e4m3fn"}, 64),
        pytest.param(QWEN3_600M, 64, marks=pytest.mark.heavy),
        pytest.param(LLAMA_8B, 512, marks=pytest.mark.heavy),
        pytest.param(QWEN3_600M, 512, marks=pytest.mark.heavy),
        (DEEPSEEK_V3_TP8, 64),
        pytest.param(DEEPSEEK_V3_TP8, 512, marks=pytest.mark.heavy),
    ],
    ids=["8B decode", "8B decode of 8-bit pages", "0.6B decode", "8B mixed", "0.6B mixed", "V3 decode", "V3 mixed"],
)
def test_the_kernel_compiles_for_v6e_and_updates_pages_in_place(model, tokens):
    found = compile_isolated(KERNEL, {"target": "v6e:1x1", **PAGES, **model, "tokens": tokens, "rows": 64}, timeout_s=300)
    assert found["alias_bytes"] >= found["cache_bytes"]
    assert found["temp_bytes"] < 8 * MIB


def check_collectives(found, rows, tokens, itemsize=2):
    """What four chips tell each other: two sums a layer, one of the embedding, which is split by vocabulary; each gets the logits of a
    quarter of the rows, and everybody what was sampled from them.
    """
    hidden = tokens * SMALL_LLAMA["hidden_size"] * itemsize
    layers = found["num_layers"]
    by_kind = {(c["kind"], c["in_layers"]): (c["count"], c["bytes"]) for c in found["collectives"]}
    assert by_kind.pop(("all-reduce", True)) == (2 * layers, 2 * layers * hidden)
    assert by_kind.pop(("all-to-all", False)) == (1, rows // 4 * SMALL_LLAMA["vocab_size"] * 4)
    assert by_kind.keys() <= {("all-gather", False), ("all-reduce", False)}
    assert hidden <= sum(size for _, size in by_kind.values()) < hidden + 2**14


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("target", "model", "tokens"),
    [
        ("h100", LLAMA_8B, 64),
        ("h100", LLAMA_8B, 512),
        ("b200", LLAMA_8B, 512),
        ("b200", LLAMA_8B | {"kv_dtype": "float8_e4m3fn"}, 64),
        pytest.param("h200", LLAMA_8B, 512, marks=[pytest.mark.heavy, pytest.mark.ahead_of_time]),
        pytest.param("h100", QWEN3_600M, 512, marks=pytest.mark.heavy),
        pytest.param("h100", GEMMA3_4B, 512, marks=[pytest.mark.heavy, pytest.mark.ahead_of_time]),
        ("h100", DEEPSEEK_V3_TP8, 64),
        pytest.param("h200", DEEPSEEK_V3, 512, marks=pytest.mark.heavy),
        ("b200", DEEPSEEK_V3_TP8, 512),
    ],
    ids=[
        "8B decode",
        "8B mixed",
        "8B mixed B200",
        "8B decode B200 8-bit",
        "8B mixed H200",
        "0.6B mixed",
        "Gemma mixed",
        "V3 decode",
        "V3 mixed H200",
        "V3 mixed B200",
    ],
)
def test_the_kernel_compiles_for_gpus_without_spills_and_updates_pages_in_place(target, model, tokens):
    request = {"target": target, **PAGES, **model, "page_size": 64, "tokens": tokens, "rows": 64}
    found = compile_isolated(KERNEL, request, timeout_s=300)
    assert found["alias_bytes"] >= found["cache_bytes"]
    # Queries and outputs in tiles: those of 128 heads of 576 and 512 dims are that large themselves.
    assert found["temp_bytes"] < (160 if model is DEEPSEEK_V3 else 80 if target == "b200" else 64) * MIB
    assert found["registers"] <= 255
    assert found["spill_bytes"] == 0


@needs_gpu_compiler
@pytest.mark.parametrize("target", [pytest.param("a100:4", marks=pytest.mark.heavy), "h100:4"])
def test_the_whole_step_compiles_for_gpus_and_copies_no_pages(target):
    layers = SMALL_LLAMA["num_hidden_layers"]
    request = {"target": target, "hf_config": SMALL_LLAMA, "dtype": "bfloat16", "num_tokens": 16, "num_rows": 16}
    found = compile_isolated(STEP, request | {"page_size": 64, "max_model_len": 2048, "num_pages": 513}, timeout_s=300)

    assert found["alias_bytes"] >= found["cache_bytes"] == layers * 513 * 64 * 2 * 128 * 2
    assert found["temp_bytes"] < 16 * MIB < found["cache_bytes"]
    check_collectives(found, 16, 16)
    assert found["kernels"] == (layers if target == "h100:4" else 0)


@needs_gpu_compiler
def test_a_step_with_experts_copies_neither_their_weights_nor_rows_for_each():
    request = {"target": "h100:1", "hf_config": SMALL_MIXTURE, "dtype": "bfloat16", "num_tokens": 64, "num_rows": 64}
    found = compile_isolated(STEP, request | {"page_size": 64, "max_model_len": 2048, "num_pages": 257}, timeout_s=300)
    assert found["temp_bytes"] < 8 * MIB < 64 * 512 * 256 * 3 * 2  # the weights of a layer's experts


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("target", "rows", "groups", "num_in", "num_out"),
    [
        pytest.param("h100", 512, 128, 2048, 1536, id="H100 decode"),
        pytest.param("b200", 256, 32, 2880, 2880, id="B200 decode, half a tile"),
        pytest.param("b200", 256, 32, 2880, 720, id="B200 decode, narrow columns", marks=pytest.mark.heavy),
        pytest.param("h100", 256, 32, 2880, 720, id="H100 decode, narrow columns"),
        pytest.param("h200", 4096, 8, 4096, 28672, id="H200 prefill", marks=pytest.mark.heavy),
        pytest.param("b200", 16384, 128, 768, 2048, id="B200 prefill", marks=pytest.mark.heavy),
    ],
)
def test_grouped_products_compile_for_gpus_without_spills_and_copies(target, rows, groups, num_in, num_out):
    request = {"target": target, "rows": rows, "groups": groups, "num_in": num_in, "num_out": num_out}
    found = compile_isolated(GROUPED, request, timeout_s=120)
    assert found["temp_bytes"] < MIB / 16
    assert found["registers"] <= 168  # of each of 384 threads
    assert found["spill_bytes"] == 0


@needs_tpu_compiler
@pytest.mark.heavy
@pytest.mark.parametrize("tokens", [16, 256], ids=["decode", "mixed"])
@pytest.mark.parametrize(("target", "chips"), [("v6e:1x1", 1), pytest.param("v6e:2x2", 4, marks=pytest.mark.ahead_of_time)])
def test_the_whole_step_compiles_and_copies_no_pages(target, chips, tokens):
    request = {"target": target, "hf_config": SMALL_LLAMA, "dtype": "bfloat16", "num_tokens": tokens, "num_rows": 16}
    found = compile_isolated(STEP, request | {"page_size": 128, "max_model_len": 2048, "num_pages": 257}, timeout_s=300)

    layers = SMALL_LLAMA["num_hidden_layers"]
    assert found["cache_bytes"] == layers * 257 * 4 // chips * 128 * 128 * 4  # pages x KV heads x positions x lanes of words
    assert found["alias_bytes"] >= found["cache_bytes"]
    assert found["temp_bytes"] < 16 * MIB < found["cache_bytes"]
    if chips == 1:
        assert not found["collectives"]
    else:
        check_collectives(found, 16, tokens)
    assert found["kernels"] == layers * (1 if tokens == 16 else 3)


PRODUCT = {"num_in": 4096, "num_out": 14336, "values": "float8_e4m3fn", "group": 128, "zeros": False, "activations": None}
INT4 = {"values": "int4", "group": 32, "zeros": True}


@needs_tpu_compiler
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("target", "rows", "options"),
    [
        ("v6e:1x1", 8, {}),
        ("v6e:1x1", 2048, INT4),
        pytest.param("v5e:1x1", 64, INT4, marks=pytest.mark.ahead_of_time),
        pytest.param("tpu7x:2x2x1", 2048, {"activations": "float8_e4m3fn"}, marks=pytest.mark.ahead_of_time),
    ],
)
def test_products_with_quantized_groups_compile_for_tpus_and_copy_no_weight(target, rows, options):
    found = compile_isolated(PRODUCTS, {"target": target, "rows": rows, "kernel": True, **PRODUCT, **options}, timeout_s=300)
    assert found["temp_bytes"] < MIB


@needs_gpu_compiler
@pytest.mark.heavy
@pytest.mark.parametrize("target", ["h100", "b200"])
@pytest.mark.parametrize(("rows", "options"), [(8, {}), (128, INT4), pytest.param(64, {"values": "int8"}, marks=pytest.mark.ahead_of_time)])
def test_products_with_quantized_groups_compile_for_gpus_and_copy_no_weight(target, rows, options):
    found = compile_isolated(PRODUCTS, {"target": target, "rows": rows, "kernel": True, **PRODUCT, **options}, timeout_s=300)
    assert found["temp_bytes"] < 24 * MIB  # sums of the parts: a copy would take 112
    assert found["spill_bytes"] == 0


@pytest.mark.heavy
@pytest.mark.parametrize("target", [pytest.param("v6e:1x1", marks=needs_tpu_compiler), pytest.param("h100", marks=needs_gpu_compiler)])
@pytest.mark.parametrize("activations", [None, "int8"])
def test_scales_of_outputs_need_no_kernel(target, activations):
    request = {**PRODUCT, "values": "int8", "group": None, "activations": activations}
    found = compile_isolated(PRODUCTS, {"target": target, "rows": 8, "kernel": False, **request}, timeout_s=300)
    assert found["temp_bytes"] < 4 * MIB < found["argument_bytes"]  # on GPUs sums of parts of the inputs


@pytest.mark.heavy
@pytest.mark.ahead_of_time
@pytest.mark.parametrize(
    ("name", "target", "backend"),
    [
        pytest.param(name, target, backend, marks=needs)
        for target, needs in (("v6e:1x1", needs_tpu_compiler), ("h100:1", needs_gpu_compiler))
        for name, backend in (
            ("gemma4", "kernel" if target == "v6e:1x1" else "kernel and XLA"),
            ("gpt_oss", "kernel"),
            ("qwen3_next", "kernel"),
        )
    ],
)
def test_steps_of_families_compile_and_copy_no_pages(name, target, backend):
    """Shared keys and values, experts and sinks, a gated delta net; docs/models.md has every family."""
    found = compile_isolated(STEP, step_request(CASES[name], target), timeout_s=300)
    assert attention_backend(CASES[name], found["kernels"]) == backend
    assert found["alias_bytes"] >= found["cache_bytes"]


ENCODERS = {
    "BERT": partial(pooling_request, POOLING_CASES["bert"]),
    "windows of ModernBERT": partial(pooling_request, POOLING_CASES["modernbert"]),
    "encoder of T5": partial(encoder_request, CASES["t5"]),
}


@pytest.mark.heavy
@pytest.mark.ahead_of_time
@pytest.mark.parametrize("target", [pytest.param("v6e:1x1", marks=needs_tpu_compiler), pytest.param("h100:1", marks=needs_gpu_compiler)])
@pytest.mark.parametrize("name", ENCODERS)
def test_steps_of_whole_inputs_compile_without_kernels(name, target):
    """Encoders; docs/models.md has every architecture that is pooled."""
    found = compile_isolated(STEP, ENCODERS[name](target), timeout_s=300)
    assert found["kernels"] == 0
    assert found["alias_bytes"] >= found["cache_bytes"]
    assert (found["cache_bytes"] > 0) is (name == "encoder of T5")


@needs_tpu_compiler
def test_a_compilation_that_takes_too_long_is_ended():
    with pytest.raises(AotError, match=r"did not answer for v6e:1x1 within 0 s"):
        compile_isolated(KERNEL, {"target": "v6e:1x1"}, timeout_s=0.2)


@needs_tpu_compiler
def test_a_failed_compilation_says_what_the_compiler_said():
    with pytest.raises(AotError, match="KeyError: 'dtype'"):
        compile_isolated(KERNEL, {"target": "v6e:1x1"}, timeout_s=120)


@pytest.mark.parametrize(("target", "extra"), [("v6e:1x1", "plan-tpu"), ("h100", "plan-gpu")])
def test_without_a_compiler_one_line_says_what_to_install(target, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AotError, match=rf"pip install 'jaxllm\[{extra}\]'"):
        compile_isolated(KERNEL, {"target": target}, timeout_s=1)
