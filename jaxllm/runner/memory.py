"""The memory plan: what weights, sampling state, temporaries and KV pages take, decided before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from jaxllm.config import CacheConfig
from jaxllm.core_types import CacheGroup, CacheKind, CacheSpec
from jaxllm.errors import OutOfMemoryPlanError
from jaxllm.models.build import ModelDef
from jaxllm.ops.attention import AttentionBackend, Cache
from jaxllm.ops.recurrent.rows import DECODE_ROWS
from jaxllm.runner.mesh import Placement
from jaxllm.runner.sampler import SlotState
from jaxllm.sampling_params import MAX_LOGIT_BIAS_ENTRIES
from jaxllm.specs import AttendSpec, CacheLayer, MoESpec, StateLayer

# Host memory is shared with everything else on the machine: without an explicit size, take this much at most for pages.
_CPU_CACHE_LIMIT = 2 * 2**30
# Logits, their processed copy and what sampling holds beside them (float32, each [R, V]).
_LOGITS_COPIES = 8
# Positions between snapshots of states: beyond this, prefixes are hardly ever found.
_MOST_BETWEEN_SNAPSHOTS = 1024


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine that do not depend on memory."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int


@dataclass(frozen=True)
class MemoryPlan:
    """What each device will hold, in bytes, and what fits of it.

    Attributes:
        total: memory that the engine may use on each device.
        cache_spec: the page pools.
        max_model_len: longest sequence of the engine.
    """

    total: int
    weights: int
    sampling_state: int
    temporaries: int
    kv_cache: int
    cache_spec: CacheSpec
    max_model_len: int

    @property
    def cache_tokens(self) -> int:
        """Positions that the smallest pool of full attention (or else of any kind) can hold."""
        full = [g for g in self.cache_spec.groups if g.kind is CacheKind.FULL] or list(self.cache_spec.groups)
        return min((g.num_pages - 1) * self.cache_spec.positions_per_page(g) for g in full)

    def table(self) -> str:
        """The plan for people to read."""
        rows = [
            ("weights", self.weights),
            ("sampling state", self.sampling_state),
            ("temporaries (estimate)", self.temporaries),
            (f"KV pages ({self.cache_tokens:,} tokens)", self.kv_cache),
            ("sum", self.weights + self.sampling_state + self.temporaries + self.kv_cache),
            ("usable per device", self.total),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {_readable(size):>10}" for name, size in rows]
        concurrency = self.cache_tokens / self.max_model_len
        return "\n".join(["memory plan per device:", *lines, f"  requests of {self.max_model_len:,} tokens at once: {concurrency:.1f}"])


def usable_memory(placement: Placement, cache: CacheConfig) -> int:
    """Bytes that the engine may use on each device: the configured share of its memory, or of what is free of the host's on CPU.

    Of a GPU jax took a share when it started (the same one, unless someone said otherwise), and that is what it reports.
    """
    device = placement.mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * (1 if device.platform == "gpu" else cache.gpu_memory_utilization))
    return int(psutil.virtual_memory().available * cache.gpu_memory_utilization) // placement.mesh.size


def plan_memory(
    model_def: ModelDef,
    backend: AttentionBackend,
    placement: Placement,
    cache: CacheConfig,
    limits: Limits,
    *,
    max_model_len: int | None,
    device_bytes: int | None = None,
) -> MemoryPlan:
    """Plan from shapes alone.

    Args:
        max_model_len: as asked for; None takes the model's own, or less if only less fits.
        device_bytes: memory of each device, where the mesh is of devices that are not there; None asks the devices.

    Raises:
        OutOfMemoryPlanError: the plan cannot fit; the message says which option to turn, and to what.
    """
    shards = placement.num_shards
    total = usable_memory(placement, cache) if device_bytes is None else int(device_bytes * cache.gpu_memory_utilization)
    weights = weight_bytes(model_def, placement)
    slots = SlotState.shapes(limits.max_num_seqs, model_def.vocab_size, MAX_LOGIT_BIAS_ENTRIES)
    sampling_state = sum(_nbytes(leaf) for leaf in jax.tree.leaves(slots))
    temporaries = _temporaries(model_def, limits, shards)

    groups = cache_groups(model_def.cache_layers)
    layer_bytes = [page_bytes_of(model_def, backend, layer, limits.page_size, shards) for layer in model_def.cache_layers]
    page_bytes = [sum(layer_bytes[i] for i in layers) for layers in groups.values()]
    wanted_len = max_model_len or model_def.max_model_len
    interval = state_interval(model_def.cache_layers, limits)
    pools = _Pools(tuple(groups), page_bytes, limits, wanted_len, interval)
    fixed = f"weights ({_readable(weights)}), sampling state ({_readable(sampling_state)}) and temporaries ({_readable(temporaries)})"
    left = total - weights - sampling_state - temporaries
    lower = f"lower max_num_seqs (now {limits.max_num_seqs}) or max_num_batched_tokens (now {limits.max_num_batched_tokens})"
    one_page = pools.cost(limits.page_size)
    if left < one_page:
        raise OutOfMemoryPlanError(
            f"{fixed} leave {_readable(max(left, 0))} of {_readable(total)} for KV pages, which is not enough for one page; raise"
            f" gpu_memory_utilization (now {cache.gpu_memory_utilization}), {lower}, or share the model over more devices"
        )
    budget = cache.kv_cache_memory_bytes
    if budget is None:
        on_cpu = device_bytes is None and placement.mesh.devices.flat[0].platform == "cpu"
        budget = min(left, _CPU_CACHE_LIMIT) if on_cpu else left
    elif not one_page <= budget <= left:
        raise OutOfMemoryPlanError(
            f"kv_cache_memory_bytes={budget} must be from {one_page} (one page) to {left}: what {fixed} leave of {_readable(total)}"
        )
    tokens = pools.tokens_for(budget, at_most=limits.max_num_seqs * wanted_len)
    longest = pools.longest_sequence(tokens)
    if longest < wanted_len and max_model_len is not None:
        raise OutOfMemoryPlanError(
            f"max_model_len={max_model_len} needs {_readable(pools.cost(max_model_len))} of KV pages, but {_readable(budget)} are there;"
            f" max_model_len={int(longest)} fits, or give kv_cache_memory_bytes={pools.cost(max_model_len)}"
        )
    counts = pools.page_counts(tokens)
    return MemoryPlan(
        total=total,
        weights=weights,
        sampling_state=sampling_state,
        temporaries=temporaries,
        kv_cache=sum(count * size for count, size in zip(counts, page_bytes, strict=True)),
        cache_spec=cache_spec(groups, counts, limits.page_size, interval),
        max_model_len=int(min(wanted_len, longest)),
    )


def weight_bytes(model_def: ModelDef, placement: Placement) -> int:
    """Bytes of the parameters on each device."""
    return sum(_nbytes(model_def.shapes[name]) // shards_of(model_def.axes[name], placement) for name in model_def.names)


# What layers of a cache group keep, and the window of it.
GroupKey = tuple[CacheKind, int | None]


def cache_groups(cache_layers: Sequence[CacheLayer | StateLayer]) -> dict[GroupKey, tuple[int, ...]]:
    """Layers by what they keep, in order of first appearance; what is kept of an encoder comes last."""
    groups: dict[GroupKey, tuple[int, ...]] = {}
    for index, layer in enumerate(cache_layers):
        key = (CacheKind.RECURRENT, None) if isinstance(layer, StateLayer) else group_of(layer.attend)
        groups[key] = (*groups.get(key, ()), index)
    return dict(sorted(groups.items(), key=lambda item: item[0][0] is CacheKind.ENCODER))


def group_of(attend: AttendSpec) -> GroupKey:
    """The cache group of layers that attend so. Only an encoder's positions are attended to from pages without causality."""
    kind = CacheKind.FULL if attend.window is None else CacheKind.SLIDING_WINDOW
    return kind if attend.causal else CacheKind.ENCODER, attend.window


