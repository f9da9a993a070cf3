"""The few shapes that steps are compiled for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape: room for `num_tokens` tokens of `num_rows` rows.

    A decode bucket has a token for each row and takes rows of one token only; every other bucket has more tokens than rows.
    """

    num_tokens: int
    num_rows: int

    @property
    def decode_only(self) -> bool:
        return self.num_tokens == self.num_rows

    def fits(self, num_tokens: int, num_rows: int) -> bool:
        """Whether a step of `num_tokens` tokens in `num_rows` rows can run in this shape."""
        if self.decode_only and num_tokens != num_rows:
            return False
        return num_tokens <= self.num_tokens and num_rows <= self.num_rows


_SMALLEST_MIXED = 64
_SMALLEST_POOLING = 16
_HALF_RUNGS_ABOVE = 256


def bucket_ladder(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """All buckets of an engine, small to large.

    Decode buckets rise fourfold from one row: decodes are bound by reading the weights, so padding rows cost little. Mixed buckets
    double, with rungs half-way above 256 tokens where compute is the bound: padding then stays under a third.
    """
    rows = [1]
    while rows[-1] < max_num_seqs:
        step = 8 if rows[-1] == 1 else 4 * rows[-1]
        rows.append(min(step, max_num_seqs))
    tokens = _token_rungs(_SMALLEST_MIXED, max_num_batched_tokens)
    top = max(max_num_batched_tokens, max_num_seqs + 1)
    mixed = [Bucket(t, min(max_num_seqs, t // 2)) for t in tokens if t < top] + [Bucket(top, max_num_seqs)]
    return (*(Bucket(r, r) for r in rows), *mixed)


def pooling_ladder(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """All buckets of a pooling engine, small to large: rows cost next to nothing, so there are as many as tokens could need but one, and
    single queries are short.
    """
    top = max(max_num_batched_tokens, max_num_seqs + 1)
    tokens = [t for t in _token_rungs(_SMALLEST_POOLING, top) if t < top]
    return tuple(Bucket(t, min(max_num_seqs, t - 1)) for t in (*tokens, top))


def _token_rungs(smallest: int, largest: int) -> list[int]:
    tokens = [smallest]
    while tokens[-1] < largest:
        last = tokens[-1]
        power = 1 << (last.bit_length() - 1)
        if last != power:
            tokens.append(2 * power)
        elif last >= _HALF_RUNGS_ABOVE:
            tokens.append(last + last // 2)
        else:
            tokens.append(2 * last)
    return tokens


def smallest_fit(buckets: Iterable[Bucket], num_tokens: int, num_rows: int) -> Bucket | None:
    """The cheapest of `buckets` that takes the step, or None."""
    fitting = [b for b in buckets if b.fits(num_tokens, num_rows)]
    return min(fitting, key=lambda b: (b.num_tokens, b.num_rows), default=None)
