"""Kernels run where there is one for the weight; what they refuse goes through XLA, said once."""

import logging

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


@pytest.mark.parametrize(("platform", "has_kernel"), [("tpu", True), ("cpu", False)])
def test_the_product_follows_the_platform(platform, has_kernel):
    assert (choose_product(platform, "TPU v6 lite").kernel is not None) == has_kernel
