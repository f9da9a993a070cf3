"""The XLA attention against the plain oracle, over ragged steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.attention import AttentionMetadata, LayerCache, gpu, reference, xla
from jaxllm.specs import AttendSpec
from pallas_kernels.ragged_paged_attention.scales import attend_scaled, quantize

HEAD_DIM, NUM_KV = 16, 2


def make_step(rng, rows, num_tokens, num_rows, page_size, window=None, pages_per_row=12):
    """`rows` = [(query tokens, positions already cached)], decodes first. Returns (metadata, cache) with random pages."""
    num_pages = num_rows * pages_per_row + 1
    table = np.zeros((num_rows, pages_per_row), np.int32)
    free = list(rng.permutation(np.arange(1, num_pages)))
    q_starts, kv_lens = np.zeros(num_rows + 1, np.int32), np.zeros(num_rows, np.int32)
    positions, token_rows = np.zeros(num_tokens, np.int32), np.full(num_tokens, num_rows, np.int32)
    at = 0
    for i, (new, cached) in enumerate(rows):
        for p in range((new + cached + page_size - 1) // page_size):
            behind = window is not None and (p + 1) * page_size <= cached + 1 - window
            table[i, p] = 0 if behind else free.pop()
        positions[at : at + new] = np.arange(cached, cached + new)
        token_rows[at : at + new] = i
        at += new
        q_starts[i + 1 :] = at
        kv_lens[i] = new + cached
    metadata = AttentionMetadata(
        page_table=jnp.array(table),
        q_starts=jnp.array(q_starts),
        kv_lens=jnp.array(kv_lens),
        positions=jnp.array(positions),
        token_rows=jnp.array(token_rows),
        num_decodes=jnp.int32(sum(new == 1 for new, _ in rows)),
    )
    k = jnp.array(rng.normal(size=(num_pages, NUM_KV, HEAD_DIM, page_size)), jnp.float32)
    v = jnp.array(rng.normal(size=(num_pages, NUM_KV, page_size, HEAD_DIM)), jnp.float32)
    return metadata, LayerCache(k, v)


STEPS = {
    "one decode at a page start": ([(1, 8)], 1, 1),
    "decodes around page edges": ([(1, 0), (1, 6), (1, 7), (1, 8), (1, 9), (1, 60)], 8, 8),
    "one prompt": ([(29, 0)], 32, 4),
    "chunk on a cached prefix": ([(16, 33)], 16, 4),
    "decodes and prompts, padded": ([(1, 17), (1, 40), (9, 0), (2, 63), (13, 8)], 48, 8),
    "nothing": ([], 16, 4),
    "a tile and one": ([(1, 3), (17, 5)], 24, 2),
    "large tiles between small ones": ([(1, 3), (20, 0), (70, 90), (3, 0), (64, 9), (134, 5)], 320, 8),
}


SPECS = [AttendSpec(0.25), AttendSpec(0.3, window=5), AttendSpec(0.3, window=20, softcap=3.0), AttendSpec(0.3, window=12, chunked=True)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Steps of a few hundred tokens have every kind of tile, and several blocks of keys."""
    for name, size in {"_LARGE_TILE": 64, "_SMALL_TILE": 16, "_KEY_BLOCK": 32, "_DECODE_BLOCK": 128}.items():
        monkeypatch.setattr(xla, name, size)


def attend(*args):
    return xla.attend(*args)


run, expect = (jax.jit(function, static_argnums=5) for function in (attend, reference.attend))


