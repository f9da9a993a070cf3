"""Check and measure an accelerator in one command of a few minutes: kernels against a plain reference, then a whole engine.

    PYTHONPATH=. python scripts/device_check.py [--output result.json] [--tiny]

Needs Python 3.11 with jax for the device, flax, numpy, psutil and msgspec: no network, no server, no weights. Prints a table, and JSON
where asked. Shares are of the bandwidth and the bfloat16 FLOP/s in the device's data sheet (`pallas_kernels/devices.py`), or, for a device
that is not there, of what is measured first. `--tiny` is for trying the script itself on CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxllm.config import CacheConfig, CompileConfig
from jaxllm.core_types import EngineRequest
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import Scheduler
from jaxllm.models.build import ModelDef, define_model
from jaxllm.ops.attention import AttentionBackend, AttentionMetadata, choose_backend
from jaxllm.ops.moe import choose_product as choose_grouped_product
from jaxllm.ops.quantized_linear import choose_product
from jaxllm.runner import hardware
from jaxllm.runner.memory import Limits, plan_memory
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.runner.roofline import Roofline, Work
from jaxllm.sampling_params import SamplingParams
from jaxllm.specs import AttendSpec, CacheLayer
from pallas_kernels.devices import DEVICES, Device
from pallas_kernels.quantized_matmul import reference
from pallas_kernels.quantized_matmul.weight import QuantizedWeight

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
TINY = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"vocab_size": 512}
# Groups, inputs, outputs, and experts of a token: those of Qwen3-30B-A3B both ways, gpt-oss-20b, Mixtral-8x7B.
EXPERTS = ((128, 2048, 1536, 8), (128, 768, 2048, 8), (32, 2880, 5760, 4), (8, 4096, 28672, 2))
TINY_EXPERTS = ((8, 128, 192, 2),)
REPEATS = 20


@dataclass(frozen=True)
class Shape:
    """Attention of one model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: int | None = None

    @property
    def spec(self) -> AttendSpec:
        return AttendSpec(self.head_dim**-0.5, self.window, self.softcap, latent=self.latent)


SHAPES = (
    Shape("Llama-3.1-8B", 32, 8, 128),
    Shape("Gemma-3-4B, window", 8, 4, 256, window=1024),
    Shape("gpt-oss-20b, window", 64, 8, 64, window=128, sinks=True),
    Shape("Gemma-2-9B, capped", 16, 8, 256, softcap=50.0),
    Shape("DeepSeek-V3, an eighth", 16, 1, 576, latent=512),
)
# Weights, inputs that share a scale (None: all of an output), and what rows are rounded to.
PRODUCTS = (
    ("int8", None, None),
    ("int8", None, "int8"),
    ("float8_e4m3fn", None, "float8_e4m3fn"),
    ("float8_e4m3fn", 128, None),
    ("float8_e4m3fn", 128, "float8_e4m3fn"),
    ("int4", 128, None),
    ("int4", 32, None),
)
TINY_SHAPES = (Shape("tiny", 4, 2, 64, window=20, softcap=5.0, sinks=True), Shape("tiny latent", 4, 1, 80, latent=64))


# ------------------------------------------------------------------------------------------------------------------- attention


def metadata_of(rows: list[tuple[int, int]], num_tokens: int, pages_per_row: int) -> AttentionMetadata:
    """`rows` = [(new tokens, positions cached before)], decodes first; row i has the pages 1 + i * pages_per_row and on."""
    lens = np.array([new for new, _ in rows])
    q_starts = np.concatenate(([0], np.cumsum(lens)))
    kv_lens = np.array([new + cached for new, cached in rows])
    token = np.arange(num_tokens)
    token_rows = np.searchsorted(q_starts[1:], token, side="right")
    row = np.minimum(token_rows, len(rows) - 1)
    positions = np.where(token_rows < len(rows), kv_lens[row] - (q_starts[row + 1] - token), 0)
    table = 1 + np.arange(len(rows) * pages_per_row).reshape(len(rows), pages_per_row)
    num_decodes = next((i for i, new in enumerate(lens) if new != 1), len(rows))
    arrays = (table, q_starts, kv_lens, positions, token_rows, np.array(num_decodes))
    return AttentionMetadata(*(jnp.asarray(a, jnp.int32) for a in arrays))


