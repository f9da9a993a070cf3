"""The TPU kernel under the interpreter that keeps the clocks of transfers: no race, and a missing wait is found."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import tpu, tpu_stream
from tests.pallas.steps import assert_same, expect, make_step
from tests.pallas.test_latent_attention import latent_step
from tests.pallas.test_ragged_paged_attention import BLOCKS

DECODES = make_step([(1, 9), (1, 30)], 2, 2, num_heads=1, num_kv_heads=1)
MIXED = make_step([(1, 9), (11, 6), (6, 14)], 24, 4, num_heads=1, num_kv_heads=1)
LATENTS = latent_step([(1, 9), (11, 14), (6, 30)], 24, 4, num_heads=1, dims=(20, 16), dtype="bfloat16")


def attend(step, latent=None):
    # Eager transfers: one that nobody waits for happens all the same, as on the hardware.
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    out = tpu.attend(*step, scale=0.1, latent=latent, blocks=BLOCKS, interpret=params)
    return jax.block_until_ready(out)


def races_found(step, latent=None) -> bool:
    """Newer versions of jax raise on a race, older ones remember it."""
    try:
        attend(step, latent)
    except Exception as error:
        if "race" not in str(error).lower():
            raise
        return True
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)


@pytest.mark.parametrize("step", [DECODES, pytest.param(MIXED, marks=pytest.mark.heavy)], ids=["decodes", "mixed"])
def test_transfers_and_computation_do_not_race(step):
    assert not races_found(step)
    assert_same(attend(step), expect(step, scale=0.1), step, 2e-5)


@pytest.mark.heavy
def test_pages_of_latents_do_not_race():
    assert not races_found(LATENTS, 16)


@pytest.mark.parametrize("step", [DECODES, pytest.param(MIXED, marks=pytest.mark.heavy)], ids=["decodes", "mixed"])
def test_a_missing_wait_for_pages_is_caught(step, monkeypatch):
    monkeypatch.setattr(tpu_stream.Stream, "wait", lambda self, item, block, slot: None)
    assert races_found(step)
