"""Page tables over several groups: hits that hold for all, windows that let go, pools that differ."""

from __future__ import annotations

from jaxllm.core_types import CacheSpec
from jaxllm.engine.kv_cache_manager import KVCacheManager
from jaxllm.engine.request import Request
from tests.engine.harness import make_request
from tests.engine.mock_runner import cache_spec


def _request(kv: KVCacheManager, tokens: list[int], **fields: object) -> Request:
    return Request(make_request("r", tokens, **fields), sequence=0, by_priority=False, max_len=1000, num_groups=kv.num_groups, seed=0)


def _compute(kv: KVCacheManager, request: Request, chunk: int = 1000) -> Request:
    """Run all tokens of the request."""
    hit = kv.find_prefix(request)
    num_new = kv.admit(request, hit, min(chunk, len(request.token_ids) - hit.num_tokens), reserve=0.0)
    while num_new:
        kv.advance(request, num_new)
        num_new = kv.grow(request, min(chunk, len(request.token_ids) - request.num_computed))
    assert request.num_computed == len(request.token_ids)
    return request


def _served(spec: CacheSpec, tokens: list[int], chunk: int = 1000, **fields: object) -> KVCacheManager:
    """A manager that has served one request with these tokens."""
    kv = KVCacheManager(spec)
    kv.free(_compute(kv, _request(kv, tokens, **fields), chunk))
    assert kv.usage == 0
    return kv


TOKENS = list(range(100, 116))


def test_at_least_one_token_is_left_to_compute() -> None:
    kv = _served(cache_spec(4), TOKENS)
    hits = {length: kv.find_prefix(_request(kv, [*TOKENS, 1, 2, 3, 4][:length])).num_tokens for length in (1, 4, 5, 15, 16, 17, 20)}
    assert hits == {1: 0, 4: 0, 5: 4, 15: 12, 16: 12, 17: 16, 20: 16}


def test_a_salt_keeps_equal_prompts_apart() -> None:
    kv = _served(cache_spec(4), TOKENS, cache_salt="x")
    for salt, expected in (("x", 12), ("y", 0), (None, 0)):
        assert kv.find_prefix(_request(kv, TOKENS, cache_salt=salt)).num_tokens == expected


def test_prompt_logprobs_need_every_position_and_skip_the_cache() -> None:
    kv = _served(cache_spec(4), TOKENS)
    assert kv.find_prefix(_request(kv, TOKENS, prompt_logprobs=0)).num_tokens == 0


def test_a_page_that_is_not_full_or_not_computed_is_not_found() -> None:
    kv = KVCacheManager(cache_spec(4))
    request = _request(kv, TOKENS)
    kv.admit(request, kv.find_prefix(request), 6, reserve=0.0)
    request.num_computed = 6
    kv.register(request)
    assert kv.find_prefix(_request(kv, TOKENS)).num_tokens == 4


def test_a_prefix_that_is_being_computed_is_worth_waiting_for() -> None:
    kv = KVCacheManager(cache_spec(4))
    first = _request(kv, TOKENS)
    kv.admit(first, kv.find_prefix(first), 8, reserve=0.0)
    assert kv.find_prefix(_request(kv, TOKENS)).pending
    assert not kv.find_prefix(_request(kv, [1, 2, 3, 4, 5])).pending
    kv.free(first)
    assert not kv.find_prefix(_request(kv, TOKENS)).pending


def test_a_window_group_lets_go_of_pages_behind_the_window() -> None:
    kv = KVCacheManager(cache_spec(4, 33, [(6, 33)]))
    request = _compute(kv, _request(kv, TOKENS), chunk=4)
    full, window = request.page_ids
    assert all(full)
    # The last chunk began at 12 and saw back to 7.
    assert [page > 0 for page in window] == [False, True, True, True]
    assert [group.pool.num_free for group in kv._groups] == [32 - 4, 32 - 3]


def test_a_hit_needs_only_the_window_of_a_window_group() -> None:
    kv = _served(cache_spec(4, 33, [(6, 33)]), [*TOKENS, 1], chunk=4)
    hit = kv.find_prefix(_request(kv, [*TOKENS, 9, 9]))
    assert hit.num_tokens == 16
    # Position 16 sees 11 to 16.
    assert [page > 0 for page in hit.page_ids[1]] == [False, False, True, True]
    assert all(hit.page_ids[0])


