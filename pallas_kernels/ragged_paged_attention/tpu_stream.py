"""What decode and prefill of the TPU kernel share: pages streamed through vector memory, and the online softmax over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import layout, work
from pallas_kernels.ragged_paged_attention.tuning import Blocks, Shape

# A masked score is far below the floor that running maxima start from, so that its exponential is zero even before anything was seen.
_MASKED = -1e30
FLOOR = -1e29
_UNROLLED_HEADS = 8


@dataclass(frozen=True)
class Call:
    """What is static of a call, for all parts."""

    shape: Shape
    blocks: Blocks
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool
    dtype: jnp.dtype  # of queries and products
    kept: jnp.dtype  # of keys and values in pages
    interpret: Any

    def params(self, vmem_bytes: int) -> dict[str, Any]:
        """The compiler may use what was planned and a reserve for what it spills."""
        return {
            "compiler_params": pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_bytes + vmem_bytes // 2 + 2**22
            ),
            "interpret": self.interpret,
        }


@dataclass(frozen=True)
class Stream:
    """Blocks of the pages of consecutive work items, fetched one block ahead into two slots.

    table [R * P], items and slot (which slot comes next) are in scalar memory; cache [N, W, S, L] in HBM; buffer [2, B, W, S, L] in vector
    memory; arrived: a DMA semaphore for each slot.
    """

    table: Any
    items: work.Items
    cache: Any
    buffer: Any
    arrived: Any
    slot: Any
    shape: Shape

    @property
    def pages(self) -> int:
        return self.buffer.shape[1]

    @property
    def positions(self) -> int:
        return self.pages * self.shape.page_size

    def page_id(self, item: Any, index: Any) -> Any:
        """The id of page `index` of an item's row."""
        return self.table[self.items.row[item] * self.shape.pages_per_row + index]

    def _each_page(self, item: Any, block: Any, slot: Any, act: Callable[[Any], None]) -> None:
        """Act on the copy of every page of the block that the item needs; the same list whether starting or waiting."""
        size = self.shape.page_size
        first = jnp.maximum(block * self.pages, self.items.low[item] // size)
        last = jnp.minimum((block + 1) * self.pages, pl.cdiv(self.items.high[item], size))

        def one(index: Any, _: None) -> None:
            target = self.buffer.at[slot, index - block * self.pages]
            act(pltpu.make_async_copy(self.cache.at[self.page_id(item, index)], target, self.arrived.at[slot]))

        lax.fori_loop(first, last, one, None)

    def fetch(self, item: Any, block: Any, slot: Any) -> None:
        self._each_page(item, block, slot, lambda copy: copy.start())

    def wait(self, item: Any, block: Any, slot: Any) -> None:
        self._each_page(item, block, slot, lambda copy: copy.wait())

    def start(self, number: Any) -> None:
        """Fetch the first block of the first item, once a call."""
        self.slot[0] = 0

        pl.when(number > 0)(lambda: self.fetch(0, self.items.low[0] // self.positions, 0))

    def run(self, item: Any, number: Any, compute: Callable[[Any, Any, Any], None]) -> None:
        """Call compute(block, slot, is_last) for each block of an item, the next block (maybe of the next item) already on its way."""
        last_block = pl.cdiv(self.items.high[item], self.positions) - 1

        def one(block: Any, _: None) -> None:
            slot = self.slot[0]
            is_last = block == last_block
            following = jnp.where(is_last, item + 1, item)
            following_block = jnp.where(is_last, self.items.low[item + 1] // self.positions, block + 1)

            pl.when(following < number)(lambda: self.fetch(following, following_block, 1 - slot))

            self.wait(item, block, slot)
            compute(block, slot, is_last)
            self.slot[0] = 1 - slot

        lax.fori_loop(self.items.low[item] // self.positions, last_block + 1, one, None)


@dataclass(frozen=True)
class Softmax:
    """An unfinished softmax of each KV head in vector memory: running maxima and sums [K, M, 128] (equal lanes), values [K, M, V], where V
    is L or what a latent's value takes of it.
    """

    top: Any
    total: Any
    acc: Any
    call: Call

    def start(self) -> None:
        """Set sums and values; the caller sets the maxima."""
        self.total[...] = jnp.full(self.total.shape, 1.0 if self.call.has_sinks else 0.0, jnp.float32)
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def add(self, head: Any, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None) -> None:
        """Take in keys [B, L] and values [B, V] of one head for queries [M, L]; visible [M, B] (None: all)."""
        scores = product(q, k, 1) * self.call.scale
        if self.call.softcap is not None:
            scores = self.call.softcap * jnp.tanh(scores * (1 / self.call.softcap))
        if visible is not None:
            scores = jnp.where(visible, scores, _MASKED)
        before = self.top[head]
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - top[:, :1])
        shrink = jnp.exp(before - top)
        self.total[head] = self.total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        self.acc[head] = self.acc[head] * shrink[:, :1] + product(weights.astype(v.dtype), v, 0)
        self.top[head] = top

    def value(self, head: Any) -> jax.Array:
        """[M, V] float32; zeros where nothing was seen."""
        return self.acc[head] / jnp.maximum(self.total[head][:, :1], 1e-30)


def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """[M, C] by `b` contracted over its `axis`, in float32; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32, precision=precision)


def select(chosen: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`where`, in the dtype of `old`. Masks are of 32-bit elements: narrower ones are widened, exactly."""
    if old.dtype.itemsize == 4:
        return jnp.where(chosen, new, old)
    return jnp.where(chosen, new.astype(jnp.float32), old.astype(jnp.float32)).astype(old.dtype)


def keys_values(buffer: Any, slot: Any, pages: Any, head: Any, call: Call, known: tuple[Any, Any] | None) -> tuple[jax.Array, jax.Array]:
    """Keys [B, L] and values [B, V] of one head in some pages of a slot. Of an edge block only positions [begin, end) are `known`: others
    may not have been fetched, and become zero, since whatever bits lie there might be NaN.
    """

    def words(word_head: Any) -> jax.Array:
        found = buffer[slot, pages, word_head].reshape(-1, buffer.shape[-1])
        if known is None:
            return found
        offset = lax.broadcasted_iota(jnp.int32, found.shape, 0) * call.shape.packing
        if call.shape.packing > 1:
            return found & layout.bytes_between(known[0] - offset, known[1] - offset)
        return select((offset >= known[0]) & (offset < known[1]), found, jnp.zeros_like(found))

    if call.shape.latent is not None:
        keys = words(head)
        return keys, keys[:, : call.shape.value_dim]
    if call.shape.packing > 1:
        keys, values = (pltpu.bitcast(words(2 * head + i), call.kept) for i in range(2))
    elif buffer.dtype == jnp.uint32:
        keys, values = layout.split_word(words(head))
    else:
        keys, values = words(2 * head), words(2 * head + 1)
    return keys.astype(call.dtype), values.astype(call.dtype)


def each_head(num_heads: int, act: Callable[[Any], None]) -> None:
    """Unrolled as far as code size allows: the compiler overlaps one head's products with another's exponentials."""
    unrolled = next(n for n in range(min(_UNROLLED_HEADS, num_heads), 0, -1) if num_heads % n == 0)

    def some(turn: Any, _: None) -> None:
        for i in range(unrolled):
            act(turn * unrolled + i)

    if unrolled == num_heads:
        some(0, None)
    else:
        lax.fori_loop(0, num_heads // unrolled, some, None)


def padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.pad(x, [(0, size - n if i == axis % x.ndim else 0) for i, n in enumerate(x.shape)])


def on_edge(edge: Any, act: Callable[[bool], None]) -> None:
    """Run the body with masks only where something is out of sight: masks cost a third of the vector work."""

    pl.when(edge)(lambda: act(True))
    pl.when(jnp.logical_not(edge))(lambda: act(False))


def compute_turns(low: Any, high: Any, size: int, limit: int) -> tuple[Any, Any]:
    """Compute blocks of `size` that touch [low, high) of a fetched block of `limit` positions."""
    return jnp.maximum(low, 0) // size, pl.cdiv(jnp.minimum(high, limit), size)
