"""Which page holds which prefix: full pages are known by a hash chained over everything before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_DIGEST_BYTES = 16


def chain_root(domains: Sequence[tuple[str, str | int]]) -> bytes:
    """The parent hash of a first page. `domains` are (domain, value) pairs that keep equal tokens apart, such as a cache salt.

    Each value is hashed together with the name of its domain: a salt never equals an adapter of the same name.
    """
    return hashlib.blake2b(repr(tuple(domains)).encode(), digest_size=_DIGEST_BYTES).digest()


def extend_chain(hashes: list[bytes], root: bytes, token_ids: Sequence[int], page_size: int) -> None:
    """Append to `hashes` those of the full pages of `token_ids` that are not in it yet."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * page_size, len(token_ids) - page_size + 1, page_size):
        tokens = array("q", token_ids[start : start + page_size])
        parent = hashlib.blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)


class PrefixCache:
    """Hash of a full page <-> the page that holds it, for one cache group. The first page with a hash keeps it."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def get(self, page_hash: bytes) -> int | None:
        return self._page_of.get(page_hash)

    def put(self, page_hash: bytes, page: int) -> bool:
        """Remember the page; False where another page has this content already."""
        if page_hash in self._page_of:
            return False
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        return True

    def forget_page(self, page: int) -> None:
        """The page gets new content."""
        del self._page_of[self._hash_of.pop(page)]

    def forget_hash(self, page_hash: bytes) -> int | None:
        """Drop one entry; returns its page."""
        page = self._page_of.pop(page_hash, None)
        if page is not None:
            del self._hash_of[page]
        return page

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that were known."""
        pages = list(self._hash_of)
        self._page_of.clear()
        self._hash_of.clear()
        return pages
