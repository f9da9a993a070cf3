"""Slopes of attention with linear biases (Press et al., 2021, arXiv:2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric series for a power of two of heads; the others interleave the series of twice as many."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return tuple(slopes + between[: num_heads - power])


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """MPT's order: of the next power of two of heads, every second one first."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * (i + 1) / power) for i in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
