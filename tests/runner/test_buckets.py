"""The ladder of compiled shapes."""

import pytest

from jaxllm.runner.buckets import Bucket, bucket_ladder, smallest_fit


@pytest.mark.parametrize("seqs", [1, 2, 7, 8, 33, 64, 256, 1024])
@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 512, 2048, 8192])
def test_every_step_that_can_be_scheduled_fits(seqs, tokens):
    ladder = bucket_ladder(seqs, tokens)
    for rows in {1, min(2, seqs), seqs // 2, seqs} - {0}:
        assert smallest_fit(ladder, rows, rows) is not None
        for count in {rows + 1, tokens // 2, tokens}:
            if rows < count <= tokens:
                assert smallest_fit(ladder, count, rows) is not None


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_prompts_pad_less_than_a_third_above_256_tokens(tokens):
    ladder = bucket_ladder(64, tokens)
    for count in range(257, tokens + 1, 7):
        bucket = smallest_fit(ladder, count, 1)
        assert (bucket.num_tokens - count) / bucket.num_tokens < 1 / 3 + 1e-9


def test_decodes_take_the_decode_bucket_and_prompts_never_do():
    ladder = bucket_ladder(64, 512)
    assert smallest_fit(ladder, 5, 5) == Bucket(8, 8)
    assert not smallest_fit(ladder, 6, 5).decode_only


def test_the_default_ladders_are_short():
    assert len(bucket_ladder(64, 512)) <= 12
    assert len(bucket_ladder(256, 2048)) <= 15


def test_a_step_beyond_the_limits_fits_nothing():
    assert smallest_fit(bucket_ladder(8, 64), 65, 2) is None
