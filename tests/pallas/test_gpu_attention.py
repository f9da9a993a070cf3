"""The kernel for Hopper and Blackwell, interpreted, against the oracle of the TPU kernel over the same ragged steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import layout
from tests.pallas.steps import expect, make_step

if jax.__version_info__ < (0, 11):
    pytest.skip("this jax has no interpreter for GPU kernels", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention import gpu
from pallas_kernels.ragged_paged_attention.gpu_products import TensorMemory

pytestmark = pytest.mark.gpu_kernel
DECODES = [(1, 0), (1, 62), (1, 63), (1, 64), (1, 150)]  # around page borders
MIXED = [(1, 17), (1, 140), (9, 0), (2, 138), (0, 0), (70, 60), (3, 6)]  # 70 tokens: a tile and a part of one


def step_of(rows, num_tokens, num_rows, **options):
    defaults = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 64, "dtype": "bfloat16"}
    return make_step(rows, num_tokens, num_rows, **(defaults | options))


def pages_of(words, head_dim, dtype=jnp.bfloat16):
    """Pages of the GPU's layout from those of the TPU's; nothing in them may be anything but finite."""
    if words.dtype == jnp.bfloat16:
        return jnp.swapaxes(jnp.where(jnp.isfinite(words), words, 0)[..., :head_dim], 2, 3), None
    keys, values = (x[..., :head_dim].astype(dtype) for x in layout.unpack(jnp.array(words), dtype))
    keys, values = (jnp.where(jnp.isfinite(x), x, 0) for x in (keys, values))
    return jnp.swapaxes(keys, 2, 3), values


def check(step, *, interpret=None, splits=None, blackwell=False, **options):
    interpret = interpret or plgpu.InterpretGPUParams()
    pages = pages_of(step.cache, step.q.shape[2], step.k.dtype)
    run = jax.jit(functools.partial(gpu.attend, interpret=interpret, splits=splits, blackwell=blackwell, **options))
    out, cache = run(*step[:3], pages, *step[4:])
    expected, words = expect(step, **options)
    total = int(step.q_starts[-1])
    np.testing.assert_allclose(np.asarray(out[:total], np.float32), np.asarray(expected[:total], np.float32), atol=2e-2, rtol=2e-2)
    for got, want in zip(jax.tree.leaves(cache), jax.tree.leaves(pages_of(words, step.q.shape[2], step.k.dtype)), strict=True):
        np.testing.assert_array_equal(np.asarray(got[1:], np.float32), np.asarray(want[1:], np.float32))
    return out


@pytest.mark.parametrize("blackwell", [False, True], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("window", [None, 70], ids=str)
def test_decodes_equal_the_reference(window, blackwell):
    check(step_of(DECODES, 8, 8, window=window), scale=0.1, window=window, blackwell=blackwell)


def test_decodes_cut_into_parts_equal_the_reference():
    check(step_of(DECODES, 8, 8), scale=0.1, splits=3)


@pytest.mark.parametrize("blackwell", [False, True], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("window", [None, pytest.param(70, marks=pytest.mark.heavy)], ids=str)
def test_mixed_steps_equal_the_reference(window, blackwell):
    check(step_of(MIXED, 96, 8, window=window), scale=0.1, window=window, blackwell=blackwell)


@pytest.mark.parametrize("blackwell", [False, pytest.param(True, marks=pytest.mark.heavy)], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("kept", ["float8_e4m3fn", pytest.param("int8", marks=pytest.mark.heavy)])
def test_pages_of_8_bits_equal_the_reference(kept, blackwell):
    scale = 0.001 if kept == "int8" else 0.1
    check(step_of([(1, 150), (1, 64), (40, 100)], 48, 3, kept=kept, num_heads=2, num_kv_heads=1), scale=scale, blackwell=blackwell)


def test_softcap_and_sinks():
    step = step_of([(1, 69), (1, 0), (5, 62)], 8, 3)
    check(step, scale=0.5, softcap=2.0, sinks=jnp.array([0.5, -3.0, 2.0, 0.0]))


@pytest.mark.heavy
@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (3, 1)], ids=str)
def test_every_grouping_of_heads_equals_the_reference(heads):
    check(step_of([(1, 70), (5, 62)], 8, 2, num_heads=heads[0], num_kv_heads=heads[1]), scale=0.1)


@pytest.mark.heavy
@pytest.mark.parametrize("blackwell", [False, True], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_every_head_dim_equals_the_reference(head_dim, blackwell):
    check(step_of([(1, 70), (5, 62)], 8, 2, head_dim=head_dim, num_heads=2, num_kv_heads=1), scale=0.1, blackwell=blackwell)


LATENT = {"num_kv_heads": 1, "head_dim": 192, "latent": True}


@pytest.mark.parametrize("blackwell", [False, True], ids=["Hopper", "Blackwell"])
def test_decodes_of_latents_equal_the_reference(blackwell):
    check(step_of(DECODES, 8, 8, num_heads=16, **LATENT), scale=0.1, latent=128, splits=2, blackwell=blackwell)


@pytest.mark.parametrize(
    ("latent", "head_dim", "page_size"),
    [(512, 576, 64), pytest.param(384, 448, 64, marks=pytest.mark.heavy), pytest.param(256, 288, 128, marks=pytest.mark.heavy)],
)
def test_sums_of_latents_in_parts_of_tensor_memory_equal_the_reference(latent, head_dim, page_size):
    step = step_of([(1, 70), (0, 0), (6, 62)], 8, 3, num_heads=16, page_size=page_size, **(LATENT | {"head_dim": head_dim}))
    check(step, scale=0.05, latent=latent, blackwell=True)


@pytest.mark.parametrize("blackwell", [False, pytest.param(True, marks=pytest.mark.heavy)], ids=["Hopper", "Blackwell"])
def test_latents_of_8_bits_equal_the_reference_over_the_same_values_in_16(blackwell):
    kept = jnp.float8_e4m3fn
    step = step_of([(1, 70), (0, 0), (6, 62)], 8, 3, num_heads=16, **LATENT)
    step = step._replace(k=step.k.astype(kept).astype(jnp.bfloat16), cache=step.cache.astype(kept).astype(jnp.bfloat16))
    expected, _ = expect(step, scale=0.1, latent=128)
    pages = pages_of(step.cache, 192)[0].astype(kept), None
    params = plgpu.InterpretGPUParams(detect_races=True)
    run = jax.jit(functools.partial(gpu.attend, scale=0.1, latent=128, blackwell=blackwell, interpret=params))
    out, _ = run(step.q, step.k.astype(kept), None, pages, *step[4:])
    np.testing.assert_allclose(np.asarray(out[:7], np.float32), np.asarray(expected[:7], np.float32), atol=2e-2, rtol=2e-2)


@pytest.mark.heavy
@pytest.mark.parametrize("blackwell", [False, True], ids=["Hopper", "Blackwell"])
def test_more_heads_than_rows_of_a_tile_share_a_latent(blackwell):
    check(step_of([(1, 70), (0, 0), (3, 62)], 4, 3, num_heads=128, **LATENT), scale=0.1, latent=128, blackwell=blackwell)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("float32", 4, 2, 64, 64), "float32 .* bfloat16 and float16 are"),
        (("bfloat16", 4, 2, 72, 64), "head_dim 72 in bfloat16 .* 64, 128, 192 and 256 are, and of 16 bits multiples of 16"),
        (("bfloat16", 4, 2, 64, 16), "pages of 16 positions .* block_size 64, 128 or 256"),
        (("bfloat16", 256, 2, 64, 64), "128 heads to a KV head"),
        (("bfloat16", 4, 2, 256, 256), "block_size=128 would"),
        (("bfloat16", 16, 1, 576, 128, 512), "block_size=64 would"),
        (("bfloat16", 16, 1, 592, 64, 520), "a latent of 520 in bfloat16 keys of 592 .* 128, 256, 384, 512"),
        (("bfloat16", 130, 1, 576, 64, 512), "130 heads of a latent .* multiples of 3 are"),
    ],
)
def test_a_shape_that_cannot_run_is_refused_with_what_would(shape, message):
    with pytest.raises(layout.UnsupportedShapeError, match=message):
        gpu.check_shape(*shape)


def test_pages_of_8_bits_that_cannot_be_widened_are_refused():
    with pytest.raises(layout.UnsupportedShapeError, match=r"head_dim 80 in int8 .* 64, 128, 192 and 256 are"):
        gpu.check_shape("bfloat16", 4, 2, 80, 64, kept="int8")
    with pytest.raises(layout.UnsupportedShapeError, match=r"pages of float8_e5m2 .* bfloat16, float8_e4m3fn and int8 are"):
        gpu.check_shape("bfloat16", 4, 2, 64, 64, kept="float8_e5m2")
    with pytest.raises(layout.UnsupportedShapeError, match=r"a latent of 256 in int8 keys of 288 .* in multiples of 64 are"):
        gpu.check_shape("bfloat16", 40, 1, 288, 64, 256, kept="int8")


RACING = step_of([(1, 150), (40, 100)], 48, 2, num_heads=1, num_kv_heads=1)


NARROW = step_of([(1, 150), (40, 100)], 48, 2, num_heads=1, num_kv_heads=1, kept="float8_e4m3fn")


@pytest.mark.parametrize("step", [RACING, NARROW], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("blackwell", [False, True], ids=["Hopper", "Blackwell"])
def test_transfers_and_computation_do_not_race(step, blackwell):
    check(step, interpret=plgpu.InterpretGPUParams(detect_races=True), scale=0.1, blackwell=blackwell)


@pytest.mark.parametrize(("latent", "blackwell"), [(128, False), (512, True)], ids=["Hopper", "Blackwell"])
def test_those_that_share_the_columns_of_a_latent_do_not_race(latent, blackwell):
    """Two warpgroups on Hopper; on Blackwell one, and the tensor core, which adds to a part of the sum while the next is rescaled."""
    step = step_of([(1, 150), (6, 100), (0, 0), (2, 62)], 16, 5, num_heads=16, **(LATENT | {"head_dim": latent + 64}))
    check(step, interpret=plgpu.InterpretGPUParams(detect_races=True), scale=0.05, latent=latent, blackwell=blackwell)


def test_a_missing_wait_for_a_free_slot_is_caught(monkeypatch):
    """Pages that are fetched before the slot's last user is done."""
    monkeypatch.setattr(gpu, "_MAX_STAGES", 2)
    monkeypatch.setattr(gpu._Program, "wait_until_free", lambda self, page: None)
    with pytest.raises(Exception, match=r"(?i)race"):
        check(RACING, interpret=plgpu.InterpretGPUParams(detect_races=True), scale=0.1)


def test_a_sum_that_is_read_before_the_tensor_core_is_done_is_caught(monkeypatch):
    monkeypatch.setattr(TensorMemory, "_finish", lambda self: None)
    with pytest.raises(Exception, match=r"(?i)race"):
        check(RACING, interpret=plgpu.InterpretGPUParams(detect_races=True), scale=0.1, blackwell=True)
