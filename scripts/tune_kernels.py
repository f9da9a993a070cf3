"""Measure block sizes of the TPU kernels on the device that is here, and write those that beat the defaults to configs/tuned_blocks.json.

    PYTHONPATH=. python scripts/tune_kernels.py [--kernels ragged_paged_attention quantized_matmul] [--output configs/tuned_blocks.json]

The shapes are those of Llama-3.1-8B, whole and a quarter. Entries of other devices and shapes stay as they are; an entry whose default
has become the best goes. Kernels for GPUs choose their blocks by the shape alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pallas_kernels import tuned
from pallas_kernels.devices import Device, find_device
from pallas_kernels.quantized_matmul import tpu as quantized
from pallas_kernels.quantized_matmul import tuning as quantized_tuning
from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.ragged_paged_attention import tpu as attention
from pallas_kernels.ragged_paged_attention import tuning as attention_tuning

_GAIN = 0.97  # of the default's time: less is noise
_REPEATS = 20
Call = Callable[[], Any]


@dataclass(frozen=True)
class Stage:
    """One thing to measure: blocks to try beside the best so far, and the call that runs with given blocks."""

    vary: Callable[[Any], Iterable[Any]]
    call: Callable[[Any], Call]


@dataclass(frozen=True)
class Case:
    """A shape of a kernel. default: what the tuning function says without an exception."""

    kernel: str
    key: str
    default: Any
    fits: Callable[[Any], bool]
    stages: tuple[Stage, ...]


def tune(cases: Iterable[Case], kind: str, seconds: Callable[[Call], float], table: Path) -> None:
    """Measure all cases, and keep what won in the table for the device kind, case by case."""
    for case in cases:
        best = case.default
        for stage in case.stages:
            times = {}
            for blocks in dict.fromkeys([best, *filter(case.fits, stage.vary(best))]):
                try:
                    times[blocks] = seconds(stage.call(blocks))
                except Exception as error:  # the compiler's: of many kinds
                    print(f"  {blocks}: {str(error).splitlines()[0][:100]}", flush=True)
            fastest = min(times, key=lambda blocks: times[blocks], default=best)
            if fastest != best and (best not in times or times[fastest] < _GAIN * times[best]):
                best = fastest
        print(f"{case.kernel} {case.key}: {best}{'' if best != case.default else ', the default'}", flush=True)
        found = json.loads(table.read_text()) if table.is_file() else {}
        shapes = found.setdefault(case.kernel, {}).setdefault(kind, {})
        shapes.pop(case.key, None)
        if best != case.default:
            shapes[case.key] = asdict(best)
        if not shapes:
            del found[case.kernel][kind]
        table.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def measure(call: Call) -> float:
    """Seconds of a call, the median of three runs of many enqueued at once."""
    jax.block_until_ready(call())
    runs = []
    for _ in range(3):
        started = time.perf_counter()
        jax.block_until_ready([call() for _ in range(_REPEATS)])
        runs.append((time.perf_counter() - started) / _REPEATS)
    return sorted(runs)[1]


# ------------------------------------------------------------------------------------------------------------------- the kernels


def attention_case(device: Device, heads: int, kv_heads: int, *, page: int = 128, context: int = 2048, interpret: Any = False) -> Case:
    """Decodes of 64 rows, then a prompt."""
    head_dim, rows = 128, 64
    per_row = context // page
    shape = layout.cache_shape(1 + rows * per_row, page, kv_heads, head_dim, jnp.bfloat16)
    cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape)
    tables = jnp.asarray(1 + np.arange(rows * per_row).reshape(rows, per_row), jnp.int32)

    def inputs(lens: list[int], kv_lens: list[int]) -> tuple[Any, ...]:
        tokens = sum(lens)
        q, k = (jnp.ones((tokens, n, head_dim), jnp.bfloat16) for n in (heads, kv_heads))
        starts = jnp.asarray(np.concatenate(([0], np.cumsum(lens))), jnp.int32)
        decodes = jnp.asarray(len(lens) if max(lens) == 1 else 0, jnp.int32)
        return q, k, k, cache, tables[: len(lens)], starts, jnp.asarray(kv_lens, jnp.int32), decodes

    decode, prefill = inputs([1] * rows, [context] * rows), inputs([context], [context])

    def call(arguments: tuple[Any, ...], blocks: Any) -> Call:
        run = jax.jit(functools.partial(attention.attend, scale=head_dim**-0.5, blocks=blocks, interpret=interpret))
        return lambda: run(*arguments)[0]

    def vary_decode(best: Any) -> list[Any]:
        pages = [n for n in (1, 2, 4, 8, 16, 32) if n <= per_row]
        return [
            replace(best, decode_rows=r, decode_pages=n, decode_compute_pages=c)
            for r in (16, 32, 64)
            for n in pages
            for c in pages
            if n % c == 0
        ]

    def vary_prefill(best: Any) -> list[Any]:
        pages = [n for n in (1, 2, 4, 8, 16) if n <= per_row]
        return [
            replace(best, query_tile=t, prefill_pages=n, prefill_compute_pages=c)
            for t in (64, 128, 256)
            for n in pages
            for c in pages
            if n % c == 0
        ]

    shape = attention.shape_of(prefill[0], prefill[1], cache, prefill[4])
    return Case(
        "ragged_paged_attention",
        shape.key,
        attention_tuning.choose_blocks(shape, device, exceptions=False),
        lambda blocks: blocks.vmem(shape) <= device.vmem_bytes // 2,
        (Stage(vary_decode, functools.partial(call, decode)), Stage(vary_prefill, functools.partial(call, prefill))),
    )


def quantized_case(device: Device, rows: int, num_in: int, num_out: int, values: str, group: int | None, *, interpret: Any = False) -> Case:
    """One product; int4 has zeros."""
    groups = num_in // (group or num_in)
    scales = jnp.ones((groups, num_out))
    weight = QuantizedWeight(jnp.ones((num_out, num_in), values), scales, scales if values == "int4" else None)
    x = jnp.ones((rows, num_in), jnp.bfloat16)
    shape = quantized.shape_of(x, weight, None)

    def call(blocks: Any) -> Call:
        run = jax.jit(functools.partial(quantized.matmul, blocks=blocks, interpret=interpret))
        return lambda: run(x, weight)

    def vary(best: Any) -> list[Any]:
        inputs = [n for n in quantized_tuning.input_blocks(shape) if 512 <= n <= 4096] or [best.inputs]
        heights = {best.rows, max(16, best.rows // 2)}
        return [replace(best, rows=r, outputs=o, inputs=i) for r in sorted(heights) for o in (256, 512, 1024, 2048) for i in inputs]

    return Case(
        "quantized_matmul",
        shape.key,
        quantized_tuning.choose_blocks(shape, device, exceptions=False),
        lambda blocks: blocks.vmem(shape) <= device.vmem_bytes // 2,
        (Stage(vary, call),),
    )


def cases(device: Device, kernels: list[str]) -> Iterable[Case]:
    """Cases one after the other: their arrays go before the next ones come."""
    if "ragged_paged_attention" in kernels:
        for heads, kv_heads in ((32, 8), (8, 2)):
            yield attention_case(device, heads, kv_heads)
    if "quantized_matmul" in kernels:
        for num_in, num_out in ((4096, 14336), (14336, 4096), (4096, 6144)):
            for values, group in (("int8", None), ("float8_e4m3fn", 128), ("int4", 128), ("int4", 32)):
                for rows in (8, 64, 2048):
                    yield quantized_case(device, rows, num_in, num_out, values, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["ragged_paged_attention", "quantized_matmul"]
    parser.add_argument("--kernels", nargs="+", choices=names, default=names)
    parser.add_argument("--output", type=Path, default=tuned.TABLE)
    args = parser.parse_args()
    first = jax.devices()[0]
    if first.platform != "tpu":
        sys.exit(f"tune_kernels measures TPU kernels on a TPU, and jax finds a {first.platform} here ({first.device_kind})")
    tune(cases(find_device(first.device_kind), args.kernels), first.device_kind, measure, args.output)


if __name__ == "__main__":
    main()
