"""A learned bias of attention for the distance between query and key (T5: Raffel et al., 2020, arXiv:1910.10683)."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.param import param
from jaxllm.specs import RelativeSpec


def buckets(spec: RelativeSpec, *, causal: bool) -> np.ndarray:
    """[2 * max_distance + 1] the bucket of keys that lie -max_distance .. max_distance ahead of their query.

    Half of the buckets are for one distance each, the others for distances that grow logarithmically; without `causal`, keys ahead have
    half of all buckets.
    """
    ahead = np.arange(-spec.max_distance, spec.max_distance + 1)
    count = spec.num_buckets if causal else spec.num_buckets // 2
    distance = np.maximum(-ahead, 0) if causal else np.abs(ahead)
    exact = count // 2
    # In float32, as models were trained: where a bucket begins depends on rounding.
    growth = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact)) / np.float32(np.log(spec.max_distance / exact))
    large = np.minimum(exact + (growth * np.float32(count - exact)).astype(int), count - 1)
    found = np.where(distance < exact, distance, large)
    return found if causal else found + count * (ahead > 0)


class RelativeBias(nnx.Module):
    """`weight` [H, B] for B buckets."""

    def __init__(self, spec: RelativeSpec, num_heads: int, dtype: DTypeLike, *, causal: bool):
        self.spec, self.causal = spec, causal
        self.weight = param((num_heads, spec.num_buckets), ("heads", None), dtype)

    def __call__(self) -> jax.Array:
        """[H, 2 * n + 1] what is added to the scores of keys that lie -n .. n ahead of their query; beyond, it stays as it is there."""
        return self.weight[...][:, buckets(self.spec, causal=self.causal)]
