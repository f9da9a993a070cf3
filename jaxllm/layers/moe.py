"""A feed-forward of experts: the router, the routed experts and the shared one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.mlp import ACTIVATIONS, MLP, gated
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.ops.linear import linear
from jaxllm.ops.moe import ExpertWeights, Routing, RunExperts, route
from jaxllm.specs import MLPSpec, MoESpec


class Experts(nnx.Module):
    """E MLPs, stacked: `gate_up` [E, N, M, 2 * F / N] for N groups (1 for 2 where not gated), `down` [E, F, M]; biases without the inputs.

    Inputs lie before outputs, unlike in other layers: in the other order TPUs transpose a copy of all experts in every step.
    """

    def __init__(self, num_experts: int, spec: MLPSpec, width: int, dtype: DTypeLike):
        grouped = (num_experts, spec.groups, 1 + spec.gated, spec.width // spec.groups)
        both = grouped[2] * grouped[3]
        self.gate_up = param((num_experts, spec.groups, width, both), ("experts", "mlp", "embed", None), dtype)
        self.gate_up_bias = param(grouped, ("experts", "mlp", None, None), dtype) if spec.bias else None
        self.down = param((num_experts, spec.width, width), ("experts", "mlp", "embed"), dtype)
        self.down_bias = param((num_experts, width), ("experts", "embed"), dtype) if spec.bias else None

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up[...], None if self.gate_up_bias is None else self.gate_up_bias[...], self.down[...])


class MoE(nnx.Module):
    """`router` [E, M], its bias and the correction [E] of the choice in float32: a rounded score sends a token to another expert. So is
    `expert_scale` [E].
    """

    def __init__(self, spec: MoESpec, width: int, dtype: DTypeLike):
        num_experts = spec.router.num_experts
        self.spec = spec
        self.router = param((num_experts, width), (None, "embed"), jnp.float32)
        self.router_bias = param((num_experts,), (None,), jnp.float32) if spec.router.bias else None
        self.correction = param((num_experts,), (None,), jnp.float32) if spec.router.correction else None
        self.expert_scale = param((num_experts,), (None,), jnp.float32) if spec.router.expert_scale else None
        self.experts = Experts(num_experts, spec.expert, width, dtype)
        self.shared = MLP(spec.shared, width, dtype) if spec.shared else None
        self.shared_gate = param((1, width), (None, "embed"), dtype) if spec.shared_gate else None

        def norm() -> Norm | None:
            return Norm(spec.norm, width, dtype, "embed") if spec.norm else None

        self.router_norm, self.experts_norm, self.experts_post_norm = norm(), norm(), norm()
        self.shared_norm, self.shared_post_norm = norm(), norm()

    def __call__(self, x: jax.Array, run_experts: RunExperts) -> jax.Array:
        """x [T, M] to [T, M]."""
        routing = self._route(x)
        expert = self.spec.expert
        gate = gated(expert) if expert.gated else ACTIVATIONS[expert.activation]
        before = x if self.experts_norm is None else self.experts_norm(x)
        out = run_experts(before, routing, self.experts.weights(), gate, weigh_inputs=self.spec.weigh_inputs)
        if self.experts.down_bias is not None:
            out = out + jnp.einsum("tk,tkm->tm", routing.weights, self.experts.down_bias[...][routing.experts]).astype(out.dtype)
        out = out if self.experts_post_norm is None else self.experts_post_norm(out)
        if self.shared is not None:
            shared = self.shared(x if self.shared_norm is None else self.shared_norm(x))
            shared = shared if self.shared_post_norm is None else self.shared_post_norm(shared)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(linear(x, self.shared_gate[...]))
            out = out + shared
        return out

    def _route(self, x: jax.Array) -> Routing:
        if self.router_norm is not None:
            x = self.router_norm(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        logits = jnp.einsum("tm,em->te", x.astype(jnp.float32), self.router[...], precision="highest")
        if self.router_bias is not None:
            logits = logits + self.router_bias[...]
        routing = route(logits, self.spec.router, None if self.correction is None else self.correction[...])
        if self.expert_scale is None:
            return routing
        return routing._replace(weights=routing.weights * self.expert_scale[...][routing.experts])
