"""Pages of requests over all cache groups: growth, windows, states, prefix hits and release."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.core_types import CacheGroup, CacheKind, CacheSpec
from jaxllm.engine.block_pool import SINK_PAGE, BlockPool
from jaxllm.engine.prefix_cache import PrefixCache, chain_root, extend_chain
from jaxllm.engine.request import Request


@dataclass(slots=True)
class PrefixHit:
    """Cached pages at the start of a request that hold for every group.

    `page_ids[g]` are the first pages of group g's table (0 behind its window). `pending` says that a running request is computing
    the page that follows, so that waiting for it saves work.
    """

    num_tokens: int
    page_ids: list[list[int]]
    pending: bool = False


class _Group:
    """One cache group: its pool, what is cached in it, and its window.

    `size` is the number of positions that a table entry stands for: `stride` pages of the prefix chain, whose last hash names the entry.
    """

    def __init__(self, group: CacheGroup, spec: CacheSpec):
        self.is_recurrent = group.kind is CacheKind.RECURRENT
        # A step at position p needs the state after p - 1 and writes the one after p: as if it saw two positions.
        self.window = 2 if self.is_recurrent else group.window
        self.size = spec.positions_per_page(group)
        self.stride = self.size // spec.page_size
        self.cache = PrefixCache()
        self.pool = BlockPool(group.num_pages, self.cache.forget_page)

    def num_pages(self, num_positions: int) -> int:
        """Table entries that so many positions need."""
        return -(-num_positions // self.size)

    def first_needed(self, position: int) -> int:
        """Index of the first page that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.size

    def name(self, hashes: list[bytes], index: int) -> bytes:
        """The hash of the prefix that the table entry ends."""
        return hashes[(index + 1) * self.stride - 1]

    def longest_hit(self, hashes: list[bytes], num_hashes: int) -> int:
        """The most leading hashes, at most `num_hashes`, that a request could start behind as far as this group goes."""
        if self.window is None:
            for index in range(num_hashes):
                if self.cache.get(hashes[index]) is None:
                    return index
            return num_hashes
        end = num_hashes // self.stride
        index = end - 1
        while end > 0 and index >= self.first_needed(end * self.size):
            if self.cache.get(self.name(hashes, index)) is None:
                end = index
            index -= 1
        return max(end, 0) * self.stride

    def cached_pages(self, hashes: list[bytes], num_hashes: int) -> list[int]:
        """The table of a request that starts behind a hit of so many hashes."""
        count = num_hashes // self.stride
        first = min(self.first_needed(count * self.size), count)
        pages = [self.cache.get(self.name(hashes, index)) for index in range(first, count)]
        assert None not in pages, "longest_hit has seen these pages"
        return [SINK_PAGE] * first + [page for page in pages if page is not None]


