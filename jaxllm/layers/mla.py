"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434): keys and values of all heads come out of one small latent.

Only the latent and one rotated key are kept of each position. The projections that would make keys and values of it are absorbed into
the query and into the output, so that attention runs on the latent itself, which is key and value of all heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.attention import Attend, Where
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.layers.rope import rotate
from jaxllm.ops.linear import linear
from jaxllm.specs import MLASpec


class MLA(nnx.Module):
    """For L latent, N unrotated and D' rotated dims: `q` [H, N + D', M] (or `q_down` [Q, M] and `q` [H, N + D', Q]), `kv_down`
    [L + D', M], `key_up` [H, N, L], `value_up` [H, V, L], `out` [M, H V].
    """

    def __init__(self, spec: MLASpec, width: int, dtype: DTypeLike):
        heads, latent = spec.num_heads, spec.latent_dim
        self.spec = spec
        self.q_down = param((spec.q_latent_dim, width), (None, "embed"), dtype) if spec.q_latent_dim else None
        self.q_norm = Norm(spec.norm, spec.q_latent_dim, dtype) if spec.q_latent_dim else None
        self.q = param((heads, spec.nope_dim + spec.rope_dim, spec.q_latent_dim or width), ("heads", None, None), dtype)
        self.kv_down = param((latent + spec.rope_dim, width), (None, "embed"), dtype)
        self.kv_norm = Norm(spec.norm, latent, dtype)
        self.key_up = param((heads, spec.nope_dim, latent), ("heads", None, None), dtype)
        self.value_up = param((heads, spec.value_dim, latent), ("heads", None, None), dtype)
        self.out = param((width, heads * spec.value_dim), ("embed", "heads"), dtype)

    def __call__(self, x: jax.Array, where: Where, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        spec = self.spec
        q_input = x if self.q_down is None or self.q_norm is None else self.q_norm(linear(x, self.q_down[...]))
        q = linear(q_input, self.q[...])
        # In the space of the latent, a query's score is its product with the latent itself.
        latent_q = jnp.einsum("thn,hnl->thl", q[..., : spec.nope_dim], self.key_up[...])
        kv = linear(x, self.kv_down[...])
        latent = self.kv_norm(kv[:, : spec.latent_dim])
        assert where.rotation is not None
        rotated_q, rotated_k = (
            rotate(part, where.rotation, interleaved=spec.rope.interleaved) for part in (q[..., spec.nope_dim :], kv[:, spec.latent_dim :])
        )
        queries = jnp.concatenate([latent_q, rotated_q], axis=-1)
        keys = jnp.concatenate([latent, rotated_k], axis=-1)[:, None]
        out, cache = attend(queries, keys, None, cache, spec.attend)
        values = jnp.einsum("thl,hvl->thv", out, self.value_up[...])
        return linear(values.reshape(len(values), -1), self.out[...]), cache
