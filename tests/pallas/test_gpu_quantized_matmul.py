"""The kernel for quantized weights on Hopper and Blackwell, interpreted, against the definition."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError
from tests.pallas.test_quantized_matmul import GROUPED, assert_close, make

if jax.__version_info__ < (0, 11):
    pytest.skip("this jax has no interpreter for GPU kernels", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul import gpu

pytestmark = pytest.mark.gpu_kernel
on_both = pytest.mark.parametrize("blackwell", [False, True], ids=["Hopper", "Blackwell"])


def check(values, group, zeros, activations, *, rows, num_in, num_out, blackwell):
    x, weight = make(values, group, zeros, rows=rows, num_in=num_in, num_out=num_out)
    params = plgpu.InterpretGPUParams(detect_races=True)
    got = gpu.matmul(x, weight, activations=activations, blackwell=blackwell, interpret=params)
    assert_close(jax.block_until_ready(got), x, weight, activations)


def check_that_a_race_is_caught(blackwell, without):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, without, lambda: None)
        with pytest.raises(Exception, match="RACE"):
            check("int8", 128, False, None, rows=1, num_in=768, num_out=128, blackwell=blackwell)
    reset_gpu_interpret_mode_state()


def run_with_enough_threads(code):
    """In a process of its own: the interpreter holds a thread of XLA's pool for each warpgroup, and small hosts have no more."""
    command = [sys.executable, "-c", f"from {__name__} import *\n{code}"]
    environment = os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("rows", [1, pytest.param(20, marks=pytest.mark.heavy), pytest.param(130, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", GROUPED)
def test_the_kernel_equals_the_definition_without_races(name, rows):
    check(*GROUPED[name], rows=rows, num_in=768, num_out=256, blackwell=False)


@pytest.mark.parametrize("rows", [1, pytest.param(20, marks=pytest.mark.heavy), pytest.param(130, marks=pytest.mark.heavy)])
def test_the_kernel_equals_the_definition_without_races_on_blackwell(rows):
    run_with_enough_threads(
        f"for name in GROUPED: print(name); check(*GROUPED[name], rows={rows}, num_in=768, num_out=256, blackwell=True)"
    )


def test_fetching_over_what_is_still_read_is_caught():
    check_that_a_race_is_caught(False, "commit_smem")


def test_what_is_not_ordered_on_blackwell_is_caught():
    run_with_enough_threads("for name in ('commit_smem', 'commit_tmem', 'wait_load_tmem'): check_that_a_race_is_caught(True, name)")


def test_many_inputs_are_cut_into_parts():
    check("int8", 128, True, None, rows=3, num_in=2048, num_out=128, blackwell=False)


def test_outputs_that_two_warpgroups_cannot_share_are_those_of_one():
    weight = make("float8_e4m3fn", 64, False, rows=9, num_in=256, num_out=192)[1]
    assert gpu.plan_product(9, weight, blackwell=False).products.warpgroups == 1
    check("float8_e4m3fn", 64, False, None, rows=9, num_in=256, num_out=192, blackwell=False)


@on_both
@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("name", GROUPED)
def test_tiles_fit_shared_and_tensor_memory(name, rows, blackwell):
    values, group, *_ = GROUPED[name]
    weight = QuantizedWeight(jax.ShapeDtypeStruct((4096, 14336), values), jax.ShapeDtypeStruct((14336 // group, 4096), "float32"))
    plan = gpu.plan_product(rows, weight, blackwell=blackwell)
    assert plan.shared_bytes <= 227 * 1024
    assert plan.stages >= 3
    scratch = plan.products.scratch(None)
    if blackwell:
        assert plan.products.rows % 16 == 0  # other products of 128 outputs are undefined; neither compiler nor interpreter says so
        # Two bfloat16 are a column.
        assert scratch["wide"].shape[1] // 2 + scratch["sums"].shape[1] <= 512


@on_both
@pytest.mark.parametrize(("num_in", "num_out"), [(576, 128), (512, 96)])
def test_what_are_no_whole_tiles_is_refused_with_what_fits(num_in, num_out, blackwell):
    x, weight = make("int8", 64, False, rows=1, num_in=num_in, num_out=num_out)
    fits = f"multiples of {128 if blackwell else 64} outputs and of 128 inputs"
    with pytest.raises(UnsupportedShapeError, match=f"{num_out} outputs of {num_in} inputs .* {fits}"):
        gpu.matmul(x, weight, blackwell=blackwell)
