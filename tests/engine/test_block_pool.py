"""Page ids are handed out once, taken back once, and never leave their range."""

from __future__ import annotations

import random

import pytest

from jaxllm.engine.block_pool import BlockPool
from jaxllm.errors import ConfigError


def test_the_sink_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.usage == 1.0


def test_more_than_there_is_cannot_be_allocated() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="3 pages asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_page_is_freed_when_its_last_reference_goes() -> None:
    pool = BlockPool(3)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.free([page])
    assert pool.num_free == 1
    pool.free([page])
    assert pool.num_free == 2
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free([page])


@pytest.mark.parametrize("page", [0, -1, 4, 1000])
def test_ids_out_of_range_are_refused(page: int) -> None:
    pool = BlockPool(4)
    for act in (pool.share, pool.free):
        with pytest.raises(RuntimeError, match=r"outside 1\.\.3"):
            act([page])


def test_a_blank_free_page_cannot_be_shared() -> None:
    with pytest.raises(RuntimeError, match="blank"):
        BlockPool(4).share([2])


def test_kept_pages_are_evicted_last_and_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, evicted.append)
    pages = pool.allocate(4)
    for page in pages[:3]:
        pool.mark_cached(page)
    pool.free([pages[1], pages[0], pages[3], pages[2]])
    pool.share([pages[0]])  # a hit takes it out of the line
    assert pages[0] not in pool.allocate(2)
    assert not evicted
    assert pool.allocate(2) == evicted == [pages[1], pages[2]]


def test_a_forgotten_page_is_blank_again() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, evicted.append)
    pages = pool.allocate(2)
    for page in pages:
        pool.mark_cached(page)
    pool.free(pages[:1])
    for page in pages:
        pool.mark_blank(page)
    pool.free(pages[1:])
    assert sorted(pool.allocate(2)) == sorted(pages)
    assert not evicted


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 pages"):
        BlockPool(1)


def test_random_use_keeps_the_books() -> None:
    rng = random.Random(0)
    cached: set[int] = set()
    pool = BlockPool(20, cached.remove)
    references: list[int] = []
    for _ in range(20_000):
        action = rng.random()
        if action < 0.35:
            count = rng.randint(0, min(3, pool.num_free))
            pages = pool.allocate(count)
            assert not set(pages) & (set(references) | cached)
            references += pages
        elif action < 0.5 and (set(references) | cached):
            page = rng.choice(sorted(set(references) | cached))
            pool.share([page])
            references.append(page)
        elif action < 0.6 and references:
            page = rng.choice(references)
            pool.mark_cached(page)
            cached.add(page)
        elif action < 0.65 and cached:
            page = rng.choice(sorted(cached))
            pool.mark_blank(page)
            cached.remove(page)
        elif references:
            page = references.pop(rng.randrange(len(references)))
            pool.free([page])
        assert pool.num_free == pool.num_usable - len(set(references))
        assert all(pool.ref_count(page) == references.count(page) for page in range(1, 20))