def empty_pages(backend: AttentionBackend, shape: Shape, num_pages: int, page_size: int, dtype: Any) -> Any:
    layer = CacheLayer(shape.kv_heads, shape.head_dim, shape.spec)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), backend.cache_shapes(num_pages, page_size, layer, dtype))


def error_of(backend: AttentionBackend, shape: Shape, page_size: int, dtype: Any) -> float:
    """Largest difference from plain float32 attention: prompts that cross pages, then a step of decodes and one more chunk."""
    rng = np.random.default_rng(0)
    first = [page_size + 7, 1, 2 * page_size]
    # A decode, a row that goes on with a chunk, and one that has nothing to do.
    steps = [[(n, 0) for n in first], [(1, first[0]), (page_size + 3, 1), (0, first[2])]]
    sinks = jnp.asarray(rng.normal(size=shape.heads), jnp.float32) if shape.sinks else None
    total = 2 * page_size + 16
    known = [rng.normal(size=(total, 2, shape.kv_heads, shape.head_dim)) for _ in first]
    pages = empty_pages(backend, shape, 1 + 3 * 4, page_size, dtype)
    attend = jax.jit(lambda q, k, v, pages, metadata: backend.attend_shard(q, k, v, pages, metadata, shape.spec, sinks), donate_argnums=3)
    worst = 0.0
    for rows in steps:
        num_tokens = -(-sum(new for new, _ in rows) // 64) * 64
        keys_values = np.zeros((num_tokens, 2, shape.kv_heads, shape.head_dim))
        at = 0
        for i, (new, cached) in enumerate(rows):
            keys_values[at : at + new] = known[i][cached : cached + new]
            at += new
        q = jnp.asarray(rng.normal(size=(num_tokens, shape.heads, shape.head_dim)), dtype)
        k, v = (jnp.asarray(keys_values[:, part], dtype) for part in range(2))
        out, pages = attend(q, k, v if shape.latent is None else None, pages, metadata_of(rows, num_tokens, 4))
        at = 0
        for i, (new, cached) in enumerate(rows):
            if new:
                expected = plain(q[at : at + new], jnp.asarray(known[i][: cached + new], dtype), cached, shape, sinks)
                worst = max(worst, float(jnp.max(jnp.abs(out[at : at + new].astype(jnp.float32) - expected))))
            at += new
    return worst


def plain(q: jax.Array, keys_values: jax.Array, first: int, shape: Shape, sinks: jax.Array | None) -> jax.Array:
    """Attention of one row without pages: q [T, H, D] from position `first` on, keys and values [P, 2, K, D]."""
    keys, values = (keys_values[:, part].astype(jnp.float32) for part in range(2))
    if shape.latent is not None:
        values = keys[..., : shape.latent]
    grouped = q.astype(jnp.float32).reshape(q.shape[0], shape.kv_heads, -1, shape.head_dim)
    scores = jnp.einsum("tkgd,pkd->tkgp", grouped, keys, precision="highest") * shape.spec.scale
    if shape.softcap is not None:
        scores = shape.softcap * jnp.tanh(scores / shape.softcap)
    behind = first + jnp.arange(q.shape[0])[:, None] - jnp.arange(keys.shape[0])
    visible = (behind >= 0) & (behind < (shape.window or keys.shape[0]))
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks.reshape(shape.kv_heads, -1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate((scores, extra), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[0]]
    return jnp.einsum("tkgp,pkd->tkgd", weights, values, precision="highest").reshape(*q.shape[:2], -1)


def attention_seconds(backend: AttentionBackend, shape: Shape, rows: list[tuple[int, int]], page_size: int, dtype: Any) -> float:
    num_tokens = max(sum(new for new, _ in rows), len(rows))
    pages_per_row = max(-(-(new + cached) // page_size) for new, cached in rows)
    pages = empty_pages(backend, shape, 1 + len(rows) * pages_per_row, page_size, dtype)
    q = jnp.ones((num_tokens, shape.heads, shape.head_dim), dtype)
    k = jnp.ones((num_tokens, shape.kv_heads, shape.head_dim), dtype)
    metadata = metadata_of(rows, num_tokens, pages_per_row)
    sinks = jnp.zeros(shape.heads) if shape.sinks else None
    v = k if shape.latent is None else None
    attend = jax.jit(lambda q, k, v, pages, metadata: backend.attend_shard(q, k, v, pages, metadata, shape.spec, sinks), donate_argnums=3)
    _, pages = attend(q, k, v, pages, metadata)
    return _seconds_each(lambda pages: attend(q, k, v, pages, metadata)[1], pages)


def _seconds_each(run: Callable[[Any], Any], state: Any) -> float:
    """Of REPEATS calls enqueued at once, each of which takes the state of the one before."""
    jax.block_until_ready(state)
    started = time.perf_counter()
    for _ in range(REPEATS):
        state = run(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - started) / REPEATS


def attention_work(shape: Shape, rows: list[tuple[int, int]], itemsize: int) -> Work:
    """FLOPs and bytes of one layer."""
    flops = size = 0.0
    values = shape.latent or shape.head_dim
    position = shape.kv_heads * (shape.head_dim if shape.latent else 2 * shape.head_dim) * itemsize
    for new, cached in rows:
        window = shape.window or new + cached
        seen = sum(min(cached + i + 1, window) for i in range(new))
        flops += 2 * shape.heads * (shape.head_dim + values) * seen
        size += (min(new + cached, window + new - 1) + new) * position + new * shape.heads * (shape.head_dim + values) * itemsize
    return Work(flops, size)


def check_attention(device: Device, backend: AttentionBackend, page_size: int, tiny: bool) -> list[dict[str, Any]]:
    dtype = jnp.bfloat16
    decode = [(1, 40)] * 4 if tiny else [(1, 2047)] * 64
    prompt = [(100, 0)] if tiny else [(2048, 0)]
    found = []
    for shape in TINY_SHAPES if tiny else SHAPES:
        row: dict[str, Any] = {"backend": backend.name, "shape": shape.name, "error": error_of(backend, shape, page_size, dtype)}
        for name, rows in (("decode", decode), ("prefill", prompt)):
            work, seconds = attention_work(shape, rows, 2), attention_seconds(backend, shape, rows, page_size, dtype)
            share = work.bytes / device.hbm_bytes_per_s if name == "decode" else work.flops / device.bf16_flops
            row |= {f"{name}_us": seconds * 1e6, f"{name}_share": share / seconds}
        found.append(row)
        print(
            f"  {backend.name:<4} {shape.name:<22} error {row['error']:.4f}  decode {row['decode_us']:>8.0f} us, "
            f"{row['decode_share']:>6.1%} of bandwidth  prefill {row['prefill_us']:>8.0f} us, {row['prefill_share']:>6.1%} of FLOP/s",
            flush=True,
        )
    return found


# -------------------------------------------------------------------------------------------------------------------- products


def quantized_weight(values: str, group: int | None, num_in: int, num_out: int) -> QuantizedWeight:
    """Random numbers whose products are about as large as the rows; int4 has zeros."""
    groups, keys = num_in // (group or num_in), jax.random.split(jax.random.key(0), 2)
    top = {"int4": 7, "int8": 127, "float8_e4m3fn": 448}[values]
    numbers = jax.random.randint(keys[0], (num_out, num_in), -top, top + 1, "int16").astype(values)
    scales = jax.random.uniform(keys[1], (groups, num_out), jnp.float32, 0.5, 1.5) / top * num_in**-0.5
    return QuantizedWeight(numbers, scales, jnp.ones_like(scales) if values == "int4" else None)


def check_products(device: Device, platform: str, tiny: bool) -> list[dict[str, Any]]:
    """Products with quantized weights, as models would run them."""
    num_in, num_out = (256, 128) if tiny else (4096, 14336)
    product, found = choose_product(platform, device.kind), []
    for values, group, activations in PRODUCTS:
        weight = jax.jit(quantized_weight, static_argnums=(0, 1, 2, 3))(values, group, num_in, num_out)
        run = jax.jit(functools.partial(product, activations=activations))
        name = f"{values}, {f'groups of {group}' if group else 'outputs'}, {activations or 'bfloat16'} rows"
        row: dict[str, Any] = {"weight": name, "kernel": group is not None and product.kernel is not None}
        for rows in (8, 64, 2048 if not tiny else 96):
            x = jax.random.normal(jax.random.key(rows), (rows, num_in), jnp.bfloat16)
            expected = reference.matmul(x, weight, activations=activations).astype(jnp.float32)
            row["error"] = max(row.get("error", 0.0), float(jnp.max(jnp.abs(run(x, weight).astype(jnp.float32) - expected))))
            seconds = _seconds_each(lambda _, run=run, x=x, weight=weight: run(x, weight), x)
            size = num_in * num_out * (0.5 if values == "int4" else 1) + weight.scales.size * 4 + 2 * rows * (num_in + num_out)
            least = max(size / device.hbm_bytes_per_s, 2 * rows * num_in * num_out / device.bf16_flops)
            row |= {f"us_{rows}": seconds * 1e6, f"share_{rows}": least / seconds}
        found.append(row)
        shares = "  ".join(f"{key[6:]} rows {row[f'us_{key[6:]}']:>7.0f} us {share:>6.1%}" for key, share in row.items() if "share" in key)
        print(f"  {'kernel' if row['kernel'] else 'xla':<6} {name:<46} error {row['error']:.4f}  {shares}", flush=True)
    return found


def by_group(x: jax.Array, matrices: jax.Array, counts: jax.Array) -> jax.Array:
    """Grouped products in float32, one group after the other over all rows."""
    group = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(len(x)), side="right")

    def add(index: jax.Array, out: jax.Array) -> jax.Array:
        return jnp.where((group == index)[:, None], jnp.dot(x, matrices[index], preferred_element_type=jnp.float32), out)

    return jax.lax.fori_loop(0, len(matrices), add, jnp.zeros((len(x), matrices.shape[2]), jnp.float32))


def check_experts(device: Device, platform: str, tiny: bool) -> list[dict[str, Any]]:
    """Grouped products, as models would run them, of tokens that choose at random."""
    run, found = jax.jit(choose_grouped_product(platform, device.kind) or jax.lax.ragged_dot), []
    for groups, num_in, num_out, top_k in TINY_EXPERTS if tiny else EXPERTS:
        keys = jax.random.split(jax.random.key(0), 3)
        scaled = jax.jit(lambda key, shape=(groups, num_in, num_out): jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5)
        matrices = scaled(keys[0])
        row: dict[str, Any] = {"experts": f"{groups} of {num_in} by {num_out}", "error": 0.0}
        for tokens in (8, 64, 2048 if not tiny else 96):
            rows = tokens * top_k
            x = jax.random.normal(keys[1], (rows, num_in), jnp.bfloat16)
            counts = jnp.bincount(jax.random.randint(keys[2], (rows,), 0, groups), length=groups)
            error = jnp.max(jnp.abs(run(x, matrices, counts).astype(jnp.float32) - jax.jit(by_group)(x, matrices, counts)))
            row["error"] = max(row["error"], float(error))
            seconds = _seconds_each(lambda _, x=x, counts=counts, matrices=matrices: run(x, matrices, counts), x)
            size = 2 * (int((counts > 0).sum()) * num_in * num_out + rows * (num_in + num_out))
            least = max(size / device.hbm_bytes_per_s, 2 * rows * num_in * num_out / device.bf16_flops)
            row |= {f"us_{tokens}": seconds * 1e6, f"share_{tokens}": least / seconds}
        found.append(row)
        shares = "  ".join(
            f"{key[6:]} tokens {row[f'us_{key[6:]}']:>7.0f} us {share:>6.1%}" for key, share in row.items() if "share" in key
        )
        print(f"  {row['experts']:<22} error {row['error']:.4f}  {shares}", flush=True)
    return found


# ---------------------------------------------------------------------------------------------------------------------- engine


class Engine:
    """A whole engine of a dummy model on the first device."""

    def __init__(self, config: dict[str, Any], device: Device, backend: AttentionBackend, limits: Limits):
        self.device, self.limits = device, limits
        placement = Placement(make_mesh(1))
        self.model_def = define_model(config, dtype="bfloat16", max_model_len=config["max_position_embeddings"])
        plan = plan_memory(self.model_def, backend, placement, CacheConfig(), limits, max_model_len=2048 + 64)
        self.roofline = Roofline.of(self.model_def, backend, placement, limits.page_size)
        runner = ModelRunner(
            self.model_def,
            dummy_weights(self.model_def),
            plan,
            limits,
            placement,
            backend,
            CompileConfig(enforce_eager=True),
            num_sampled_ids=self.model_def.vocab_size,
        )
        runner.warm_up()
        scheduler = Scheduler(
            plan.cache_spec,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            policy="fcfs",
            enable_prefix_caching=False,
        )
        self.core = EngineCore(scheduler, runner)
        self._count = 0

    def add(self, prompt_len: int, max_tokens: int) -> None:
        self._count += 1
        ids = np.random.default_rng(self._count).integers(0, self.model_def.vocab_size, prompt_len).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = EngineRequest(request_id=str(self._count), prompt_token_ids=ids, sampling_params=params, arrival_time=time.time())
        self.core.add_request(request)

    def run(self) -> tuple[float, int, float, int]:
        """Run what was added to its end. Returns seconds, tokens, host seconds and number of the steps that only decoded."""
        seconds = host = 0.0
        tokens = steps = 0
        while self.core.has_work:
            started = time.perf_counter()
            out = self.core.step()
            took = time.perf_counter() - started
            stats = out.stats
            failed = [o.error for o in out.outputs if o.error]
            if failed:
                sys.exit(f"the engine failed: {failed[0]}")
            if stats is not None and out.outputs and 0 < stats.num_scheduled_tokens <= self.limits.max_num_seqs:
                seconds, host, tokens, steps = seconds + took, host + stats.host_seconds, tokens + stats.num_scheduled_tokens, steps + 1
        return seconds, tokens, host, steps

    def decode(self, batch: int, prompt_len: int, max_tokens: int) -> dict[str, Any]:
        for warm in (True, False):
            for _ in range(batch):
                self.add(prompt_len, 4 if warm else max_tokens)
            seconds, tokens, host, steps = self.run()
        work = self.roofline.decode(batch, prompt_len + max_tokens // 2)
        step = seconds / steps
        return {
            "batch": batch,
            "tokens_per_s": tokens / seconds,
            "step_ms": step * 1e3,
            "share_of_bandwidth": work.bytes / self.device.hbm_bytes_per_s / step,
            "host_ms": host / steps * 1e3,
        }

    def prefill(self, prompt_len: int) -> dict[str, Any]:
        for _ in range(2):
            self.add(prompt_len, 1)
            started = time.perf_counter()
            while self.core.has_work:
                self.core.step()
            seconds = time.perf_counter() - started
        work = self.roofline.prefill(prompt_len)
        return {"tokens": prompt_len, "tokens_per_s": prompt_len / seconds, "mfu": work.flops / self.device.bf16_flops / seconds}


def dummy_weights(model_def: ModelDef) -> list[jax.Array]:
    """Small random weights, made on the device."""

    def make(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)

    made = jax.jit(make, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(0), len(model_def.names))
    return [made(key, tuple(a.shape), a.dtype) for key, a in zip(keys, (model_def.shapes[n] for n in model_def.names), strict=True)]


def fitting_layers(config: dict[str, Any], device: Device) -> int:
    """Layers of the model whose weights take no more than 60 % of the device's memory."""
    width, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * width // config["num_attention_heads"]
    layer = 2 * (2 * width * width + 2 * width * kv + 3 * width * mlp)
    return max(1, min(config["num_hidden_layers"], int(0.6 * device.hbm_bytes - 4 * vocab * width) // layer))


def check_engine(device: Device, backend: AttentionBackend, page_size: int, tiny: bool) -> dict[str, Any]:
    config = TINY if tiny else LLAMA_8B
    config = config | {"num_hidden_layers": fitting_layers(config, device)}
    limits = Limits(4, 64, page_size) if tiny else Limits(64, 2048, page_size)
    engine = Engine(config, device, backend, limits)
    print(f"engine: {config['num_hidden_layers']} layers of the shape of Llama-3.1-8B" + (", shrunk" if tiny else ""), flush=True)
    found: dict[str, Any] = {"num_layers": config["num_hidden_layers"], "decode": [], "prefill": engine.prefill(48 if tiny else 2048)}
    print(f"  prefill: {found['prefill']['tokens_per_s']:,.0f} tokens/s, {found['prefill']['mfu']:.1%} of FLOP/s", flush=True)
    for batch in (1, 4) if tiny else (1, 8, 64):
        row = engine.decode(batch, 16 if tiny else 1024, 12 if tiny else 64)
        found["decode"].append(row)
        print(
            f"  decode of {batch:>2}: {row['tokens_per_s']:>8,.0f} tokens/s, {row['step_ms']:.2f} ms a step, "
            f"{row['share_of_bandwidth']:.1%} of bandwidth, host {row['host_ms']:.2f} ms a step",
            flush=True,
        )
    return found


def describe(tiny: bool) -> tuple[Device, dict[str, Any]]:
    """The device's figures: the data sheet's, or what is measured where it is not in the table."""
    first = jax.devices()[0]
    known = next((d for d in DEVICES.values() if d.kind == first.device_kind), None)
    if tiny:
        return replace(DEVICES["v6e"], kind=first.device_kind, hbm_bytes=2**30, hbm_bytes_per_s=2e10, bf16_flops=1e11), {}
    measured = hardware.measure(("bfloat16",))
    limits = {"bytes_per_s": measured.bytes_per_second, "bf16_flops": measured.flops_per_second["bfloat16"]}
    stats = first.memory_stats() or {}
    device = known or replace(DEVICES["v6e"], name=first.device_kind, kind=first.device_kind)
    if known is None:
        device = replace(device, hbm_bytes_per_s=limits["bytes_per_s"], bf16_flops=limits["bf16_flops"])
    return replace(device, hbm_bytes=int(stats.get("bytes_limit", device.hbm_bytes))), limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write JSON to this file")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    started = time.perf_counter()
    first = jax.devices()[0]
    device, measured = describe(args.tiny)
    print(f"{first.device_kind}, jax {jax.__version__}, {len(jax.devices())} device(s); {first.platform}")
    if measured:
        shares = measured["bytes_per_s"] / device.hbm_bytes_per_s, measured["bf16_flops"] / device.bf16_flops
        print(f"measured: {measured['bytes_per_s'] / 1e12:.2f} TB/s read ({shares[0]:.1%} of the data sheet's), ", end="")
        print(f"{measured['bf16_flops'] / 1e12:.0f} TFLOP/s ({shares[1]:.1%})")
    chosen = choose_backend(first.platform, first.device_kind)
    page_size = 64 if first.platform in ("cpu", "gpu") else 128
    result: dict[str, Any] = {"device": first.device_kind, "jax": jax.__version__, "measured": measured, "attention": []}
    print("attention:")
    for backend in [chosen] if chosen.name == "xla" else [chosen, choose_backend("cpu")]:
        result["attention"] += check_attention(device, backend, page_size, args.tiny)
    print("quantized products (shares of the bandwidth or the bfloat16 FLOP/s, whichever bounds):")
    result["products"] = check_products(device, first.platform, args.tiny)
    print("grouped products (experts):")
    result["experts"] = check_experts(device, first.platform, args.tiny)
    result["engine"] = check_engine(device, chosen, page_size, args.tiny)
    result["seconds"] = time.perf_counter() - started
    print(f"done in {result['seconds']:.0f} s")
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    for part in ("attention", "products", "experts"):
        worst = max(row["error"] for row in result[part])
        if worst > 0.05:
            sys.exit(f"{part}: a difference of {worst:.3f} from the reference")


if __name__ == "__main__":
    main()
