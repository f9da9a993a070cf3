"""The Mosaic GPU kernel for grouped products, interpreted, against XLA's: shared tiles, groups without rows, rows of nobody."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("this jax has no interpreter for GPU kernels", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import gpu

pytestmark = pytest.mark.gpu_kernel
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)


def make(num_rows: int, num_groups: int, num_in: int, num_out: int, dtype=jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(num_rows, num_in)), dtype), jnp.asarray(rng.normal(size=(num_groups, num_in, num_out)), dtype)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """So that a program has several items of work."""
    monkeypatch.setattr(gpu, "_MULTIPROCESSORS", {False: 3, True: 3})


@pytest.mark.parametrize("blackwell", [False, True], ids=["hopper", "blackwell"])
@pytest.mark.parametrize(
    ("counts", "of_nobody", "num_in", "num_out"),
    [
        pytest.param([3, 0, 11, 1, 0, 8], 9, 64, 128, id="shared tiles, rows of nobody"),
        pytest.param([0, 20, 0], 0, 128, 192, id="one group, half a tile of outputs"),
        pytest.param([0, 0, 1], 0, 72, 144, id="one row, no whole tiles"),
        pytest.param([0, 0], 8, 64, 128, id="no rows of groups"),
        pytest.param([70, 5, 130, 0], 3, 320, 256, id="several tiles", marks=pytest.mark.heavy),
    ],
)
def test_products_equal_those_of_xla_without_races(counts, of_nobody, num_in, num_out, blackwell):
    used = sum(counts)
    x, matrices = make(used + of_nobody, len(counts), num_in, num_out)
    got = gpu.ragged_dot(x, matrices, jnp.asarray(counts), blackwell=blackwell, interpret=INTERPRETED)
    want = jax.lax.ragged_dot(x, matrices, jnp.asarray(counts), preferred_element_type=jnp.float32)
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    np.testing.assert_allclose(got[:used].astype(jnp.float32), want[:used], rtol=1e-2, atol=1e-2 * num_in**0.5)


@pytest.mark.parametrize("removed", ["commit_smem", "wait_smem_to_gmem"])
def test_storing_over_what_is_still_read_is_caught(monkeypatch, removed):
    monkeypatch.setattr(plgpu, removed, lambda *args, **keywords: None)
    x, matrices = make(40, 3, 64, 128)
    with pytest.raises(Exception, match="RACE"):
        jax.block_until_ready(gpu.ragged_dot(x, matrices, jnp.asarray([20, 10, 10]), interpret=INTERPRETED))
    reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(("rows", "groups"), [(1, 256), (512, 128), (16384, 128), (16384, 8)])
def test_a_tile_holds_the_rows_of_an_average_group_and_fits_shared_memory(rows, groups):
    tile_rows, stages = gpu.plan_tile(rows, groups)
    assert tile_rows >= min(rows // groups + 7, 256)
    assert stages >= 3
    assert 2 * (stages * 64 * (tile_rows + 128) + 128 * tile_rows) <= 227 * 1024


@pytest.mark.parametrize(
    ("dtype", "num_in", "num_out"), [("float32", 64, 128), ("bfloat16", 68, 128), ("bfloat16", 64, 136), ("bfloat16", 64, 64)]
)
def test_what_does_not_fit_runs_through_triton_and_says_so_once(dtype, num_in, num_out, monkeypatch, caplog):
    gpu.say_once.cache_clear()
    monkeypatch.setattr(gpu.triton, "ragged_dot", lambda *arrays: "triton")
    x, matrices = make(8, 2, num_in, num_out, dtype)
    with caplog.at_level(logging.WARNING):
        assert [gpu.ragged_dot(x, matrices, jnp.asarray([4, 4])) for _ in range(2)] == ["triton"] * 2
    (record,) = caplog.records
    assert f"{dtype} rows with {num_out} outputs of {num_in} inputs" in record.getMessage()
