"""The Hopper kernel for quantized weights, interpreted, against the definition."""

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


@pytest.mark.parametrize("rows", [1, pytest.param(20, marks=pytest.mark.heavy), pytest.param(130, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", GROUPED)
def test_the_kernel_equals_the_definition_without_races(name, rows):
    values, group, zeros, activations = GROUPED[name]
    x, weight = make(values, group, zeros, rows=rows, num_in=768, num_out=256)
    params = plgpu.InterpretGPUParams(detect_races=True)
    got = gpu.matmul(x, weight, activations=activations, interpret=params)
    assert_close(jax.block_until_ready(got), x, weight, activations)


def test_fetching_over_what_is_still_read_is_caught(monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    x, weight = make("int8", 128, False, rows=1, num_in=768, num_out=128)
    with pytest.raises(Exception, match="RACE"):
        jax.block_until_ready(gpu.matmul(x, weight, interpret=plgpu.InterpretGPUParams(detect_races=True)))
    reset_gpu_interpret_mode_state()


def test_many_inputs_are_cut_into_parts():
    x, weight = make("int8", 128, True, rows=3, num_in=2048, num_out=128)
    assert_close(gpu.matmul(x, weight, interpret=plgpu.InterpretGPUParams()), x, weight, None)


@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("name", GROUPED)
def test_tiles_fit_shared_memory(name, rows):
    values, group, *_ = GROUPED[name]
    weight = QuantizedWeight(jax.ShapeDtypeStruct((4096, 14336), values), jax.ShapeDtypeStruct((14336 // group, 4096), "float32"))
    assert gpu.shared_bytes(rows, weight) <= 227 * 1024


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 128), (512, 192)])
def test_what_are_no_whole_tiles_is_refused_with_what_fits(num_in, num_out):
    x, weight = make("int8", 64, False, rows=1, num_in=num_in, num_out=num_out)
    with pytest.raises(UnsupportedShapeError, match=f"{num_out} outputs of {num_in} inputs .* multiples of 128 of both"):
        gpu.matmul(x, weight)
