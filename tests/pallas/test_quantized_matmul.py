"""Products with quantized weights: the TPU kernel, interpreted, and plain XLA, against the definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.devices import DEVICES
from pallas_kernels.quantized_matmul import reference, tpu, xla
from pallas_kernels.quantized_matmul.tuning import Blocks, choose_blocks, input_blocks
from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

FORMATS = {
    "int8, outputs": ("int8", None, False, None),
    "int8, outputs, int8 rows": ("int8", None, False, "int8"),
    "fp8, outputs": ("float8_e4m3fn", None, False, None),
    "fp8, outputs, fp8 rows": ("float8_e4m3fn", None, False, "float8_e4m3fn"),
    "int8, blocks, int8 rows": ("int8", 128, False, "int8"),
    "fp8, blocks": ("float8_e4m3fn", 128, False, None),
    "fp8, blocks, fp8 rows": ("float8_e4m3fn", 128, False, "float8_e4m3fn"),
    "int4, groups of 32": ("int4", 32, True, None),
    "int4, groups of 64": ("int4", 64, True, None),
    "int4, groups of 128": ("int4", 128, True, None),
    "int4, groups of 256": ("int4", 256, False, None),
}
GROUPED = {name: format for name, format in FORMATS.items() if format[1]}


def make(values, group, zeros, *, rows, num_in=512, num_out=200):
    rng = np.random.default_rng(rows)
    top = {"int4": 7, "int8": 127, "float8_e4m3fn": 400}[values]
    numbers = rng.integers(-top, top + 1, (num_out, num_in))
    groups = num_in // (group or num_in)
    weight = QuantizedWeight(
        jnp.asarray(numbers, jnp.float32).astype(values),
        jnp.asarray(rng.uniform(0.5, 1.5, (groups, num_out)) / top, jnp.float32),
        jnp.asarray(rng.integers(-top, top, (groups, num_out)), jnp.float32) if zeros else None,
    )
    return jnp.asarray(rng.normal(size=(rows, num_in)), jnp.bfloat16), weight


def assert_close(got, x, weight, activations):
    expected = np.asarray(reference.matmul(x, weight, activations=activations), np.float32)
    assert got.dtype == x.dtype
    # A bfloat16 weight is off by up to 1/512 of itself, and so is the result.
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.004 * np.abs(expected).max(), rtol=0.01)


@pytest.mark.parametrize("rows", [1, 17, 100])
@pytest.mark.parametrize("name", GROUPED)
def test_the_kernel_equals_the_definition(name, rows):
    values, group, zeros, activations = FORMATS[name]
    x, weight = make(values, group, zeros, rows=rows)
    # Blocks that the outputs and the rows are no multiple of, and several of inputs.
    got = tpu.matmul(x, weight, activations=activations, blocks=Blocks(32, 128, 256), interpret=True)
    assert_close(got, x, weight, activations)


@pytest.mark.parametrize("name", FORMATS)
def test_plain_xla_equals_the_definition(name):
    values, group, zeros, activations = FORMATS[name]
    x, weight = make(values, group, zeros, rows=5)
    assert_close(jax.jit(xla.matmul, static_argnames="activations")(x, weight, activations=activations), x, weight, activations)


@pytest.mark.parametrize("rows", [8, 80])
def test_transfers_and_computation_do_not_race(rows):
    x, weight = make("int8", 128, True, rows=rows, num_in=256, num_out=256)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    got = tpu.matmul(x, weight, blocks=Blocks(16, 128, 128), interpret=params)
    assert_close(jax.block_until_ready(got), x, weight, None)


def test_scales_of_square_blocks_repeat_over_their_outputs():
    scales = jnp.arange(6.0).reshape(3, 2) + 1
    weight = QuantizedWeight.of_blocks(jnp.ones((300, 256), "int8"), scales)
    wide = np.asarray(weight.dequantized())
    assert wide[127, 127] == 1
    assert wide[128, 127] == 3
    assert wide[299, 128] == 6


@pytest.mark.parametrize("name", GROUPED)
def test_blocks_fit_every_tpu_and_divide_the_inputs(name):
    values, group, zeros, activations = GROUPED[name]
    sizes = [(4096, 14336), (14336, 4096), (3584, 576), (18432, 7168)]
    tpus = [device for device in DEVICES.values() if device.platform == "tpu"]
    for (num_in, num_out), rows, device in itertools.product(sizes, (1, 64, 2048), tpus):
        tables = jax.ShapeDtypeStruct((num_in // group, num_out), jnp.float32)
        weight = QuantizedWeight(jax.ShapeDtypeStruct((num_out, num_in), values), tables, tables if zeros else None)
        shape = tpu.shape_of(jax.ShapeDtypeStruct((rows, num_in), jnp.bfloat16), weight, activations)
        blocks = choose_blocks(shape, device)
        assert blocks.vmem(shape) <= device.vmem_bytes // 2
        assert blocks.inputs in input_blocks(shape)
        assert blocks.rows % 16 == 0
        assert blocks.outputs % 128 == 0


@pytest.mark.parametrize(("num_in", "group"), [(576, 64), (384, 96), (512, None)])
def test_inputs_and_groups_that_are_not_whole_tiles_are_refused_with_what_fits(num_in, group):
    x, weight = make("int8", group, False, rows=1, num_in=num_in)
    with pytest.raises(
        UnsupportedShapeError, match=f"{num_in} quantized inputs in groups of {group or 512} .* of 128 inputs in groups of 32, 64"
    ):
        tpu.matmul(x, weight, device=DEVICES["v6e"], interpret=True)
