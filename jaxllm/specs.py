"""A model as data: small frozen specs, each read by one layer. No jax here.

A decoder is an embedding, a tuple of `BlockSpec`s and a head. Family files (`models/*.py`) turn a Hugging Face config into these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttendSpec:
    """What the attention operation itself must know of a layer.

    `window` counts the positions that a query sees, itself included; None sees everything before it. `softcap` bounds the scores:
    softcap * tanh(score / softcap).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
