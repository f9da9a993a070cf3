#!/usr/bin/env python3
"""Time Hugging Face transformers on a benchmark workload, for ratios to `jaxllm bench throughput` on the same machine.

Needs torch and transformers, which jaxllm itself does not: run it in an environment that has them.

    python scripts/bench_transformers.py MODEL --workload workload.json --workload-name b --threads 2 --output-json out.json

Greedy, float32, exact lengths, token ids in and out. Requests are batched as `generate` allows: sorted by length, left-padded, each batch
runs to its longest output; only the tokens that were asked for are counted.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Request = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face directory or hub id, or a .gguf file")
    parser.add_argument("--workload", required=True, metavar="FILE", help='{name: [{"prompt": [ids], "out": tokens}]}')
    parser.add_argument("--workload-name", required=True, metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="Most requests computed together [32]")
    parser.add_argument("--num-warmups", type=int, default=1, help="Passes before the measured one [1]")
    parser.add_argument("--output-json", metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    requests: list[Request] = json.loads(pathlib.Path(args.workload).read_text())[args.workload_name]
    model = load(args.model)
    for _ in range(args.num_warmups):
        run(model, requests, args.batch_size)
    seconds, first_token_seconds = run(model, requests, args.batch_size)
    num_in, num_out = sum(len(request["prompt"]) for request in requests), sum(request["out"] for request in requests)
    result = {
        "engine": {"name": "transformers", "torch": torch.__version__, "threads": args.threads, "dtype": "float32"},
        "workload": args.workload_name,
        "num_requests": len(requests),
        "elapsed_time": seconds,
        "total_num_tokens": num_in + num_out,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (num_in + num_out) / seconds,
        "input_tokens_per_second": num_in / seconds,
        "output_tokens_per_second": num_out / seconds,
        "mean_ttft_ms": 1000 * first_token_seconds,
    }
    print(json.dumps(result, indent=2))
    if args.output_json:
        pathlib.Path(args.output_json).write_text(json.dumps(result, indent=2) + "\n")


def load(model: str) -> Any:
    """The model in float32; a GGUF file is dequantized by transformers itself."""
    path = pathlib.Path(model)
    if path.suffix == ".gguf":
        loaded = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


@torch.inference_mode()
def run(model: Any, requests: list[Request], batch_size: int) -> tuple[float, float]:
    """Seconds for all requests, and mean seconds to the first token counted from the start of its batch."""
    ordered = sorted(requests, key=lambda request: (request["out"], len(request["prompt"])))
    num_batches = math.ceil(len(ordered) / batch_size)
    firsts = 0.0
    started = time.perf_counter()
    for index in range(num_batches):
        batch = ordered[index * batch_size : (index + 1) * batch_size]
        firsts += len(batch) * generate(model, batch)
    return time.perf_counter() - started, firsts / len(requests)


def generate(model: Any, batch: list[Request]) -> float:
    """Run one batch greedily to its longest output. Returns the seconds to its first token."""
    longest = max(len(request["prompt"]) for request in batch)
    padding = [longest - len(request["prompt"]) for request in batch]
    ids = torch.tensor([[0] * pad + request["prompt"] for pad, request in zip(padding, batch, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    started = time.perf_counter()
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    first = time.perf_counter() - started
    positions = positions[:, -1:]
    # Newer versions of transformers call it `cache`.
    cache_name = "cache" if "cache" in out else "past_key_values"
    for _ in range(max(request["out"] for request in batch) - 1):
        ids = out.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = positions + 1
        cache = {cache_name: out[cache_name]}
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache)
    return first


if __name__ == "__main__":
    main()