def test_a_hit_must_hold_for_every_group() -> None:
    # The window pool keeps only its newest pages: the full group remembers more than can be used.
    kv = _served(cache_spec(4, 33, [(8, 5)]), list(range(100, 160)), chunk=4)
    full = kv._groups[0].longest_hit(_hashes(kv, list(range(100, 160))), 14)
    assert full == 14
    assert kv.find_prefix(_request(kv, list(range(100, 130)))).num_tokens == 0
    assert kv.find_prefix(_request(kv, list(range(100, 160)))).num_tokens == 56


def _hashes(kv: KVCacheManager, tokens: list[int]) -> list[bytes]:
    return kv._hashes(_request(kv, tokens))


def test_groups_that_shorten_each_others_hit_agree_in_the_end() -> None:
    kv = _served(cache_spec(4, 33, [(6, 33), (12, 33)]), [*TOKENS, *TOKENS, 1])
    first, second = kv._groups[1], kv._groups[2]
    hashes = _hashes(kv, [*TOKENS, *TOKENS, 1])
    # The second window cannot start at 8 or 7 pages; the first then cannot start at 6 or 5.
    for group, index in ((second, 6), (first, 4)):
        page = group.cache.forget_hash(hashes[index])
        assert page is not None
        group.pool.mark_blank(page)
    hit = kv.find_prefix(_request(kv, [*TOKENS, *TOKENS, 1]))
    assert hit.num_tokens == 16
    for g, window in ((1, 6), (2, 12)):
        visible = range((16 - window + 1) // 4, 4)
        assert all(hit.page_ids[g][index] for index in visible)


def test_a_hit_survives_the_allocation_that_follows_it() -> None:
    """All other pages are free and cached too: growing must not evict what was just found."""
    kv = _served(cache_spec(4, 6), list(range(20)))
    request = _request(kv, [*range(8), 50, 51, 52, 53, 54])
    hit = kv.find_prefix(request)
    assert hit.num_tokens == 8
    assert kv.admit(request, hit, 5, reserve=0.0) == 5
    assert len(set(request.page_ids[0])) == 4


def test_free_pages_that_are_part_of_the_hit_are_not_counted_twice() -> None:
    kv = _served(cache_spec(4, 5), TOKENS)
    request = _request(kv, [*range(100, 112), 1, 2, 3, 4, 5])
    hit = kv.find_prefix(request)
    assert hit.num_tokens == 12
    assert kv.admit(request, hit, 5, reserve=0.0) == 0
    assert kv.usage == 0


def test_a_full_group_takes_all_pages_of_a_prompt_at_once_and_a_window_group_those_of_the_chunk() -> None:
    kv = KVCacheManager(cache_spec(4, 33, [(4, 33)]))
    request = _request(kv, list(range(40)))
    assert kv.admit(request, kv.find_prefix(request), 8, reserve=0.0) == 8
    assert list(map(len, request.page_ids)) == [10, 2]


def test_a_small_window_pool_shortens_the_chunk() -> None:
    kv = KVCacheManager(cache_spec(4, 33, [(4, 4)]))
    request = _request(kv, list(range(40)))
    assert kv.admit(request, kv.find_prefix(request), 40, reserve=0.0) == 12
    request.num_computed = 12
    # Position 12 sees back to 9: one page stays, two come free.
    assert kv.grow(request, 28) == 8


def test_most_positions_of_one_request() -> None:
    assert KVCacheManager(cache_spec(4, 11)).max_positions() == 40
    assert KVCacheManager(cache_spec(4, 11, [(8, 4)])).max_positions() == 40
    assert KVCacheManager(cache_spec(4, 11, [(8, 3)])).max_positions() == 8
    assert KVCacheManager(cache_spec(4, 0, [(8, 4)], full=False)).max_positions() is None


def test_a_reset_forgets_everything_and_what_runs_is_not_found_afterwards() -> None:
    kv = KVCacheManager(cache_spec(4))
    running = _request(kv, TOKENS)
    kv.admit(running, kv.find_prefix(running), 8, reserve=0.0)
    running.num_computed = 8
    kv.register(running)
    kv.reset_prefix_cache()
    running.num_computed = 16
    kv.free(running)
    assert kv.find_prefix(_request(kv, [*TOKENS, 1])).num_tokens == 0
    assert not kv._groups[0].pool._kept


def test_what_cannot_be_trusted_is_forgotten() -> None:
    kv = KVCacheManager(cache_spec(4))
    request = _compute(kv, _request(kv, TOKENS))
    kv.forget(request)
    kv.free(request)
    assert kv.find_prefix(_request(kv, TOKENS)).num_tokens == 0


def test_what_cannot_be_trusted_does_not_come_back_when_it_is_freed() -> None:
    kv = KVCacheManager(cache_spec(4))
    request = _request(kv, TOKENS)
    kv.admit(request, kv.find_prefix(request), 8, reserve=0.0)
    request.num_computed = 8
    kv.register(request)
    request.num_computed = 16
    kv.forget(request)
    kv.free(request)
    assert not kv._groups[0].pool._kept
    assert not kv._pending


def test_the_tail_of_a_prefix_is_evicted_first() -> None:
    kv = _served(cache_spec(4, 5), TOKENS)
    _compute(kv, _request(kv, [1, 2, 3, 4, 5]))
    assert kv.find_prefix(_request(kv, [*TOKENS, 1])).num_tokens == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVCacheManager(cache_spec(4), enable_prefix_caching=False)
    kv.free(_compute(kv, _request(kv, TOKENS)))
    assert kv.find_prefix(_request(kv, TOKENS)).num_tokens == 0


STATES = cache_spec(4, 33, states=(8, 9))


def test_a_request_owns_one_state_and_leaves_snapshots_at_every_interval() -> None:
    kv = KVCacheManager(STATES)
    request = _compute(kv, _request(kv, [*TOKENS, 1, 2]))
    full, states = request.page_ids
    assert all(full)
    assert [page > 0 for page in states] == [False, False, True]
    # What 16 tokens left behind is free to take, and found as long as nobody does.
    assert [group.pool.num_free for group in kv._groups] == [32 - 5, 8 - 1]
    assert kv.find_prefix(_request(kv, [*TOKENS, 9])).num_tokens == 16


def test_a_hit_ends_where_a_snapshot_exists() -> None:
    kv = _served(STATES, TOKENS)
    hits = {length: kv.find_prefix(_request(kv, [*TOKENS, 1, 2, 3, 4][:length])).num_tokens for length in (8, 9, 15, 16, 17, 20)}
    assert hits == {8: 0, 9: 8, 15: 8, 16: 8, 17: 16, 20: 16}
    hit = kv.find_prefix(_request(kv, [*TOKENS, 1]))
    assert [page > 0 for page in hit.page_ids[1]] == [False, True]


def test_no_step_computes_across_a_snapshot() -> None:
    kv = KVCacheManager(STATES)
    request = _request(kv, [*TOKENS, 1, 2])
    steps = [kv.admit(request, kv.find_prefix(request), 5, reserve=0.0)]
    while request.num_computed + steps[-1] < len(request.token_ids):
        kv.advance(request, steps[-1])
        steps.append(kv.grow(request, len(request.token_ids) - request.num_computed))
    assert steps == [5, 3, 8, 2]


def test_a_state_that_is_being_computed_is_worth_waiting_for() -> None:
    kv = KVCacheManager(STATES)
    first = _request(kv, [*TOKENS, 1])
    kv.advance(first, kv.admit(first, kv.find_prefix(first), 4, reserve=0.0))
    # The first page of four tokens is there, but no state to go with it.
    assert kv.find_prefix(_request(kv, TOKENS)).pending
    assert not kv.find_prefix(_request(kv, TOKENS[:8])).pending
    kv.advance(first, kv.grow(first, 4))
    assert kv.find_prefix(_request(kv, TOKENS[:9])).num_tokens == 8


# --------------------------------------------------------------------------- inputs of an encoder


def test_an_encoder_input_has_its_pages_as_long_as_its_request_runs() -> None:
    kv = KVCacheManager(cache_spec(4, encoder=(16, 5)))
    first = _compute(kv, _request(kv, TOKENS, encoder_token_ids=[1] * 9), chunk=3)
    assert (len(first.page_ids[-1]), kv.max_encoder_len) == (3, 16)
    second = _request(kv, [1, 2], encoder_token_ids=[1] * 8)
    assert kv.admit(second, kv.find_prefix(second), 2, reserve=0.0) == 0
    assert second.page_ids == [[], []]
    kv.free(first)
    assert kv.usage == 0
    assert kv.admit(second, kv.find_prefix(second), 2, reserve=0.0) == 2
    assert [len(pages) for pages in kv.new_page_ids(second)] == [1, 2]


def test_a_prefix_behind_another_encoder_input_is_not_found() -> None:
    kv = _served(cache_spec(4, encoder=(16, 5)), TOKENS, encoder_token_ids=[1, 2, 3])
    for given, expected in (([1, 2, 3], 12), ([1, 2], 0)):
        assert kv.find_prefix(_request(kv, TOKENS, encoder_token_ids=given)).num_tokens == expected
