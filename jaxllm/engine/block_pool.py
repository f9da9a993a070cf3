"""Page ids of one cache group: reference counts and the free list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from jaxllm.errors import ConfigError

# Padding writes to this page and reads from it are masked; it is never handed out.
SINK_PAGE = 0


class BlockPool:
    """Hands out page ids 1 .. num_pages - 1 and takes them back when nobody refers to them any more.

    A free page whose content the prefix cache knows is kept as long as possible: blank pages go first, then kept pages, least
    recently freed first. `on_evict(page)` is called when a kept page is handed out for new content.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None):
        if num_pages < 2:
            raise ConfigError(f"a page pool needs at least 2 pages (one is the sink), got {num_pages}; give the KV cache more memory")
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._refs = [0] * num_pages
        self._cached = bytearray(num_pages)
        self._blank = list(range(num_pages - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def usage(self) -> float:
        """Share of the usable pages that are in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable

    def ref_count(self, page: int) -> int:
        return self._refs[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. The caller has checked `num_free`; RuntimeError where it has not."""
        if count > self.num_free:
            raise RuntimeError(f"{count} pages asked for, {self.num_free} free")
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                self._cached[page] = 0
                if self._on_evict is not None:
                    self._on_evict(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page; kept free pages come back to life."""
        for page in pages:
            self._check(page)
            if self._refs[page] == 0:
                if not self._cached[page]:
                    raise RuntimeError(f"page {page} is free and blank: nothing to share")
                del self._kept[page]
            self._refs[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. Pages that are given first are evicted first."""
        for page in pages:
            self._check(page)
            if self._refs[page] == 0:
                raise RuntimeError(f"page {page} freed twice")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._cached[page]:
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def mark_cached(self, page: int) -> None:
        """The prefix cache knows this page's content now: keep it when it becomes free."""
        self._check(page)
        self._cached[page] = 1

    def mark_blank(self, page: int) -> None:
        """The prefix cache has forgotten this page."""
        self._check(page)
        self._cached[page] = 0
        if self._refs[page] == 0 and page in self._kept:
            del self._kept[page]
            self._blank.append(page)

    def _check(self, page: int) -> None:
        # JAX clips wrong indices silently, so a wrong id must not get past the host.
        if not SINK_PAGE < page < self.num_pages:
            raise RuntimeError(f"page id {page} is outside 1..{self.num_pages - 1}")
