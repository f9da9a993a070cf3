"""Opening safetensors directories: what is read, and which broken ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.errors import ModelLoadError
from jaxllm.weights.hf import open_checkpoint
from tests.checkpoints import random_tensors, tiny_config, write_model

INDEX = "model.safetensors.index.json"


def write_raw(path: Path, dtype: str, shape: list[int], data: bytes) -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_tensors_are_read_as_written(num_shards: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, num_shards=num_shards))
    expected = random_tensors(tiny_config())
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tensor.shape
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", ml_dtypes.bfloat16), ("F16", np.float16), ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)],
)
def test_short_floats_are_viewed_without_conversion(name: str, dtype: type, tmp_path: Path) -> None:
    values = np.array([[1.0, -2.0], [0.5, 3.0]]).astype(dtype)
    write_raw(tmp_path / "model.safetensors", name, [2, 2], values.tobytes())
    read = open_checkpoint(tmp_path).read("w")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read.astype(np.float32), values.astype(np.float32))


def test_shards_without_an_index_are_found(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=2)
    (tmp_path / INDEX).unlink()
    assert set(open_checkpoint(tmp_path).names()) == set(random_tensors(tiny_config()))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors"):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named_without_an_index_too(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=3)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00003-of-00003\.safetensors"):
        open_checkpoint(tmp_path)


def test_stale_index_beside_a_single_file_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002\.safetensors; if model\.safetensors is complete, delete"):
        open_checkpoint(tmp_path)


def test_index_that_places_a_tensor_wrongly_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="index is stale"):
        open_checkpoint(tmp_path)


def test_tensor_that_the_index_forgets_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"does not list .*model\.norm\.weight"):
        open_checkpoint(tmp_path)


def test_broken_index_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=2)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ModelLoadError, match="not a safetensors index"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_cut_off_file_is_named(keep: int, tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_directory_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"no \.safetensors files.*pytorch_model\.bin"):
        open_checkpoint(tmp_path)


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", "F4", [2], b"\0")
    with pytest.raises(ModelLoadError, match="dtype F4"):
        open_checkpoint(tmp_path)


def test_mistral_copy_of_the_weights_is_left_out(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=2)
    (tmp_path / INDEX).unlink()
    save_file({"layers.0.attention.wq.weight": np.zeros(2, np.float32)}, tmp_path / "consolidated.safetensors")
    assert "layers.0.attention.wq.weight" not in set(open_checkpoint(tmp_path).names())
