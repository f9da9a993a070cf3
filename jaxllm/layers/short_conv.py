"""A gated short convolution (LFM2)."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.param import param
from jaxllm.ops.linear import linear
from jaxllm.ops.recurrent import StateRows, causal_conv
from jaxllm.specs import ShortConvSpec


class ShortConv(nnx.Module):
    """`projection` [C, 3, M] to the gate of the input, the gate of the output, and the input; `conv` [C, W]; `out` [M, C]."""

    def __init__(self, spec: ShortConvSpec, width: int, dtype: DTypeLike):
        channels = spec.channels
        self.projection = param((channels, 3, width), ("mlp", None, "embed"), dtype)
        self.projection_bias = param((channels, 3), ("mlp", None), dtype) if spec.bias else None
        self.conv = param((channels, spec.conv_width), ("mlp", None), dtype)
        self.conv_bias = param((channels,), ("mlp",), dtype) if spec.bias else None
        self.out = param((width, channels), ("embed", "mlp"), dtype)
        self.out_bias = param((width,), ("embed",), dtype) if spec.bias else None

    def __call__(self, x: jax.Array, cache: Any, rows: StateRows) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        parts = linear(x, self.projection[...], None if self.projection_bias is None else self.projection_bias[...])
        bias = None if self.conv_bias is None else self.conv_bias[...]
        y, conv = causal_conv(parts[..., 0] * parts[..., 2], self.conv[...], bias, cache[0], rows)
        y = parts[..., 1] * y.astype(x.dtype)
        return linear(y, self.out[...], None if self.out_bias is None else self.out_bias[...]), (conv,)
