"""What kernels for GPUs share, interpreted, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("this jax has no interpreter for GPU kernels", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import product, shared_matrix


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_product_of_matrices_in_shared_memory_is_summed_in_float32(dtype):
    a, b = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed, shape in enumerate([(64, 128), (128, 64)]))

    def kernel(a_hbm, b_hbm, out, a_smem, b_smem, barrier):
        for source, target in ((a_hbm, a_smem), (b_hbm, b_smem)):
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)
        out[...] = product(a_smem, b_smem)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[shared_matrix(dtype, x.shape, 128) for x in (a, b)] + [plgpu.Barrier(num_arrivals=2)],
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    np.testing.assert_allclose(run(a, b), a.astype(jnp.float32) @ b.astype(jnp.float32), rtol=1e-5, atol=1e-4)
