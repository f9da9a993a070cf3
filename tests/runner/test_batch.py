"""Packing a step on the host and taking it apart on the device."""

import jax
import numpy as np
import pytest

from jaxllm.core_types import CacheGroup, CacheKind, CacheSpec, NewRow, ScheduledRow
from jaxllm.runner.batch import LAST_SAMPLED, BatchBuilder, decodes_first, unpack
from jaxllm.runner.buckets import Bucket
from jaxllm.sampling_params import SamplingParams

SPEC = CacheSpec(4, (CacheGroup(CacheKind.FULL, (0,), 20), CacheGroup(CacheKind.SLIDING_WINDOW, (1,), 10, window=8)))


def new_row(slot, tokens, pages):
    return NewRow(slot, str(slot), len(tokens), tokens, SamplingParams(), 0, pages)


@pytest.fixture
def builder() -> BatchBuilder:
    return BatchBuilder(SPEC, num_slots=3, max_model_len=32)


def test_rows_tokens_positions_and_pages_arrive(builder):
    builder.admit(new_row(2, [10, 11, 12], [[5], [7]]))
    builder.admit(new_row(0, list(range(20, 27)), [[3, 4], [1, 2]]))
    rows = [ScheduledRow(2, 3, 1, True, [[], []]), ScheduledRow(0, 1, 5, False, [[6], []])]
    bucket = Bucket(8, 3)
    batch = jax.jit(lambda x: unpack(x, builder.layout(bucket)))(builder.pack(rows, bucket))

    assert batch.tokens.tolist() == [LAST_SAMPLED, 21, 22, 23, 24, 25, 0, 0]
    assert batch.positions.tolist() == [3, 1, 2, 3, 4, 5, 0, 0]
    assert batch.token_rows.tolist() == [0, 1, 1, 1, 1, 1, 3, 3]
    assert batch.slots.tolist() == [2, 0, builder.sink_slot]
    assert batch.samples.tolist() == [True, False, False]
    assert batch.last_tokens[:2].tolist() == [0, 5]
    assert batch.next_positions.tolist() == [4, 6, 0]
    full, window = batch.metadata
    assert full.page_table[:, :4].tolist() == [[5, 0, 0, 0], [3, 4, 6, 0], [0, 0, 0, 0]]
    assert window.page_table[:, :2].tolist() == [[7, 0], [1, 2], [0, 0]]
    assert int(full.num_decodes) == 1


def test_an_empty_step_packs(builder):
    bucket = Bucket(4, 2)
    batch = unpack(jax.numpy.asarray(builder.pack([], bucket)), builder.layout(bucket))
    assert batch.metadata[0].kv_lens.tolist() == [0, 0]
    assert batch.token_rows.tolist() == [2] * 4


@pytest.mark.parametrize("page", [-1, 20])
def test_a_page_outside_its_pool_is_an_error(builder, page):
    with pytest.raises(IndexError, match="20"):
        builder.admit(new_row(0, [1], [[page], [0]]))


def test_a_new_owner_of_a_slot_starts_with_its_own_pages(builder):
    builder.admit(new_row(1, [1] * 12, [[1, 2, 3], [1, 2, 3]]))
    builder.admit(new_row(1, [1], [[9], [8]]))
    packed = builder.pack([ScheduledRow(1, 0, 1, True, [[10], []])], Bucket(1, 1))
    batch = unpack(jax.numpy.asarray(packed), builder.layout(Bucket(1, 1)))
    assert batch.metadata[0].page_table[0, :2].tolist() == [9, 10]


def test_rows_of_one_token_come_first_and_keep_their_order():
    rows = [ScheduledRow(i, 0, n, True, []) for i, n in enumerate([3, 1, 2, 1])]
    assert decodes_first(rows) == [1, 3, 0, 2]


def test_each_packed_step_is_its_own_memory(builder):
    builder.admit(new_row(0, [1, 2], [[1], [1]]))
    first = builder.pack([ScheduledRow(0, 0, 2, True, [[], []])], Bucket(4, 2))
    before = first.copy()
    builder.pack([], Bucket(4, 2))
    np.testing.assert_array_equal(first, before)


def test_states_come_as_a_page_to_read_and_a_page_to_write():
    spec = CacheSpec(4, (CacheGroup(CacheKind.FULL, (0,), 20), CacheGroup(CacheKind.RECURRENT, (1,), 9, interval=8)))
    builder = BatchBuilder(spec, num_slots=4, max_model_len=32)
    builder.admit(new_row(0, list(range(20)), [[1, 2], [3]]))  # at its beginning
    builder.admit(new_row(1, list(range(20)), [[1, 2, 4], [3, 5]]))  # behind a snapshot
    builder.admit(new_row(2, list(range(20)), [[6, 7], [8]]))  # in between
    rows = [ScheduledRow(2, 6, 1, True, [[], []]), ScheduledRow(0, 0, 8, False, [[], []]), ScheduledRow(1, 8, 4, True, [[], []])]
    bucket = Bucket(16, 4)
    states = unpack(jax.numpy.asarray(builder.pack(rows, bucket)), builder.layout(bucket)).states
    assert states.fresh.tolist() == [False, True, False, True]
    assert states.read[jax.numpy.array([0, 2])].tolist() == [8, 3]
    assert states.write.tolist() == [8, 3, 5, 0]
    assert states.lens.tolist() == [1, 8, 4, 0]