def state_interval(cache_layers: Sequence[CacheLayer | StateLayer], limits: Limits) -> int:
    """Positions between snapshots of states: as many whose keys and values take the memory of a state, if that is no more than a step
    computes.
    """
    most = min(limits.max_num_batched_tokens, _MOST_BETWEEN_SNAPSHOTS)
    state = sum(4 * math.prod(shape) for layer in cache_layers if isinstance(layer, StateLayer) for shape in layer.shapes)
    kept = (layer for layer in cache_layers if isinstance(layer, CacheLayer))
    position = sum(2 * layer.num_kv_heads * layer.head_dim * (2 if layer.attend.latent is None else 1) for layer in kept)
    pages = -(-state // max(position * limits.page_size, 1))
    return max(1, min(pages, most // limits.page_size)) * limits.page_size


def cache_spec(groups: Mapping[GroupKey, tuple[int, ...]], counts: Sequence[int], page_size: int, interval: int) -> CacheSpec:
    """The groups of `cache_groups` with so many pages each; `interval` is that of states."""
    return CacheSpec(
        page_size,
        tuple(
            CacheGroup(kind, layers, count, window, interval if kind is CacheKind.RECURRENT else None)
            for ((kind, window), layers), count in zip(groups.items(), counts, strict=True)
        ),
    )


def abstract_caches(model_def: ModelDef, backend: AttentionBackend, placement: Placement, spec: CacheSpec) -> tuple[Cache, ...]:
    """The page pools of each layer, as they lie on the devices."""
    dtype = model_def.shapes[model_def.names[0]].dtype
    pages = {layer: group.num_pages for group in spec.groups for layer in group.layers}

    def pool(index: int, layer: CacheLayer | StateLayer) -> Cache:
        shapes = _pages(backend, layer, pages[index], spec.page_size, dtype)
        sharding = placement.cache(layer)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)

    return tuple(pool(index, layer) for index, layer in enumerate(model_def.cache_layers))


def _pages(backend: AttentionBackend, layer: CacheLayer | StateLayer, num_pages: int, page_size: int, dtype: jnp.dtype) -> Cache:
    """Abstract arrays of one layer's pages."""
    if isinstance(layer, StateLayer):
        return tuple(jax.ShapeDtypeStruct((num_pages, *shape), jnp.float32) for shape in layer.shapes)
    return backend.cache_shapes(num_pages, page_size, layer, dtype)


@dataclass(frozen=True)
class _Pools:
    """Page counts and bytes of all groups as a function of the positions that full attention can hold."""

    groups: tuple[GroupKey, ...]
    page_bytes: list[int]
    limits: Limits
    max_model_len: int
    interval: int

    def page_counts(self, tokens: int) -> list[int]:
        """Pages of each group, the sink included, to hold `tokens` positions of running requests."""
        return [1 + self._count(kind, window, tokens) for kind, window in self.groups]

    def _count(self, kind: CacheKind, window: int | None, tokens: int) -> int:
        pages = -(-tokens // self.limits.page_size)
        if kind is CacheKind.RECURRENT:
            # A snapshot an interval; or at least two for each request of full length: the one it started from and its own.
            return max(-(-tokens // self.interval), 2 * -(-tokens // self.max_model_len))
        most = self._request_pages(kind, window)
        if kind is CacheKind.ENCODER and most is not None:
            # The longest input for each request of full length.
            return most * -(-tokens // self.max_model_len)
        return pages if most is None else min(pages, most * self.limits.max_num_seqs)

    def _request_pages(self, kind: CacheKind, window: int | None) -> int | None:
        """Most pages that one request holds at once (window and chunk, cut anywhere); None where they grow with it."""
        if kind is CacheKind.RECURRENT:
            return 2
        if kind is CacheKind.ENCODER and window is not None:
            return -(-window // self.limits.page_size)
        return None if window is None else (window + self.limits.max_num_batched_tokens) // self.limits.page_size + 2

    def cost(self, tokens: int) -> int:
        return sum(count * size for count, size in zip(self.page_counts(tokens), self.page_bytes, strict=True))

    def tokens_for(self, budget: int, at_most: int) -> int:
        """Most positions, whole pages, that cost no more than `budget`."""
        size = self.limits.page_size
        low, high = 1, -(-at_most // size)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cost(middle * size) <= budget else (low, middle - 1)
        return low * size

    def longest_sequence(self, tokens: int) -> float:
        """Longest sequence that can run when pools are sized for `tokens`; infinite where a window bounds what every layer keeps."""
        return min(
            math.inf if (most := self._request_pages(*group)) is not None and count > most else (count - 1) * self.limits.page_size
            for group, count in zip(self.groups, self.page_counts(tokens), strict=True)
        )


def check_fits(model_def: ModelDef, placement: Placement, cache: CacheConfig, limits: Limits) -> str:
    """The plan of a model that keeps nothing between steps, for people to read.

    Raises:
        OutOfMemoryPlanError: it does not fit; the message says which option to turn.
    """
    total, weights = usable_memory(placement, cache), weight_bytes(model_def, placement)
    temporaries = _activations(model_def, limits, placement.num_shards)
    parts = f"weights {_readable(weights)}, temporaries (estimate) {_readable(temporaries)}, usable per device {_readable(total)}"
    if weights + temporaries > total:
        narrower = "give dtype=bfloat16 (now float32), " if model_def.shapes[model_def.names[0]].dtype == jnp.float32 else ""
        raise OutOfMemoryPlanError(
            f"the model does not fit: {parts}; {narrower}raise gpu_memory_utilization (now {cache.gpu_memory_utilization}), lower "
            f"max_num_batched_tokens (now {limits.max_num_batched_tokens}), or share the model over more devices"
        )
    return parts


def _activations(model_def: ModelDef, limits: Limits, shards: int) -> int:
    spec = model_def.spec
    widest = max((block.feed_forward.width for block in spec.blocks if block.feed_forward), default=2 * spec.width)
    itemsize = jnp.dtype(model_def.shapes[model_def.names[0]].dtype).itemsize
    # Experts get a row of their own for each token that chose them.
    rows = max(block.feed_forward.router.top_k if isinstance(block.feed_forward, MoESpec) else 1 for block in spec.blocks)
    return limits.max_num_batched_tokens * (4 * rows * spec.width + 4 * widest // shards) * max(itemsize, 4)


def _temporaries(model_def: ModelDef, limits: Limits, shards: int) -> int:
    states = [sum(map(math.prod, layer.shapes)) for layer in model_def.cache_layers if isinstance(layer, StateLayer)]
    # The states of the rows that decode at once, one layer at a time: as read, as decoded, and as written.
    of_states = 3 * min(limits.max_num_seqs, DECODE_ROWS) * max(states, default=0) * 4 // shards
    return _activations(model_def, limits, shards) + of_states + _LOGITS_COPIES * limits.max_num_seqs * model_def.vocab_size * 4


def page_bytes_of(model_def: ModelDef, backend: AttentionBackend, layer: CacheLayer | StateLayer, page_size: int, shards: int) -> int:
    """Bytes of one layer's page on each device."""
    dtype = model_def.shapes[model_def.names[0]].dtype
    if isinstance(layer, StateLayer):
        layer = StateLayer(tuple((shape[0] // shards, *shape[1:]) for shape in layer.shapes))
    elif layer.is_split:
        layer = replace(layer, num_kv_heads=layer.num_kv_heads // shards)
    return sum(_nbytes(leaf) for leaf in jax.tree.leaves(_pages(backend, layer, 1, page_size, dtype)))


def shards_of(axes: Sequence[str | None], placement: Placement) -> int:
    sizes: Mapping[str, int] = placement.mesh.shape
    return math.prod(sizes[axis] for axis in placement.rules.partition(tuple(axes)) if axis is not None)


def _nbytes(abstract: jax.ShapeDtypeStruct) -> int:
    return math.prod(abstract.shape) * np.dtype(abstract.dtype).itemsize


def _readable(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
