"""Random ragged steps for the tests of paged attention kernels, and what the oracle makes of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import layout, reference


class Step(NamedTuple):
    """The array arguments of `attend`, in its order."""

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    cache: jax.Array
    page_table: jax.Array
    q_starts: jax.Array
    kv_lens: jax.Array
    num_decodes: jax.Array


def make_step(
    rows: Sequence[tuple[int, int]],
    num_tokens: int,
    num_rows: int,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 8,
    pages_per_row: int = 6,
    dtype: str = "float32",
    kept: str | None = None,
    window: int | None = None,
    latent: bool = False,
    seed: int = 0,
) -> Step:
    """`rows` = [(tokens of this step, positions cached before)], decodes first. Pages behind the window are the sink, as in the engine.
    With a latent there are no values (and num_kv_heads must be 1).

    Positions of a page that no row has written hold NaN (127 in int8): nothing may read them. kept: the dtype of pages, if not `dtype`.
    """
    kept = kept or dtype
    rng = np.random.default_rng(seed)
    num_pages = num_rows * pages_per_row + 1
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = np.zeros((num_rows, pages_per_row), np.int32)
    q_starts, kv_lens = np.zeros(num_rows + 1, np.int32), np.zeros(num_rows, np.int32)
    shape = layout.cache_shape(num_pages, page_size, num_kv_heads, head_dim, jnp.dtype(kept), latent=latent)
    unit = 40 if kept == "int8" else 1

    def random(count: int, heads: int, dtype: str, unit: int = 1) -> jax.Array:
        return jnp.array(rng.normal(size=(count, heads, head_dim)) * unit, dtype)

    pages = [random(num_pages * page_size, num_kv_heads, kept, unit) for _ in range(2)]
    words = layout.pack(pages[0], None if latent else pages[1], jnp.dtype(kept))
    words = words.reshape(num_pages, page_size, shape.shape[1], shape.shape[3])
    cache = np.array(jnp.swapaxes(words, 1, 2))
    written = np.zeros((num_pages, page_size), bool)
    written[0] = True
    at = 0
    for i, (new, cached) in enumerate(rows):
        for p in range(-(-(new + cached) // page_size)):
            behind = window is not None and (p + 1) * page_size <= cached + 1 - window
            table[i, p] = 0 if behind else free.pop()
        for position in range(cached):
            written[table[i, position // page_size], position % page_size] = True
        at += new
        q_starts[i + 1 :] = at
        kv_lens[i] = new + cached
    narrow = layout.positions_per_word(jnp.dtype(kept)) > 1
    nan = np.array(np.nan, shape.dtype) if shape.dtype != jnp.uint32 else np.uint32(0x7F if narrow else 0x7FFF7FFF)
    cache = jnp.array(np.where(written[:, None, :, None], cache, nan))
    if narrow:
        cache = layout.bitcast(cache.astype(jnp.int8), jnp.uint32)
    assert cache.shape == shape.shape
    num_decodes = next((i for i, (new, _) in enumerate(rows) if new != 1), len(rows))
    k, v = (random(num_tokens, num_kv_heads, kept, unit) for _ in range(2))
    q = random(num_tokens, num_heads, dtype)
    return Step(q, k, None if latent else v, cache, jnp.array(table), jnp.array(q_starts), jnp.array(kv_lens), jnp.int32(num_decodes))


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "latent"))
def expect(step: Step, *, sinks: jax.Array | None = None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """The oracle's answer, compiled as a whole."""
    return reference.attend(*step, sinks=sinks, **options)


def assert_same(got: tuple[jax.Array, jax.Array], want: tuple[jax.Array, jax.Array], step: Step, tolerance: float) -> None:
    """Outputs of real tokens agree, padding is finite, and every written position holds the same bits."""
    total = int(step.q_starts[-1])
    out, expected = (np.asarray(x[0], np.float32) for x in (got, want))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[:total], expected[:total], atol=tolerance, rtol=tolerance)
    packing = layout.positions_per_word(step.k.dtype)
    for row in range(step.kv_lens.shape[0]):
        for word in range(-(-int(step.kv_lens[row]) // packing)):
            page, offset = int(step.page_table[row, word // step.cache.shape[2]]), word % step.cache.shape[2]
            if page:
                mine, theirs = (np.asarray(x[1][page, :, offset]).view(np.uint8) for x in (got, want))
                np.testing.assert_array_equal(mine, theirs, err_msg=f"row {row}, position {word * packing}")
