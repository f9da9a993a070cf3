"""Loading parameters: fusions, heads, padding, dtypes, and checkpoints that do not belong to the config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.build import ModelDef, define_model
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.weights.hf import open_checkpoint
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint, random_tensors, tiny_config, write_model
from tests.golden.cases import CASES


def load(
    config: dict[str, Any], tensors: Mapping[str, np.ndarray] | MemoryCheckpoint, *, dtype: Any = "float32", shards: int = 1
) -> tuple[ModelDef, dict[str, np.ndarray]]:
    model = define_model(config, dtype=dtype, tensor_parallel_size=shards)
    checkpoint = tensors if isinstance(tensors, MemoryCheckpoint) else MemoryCheckpoint(tensors)
    params = load_params(model, checkpoint, lambda name, array: (name, array))
    assert [name for name, _ in params] == list(model.names)
    for name, array in params:
        assert array.shape == model.shapes[name].shape
        assert array.dtype == model.shapes[name].dtype
    return model, dict(params)


def test_projections_are_grouped_by_kv_head() -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    _, params = load(config, tensors)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    qkv = params["layers.1.attention.qkv"]
    # 4 query heads of 8 share 2 KV heads.
    np.testing.assert_array_equal(qkv[1, 0], q[16:24])
    np.testing.assert_array_equal(qkv[1, 1], q[24:32])
    np.testing.assert_array_equal(qkv[1, 2], k[8:16])
    np.testing.assert_array_equal(qkv[1, 3], v[8:16])
    np.testing.assert_array_equal(params["layers.1.attention.out"], tensors["model.layers.1.self_attn.o_proj.weight"])
    np.testing.assert_array_equal(params["layers.0.mlp.gate_up"][0, 1], tensors["model.layers.0.mlp.up_proj.weight"])


def test_kv_heads_are_repeated_for_more_shards() -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    model, params = load(config, tensors, shards=4)
    assert model.cache_layers[0].num_kv_heads == 4
    k = tensors["model.layers.0.self_attn.k_proj.weight"].reshape(2, 8, 32)
    np.testing.assert_array_equal(params["layers.0.attention.qkv"][:, 1], k[[0, 0, 1, 1]])


def test_gate_and_up_are_grouped_by_shard() -> None:
    config = tiny_config(mlp_bias=True)
    tensors = random_tensors(config)
    _, params = load(config, tensors, shards=4)
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(params["layers.0.mlp.gate_up"][2, 1], up[32:48])
    gate_bias = tensors["model.layers.0.mlp.gate_proj.bias"]
    np.testing.assert_array_equal(params["layers.0.mlp.gate_up_bias"][3, 0], gate_bias[48:])


def test_conv1d_weights_are_transposed() -> None:
    config = tiny_config("GPT2LMHeadModel")
    tensors = random_tensors(config)
    _, params = load(config, tensors)
    fused = tensors["transformer.h.0.attn.c_attn.weight"]
    np.testing.assert_array_equal(params["layers.0.attention.qkv"][2, 1], fused[:, 32 + 16 : 32 + 24].T)
    np.testing.assert_array_equal(params["layers.0.attention.qkv_bias"][3, 2], tensors["transformer.h.0.attn.c_attn.bias"][64 + 24 :])
    np.testing.assert_array_equal(params["layers.0.mlp.down"], tensors["transformer.h.0.mlp.c_proj.weight"].T)


def test_vocabulary_is_padded_with_zero_rows_for_equal_shards() -> None:
    config = tiny_config(vocab_size=129, tie_word_embeddings=True)
    model, params = load(config, random_tensors(config), shards=4)
    assert model.vocab_size == 129
    assert params["embed.weight"].shape == (132, 32)
    assert not params["embed.weight"][129:].any()


def test_checkpoint_of_the_bare_decoder_is_loaded() -> None:
    for architecture, prefix in (("LlamaForCausalLM", "model."), ("GPT2LMHeadModel", "transformer.")):
        config = tiny_config(architecture, tie_word_embeddings=True)
        tensors = random_tensors(config)
        _, expected = load(config, tensors)
        _, params = load(config, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
        for name in expected:
            np.testing.assert_array_equal(params[name], expected[name])


def test_tensors_that_carry_nothing_are_ignored() -> None:
    config = tiny_config()
    load(config, random_tensors(config) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    config = tiny_config("GPT2LMHeadModel")
    masks = {f"transformer.h.0.attn.{name}": np.ones((1, 1, 4, 4), np.uint8) for name in ("bias", "masked_bias")}
    load(config, random_tensors(config) | masks)


UNTIED = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
TIED = ["Gemma3ForCausalLM", "GPT2LMHeadModel"]


@pytest.mark.parametrize("architecture", UNTIED + TIED)
def test_missing_head_of_an_untied_model_is_an_error(architecture: str) -> None:
    config = tiny_config(architecture, tie_word_embeddings=False)
    tensors = random_tensors(config)
    del tensors["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(config, tensors)
    model, params = load(config | {"tie_word_embeddings": True}, tensors)
    assert "head.weight" not in params
    assert model.spec.tied_head


@pytest.mark.parametrize("architecture", UNTIED + TIED)
def test_a_config_that_is_silent_about_its_head_means_what_the_architecture_does(architecture: str) -> None:
    config = tiny_config(architecture, tie_word_embeddings=False)
    tensors = random_tensors(config)
    del config["tie_word_embeddings"], tensors["lm_head.weight"]
    if architecture in TIED:
        model, params = load(config, tensors)
        assert model.spec.tied_head
        assert "head.weight" not in params
    else:
        with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings"):
            load(config, tensors)


def test_tied_model_may_carry_its_head_twice() -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    load(config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


def test_missing_tensors_are_listed() -> None:
    tensors = random_tensors(tiny_config())
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    with pytest.raises(ModelLoadError, match=r"lacks 2 tensors.*model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"):
        load(tiny_config(), tensors)


def test_unknown_tensors_are_listed() -> None:
    tensors = random_tensors(tiny_config(num_hidden_layers=3, attention_bias=True))
    with pytest.raises(ModelLoadError, match=r"tensors that this model does not use: .*self_attn\.k_proj\.bias"):
        load(tiny_config(), tensors)


def test_wrong_shape_is_an_error_with_both_shapes() -> None:
    tensors = random_tensors(tiny_config(intermediate_size=48))
    checkpoint = MemoryCheckpoint(tensors)
    with pytest.raises(ModelLoadError, match=r"mlp\.down_proj\.weight is \[32, 48\], the config needs \[32, 64\]"):
        load(tiny_config(), checkpoint)
    assert checkpoint.reads == []


def test_wrong_shape_of_a_transposed_source_is_shown_as_stored() -> None:
    tensors = random_tensors(tiny_config("GPT2LMHeadModel"))
    tensors["transformer.h.0.attn.c_attn.weight"] = tensors["transformer.h.0.attn.c_attn.weight"].T.copy()
    with pytest.raises(ModelLoadError, match=r"c_attn\.weight is \[96, 32\], the config needs \[32, 96\]"):
        load(tiny_config("GPT2LMHeadModel"), tensors)


def test_quantized_tensors_are_refused() -> None:
    tensors = random_tensors(tiny_config())
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((32, 64), np.int8)
    with pytest.raises(ModelLoadError, match="int8; quantized checkpoints"):
        load(tiny_config(), tensors)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_values_are_rounded_to_the_dtype(dtype: Any) -> None:
    tensors = random_tensors(tiny_config())
    _, params = load(tiny_config(), tensors, dtype=dtype)
    np.testing.assert_array_equal(params["final_norm.weight"], tensors["model.norm.weight"].astype(dtype))
    np.testing.assert_array_equal(params["layers.0.mlp.gate_up"][0, 0], tensors["model.layers.0.mlp.gate_proj.weight"].astype(dtype))


def test_bfloat16_checkpoint_loads_exactly_into_float32() -> None:
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in random_tensors(tiny_config()).items()}
    _, params = load(tiny_config(), tensors)
    np.testing.assert_array_equal(params["embed.weight"], tensors["model.embed_tokens.weight"].astype(np.float32))


def test_weights_beyond_float16_are_refused_not_made_infinite() -> None:
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in random_tensors(tiny_config()).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = 1e5
    load(tiny_config(), tensors, dtype="bfloat16")
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.down holds values that float16 cannot hold"):
        load(tiny_config(), tensors, dtype="float16")


def test_each_tensor_is_read_once_and_four_parameters_at_a_time_come_in_order() -> None:
    config = tiny_config()
    model = define_model(config, dtype="float32")
    checkpoint = MemoryCheckpoint(random_tensors(config))
    tensors = [len(list(model.rules.recipes[name][0].tensors())) for name in model.names]
    placed, others_came = list[str](), Event()

    def place(name: str, array: Any) -> str:
        assert name != model.names[0] or others_came.wait(60)
        assert len(checkpoint.reads) <= sum(tensors[: len(placed) + 4])
        placed.append(name)
        if len(placed) == 3:
            others_came.set()
        return name

    assert load_params(model, checkpoint, place) == list(model.names)
    assert placed[0] != model.names[0]
    assert sorted(checkpoint.reads) == sorted(checkpoint.tensors)


def test_unchanged_parameter_is_a_view_of_the_file(tmp_path: Path) -> None:
    model = define_model(tiny_config(), dtype="float32")
    params = dict(
        load_params(model, open_checkpoint(write_model(tmp_path)), lambda name, array: (name, array))  # type: ignore[arg-type]
    )
    assert not params["layers.0.mlp.down"].flags.owndata


def test_cpu_devices_take_over_what_was_fused_and_what_lies_badly_is_copied_once() -> None:
    model, placement = define_model(tiny_config(), dtype="float32"), Placement(make_mesh(1))
    addresses = {}

    def place(name: str, array: np.ndarray) -> None:
        addresses[name] = (array.ctypes.data, placement.put(array, model.axes[name]).unsafe_buffer_pointer())

    load_params(model, MemoryCheckpoint(random_tensors(tiny_config())), place)
    for part in ("attention.qkv", "mlp.gate_up"):
        made, held = addresses[f"layers.1.{part}"]
        assert made == held
    badly = np.frombuffer(np.arange(65, dtype=np.float32).tobytes(), np.float32, 64, 4)
    badly = badly if badly.ctypes.data % 64 else badly[1:]
    held = placement.put(badly)
    np.testing.assert_array_equal(held, badly)
    assert held.unsafe_buffer_pointer() % 64 == 0


# --------------------------------------------------------------------------- experts


def _expert_tensors(layout: str) -> dict[str, np.ndarray]:
    """A Qwen3-MoE checkpoint, with a tensor of its own for each matrix of an expert or with stacks."""
    tensors = CASES["qwen3_moe"].tensors()
    if layout == "stacked":
        for at in {name.split("experts.")[0] for name in tensors if "experts." in name}:
            each = [{n: tensors.pop(f"{at}experts.{e}.{n}_proj.weight") for n in ("gate", "up", "down")} for e in range(8)]
            tensors[f"{at}experts.gate_up_proj"] = np.stack([np.concatenate([e["gate"], e["up"]]) for e in each])
            tensors[f"{at}experts.down_proj"] = np.stack([e["down"] for e in each])
    return tensors


def test_both_layouts_of_experts_are_the_same_model() -> None:
    model = define_model(CASES["qwen3_moe"].config, dtype="float32", tensor_parallel_size=2)
    own, stacked = (
        load_params(model, MemoryCheckpoint(_expert_tensors(layout)), lambda name, array: np.asarray(array))
        for layout in ("own", "stacked")
    )
    for name, a, b in zip(model.names, own, stacked, strict=True):
        assert a.shape == model.shapes[name].shape
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_a_device_s_share_of_experts_is_read_without_the_others() -> None:
    model = define_model(CASES["qwen3_moe"].config, dtype="float32", tensor_parallel_size=2)
    checkpoint = MemoryCheckpoint(_expert_tensors("own"))
    params = dict(zip(model.names, load_params(model, checkpoint, lambda name, array: array), strict=True))
    checkpoint.reads.clear()
    # Of each of the two experts, the second half of gate and up.
    share = params["layers.1.mlp.experts.gate_up"][(slice(2, 4), slice(1, 2), slice(None), slice(None))]
    assert {read.split("experts.")[1].split(".")[0] for read in checkpoint.reads} == {"2", "3"}
    assert share.shape == (2, 1, 32, 24)
    at = "model.layers.1.mlp.experts.3."
    np.testing.assert_array_equal(share[1, 0, :, 12:], checkpoint.read(f"{at}up_proj.weight")[12:].T)


def test_a_missing_expert_is_named() -> None:
    tensors = _expert_tensors("own")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors of this model: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        load_params(define_model(CASES["qwen3_moe"].config, dtype="float32"), MemoryCheckpoint(tensors), lambda name, array: array)
