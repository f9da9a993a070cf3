"""What a step must do at least, from shapes alone, and how long a device needs for it at best: its roofline (Williams et al., 2009).

Counted are the matrix products and the attention (FLOPs), and each weight and each cached position that is read or written once (bytes).
All figures are per device of a tensor-parallel group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxllm.models.build import ModelDef
from jaxllm.ops.attention import AttentionBackend
from jaxllm.runner.memory import page_bytes_of, shards_of
from jaxllm.runner.mesh import Placement
from jaxllm.specs import MoESpec, StateLayer
from pallas_kernels.devices import Device


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes of memory traffic, of a step on each device."""

    flops: float
    bytes: float

    def seconds(self, device: Device) -> float:
        """The shortest time in which a device can do it: products and memory traffic overlap."""
        return max(self.flops / device.bf16_flops, self.bytes / device.hbm_bytes_per_s)

    def bound(self, device: Device) -> str:
        """What limits it: "compute" or "memory"."""
        return "compute" if self.flops / device.bf16_flops > self.bytes / device.hbm_bytes_per_s else "memory"


@dataclass(frozen=True)
class Roofline:
    """The work of steps of one model.

    Attributes:
        layer_weights: elements of the matrices that a token is multiplied with. head: those of the output head, for sampled rows.
        weight_bytes: bytes of all parameters that a step reads, but for routed experts. expert_bytes: of those.
        expert_share: of the experts of a layer, that each token goes to.
        kv_bytes: bytes of one position in each layer.
    """

    model_def: ModelDef
    shards: int
    layer_weights: float
    head: float
    weight_bytes: float
    expert_bytes: float
    expert_share: float
    kv_bytes: tuple[float, ...]

    @classmethod
    def of(cls, model_def: ModelDef, backend: AttentionBackend, placement: Placement, page_size: int) -> Roofline:
        layer_weights = head = weight_bytes = expert_bytes = 0.0
        routers = [block.feed_forward.router for block in model_def.spec.blocks if isinstance(block.feed_forward, MoESpec)]
        expert_share = routers[0].top_k / routers[0].num_experts if routers else 1.0
        for name in model_def.names:
            abstract = model_def.shapes[name]
            size = math.prod(abstract.shape) / shards_of(model_def.axes[name], placement)
            if ".experts." in name:
                layer_weights += size * expert_share
                expert_bytes += size * np.dtype(abstract.dtype).itemsize
                continue
            is_head = name == ("embed.weight" if model_def.spec.tied_head else "head.weight")
            if is_head:
                head += size
            elif name.startswith(("embed.", "encoder.")):
                continue  # rows by token id: a few; and what runs before the first step
            elif len(abstract.shape) > 1 and not name.endswith("bias"):
                layer_weights += size
            weight_bytes += size * np.dtype(abstract.dtype).itemsize
        shards = placement.num_shards
        kv = tuple(
            page_bytes_of(model_def, backend, layer, page_size, shards) / (1 if isinstance(layer, StateLayer) else page_size)
            for layer in model_def.cache_layers
        )
        return cls(model_def, shards, layer_weights, head, weight_bytes, expert_bytes, expert_share, kv)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one position takes in the caches of all layers that grow with it, on each device."""
        layers = self.model_def.spec.cache_layers
        return sum(size for size, layer in zip(self.kv_bytes, layers, strict=True) if not isinstance(layer, StateLayer))

    def decode(self, batch: int, context: int) -> Work:
        """One token of each of `batch` requests that have `context` positions."""
        return self._work(tokens=batch, rows=batch, seen_of=lambda window: batch * min(context, window), reads=batch * context)

    def prefill(self, tokens: int) -> Work:
        """One chunk of a prompt, from its beginning."""
        return self._work(tokens=tokens, rows=1, seen_of=partial(_seen, 0, tokens), reads=0)

    def generation(self, requests: Sequence[tuple[int, int]], num_steps: int, num_cached_tokens: int) -> Work:
        """All of some requests, given by their numbers of prompt and output tokens, in so many steps.

        Cached prompt tokens are not computed (their share of attention is not subtracted).
        """
        flops = kv = 0.0
        computed = -num_cached_tokens
        for prompt, output in requests:
            # The last token is sampled and not computed.
            length = prompt + output - 1
            computed += length
            flops += self._mixing(length, 1, partial(_seen, 0, length), 0)[0] + 2 * output * self.head
            kv += self._mixing(output - 1, 1, partial(_seen, prompt, length), math.inf)[1]
        return Work(flops + 2 * computed * self.layer_weights, num_steps * self._weights_read(computed / num_steps) + kv)

    def _work(self, *, tokens: int, rows: int, seen_of: Callable[[float], float], reads: int) -> Work:
        flops, kv = self._mixing(tokens, rows, seen_of, reads)
        flops += 2 * tokens * self.layer_weights + 2 * rows * self.head
        return Work(flops, self._weights_read(tokens) + kv + rows * self.model_def.vocab_size * 4)

    def _weights_read(self, tokens: float) -> float:
        """By a step; of experts, as many as so many tokens meet if each chooses evenly."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)

    def _mixing(self, tokens: int, rows: int, seen_of: Callable[[float], float], reads: float) -> tuple[float, float]:
        """FLOPs of mixing positions, and bytes of caches. seen_of: window (or infinity) -> positions that all queries together see.
        reads: cached positions that are read at most.
        """
        flops = kv = 0.0
        spec = self.model_def.spec
        for block, of_layer in zip(spec.blocks, spec.cache_of_layers, strict=True):
            for cache in of_layer:
                layer, size = spec.cache_layers[cache], self.kv_bytes[cache]
                if isinstance(layer, StateLayer):
                    # Decayed, added to and read for each token; each row's is read and written once.
                    flops += 6 * tokens * size / 4
                    kv += 2 * rows * size
                elif block.mixer is not None:
                    seen = seen_of(math.inf if layer.window is None else layer.window)
                    dims = layer.head_dim + (layer.attend.latent or layer.head_dim)  # of a key, and of a value
                    flops += 2 * block.mixer.num_heads / self.shards * dims * seen
                    kv += (min(reads, seen) + tokens) * size
        return flops, kv


def _seen(first: int, last: int, window: float) -> float:
    """Positions that the queries at [first, last) of a sequence see together."""

    def by_all_before(end: int) -> float:
        inside = min(end, window)
        return inside * (inside + 1) / 2 + (end - inside) * inside

    return by_all_before(last) - by_all_before(first)
