"""Kernels run where there is one for the weight; what they refuse goes through XLA, said once."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.quantized_linear import QuantizedProduct, choose_product
from pallas_kernels.quantized_matmul import reference
from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

X = jnp.ones((2, 256), jnp.bfloat16)
GROUPS = QuantizedWeight(jnp.full((8, 256), 3, "int8"), jnp.full((2, 8), 0.5))
OUTPUTS = QuantizedWeight(jnp.full((8, 256), 3, "int8"), jnp.full((1, 8), 0.5))


def test_groups_run_in_the_kernel_and_scales_of_outputs_through_xla():
    seen = []

    def kernel(x, weight, *, activations):
        seen.append((weight.group, activations))
        return x[:, :8]

    product = QuantizedProduct(kernel)
    product(X, GROUPS, activations="int8")
    np.testing.assert_array_equal(product(X, OUTPUTS), reference.matmul(X, OUTPUTS))
    assert seen == [(128, "int8")]


def test_what_the_kernel_refuses_goes_through_xla_and_is_said_once(caplog):
    def kernel(x, weight, *, activations):
        raise UnsupportedShapeError("such a shape is not supported")

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(QuantizedProduct(kernel)(X, GROUPS), reference.matmul(X, GROUPS))
    assert [r.message for r in caplog.records] == ["a quantized product runs through XLA: such a shape is not supported"]


def test_many_rows_go_through_xla_where_the_kernel_is_for_few():
    product = QuantizedProduct(lambda x, weight, activations: x[:, :8], max_rows=1)
    np.testing.assert_array_equal(product(X, GROUPS), reference.matmul(X, GROUPS))
    np.testing.assert_array_equal(product(X[:1], GROUPS), X[:1, :8])


NEWER_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="an older Mosaic GPU")


@pytest.mark.parametrize(
    ("platform", "kind", "num_in", "num_out"),
    [
        ("tpu", "TPU v6 lite", 2880, 64),  # gpt-oss
        pytest.param("gpu", "NVIDIA H100 80GB HBM3", 2880, 64, marks=NEWER_JAX),
        pytest.param("gpu", "NVIDIA H100 80GB HBM3", 256, 360, marks=NEWER_JAX),  # an eighth of gpt-oss
        pytest.param("gpu", "NVIDIA B200", 256, 2368, marks=NEWER_JAX),  # an eighth of Qwen2-7B's 18,944
    ],
)
def test_shares_that_are_no_whole_tiles_are_right_through_xla(platform, kind, num_in, num_out, caplog):
    rng = np.random.default_rng(0)
    weight = QuantizedWeight(
        jnp.asarray(rng.integers(-8, 8, (num_out, num_in)), "int4"),
        jnp.asarray(rng.uniform(0.5, 1.5, (num_in // 32, num_out)), jnp.float32),
        jnp.asarray(rng.integers(-8, 8, (num_in // 32, num_out)), jnp.float32),
    )
    x = jnp.asarray(rng.normal(size=(3, num_in)), jnp.bfloat16)
    with caplog.at_level(logging.WARNING):
        got = np.asarray(choose_product(platform, kind)(x, weight), np.float32)
    expected = np.asarray(reference.matmul(x, weight), np.float32)
    np.testing.assert_allclose(got, expected, atol=0.005 * np.abs(expected).max(), rtol=0.01)
    assert any("runs through XLA" in r.message and str(num_out if num_in == 256 else num_in) in r.message for r in caplog.records)


@pytest.mark.parametrize(
    ("platform", "kind", "has_kernel"),
    [
        ("tpu", "TPU v6 lite", True),
        pytest.param("gpu", "NVIDIA H200", True, marks=NEWER_JAX),
        pytest.param("gpu", "NVIDIA B200", True, marks=NEWER_JAX),
        ("gpu", "NVIDIA A100-SXM4-80GB", False),
        ("cpu", "", False),
    ],
)
def test_the_product_follows_the_device(platform, kind, has_kernel):
    assert (choose_product(platform, kind).kernel is not None) == has_kernel