class KVCacheManager:
    """Page tables of all requests.

    Pages may be handed on while a step that uses them is in flight: the device runs steps in order, so the old reads and writes
    come before the new ones. For the same reason a page counts as cached as soon as the step that fills it is scheduled; later
    steps may read it.
    """

    def __init__(self, spec: CacheSpec, *, enable_prefix_caching: bool = True):
        self.page_size = spec.page_size
        self.enable_prefix_caching = enable_prefix_caching
        # Those whose pages follow a request's positions, and that of encoder inputs, whose pages come and go with the request.
        self._groups = [_Group(group, spec) for group in spec.groups if group is not spec.encoder_group]
        self._encoder = _Group(spec.encoder_group, spec) if spec.encoder_group else None
        self._all_groups = [*self._groups, *([self._encoder] if self._encoder else [])]
        self._recurrent = [g for g, group in enumerate(self._groups) if group.is_recurrent]
        self._interval = next((self._groups[g].size for g in self._recurrent), None)
        self._stride = max((group.stride for group in self._groups), default=1)
        self._no_new_pages: list[list[int]] = [[] for _ in spec.groups]
        # Part of every chain, so that nothing computed before a reset is ever found after it.
        self._epoch = 0
        # Hashes of prompt pages that running requests will fill -> how many of them will.
        self._pending: dict[bytes, int] = {}

    @property
    def num_groups(self) -> int:
        return len(self._all_groups)

    @property
    def usage(self) -> float:
        """Share of pages in use in the fullest group, 0 to 1."""
        return max((group.pool.usage for group in self._all_groups), default=0.0)

    def max_positions(self) -> int | None:
        """Positions that one request alone can keep; None where windows bound it whatever its length."""
        limits = []
        for group in self._groups:
            if group.window is None or group.pool.num_usable < group.num_pages(group.window - 1) + 1:
                limits.append(group.pool.num_usable * group.size)
        return min(limits, default=None)

    @property
    def max_encoder_len(self) -> int:
        """Tokens that one encoder input may have; 0 where there is no encoder."""
        return 0 if self._encoder is None else self._encoder.pool.num_usable * self.page_size

    # ------------------------------------------------------------------ prefix cache

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the request that holds for every group. At least its last token is left to compute."""
        if not self.enable_prefix_caching or request.prompt_logprobs is not None:
            return PrefixHit(0, [[] for _ in self._groups])
        hashes = self._hashes(request)
        limit = (len(request.token_ids) - 1) // self.page_size
        num_pages, before = limit, -1
        # A shorter hit of one group can be too short for the window of another: repeat until all agree.
        while num_pages != before:
            before = num_pages
            for group in self._groups:
                num_pages = group.longest_hit(hashes, num_pages)
        following = num_pages + self._stride
        pending = following <= limit and hashes[following - 1] in self._pending
        return PrefixHit(num_pages * self.page_size, [group.cached_pages(hashes, num_pages) for group in self._groups], pending)

    def register(self, request: Request) -> None:
        """Make the request's full pages, as far as they are computed and their tokens known, findable by later steps."""
        if not self.enable_prefix_caching or request.cache_epoch != self._epoch:
            return
        num_full = min(request.num_computed, len(request.token_ids)) // self.page_size
        start = request.num_registered
        if num_full <= start:
            return
        hashes = self._hashes(request)
        for group, table in zip(self._groups, request.page_ids, strict=False):
            for index in range(start // group.stride, num_full // group.stride):
                if table[index] != SINK_PAGE and group.cache.put(group.name(hashes, index), table[index]):
                    group.pool.mark_cached(table[index])
        self._settle_pending(request, num_full)
        request.num_registered = num_full

    def forget(self, request: Request) -> None:
        """Take the request's pages out of the prefix cache for good: their content cannot be trusted."""
        self._settle_pending(request, request.num_pending)
        for page_hash in request.page_hashes:
            for group in self._groups:
                page = group.cache.forget_hash(page_hash)
                if page is not None:
                    group.pool.mark_blank(page)
        request.cache_epoch = -1

    def reset_prefix_cache(self) -> None:
        """Forget every cached page. Running requests keep theirs, and nothing of them is found by later ones."""
        self._epoch += 1
        self._pending.clear()
        for group in self._groups:
            for page in group.cache.clear():
                group.pool.mark_blank(page)

    def _hashes(self, request: Request) -> list[bytes]:
        if request.cache_epoch != self._epoch:
            request.cache_epoch = self._epoch
            request.page_hashes = []
        if (len(request.page_hashes) + 1) * self.page_size <= len(request.token_ids):
            domains: list[tuple[str, str | int]] = [("epoch", self._epoch)]
            if request.cache_salt is not None:
                domains.append(("salt", request.cache_salt))
            if request.encoder_token_ids:
                domains.append(("encoder", str(request.encoder_token_ids)))
            extend_chain(request.page_hashes, chain_root(domains), request.token_ids, self.page_size)
        return request.page_hashes

    def _settle_pending(self, request: Request, end: int) -> None:
        if request.cache_epoch != self._epoch:
            return
        for page_hash in request.page_hashes[request.num_registered : min(end, request.num_pending)]:
            left = self._pending.get(page_hash, 0) - 1
            if left > 0:
                self._pending[page_hash] = left
            else:
                self._pending.pop(page_hash, None)

    # ------------------------------------------------------------------ pages

    def admit(self, request: Request, hit: PrefixHit, num_new: int, *, reserve: float) -> int:
        """Give a request that holds no pages its first ones.

        Full groups get pages for all known tokens at once, so that an admitted prompt is never stuck half-way, and for its encoder input;
        window groups get them for this chunk.

        Args:
            num_new: tokens wanted in the first step, behind the hit.
            reserve: share of each pool that must stay free.
        Returns:
            The number of tokens that the first step can compute, 0 where the request must wait.
        """
        num_new = self._until_snapshot(hit.num_tokens, num_new)
        encoder_pages = -(-len(request.encoder_token_ids) // self.page_size)
        if self._encoder is not None and encoder_pages > self._encoder.pool.num_free - int(reserve * self._encoder.pool.num_usable):
            return 0
        for group, pages in zip(self._groups, hit.page_ids, strict=True):
            revived = sum(1 for page in pages if page != SINK_PAGE and group.pool.ref_count(page) == 0)
            free = group.pool.num_free - revived - int(reserve * group.pool.num_usable)
            if group.window is None:
                if group.num_pages(len(request.token_ids)) - len(pages) > free:
                    return 0
            else:
                num_new = min(num_new, free * group.size)
        if num_new <= 0:
            return 0
        for g, (group, pages) in enumerate(zip(self._groups, hit.page_ids, strict=True)):
            group.pool.share(page for page in pages if page != SINK_PAGE)
            end = len(request.token_ids) if group.window is None else hit.num_tokens + num_new
            request.page_ids[g] = pages + group.pool.allocate(group.num_pages(end) - len(pages))
            request.first_page[g] = min(group.first_needed(hit.num_tokens), len(pages))
        if self._encoder is not None:
            request.page_ids[-1] = self._encoder.pool.allocate(encoder_pages)
        request.num_computed = hit.num_tokens
        request.num_sent = [0] * self.num_groups
        request.capacity = self._capacity(request)
        request.num_registered = num_hit = hit.num_tokens // self.page_size
        if self.enable_prefix_caching:
            hashes = self._hashes(request)
            request.num_pending = len(hashes)
            for page_hash in hashes[num_hit:]:
                self._pending[page_hash] = self._pending.get(page_hash, 0) + 1
        return num_new

    def grow(self, request: Request, num_new: int) -> int:
        """Make room for the next `num_new` tokens; returns how many fit, which may be fewer, down to 0."""
        num_new = self._until_snapshot(request.num_computed, num_new)
        if request.num_computed + num_new <= request.capacity:
            return num_new
        self.register(request)
        for g, group in enumerate(self._groups):
            if group.window is not None:
                self._free_behind_window(request, g)
            num_new = min(num_new, (len(request.page_ids[g]) + group.pool.num_free) * group.size - request.num_computed)
        if num_new <= 0:
            return 0
        for group, table in zip(self._groups, request.page_ids, strict=False):
            wanted = group.num_pages(request.num_computed + num_new)
            if len(table) < wanted:
                table.extend(group.pool.allocate(wanted - len(table)))
        request.capacity = self._capacity(request)
        return num_new

    def advance(self, request: Request, num_new: int) -> None:
        """The step at hand computes `num_new` tokens more; later steps find what it fills."""
        request.num_computed += num_new
        self.register(request)
        # States are large: one that later steps do not start from goes at once, not when the next page is needed.
        for g in self._recurrent:
            self._free_behind_window(request, g)

    def _until_snapshot(self, start: int, num_new: int) -> int:
        """Of `num_new` tokens from position `start` on, those that a step may compute: none beyond the end of an interval."""
        return num_new if self._interval is None else min(num_new, self._interval - start % self._interval)

    def _capacity(self, request: Request) -> int:
        return min((len(table) * group.size for group, table in zip(self._groups, request.page_ids, strict=False)), default=0)

    def _free_behind_window(self, request: Request, g: int) -> None:
        table = request.page_ids[g]
        first = min(self._groups[g].first_needed(request.num_computed), len(table))
        behind = range(request.first_page[g], first)
        self._groups[g].pool.free([table[index] for index in behind])
        for index in behind:
            table[index] = SINK_PAGE
        request.first_page[g] = max(first, request.first_page[g])

    def new_page_ids(self, request: Request) -> list[list[int]]:
        """Per group, the pages that the runner does not know yet. The result may be shared: readers must not change it."""
        if all(len(table) == sent for table, sent in zip(request.page_ids, request.num_sent, strict=True)):
            return self._no_new_pages
        fresh = [table[sent:] for table, sent in zip(request.page_ids, request.num_sent, strict=True)]
        for group, pages in zip(self._all_groups, fresh, strict=True):
            if pages and not (min(pages) >= 0 and max(pages) < group.pool.num_pages):
                raise RuntimeError(f"page ids {pages} of request {request.request_id} are outside 0..{group.pool.num_pages - 1}")
        request.num_sent = [len(table) for table in request.page_ids]
        return fresh

    def free(self, request: Request) -> None:
        """Give all pages back. Full ones stay findable until they are needed; the tail of a prefix goes first."""
        self.register(request)
        self._settle_pending(request, request.num_pending)
        for g, group in enumerate(self._all_groups):
            group.pool.free(page for page in reversed(request.page_ids[g]) if page != SINK_PAGE)
            request.page_ids[g] = []
            request.first_page[g] = 0
        request.num_computed = 0
        request.capacity = 0
        request.num_registered = 0
        request.num_pending = 0
