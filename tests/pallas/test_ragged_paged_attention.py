"""The TPU kernel, interpreted, against its oracle over ragged steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import layout, tpu
from pallas_kernels.ragged_paged_attention.tuning import Blocks
from tests.pallas.steps import assert_same, expect, make_step

# Two fetched pages and one computed at a time, so that steps of a few dozen tokens cross every kind of border.
BLOCKS = Blocks(decode_rows=2, decode_pages=2, decode_compute_pages=1, query_tile=16, prefill_pages=2, prefill_compute_pages=1)

DECODES = [(1, 0), (1, 6), (1, 7), (1, 8), (1, 15), (1, 16), (1, 40)]  # around page and block borders
MIXED = [(1, 17), (1, 40), (9, 0), (2, 38), (0, 0), (13, 8), (3, 6)]
NARROW_DECODES = [(1, 0), (1, 2), (1, 3), (1, 31), (1, 32), (1, 69)]  # around borders of words and of pages of 32
NARROW_MIXED = [(1, 17), (1, 40), (9, 0), (2, 62), (0, 0), (39, 30), (3, 6)]
PROMPTS = [(16, 0), (17, 15), (2, 7)]  # a tile, a tile and one, and both sides of a page border


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "latent", "blocks", "interpret"))
def run(step, *, sinks=None, **options):
    return tpu.attend(*step, sinks=sinks, **options)


def check(step, *, tolerance=2e-5, interpret=True, blocks=BLOCKS, **options):
    got = run(step, blocks=blocks, interpret=interpret, **options)
    assert_same(got, expect(step, **options), step, tolerance)
    return got


@pytest.mark.parametrize("window", [None, pytest.param(1, marks=pytest.mark.heavy), 9], ids=str)
@pytest.mark.parametrize("rows", [DECODES, []], ids=["borders", "nothing"])
def test_decodes_equal_the_reference(rows, window):
    check(make_step(rows, 8, 8, window=window), scale=0.1, window=window)


@pytest.mark.parametrize("window", [None, 9, pytest.param(16, marks=pytest.mark.heavy)], ids=str)
def test_mixed_steps_equal_the_reference(window):
    check(make_step(MIXED, 48, 8, window=window), scale=0.1, window=window)


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [PROMPTS, [], [(1, 3)], [(5, 0)], [(48, 0)]], ids=str)
def test_prompts_equal_the_reference(rows):
    check(make_step(rows, 48, 4), scale=0.1)


@pytest.mark.heavy
@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (3, 1)], ids=str)
def test_every_grouping_of_heads_equals_the_reference(heads):
    step = make_step([(1, 9), (5, 6)], 8, 2, num_heads=heads[0], num_kv_heads=heads[1])
    check(step, scale=0.1)


@pytest.mark.heavy
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_every_head_dim_equals_the_reference(head_dim):
    check(make_step([(1, 9), (5, 6)], 8, 2, head_dim=head_dim), scale=0.1)


@pytest.mark.parametrize("rows", [DECODES, pytest.param(MIXED, marks=pytest.mark.heavy)], ids=["decodes", "mixed"])
def test_bfloat16_words_hold_keys_and_values(rows):
    num_tokens = 8 if rows is DECODES else 48
    check(make_step(rows, num_tokens, 8, dtype="bfloat16"), scale=0.1, tolerance=2e-2)


def test_softcap_and_sinks():
    step = make_step([(1, 9), (1, 0), (5, 6)], 8, 3)
    sunk, _ = check(step, scale=0.5, softcap=2.0, sinks=jnp.array([0.5, -3.0, 2.0, 0.0]))
    plain, _ = expect(step, scale=0.5, softcap=2.0)
    assert np.abs(np.asarray(plain - sunk)).max() > 0.1


def test_an_overflow_stays_in_its_row():
    step = make_step(MIXED, 48, 8)
    options = {"scale": 0.1, "window": None, "blocks": BLOCKS, "interpret": True}
    clean = run(step, **options)[0]
    bad = [x.at[1].set(jnp.nan).at[2:11].set(jnp.inf) for x in step[:3]]  # the second decode and the first prompt
    dirty = run(step._replace(q=bad[0], k=bad[1], v=bad[2]), **options)[0]
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[11:29], clean[11:29])


@pytest.mark.parametrize(
    ("kept", "rows"),
    [
        ("float8_e4m3fn", NARROW_DECODES),
        pytest.param("float8_e4m3fn", NARROW_MIXED, marks=pytest.mark.heavy),
        pytest.param("int8", NARROW_MIXED, marks=pytest.mark.heavy),
    ],
    ids=["decodes", "mixed", "int8"],
)
def test_words_of_four_positions_equal_the_reference(kept, rows):
    num_tokens = 8 if rows is NARROW_DECODES else 64
    step = make_step(rows, num_tokens, 8, page_size=32, num_heads=2, kept=kept)
    check(step, scale=0.001 if kept == "int8" else 0.1, tolerance=1e-3 if kept == "int8" else 2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_words_hold_every_bit(dtype):
    rng = np.random.default_rng(0)
    k, v = (jnp.array(rng.normal(size=(5, 3, 80)) * 30, dtype) for _ in range(2))
    shape = layout.cache_shape(1, 32, 3, 80, jnp.dtype(dtype))
    words = layout.pack(k, v, jnp.dtype(dtype))
    cache = layout.store(jnp.zeros(shape.shape, shape.dtype), words, jnp.zeros(5, jnp.int32), jnp.arange(3, 8), jnp.dtype(dtype))
    keys, values = layout.unpack(cache, jnp.dtype(dtype))
    np.testing.assert_array_equal(jnp.swapaxes(keys[0], 0, 1)[3:8, :, :80], k.astype(jnp.float32))
    np.testing.assert_array_equal(jnp.swapaxes(values[0], 0, 1)[3:8, :, :80], v.astype(jnp.float32))