@pytest.mark.parametrize(("group", "spec"), [(1, SPECS[0]), (4, SPECS[0]), (4, SPECS[1]), (1, SPECS[2]), (4, SPECS[3])], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_xla_equals_reference(name, group, spec):
    check(name, group, spec)


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_sinks_take_their_share_of_each_softmax(name, spec):
    # One that outweighs every score, one that no score notices.
    check(name, 2, spec, sinks=jnp.array([0.5, 30.0, -30.0, -1.0]))


@pytest.mark.parametrize("name", STEPS)
def test_a_latent_is_key_and_value(name):
    check(name, 4, AttendSpec(0.25, latent=10))


def check(name, group, spec, sinks=None, bias=None):
    rows, num_tokens, num_rows = STEPS[name]
    rng = np.random.default_rng(len(name))
    pages_per_row = -(-max([160, *(sum(row) for row in rows)]) // 8)
    metadata, cache = make_step(rng, rows, num_tokens, num_rows, 8, spec.window, pages_per_row)
    q = jnp.array(rng.normal(size=(num_tokens, NUM_KV * group, HEAD_DIM)), jnp.float32)
    k, v = (jnp.array(rng.normal(size=(num_tokens, NUM_KV, HEAD_DIM)), jnp.float32) for _ in range(2))
    if spec.latent is not None:
        cache, v = cache._replace(v=None), None

    want, want_cache = expect(q, k, v, cache, metadata, spec, sinks, bias)
    got, got_cache = run(q, k, v, cache, metadata, spec, sinks, bias)

    real = np.asarray(metadata.token_rows) < num_rows
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], atol=2e-5)
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got[1:], want[1:]), got_cache, want_cache)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", STEPS)
def test_linear_biases_grow_with_the_distance(name, window):
    check(name, 2, AttendSpec(0.3, window), bias=jnp.array([0.5, 0.25, 0.125, 0.03]))


@pytest.mark.parametrize("name", ["decodes around page edges", "decodes and prompts, padded"])
def test_learned_biases_go_by_distance_as_far_as_their_table_does(name):
    check(name, 2, AttendSpec(0.3), bias=jnp.array(np.random.default_rng(3).normal(size=(4, 2 * 9 + 1)), jnp.float32))


@pytest.mark.parametrize("name", ["decodes and prompts, padded", "a tile and one"])
def test_attention_to_an_encoder_sees_all_that_is_kept(name):
    check(name, 2, AttendSpec(0.3, window=2000, causal=False))


def test_without_keys_and_values_those_of_the_step_are_in_the_cache_already():
    rng = np.random.default_rng(5)
    metadata, cache = make_step(rng, [(1, 17), (13, 8)], 16, 2, 8)
    q = jnp.array(rng.normal(size=(16, 4, HEAD_DIM)), jnp.float32)
    k, v = (jnp.array(rng.normal(size=(16, NUM_KV, HEAD_DIM)), jnp.float32) for _ in range(2))
    want, cache = xla.attend(q, k, v, cache, metadata, AttendSpec(0.25))
    got, same = xla.attend(q, None, None, cache, metadata, AttendSpec(0.25))
    np.testing.assert_array_equal(got, want)
    assert same is cache


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("name", ["decodes and prompts, padded", "decodes around page edges"])
@pytest.mark.parametrize("latent", [None, 10])
def test_pages_of_8_bits_hold_units_of_a_scale_of_each_head(name, dtype, latent):
    rows, num_tokens, num_rows = STEPS[name]
    rng = np.random.default_rng(6)
    metadata, wide = make_step(rng, rows, num_tokens, num_rows, 8)
    q = jnp.array(rng.normal(size=(num_tokens, 2 * NUM_KV, HEAD_DIM)), jnp.float32)
    k, v = (jnp.array(rng.normal(size=(num_tokens, NUM_KV, HEAD_DIM)), jnp.float32) for _ in range(2))
    k_scale = jnp.array([0.05, 0.03])
    v_scale = k_scale if latent else jnp.array([0.04, 0.1])
    spec = AttendSpec(0.25, latent=latent)

    narrow = LayerCache(*((pages / scale[:, None, None]).astype(dtype) for pages, scale in zip(wide, (k_scale, v_scale), strict=True)))
    rounded = [quantize(x, scale, dtype).astype(jnp.float32) * scale[:, None] for x, scale in ((k, k_scale), (v, v_scale))]
    wide = LayerCache(*(x.astype(jnp.float32) * scale[:, None, None] for x, scale in zip(narrow, (k_scale, v_scale), strict=True)))
    if latent:
        narrow, wide, v, rounded[1] = narrow._replace(v=None), wide._replace(v=None), None, None
    got, pages = attend_scaled(xla.attend, q, k, v, narrow, metadata, spec, dtype=dtype, k_scale=k_scale, v_scale=v_scale)
    want, _ = expect(q, *rounded, wide, metadata, spec)

    real = np.asarray(metadata.token_rows) < num_rows
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], atol=2e-5)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(pages))


