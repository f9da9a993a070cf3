"""Block sizes follow from shapes and devices; what cannot fit is refused with what would."""

import dataclasses
import json
from pathlib import Path

import pytest

from pallas_kernels.devices import DEVICES, find_device
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError
from pallas_kernels.ragged_paged_attention.tuning import Blocks, Shape, choose_blocks

LLAMA_8B = Shape(2048, 256, 64, 128, num_heads=32, num_kv_heads=8, word_heads=8, padded_dim=128, itemsize=2)
SHAPES = {
    "Llama-8B": LLAMA_8B,
    "decodes": dataclasses.replace(LLAMA_8B, num_tokens=256),
    "one head": dataclasses.replace(LLAMA_8B, num_heads=1, num_kv_heads=1, word_heads=1),
    "multi-head, wide, float32": Shape(2048, 64, 64, 64, num_heads=32, num_kv_heads=32, word_heads=64, padded_dim=128, itemsize=4),
    "head dim 256": Shape(512, 64, 64, 128, num_heads=8, num_kv_heads=4, word_heads=4, padded_dim=256, itemsize=2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("device", [d for d in DEVICES.values() if d.platform == "tpu" and d.kind != "TPU v4"], ids=lambda d: d.kind)
def test_blocks_fit_every_device_and_divide_evenly(shape, device):
    blocks = choose_blocks(shape, device)
    assert blocks.vmem(shape) <= device.vmem_bytes // 2
    assert blocks.decode_pages % blocks.decode_compute_pages == 0
    assert blocks.prefill_pages % blocks.prefill_compute_pages == 0
    assert blocks.query_tile & (blocks.query_tile - 1) == 0


def test_a_page_table_past_scalar_memory_is_refused_with_what_fits():
    shape = dataclasses.replace(LLAMA_8B, pages_per_row=1024)
    with pytest.raises(UnsupportedShapeError, match=r"block_size=256, max_num_seqs=128 or max_model_len=65536 fits"):
        choose_blocks(shape, find_device("TPU v6 lite"))
    choose_blocks(dataclasses.replace(shape, num_rows=128), find_device("TPU v6 lite"))
    choose_blocks(dataclasses.replace(shape, page_size=256, pages_per_row=512), find_device("TPU v6 lite"))


def test_pages_past_vector_memory_are_refused_with_what_fits():
    shape = dataclasses.replace(LLAMA_8B, num_heads=64, num_kv_heads=64, word_heads=64, page_size=512, pages_per_row=8)
    with pytest.raises(UnsupportedShapeError, match="block_size=256 or a larger tensor_parallel_size"):
        choose_blocks(shape, find_device("TPU7x"))


def test_the_table_of_exceptions_can_be_read():
    table = json.loads((Path(__file__).parents[2] / "configs" / "tuned_blocks.json").read_text())
    for shapes in table["ragged_paged_attention"].values():
        for fields in shapes.values():
            Blocks(**fields)
