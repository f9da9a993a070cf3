"""How near a run came to the hardware: bytes and operations that its work needs, over what the device was measured to do.

Memory: each step reads every weight once, and each generated token reads the keys and values before it. Operations: two a weight and
token, and four a query head, head dimension and visible position in attention. Work that an engine does beyond this (padding, copies)
counts against it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.cli.bench.workload import BenchRequest
from jaxllm.config import EngineConfig
from jaxllm.errors import JaxllmError
from jaxllm.specs import FeedForwardSpec, MixerSpec, MLASpec, MoESpec

MEASURE_TIMEOUT_S = 300
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Attention:
    """What attention costs in one layer: elements of a query, elements of a position's keys and values, the window."""

    query_size: int
    kv_size: int
    window: int | None


@dataclass(frozen=True)
class ModelCost:
    """What a model's work costs.

    `body_params` are used by every token (of experts, as many as a token goes to), `head_params` by those that predict one.
    """

    body_params: int
    head_params: int
    bytes_per_param: int
    attention: tuple[Attention, ...]

    def flops(self, requests: Sequence[BenchRequest], num_cached_tokens: int = 0) -> float:
        """Operations to compute the requests; cached prompt tokens are not computed (their share of attention is not subtracted)."""
        total = 0.0
        for request in requests:
            # The last token is sampled and not computed.
            computed = len(request.prompt) + request.output_len - 1
            total += 2 * self.body_params * computed + 2 * self.head_params * request.output_len
            total += sum(4 * layer.query_size * _visible(0, computed, layer.window) for layer in self.attention)
        return total - 2 * self.body_params * num_cached_tokens

    def bytes_read(self, requests: Sequence[BenchRequest], num_steps: int) -> float:
        """Bytes that `num_steps` steps must read at the least."""
        total = num_steps * (self.body_params + self.head_params) * self.bytes_per_param
        for request in requests:
            first = len(request.prompt)
            for layer in self.attention:
                total += self.bytes_per_param * layer.kv_size * _visible(first, first + request.output_len - 1, layer.window)
        return float(total)


def _visible(first: int, last: int, window: int | None) -> int:
    """Positions seen by all queries in [first, last): a query at p sees p + 1, at most `window`."""
    if window is None:
        return (last * (last + 1) - first * (first + 1)) // 2
    return sum(min(position + 1, window) for position in range(first, last))


def model_cost(config: EngineConfig, dtype: str) -> ModelCost:
    """Count a model's parameters from its config; loads no weights."""
    from jaxllm.models.build import define_model
    from jaxllm.weights.download import resolve_model

    model = define_model(resolve_model(config.model).config, dtype=dtype)
    spec = model.spec
    table = spec.vocab_size * (spec.embedding_width or spec.width)
    # Tables are looked up, not multiplied; where it is tied, the same one is the head.
    tables = ("embed.weight", "embed.positions", "layer_inputs.weight", "head.weight")
    looked_up = sum(math.prod(model.shapes[name].shape) for name in tables if name in model.shapes)
    return ModelCost(
        body_params=model.num_params - looked_up - sum(_idle(block.feed_forward, spec.width) for block in spec.blocks),
        head_params=table,
        bytes_per_param=BYTES[dtype],
        attention=tuple(_attention(block.mixer) for block in spec.blocks if block.mixer),
    )


def _idle(feed_forward: FeedForwardSpec | None, width: int) -> int:
    """Parameters of the experts that a token does not go to."""
    if not isinstance(feed_forward, MoESpec):
        return 0
    return (feed_forward.router.num_experts - feed_forward.router.top_k) * 3 * feed_forward.expert.width * width


def _attention(mixer: MixerSpec) -> Attention:
    if isinstance(mixer, MLASpec):
        return Attention(mixer.num_heads * mixer.latent_dim, mixer.latent_dim + mixer.rope_dim, None)
    return Attention(mixer.num_heads * mixer.head_dim, 2 * mixer.num_kv_heads * mixer.head_dim, mixer.attend.window)


def measure_hardware() -> dict[str, Any]:
    """The limits of one device, measured in a process that is gone before the engine starts (`runner/hardware.py`).

    Raises:
        JaxllmError: the measurement failed.
    """
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "jaxllm.runner.hardware"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise JaxllmError(f"measuring the hardware took more than {MEASURE_TIMEOUT_S} s; leave it out with --no-roofline") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise JaxllmError(f"measuring the hardware failed ({reason}); leave it out with --no-roofline")
    limits: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return limits


def ratios(
    cost: ModelCost,
    limits: dict[str, Any],
    requests: Sequence[BenchRequest],
    *,
    seconds: float,
    num_steps: int,
    num_cached_tokens: int,
    devices: int,
    dtype: str,
) -> dict[str, float]:
    """Model bandwidth and model FLOP/s utilisation: achieved over measured, 1.0 is the hardware's limit."""
    moved, computed = cost.bytes_read(requests, num_steps), cost.flops(requests, num_cached_tokens)
    return {
        "bytes_per_second": moved / seconds,
        "flops_per_second": computed / seconds,
        "mbu": moved / seconds / (devices * limits["bytes_per_second"]),
        "mfu": computed / seconds / (devices * limits["flops_per_second"][dtype]),
    }