def test_what_is_out_of_range_is_clipped():
    x = jnp.array([[[1000.0, -1000.0, 0.6]]])
    np.testing.assert_array_equal(quantize(x, jnp.ones(1), jnp.int8), [[[127, -128, 1]]])
    np.testing.assert_array_equal(quantize(x, jnp.ones(1), jnp.float8_e4m3fn).astype(jnp.float32), [[[448, -448, 0.625]]])


def test_a_row_does_not_depend_on_its_batch_mates():
    rng = np.random.default_rng(7)
    spec = AttendSpec(0.25)
    metadata, cache = make_step(rng, [(1, 30), (1, 9), (1, 70)], 4, 4, 8)
    q = jnp.array(rng.normal(size=(4, 4, HEAD_DIM)), jnp.float32)
    k = v = jnp.array(rng.normal(size=(4, NUM_KV, HEAD_DIM)), jnp.float32)
    together, _ = xla.attend(q, k, v, cache, metadata, spec)
    alone = AttentionMetadata(
        page_table=metadata.page_table[1:2],
        q_starts=jnp.array([0, 1]),
        kv_lens=metadata.kv_lens[1:2],
        positions=metadata.positions[1:2],
        token_rows=jnp.array([0]),
        num_decodes=jnp.int32(1),
    )
    single, _ = xla.attend(q[1:2], k[1:2], v[1:2], cache, alone, spec)
    np.testing.assert_allclose(single[0], together[1], atol=1e-6)


@pytest.mark.parametrize("bad", ["q", "k", "v"])
def test_an_overflow_stays_in_its_row(bad):
    rng = np.random.default_rng(8)
    spec = AttendSpec(0.25)
    rows = [(1, 30), (1, 9), (20, 5), (7, 0)]
    metadata, cache = make_step(rng, rows, 32, 4, 8)
    arrays = {name: jnp.array(rng.normal(size=(32, heads, HEAD_DIM)), jnp.float32) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    clean, _ = xla.attend(*arrays.values(), cache, metadata, spec)
    arrays[bad] = arrays[bad].at[1].set(jnp.nan).at[2:22].set(jnp.inf).at[29:].set(jnp.nan)
    dirty, _ = xla.attend(*arrays.values(), cache, metadata, spec)
    for row in (0, 3):
        mine = np.asarray(metadata.token_rows) == row
        np.testing.assert_allclose(dirty[mine], clean[mine], atol=1e-6)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this jax has no interpreter for GPU kernels")
@pytest.mark.parametrize("spec", [AttendSpec(0.3, window=70, softcap=3.0), AttendSpec(0.3, window=12, chunked=True)], ids=["kernel", "xla"])
def test_the_gpu_backend_equals_the_reference_over_the_same_pages(spec, caplog):
    from jax.experimental.pallas import mosaic_gpu

    rng = np.random.default_rng(0)
    metadata, cache = make_step(rng, [(1, 90), (5, 62)], 8, 2, 64, spec.window, pages_per_row=3)
    cache = jax.tree.map(lambda pages: pages.astype(jnp.bfloat16), cache)
    q = jnp.array(rng.normal(size=(8, 2 * NUM_KV, HEAD_DIM)), jnp.bfloat16)
    k, v = (jnp.array(rng.normal(size=(8, NUM_KV, HEAD_DIM)), jnp.bfloat16) for _ in range(2))

    want, want_cache = reference.attend(q, k, v, cache, metadata, spec)
    gpu.say_once.cache_clear()
    got, got_cache = gpu.Attend(mosaic_gpu.InterpretGPUParams())(q, k, v, cache, metadata, spec)

    np.testing.assert_allclose(np.asarray(got[:6], np.float32), np.asarray(want[:6], np.float32), atol=2e-2)
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got[1:], want[1:]), got_cache, want_cache)
    assert ("no GPU kernel for chunked attention" in caplog.text) == spec.chunked
