"""GGUF tensors and configs: what the Hugging Face checkpoint of the same model holds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from jaxllm.config import ModelConfig
from jaxllm.errors import ModelLoadError
from jaxllm.weights.download import resolve_model
from jaxllm.weights.gguf import open_gguf
from jaxllm.weights.gguf_config import config_from_gguf, generation_config_from_gguf
from jaxllm.weights.gguf_file import read_gguf
from tests.weights.gguf_files import HEAD_DIM, KV_HEADS, VOCAB, WIDTH, gguf_name, hf_tensors, write_gguf

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]


def config_of(path):
    return config_from_gguf(read_gguf(path))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_those_of_the_hugging_face_checkpoint(tmp_path, architecture, tied):
    tensors = hf_tensors(architecture, tied=tied)
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", architecture, tensors))

    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tensor.shape
        assert checkpoint.dtype(name) == np.float32
        np.testing.assert_allclose(checkpoint.read(name), tensor, atol=2e-7 if architecture == "gemma3" and "norm" in name else 0)


@pytest.mark.parametrize(
    ("stored", "dtype", "error"),
    [
        ("F16", np.float16, 2e-3), ("BF16", ml_dtypes.bfloat16, 1.6e-2), ("Q8_0", np.float32, 2e-2),
        ("Q5_0", np.float32, 0.2), ("Q5_1", np.float32, 0.15), ("Q4_0", np.float32, 0.4), ("Q4_1", np.float32, 0.3),
    ],
)  # fmt: skip
def test_stored_types_come_back(tmp_path, stored, dtype, error):
    tensors = hf_tensors("llama")
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", "llama", tensors, stored=stored))

    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == checkpoint.dtype(name) == (dtype if tensor.ndim > 1 else np.float32)
        np.testing.assert_allclose(read.astype(np.float32), tensor, atol=error if tensor.ndim > 1 else 0)


def test_tensors_larger_than_a_thread_takes_at_once_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.weights.gguf._CHUNK", 1000)
    tensors = hf_tensors("qwen2")
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", "qwen2", tensors, stored="Q8_0"))
    embedding = tensors["model.embed_tokens.weight"]

    expected = dequantize(quantize(embedding, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight"), expected)


def _scales_and_minima(packed):
    """The 8 six-bit scales and minima of a Q4_K or Q5_K block of 256, out of their 12 bytes."""
    scales, minima = [], []
    for i in range(8):
        if i < 4:
            scales.append(packed[i] & 63)
            minima.append(packed[i + 4] & 63)
        else:
            scales.append((packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4))
            minima.append((packed[i + 4] >> 4) | (packed[i] >> 6 << 4))
    return scales, minima


def _scalar_block(kind, block):
    """One block of 256 by the definition of the format, value by value."""
    block = [int(byte) for byte in block]

    def half(at):
        return float(np.array(block[at : at + 2], np.uint8).view(np.float16)[0])

    values = []
    if kind == "Q6_K":
        low, high, scales = block[:128], block[128:192], np.array(block[192:208], np.uint8).view(np.int8)
        for i in range(256):
            part, at = divmod(i, 128)
            quarter, lane = divmod(at, 32)
            nibble = low[part * 64 + (quarter % 2) * 32 + lane] >> (4 * (quarter // 2)) & 15
            upper = high[part * 32 + lane] >> (2 * quarter) & 3
            values.append(half(208) * float(scales[i // 16]) * ((nibble | upper << 4) - 32))
        return values
    scales, minima = _scales_and_minima(block[4:16])
    fifth, low = (block[16:48], block[48:]) if kind == "Q5_K" else (None, block[16:])
    for i in range(256):
        group, lane = divmod(i, 32)
        quant = low[group // 2 * 32 + lane] >> (4 * (group % 2)) & 15
        if fifth is not None:
            quant |= (fifth[lane] >> group & 1) << 4
        values.append(half(0) * scales[group] * quant - half(2) * minima[group])
    return values


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_follow_the_definition_of_the_format(kind):
    rng = np.random.default_rng(1)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (3, size), np.uint8)
    halves = [208] if kind == "Q6_K" else [0, 2]
    for at in halves:
        blocks[:, at : at + 2] = rng.uniform(0.01, 1, (3, 1)).astype(np.float16).view(np.uint8)

    expanded = dequantize(blocks, GGMLQuantizationType[kind])

    np.testing.assert_allclose(expanded, [_scalar_block(kind, block) for block in blocks], rtol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read(tmp_path, kind):
    stored = GGMLQuantizationType[kind]
    values, size = GGML_QUANT_SIZES[stored]
    blocks = np.random.default_rng(2).integers(0, 60, (6, 2 * size), np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    checkpoint = open_gguf(tmp_path / "m.gguf")

    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.shape(name) == (6, 2 * values)
    np.testing.assert_array_equal(checkpoint.read(name), dequantize(blocks, stored))


def test_a_tensor_that_is_not_known_keeps_its_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra_tensors={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})

    assert "blk.0.attn_sinks.weight" in set(open_gguf(path).names())


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()

    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelLoadError, match="cut off"):
        open_gguf(path)
    path.write_bytes(whole[:500])
    with pytest.raises(ModelLoadError, match="cut off"):
        open_gguf(path)


def test_the_parts_of_a_split_model_are_one_checkpoint(tmp_path):
    tensors = hf_tensors("llama")
    names = sorted(tensors)
    for part, chosen in enumerate([names[::2], names[1::2]]):
        some = {name: tensors[name] for name in chosen}
        split = {"split.count": 2, "split.no": part}
        write_gguf(tmp_path / f"m-{part + 1:05d}-of-00002.gguf", "llama", some, metadata=split)
    first = tmp_path / "m-00001-of-00002.gguf"

    checkpoint = open_gguf(first)
    assert sorted(checkpoint.names()) == names
    for name in names:
        np.testing.assert_array_equal(checkpoint.read(name), tensors[name])
    assert resolve_model(ModelConfig(model=str(tmp_path))).path == first
    with pytest.raises(ModelLoadError, match=r"one of 2 parts of a model; name the first"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf cannot be read: .*No such file"):
        open_gguf(first)


def test_files_that_are_no_gguf_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" * 10)
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ModelLoadError, match="version 1"):
        read_gguf(path)


def test_a_storage_type_that_is_not_supported_is_named(tmp_path):
    tensors = hf_tensors("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, stored="F32")
    data = bytearray(path.read_bytes())
    name = gguf_name("model.layers.1.mlp.up_proj.weight", "llama").encode()
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = (10).to_bytes(4, "little")
    path.write_bytes(data)

    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight is stored as Q2_K; supported: F32, F16"):
        open_gguf(path)


# ---------------------------------------------------------------- config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_config_is_the_hugging_face_one(tmp_path, architecture):
    config = config_of(write_gguf(tmp_path / "m.gguf", architecture))

    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
    assert config["architectures"] == [names[architecture]]
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (WIDTH, KV_HEADS, HEAD_DIM)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCAB, 128)
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == (1e6 if architecture == "gemma3" else 1e4)
    assert "rope_scaling" not in config


def test_an_untied_head_and_biases_are_seen(tmp_path):
    tensors = hf_tensors("llama", tied=False)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(WIDTH, np.float32)
    config = config_of(write_gguf(tmp_path / "m.gguf", "llama", tensors))

    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_gemma3_layers_alternate(tmp_path):
    config = config_of(write_gguf(tmp_path / "m.gguf", "gemma3", metadata={"gemma3.block_count": 7}))

    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["rope_local_base_freq"], config["query_pre_attn_scalar"]) == (16, 1e4, HEAD_DIM)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rotary_scaling_is_read(tmp_path, metadata, scaling):
    assert config_of(write_gguf(tmp_path / "m.gguf", metadata=metadata)).get("rope_scaling") == scaling


def test_factors_per_frequency_are_read_and_are_no_weight(tmp_path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": factors})

    scaling = config_of(path)["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["attention_factor"] == 1.0
    np.testing.assert_array_equal(scaling["short_factor"], factors)
    assert scaling["long_factor"] == scaling["short_factor"]
    assert "rope_freqs.weight" not in set(open_gguf(path).names())


@pytest.mark.parametrize(
    ("architecture", "metadata", "complaint"),
    [
        ("bert", {}, "architecture 'bert' is not supported; supported: gemma3, llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "8 experts"),
        ("llama", {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not supported"),
        ("llama", {"llama.rope.dimension_count": 8}, "rotary part"),
        ("llama", {"llama.context_length": None}, "no metadata key llama.context_length"),
        ("llama", {"llama.feed_forward_length": [128, 64]}, "differs between layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, architecture, metadata, complaint):
    tensors = hf_tensors("llama")

    with pytest.raises(ModelLoadError, match=complaint):
        config_of(write_gguf(tmp_path / "m.gguf", architecture, tensors, metadata=metadata))


def test_generation_defaults_are_read(tmp_path):
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "tokenizer.ggml.eot_token_id": 7}
    file = read_gguf(write_gguf(tmp_path / "m.gguf", metadata=metadata))

    assert generation_config_from_gguf(file.metadata) == {"temperature": 0.5, "top_k": 40, "eos_token_id": [0, 7]}


def test_the_reader_agrees_with_the_gguf_package(tmp_path):
    from gguf import GGUFReader

    path = write_gguf(tmp_path / "m.gguf", stored="Q8_0")
    ours, theirs = read_gguf(path), GGUFReader(path)

    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset, mine.type_id) == (tensor.data_offset, tensor.tensor_type)
        assert mine.shape == tuple(reversed([int(size) for size in tensor.shape]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_loads_alike_from_either_format(tmp_path, architecture):
    from safetensors.numpy import save_file

    from jaxllm.models.build import define_model
    from jaxllm.weights.hf import open_checkpoint
    from jaxllm.weights.rules import load_params

    tensors = hf_tensors(architecture)
    save_file(tensors, tmp_path / "model.safetensors")
    path = write_gguf(tmp_path / "m.gguf", architecture, tensors)
    model = define_model(config_of(path), dtype="float32", tensor_parallel_size=1)

    from_gguf = load_params(model, open_gguf(path), lambda name, array: array)
    from_safetensors = load_params(model, open_checkpoint(tmp_path), lambda name, array: array)

    for name, one, other in zip(model.names, from_gguf, from_safetensors, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-7, err_msg=name)
