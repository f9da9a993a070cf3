"""The TPU kernel over pages of latents, whose first dims are the values as well, interpreted against its oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.attention import reference as contract
from jaxllm.ops.attention.metadata import AttentionMetadata, LayerCache
from jaxllm.specs import AttendSpec
from pallas_kernels.ragged_paged_attention import layout
from tests.pallas.steps import expect, make_step
from tests.pallas.test_ragged_paged_attention import DECODES, MIXED, check

# Dims of keys and of values: those of a real model in small (values fill whole lanes, keys a part more), and ones within a tile of lanes.
REAL, TINY = (192, 128), (20, 16)


def latent_step(rows, num_tokens, num_rows, *, dims=REAL, num_heads=16, dtype="float32", **options):
    # Tiles of bfloat16 have 16 positions.
    size = 16 if dtype == "bfloat16" else 8
    options = {"page_size": size, "num_kv_heads": 1, "latent": True} | options
    return make_step(rows, num_tokens, num_rows, num_heads=num_heads, head_dim=dims[0], dtype=dtype, **options)


@pytest.mark.parametrize("dims", [REAL, TINY], ids=str)
def test_decodes_equal_the_reference(dims):
    check(latent_step(DECODES, 8, 8, dims=dims), scale=0.1, latent=dims[1])


@pytest.mark.heavy
def test_mixed_steps_of_all_heads_of_a_large_model_equal_the_reference():
    check(latent_step(MIXED, 48, 8, num_heads=128), scale=0.1, latent=128)


@pytest.mark.parametrize(
    "rows", [[(1, 0), (1, 14), (1, 15), (1, 16), (1, 40)], [(1, 17), (9, 0), (2, 15), (0, 0), (21, 30)]], ids=["decodes", "mixed"]
)
def test_pages_of_bfloat16_latents_lie_in_their_own_dtype(rows):
    step = latent_step(rows, 8 if rows[0] == (1, 0) else 48, 8, dtype="bfloat16")
    assert step.cache.dtype == jnp.bfloat16
    check(step, scale=0.1, latent=128, tolerance=2e-2)


def test_the_oracle_of_the_kernels_agrees_with_that_of_the_engine():
    """Two written apart: over pages of words, and over pages of the contract."""
    step = latent_step(MIXED, 48, 8)
    keys, _ = layout.unpack(step.cache, step.cache.dtype, latent=True)
    token = jnp.arange(48)
    rows = jnp.sum(step.q_starts[None, 1:] <= token[:, None], axis=1)
    row = jnp.minimum(rows, 7)
    positions = jnp.where(rows < 8, step.kv_lens[row] - (step.q_starts[row + 1] - token), 0)
    metadata = AttentionMetadata(step.page_table, step.q_starts, step.kv_lens, positions, rows, step.num_decodes)
    pages = LayerCache(jnp.swapaxes(jnp.where(jnp.isfinite(keys), keys, 0)[..., :192], 2, 3), None)
    want, _ = contract.attend(step.q, step.k, None, pages, metadata, AttendSpec(0.1, latent=128))
    got, _ = expect(step, scale=0.1, latent=128)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_pages_of_latents_that_are_not_whole_tiles_are_refused():
    with pytest.raises(layout.UnsupportedShapeError, match="multiples of 16 are"):
        layout.cache_shape(5, 8, 1, 576, jnp.bfloat16, latent=True)
