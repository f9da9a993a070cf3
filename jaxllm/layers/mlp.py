"""The feed-forward layer, gated or plain, and the activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.param import param
from jaxllm.ops.linear import linear
from jaxllm.specs import Activation, MLPSpec

# Those without parameters.
ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


class XIELU(nnx.Module):
    """An activation with learned curvatures of its two sides (Huang and Schlag, 2024, arXiv:2411.13010)."""

    def __init__(self, dtype: DTypeLike):
        self.alpha_p, self.alpha_n = param((1,), (None,), dtype), param((1,), (None,), dtype)
        self.beta, self.eps = param((), (), dtype), param((), (), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        beta = self.beta[...]
        positive = jax.nn.softplus(self.alpha_p[...]) * x * x
        negative = (beta + jax.nn.softplus(self.alpha_n[...])) * (jnp.expm1(jnp.minimum(x, self.eps[...])) - x)
        return jnp.where(x > 0, positive, negative) + beta * x


def gated(spec: MLPSpec, act: Callable[[jax.Array], jax.Array] | None = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """What becomes of gate and up; `act` is the activation where it has parameters."""
    act = act or ACTIVATIONS[spec.activation]

    def combine(gate: jax.Array, up: jax.Array) -> jax.Array:
        if spec.gate_scale != 1.0:
            gate = gate * jnp.asarray(spec.gate_scale, gate.dtype)
        if spec.limit is None:
            return act(gate) * up
        return act(jnp.minimum(gate, spec.limit)) * (jnp.clip(up, -spec.limit, spec.limit) + 1)

    return combine


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
        self.act = XIELU(dtype) if spec.activation == "xielu" else None
        self.down = param((width, spec.width), ("embed", "mlp"), dtype)
        self.down_bias = param((width,), ("embed",), dtype) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, M] to [T, M]."""
        act = self.act or ACTIVATIONS[self.spec.activation]
        if self.spec.gated:
            both = linear(x, self.gate_up[...], None if self.gate_up_bias is None else self.gate_up_bias[...])
            hidden = gated(self.spec, act)(both[:, :, 0], both[:, :, 1]).reshape(-1, self.spec.width)
        else:
            hidden = act(linear(x, self.up[...], None if self.up_bias is None else self.up_bias[...]))
        out = linear(hidden, self.down[...], None if self.down_bias is None else self.down_bias[...])
        return out if self.spec.out_scale == 1.0 else out * jnp.asarray(self.spec.out_scale, out.dtype)
