"""Hashes of full pages stand for everything before them."""

from __future__ import annotations

import random

from jaxllm.engine.prefix_cache import PrefixCache, chain_root, extend_chain

ROOT = chain_root(())


def _chain(tokens: list[int], root: bytes = ROOT, page_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root, tokens, page_size)
    return hashes


def test_only_full_pages_are_hashed() -> None:
    assert [len(_chain(list(range(length)))) for length in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_depends_on_every_token_before_it() -> None:
    tokens = list(range(16))
    whole = _chain(tokens)
    for position in range(16):
        changed = [*tokens[:position], 99, *tokens[position + 1 :]]
        page = position // 4
        assert _chain(changed)[:page] == whole[:page]
        assert not set(_chain(changed)[page:]) & set(whole)


def test_growing_bit_by_bit_gives_the_same_chain() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(200_000) for _ in range(100)]
    hashes: list[bytes] = []
    end = 0
    while end < 100:
        end = min(100, end + rng.randint(0, 9))
        extend_chain(hashes, ROOT, tokens[:end], 4)
    assert hashes == _chain(tokens)


def test_domains_never_meet() -> None:
    roots = [
        chain_root(pairs) for pairs in ((), (("salt", "x"),), (("adapter", "x"),), (("salt", "y"),), (("salt", "x"), ("adapter", "x")))
    ]
    assert len(set(roots)) == len(roots)
    assert len({_chain([1, 2, 3, 4], root)[0] for root in roots}) == len(roots)


def test_the_first_page_with_a_content_keeps_it() -> None:
    cache = PrefixCache()
    assert cache.put(b"h", 3)
    assert not cache.put(b"h", 4)
    assert cache.get(b"h") == 3
    cache.forget_page(3)
    assert cache.get(b"h") is None
    assert cache.put(b"h", 4)
    assert cache.forget_hash(b"h") == 4
    assert cache.forget_hash(b"h") is None
    assert len(cache) == 0
