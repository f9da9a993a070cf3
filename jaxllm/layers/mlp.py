"""The feed-forward layer, gated or plain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.param import param
from jaxllm.ops.linear import linear
from jaxllm.specs import Activation, MLPSpec

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """`gate_up` [N, 2, F / N, M] for N groups (or `up` [F, M] where not gated), `down` [M, F]."""

    def __init__(self, spec: MLPSpec, width: int, dtype: DTypeLike):
        self.spec = spec
        if spec.gated:
            grouped = (spec.groups, 2, spec.width // spec.groups)
            self.gate_up = param((*grouped, width), ("mlp", None, None, "embed"), dtype)
            self.gate_up_bias = param(grouped, ("mlp", None, None), dtype) if spec.bias else None
        else:
            self.up = param((spec.width, width), ("mlp", "embed"), dtype)
            self.up_bias = param((spec.width,), ("mlp",), dtype) if spec.bias else None
        self.down = param((width, spec.width), ("embed", "mlp"), dtype)
        self.down_bias = param((width,), ("embed",), dtype) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, M] to [T, M]."""
        act = ACTIVATIONS[self.spec.activation]
        if self.spec.gated:
            both = linear(x, self.gate_up[...], None if self.gate_up_bias is None else self.gate_up_bias[...])
            hidden = (act(both[:, :, 0]) * both[:, :, 1]).reshape(-1, self.spec.width)
        else:
            hidden = act(linear(x, self.up[...], None if self.up_bias is None else self.up_bias[...]))
        return linear(hidden, self.down[...], None if self.down_bias is None else self.down_bias[...])
