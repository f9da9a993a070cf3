"""Quantized tensors are read as the numbers that they stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.models.build import define_model
from jaxllm.weights.dequantize import dequantized
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint
from tests.golden.cases import CASES

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_mxfp4_blocks_and_scales_become_stacked_experts() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (2, 6, 64))  # experts, outputs, inputs
    scales = rng.integers(120, 134, (2, 6, 2)).astype(np.uint8)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(2, 6, 2, 16)
    other = np.ones(3, np.float32)
    checkpoint = dequantized(MemoryCheckpoint({"e.down_blocks": packed, "e.down_scales": scales, "norm": other}))

    signed = np.array([*VALUES, *(-v for v in VALUES)])
    want = signed[codes] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=-1)
    assert list(checkpoint.names()) == ["norm", "e.down"]
    assert (checkpoint.shape("e.down"), checkpoint.dtype("e.down").name) == ((2, 64, 6), "bfloat16")
    for expert in range(2):
        np.testing.assert_array_equal(checkpoint.read("e.down")[expert].astype(np.float64), want[expert].T)
    assert checkpoint.read("norm") is other


def test_fp8_squares_are_multiplied_by_their_scales() -> None:
    rng = np.random.default_rng(1)
    stored = rng.normal(size=(200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.1, 2.0, (2, 3)).astype(np.float32)
    checkpoint = dequantized(MemoryCheckpoint({"w": stored, "w_scale_inv": scales}))
    assert list(checkpoint.names()) == ["w"]
    assert checkpoint.dtype("w") == np.float32
    want = stored.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))[:200, :300]
    np.testing.assert_array_equal(checkpoint.read("w"), want)


@pytest.mark.parametrize(("shape", "scales"), [((2, 256, 128), (2, 2, 1)), ((256, 128), (256, 1)), ((256, 128), ())])
def test_fp8_of_stacks_and_with_other_scales_is_refused(shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    stored = np.ones(shape, ml_dtypes.float8_e4m3fn)
    with pytest.raises(ModelLoadError, match=r"w is .* FP8 is supported with one scale for each square of 128 rows and columns"):
        dequantized(MemoryCheckpoint({"w": stored, "w_scale_inv": np.ones(scales, np.float32)}))


def test_a_checkpoint_without_them_is_left_alone() -> None:
    checkpoint = MemoryCheckpoint({"a": np.ones(2), "x_blocks": np.ones(3)})
    assert dequantized(checkpoint) is checkpoint


def test_gpt_oss_loads_from_mxfp4_as_from_plain_tensors() -> None:
    rng = np.random.default_rng(2)
    model = define_model(CASES["gpt_oss"].config | {"intermediate_size": 32}, dtype="bfloat16")
    plain = {
        name: rng.normal(size=shape).astype(np.float32) for layouts in model.rules.recipes.values() for name, shape in layouts[-1].tensors()
    }
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        packed[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        packed[f"{name}_scales"] = rng.integers(120, 128, (experts, outputs, inputs // 32)).astype(np.uint8)
    checkpoint = dequantized(MemoryCheckpoint(packed))
    for name in plain:
        if name not in packed:
            plain[name] = np.stack([checkpoint.read(name)[e] for e in range(len(packed[f"{name}_blocks"]))])

    packed_params, params = (load_params(model, c, lambda name, array: np.asarray(array)) for c in (checkpoint, MemoryCheckpoint(plain)))
    for name, a, b in zip(model.names, packed_params, params, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
