"""Configs to models: sizes, windows, ropes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.launch import compute_dtype
from jaxllm.model_files import ModelFiles
from jaxllm.models.build import define_model
from jaxllm.specs import DecoderSpec
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint, random_tensors, tiny_config
from tests.golden.case import Case
from tests.golden.cases import BY_ARCHITECTURE, CASES

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def define(config: dict[str, Any], **options: Any) -> Any:
    return define_model(config, **{"dtype": "float32", **options})


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in define(config).cache_layers]


def spec(**changes: Any) -> DecoderSpec:
    return define(tiny_config(**changes)).spec


# --------------------------------------------------------------------------- sizes


def test_large_model_is_defined_without_memory_for_it() -> None:
    model = define(LLAMA_8B, dtype="bfloat16")
    assert model.num_params == 8_030_261_248
    assert model.shapes["layers.31.attention.qkv"] == jax.ShapeDtypeStruct((8, 6, 128, 4096), jnp.bfloat16)
    assert (model.max_model_len, model.vocab_size) == (8192, 128256)
    assert {(layer.num_kv_heads, layer.head_dim) for layer in model.cache_layers} == {(8, 128)}


_FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_BART_BASE = {"encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        ({"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}, 60_506_624),  # t5-small
        ({"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, **_FLAN}, 76_961_152),  # flan-t5-small
        ({"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32, **_FLAN}, 2_849_757_184),  # flan-t5-xl
        # bart-base and bart-large, with the biases of logits, which are a buffer there.
        ({"d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12, **_BART_BASE}, 139_420_416 + 50_265),
        ({"d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}, 406_291_456 + 50_265),
    ],
)
def test_encoders_with_decoders_have_the_published_number_of_parameters(config: dict[str, Any], published: int) -> None:
    architecture = "T5ForConditionalGeneration" if "d_ff" in config else "BartForConditionalGeneration"
    assert define({"architectures": [architecture], **config}, dtype="bfloat16").num_params == published


@pytest.mark.parametrize("case", BY_ARCHITECTURE.values(), ids=lambda case: case.name)
def test_every_parameter_has_one_logical_axis_name_an_axis_and_comes_from_the_checkpoint(case: Case) -> None:
    model = define(case.config)
    assert model.names == tuple(model.shapes) == tuple(model.axes)
    for name in model.names:
        assert len(model.axes[name]) == len(model.shapes[name].shape)
        assert set(model.axes[name]) <= {"vocab", "embed", "heads", "kv_heads", "mlp", "experts", None}
    assert model.num_params == sum(tensor.size for tensor in case.tensors().values())


def test_bind_gives_the_decoder_its_parameters_in_the_order_of_names() -> None:
    model = define(tiny_config())

    @jax.jit
    def parts(params: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        decoder = model.bind(params)
        return decoder.layers[1].mlp.down[...], decoder.head.weight[...]

    params = [jnp.full(model.shapes[name].shape, i, jnp.float32) for i, name in enumerate(model.names)]
    down, head = parts(params)
    assert down[0, 0] == model.names.index("layers.1.mlp.down")
    assert head[0, 0] == model.names.index("head.weight")


# --------------------------------------------------------------------------- shards


def test_shards_beyond_the_kv_heads_replicate_them() -> None:
    model = define(LLAMA_8B, dtype="bfloat16", tensor_parallel_size=16)
    assert model.cache_layers[0].num_kv_heads == 16
    assert model.shapes["layers.0.attention.qkv"].shape == (16, 4, 128, 4096)
    assert model.shapes["layers.0.attention.out"].shape == (4096, 4096)


def test_shards_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .*sizes that work: 1, 2, 4$"):
        define(tiny_config(), tensor_parallel_size=3)
    # 6 query heads on 3 KV heads: 2 shards would have to cut a KV head in halves.
    config = tiny_config(num_attention_heads=6, num_key_value_heads=3, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"sizes that work: 1, 3, 6$"):
        define(config, tensor_parallel_size=2)


# --------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}, [None] * 4),
        ({"sliding_window": 16, "max_window_layers": 0}, [None] * 4),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, [None, None, None, 16]),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4}, [None] * 4),
        ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 4}, [None] * 4),
        ({"use_sliding_window": False, "sliding_window": 16, "layer_types": ["full_attention"] * 4}, [None] * 4),
        (
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
            [16, None, 16, None],
        ),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(tiny_config(architecture, num_hidden_layers=4, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 8}, [8, 8]),
        ({"sliding_window": None}, [None, None]),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 2}, [None, None]),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, [None, 8]),
    ],
)
def test_mistral_windows(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(tiny_config("MistralForCausalLM", **changes)) == expected


def test_mistral_without_the_key_has_the_first_release_s_window() -> None:
    config = tiny_config("MistralForCausalLM")
    del config["sliding_window"]
    assert windows(config) == [4096, 4096]


def test_gemma_windows_follow_the_pattern_or_the_layer_types() -> None:
    model = define(tiny_config("Gemma3ForCausalLM"))
    assert [layer.window for layer in model.cache_layers] == [16, 16, None, 16, 16, None]
    ropes = [block.mixer.rope for block in model.spec.blocks]
    assert ropes[0] != ropes[2]
    assert windows(tiny_config("Gemma3ForCausalLM", sliding_window_pattern=None, _sliding_window_pattern=2)) == [16, None] * 3
    types = ["full_attention"] * 5 + ["sliding_attention"]
    assert windows(tiny_config("Gemma3ForCausalLM", layer_types=types)) == [None] * 5 + [16]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers=2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention; supported: full_attention, sliding_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window is in force"),
    ],
)
def test_layer_types_that_cannot_be_honoured_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        define(tiny_config("Qwen2ForCausalLM", use_sliding_window=False, **changes))


# --------------------------------------------------------------------------- what is refused


def test_unsupported_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(ModelLoadError, match="OwnModel is not supported; supported: LlamaForCausalLM, MistralForCausalLM"):
        define(tiny_config() | {"architectures": ["OwnModel"]})
    with pytest.raises(ModelLoadError, match="without 'architectures'"):
        define({"model_type": "llama"})


def test_unknown_architecture_that_says_nothing_llama_would_not_is_read_as_llama(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config() | {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    assert define(config).spec == spec()
    assert "OwnForCausalLM is not known" in caplog.text
    load_params(define(config), MemoryCheckpoint(random_tensors(tiny_config())), lambda name, array: array)
    with pytest.raises(ModelLoadError, match=r"OwnForCausalLM is not supported; supported: .*Llama-like decoder: .*twist=2"):
        define(config | {"twist": 2})
    more = random_tensors(tiny_config()) | {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(ModelLoadError, match=r"1 tensors that this model does not use: model.layers.0.self_attn.q_norm.weight"):
        load_params(define(config), MemoryCheckpoint(more), lambda name, array: array)


def test_unknown_architecture_of_a_known_kind_is_not_read_as_llama() -> None:
    for kind, kin in (("gemma", "GemmaForCausalLM"), ("ernie4_5", "Ernie4_5ForCausalLM")):
        with pytest.raises(ModelLoadError, match=f"OwnForCausalLM is not supported; .*its model_type is that of {kin}"):
            define(tiny_config() | {"architectures": ["OwnForCausalLM"], "model_type": kind})


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("LlamaForCausalLM", {"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
        ("LlamaForCausalLM", {"sliding_window": 8}, "sliding_window=8"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=True"),
    ],
)
def test_key_that_is_not_understood_is_an_error(architecture: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=f"not understood for {architecture}.*{named}"):
        define(tiny_config(architecture) | changes)
    # Switched off, it changes nothing.
    define(tiny_config(architecture) | dict.fromkeys(changes) | {"use_something": False})


@pytest.mark.parametrize("case", BY_ARCHITECTURE.values(), ids=lambda case: case.name)
def test_every_family_refuses_a_key_that_it_does_not_know(case: Case) -> None:
    with pytest.raises(ModelLoadError, match=f"not understood for {case.architecture}.*: tide_multiplier=0.22"):
        define(case.config | {"tide_multiplier": 0.22})


def test_harmless_keys_are_accepted() -> None:
    define(tiny_config() | {"_name_or_path": "x", "torch_dtype": "float16", "attention_dropout": 0.1, "top_k": 50, "id2label": {"0": "a"}})


def test_quantized_checkpoint_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="quantized checkpoints other than MXFP4 and FP8 in blocks"):
        define(tiny_config() | {"quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size=30 must be a multiple"),
        ({"head_dim": 7}, "even head_dim"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported; supported: .*silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ],
)
def test_bad_values_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        define(tiny_config(**changes))


def test_float16_is_refused_where_activations_overflow_it() -> None:
    with pytest.raises(ConfigError, match=r"float16.*use bfloat16 or float32"):
        define(tiny_config("Gemma3ForCausalLM"), dtype="float16")
    define(tiny_config(), dtype="float16")


# --------------------------------------------------------------------------- rope


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "default"}, 256),
    ],
)
def test_context_length_counts_the_scaling(scaling: dict[str, Any], positions: int) -> None:
    assert define(tiny_config(rope_scaling=scaling)).max_model_len == positions


def test_first_llama_s_name_for_the_context_is_read() -> None:
    assert define(tiny_config(max_position_embeddings=None, max_sequence_length=96)).max_model_len == 96


def test_longrope_factors_follow_the_engine_s_longest_sequence() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    config = tiny_config(rope_scaling=scaling)
    short, long, default = (define(config, max_model_len=n).spec.blocks[0].mixer.rope for n in (64, 65, None))
    assert long == default
    np.testing.assert_allclose(np.array(short.frequencies), 2 * np.array(long.frequencies), rtol=1e-6)
    # The older name of the type, and the context beside the entry instead of in it.
    del scaling["original_max_position_embeddings"]
    again = tiny_config(rope_scaling=scaling | {"rope_type": None, "type": "su"}, original_max_position_embeddings=64)
    assert define(again, max_model_len=64).spec.blocks[0].mixer.rope == short


def test_dynamic_base_grows_with_the_engine_s_longest_sequence() -> None:
    config = tiny_config(rope_scaling={"type": "dynamic", "factor": 2.0})
    plain = spec().blocks[0].mixer.rope
    assert define(config, max_model_len=256).spec.blocks[0].mixer.rope == plain
    assert define(config, max_model_len=512).spec.blocks[0].mixer.rope.frequencies[1] < plain.frequencies[1]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "mrope", "mrope_section": [1, 1, 2]}, "rope type 'mrope' is not supported; supported: default, linear"),
        ({"type": "default", "mrope_section": [1, 1, 2]}, "'default' does not know mrope_section"),
        ({"type": "linear"}, "'linear' needs a number for 'factor'"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, "'linear' does not know beta_fast"),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0] * 3}, "longrope needs 4 numbers"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("linear", "must be an object"),
    ],
)
def test_ropes_that_cannot_be_honoured_are_refused(scaling: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        define(tiny_config(rope_scaling=scaling))


@pytest.mark.parametrize("name", ["gemma3", "olmo3", "gemma4"])
def test_ropes_by_layer_type_that_are_not_by_layer_type_are_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match="must have entries full_attention and sliding_attention"):
        define(CASES[name].config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})


def test_partly_rotated_heads_are_refused_where_the_config_says_so() -> None:
    with pytest.raises(ModelLoadError, match="partial_rotary_factor other than 1"):
        define(tiny_config(partial_rotary_factor=0.5))
    define(tiny_config(partial_rotary_factor=1.0))


@pytest.mark.parametrize(
    ("name", "stored", "platform", "dtype"),
    [
        ("llama", "bfloat16", "cpu", "float32"),
        ("llama", "bfloat16", "tpu", "bfloat16"),
        ("llama", "float16", "gpu", "float16"),
        ("gemma3", "float16", "gpu", "bfloat16"),
        ("gemma3", "float16", "cpu", "float32"),
    ],
)
def test_auto_is_float32_on_cpu_and_the_checkpoints_dtype_elsewhere(name: str, stored: str, platform: str, dtype: str) -> None:
    config = CASES[name].config | {"dtype": stored}
    files = ModelFiles(kind="hf", path=Path(), config=config, generation_config={}, name="m", tokenizer_path=Path())
    assert compute_dtype(EngineConfig.from_options(model="m"), files, None, platform) == dtype
    assert compute_dtype(EngineConfig.from_options(model="m", dtype="bfloat16"), files, None, platform) == "bfloat16"
