"""What a grammar on every row costs a decode step.

    python scripts/grammar_cost.py TOKENIZER [--rows N] [--tokens N] [--hidden N] [--layers N]

TOKENIZER is a folder with the tokenizer of a real model; a model of random weights is made for its vocabulary. The same requests run in
turn without a constraint, with a regular expression and with a JSON schema; printed is the least CPU time of a step of each,
host and (on CPU) device together, which does not depend on what else the machine does; and the least time by the clock.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from tests.checkpoints import tiny_config, write_model

CONSTRAINTS = {
    "no grammar": None,
    "regex": StructuredOutputsParams(regex="[a-z ,]+"),
    "JSON schema": StructuredOutputsParams(json={"type": "array", "items": {"type": ["string", "integer"]}, "minItems": 1000}),
    "short texts": StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1000}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    for name, default in (("rows", 32), ("tokens", 48), ("hidden", 256), ("layers", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    vocab = -(-len(AutoTokenizer.from_pretrained(args.tokenizer)) // 128) * 128
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(
            "LlamaForCausalLM", vocab_size=vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
            max_position_embeddings=512,
        )  # fmt: skip
        write_model(Path(folder), config, tokenizer=False)
        for file in args.tokenizer.iterdir():
            shutil.copy(file, folder)
        with LLM(
            folder, max_model_len=512, max_num_seqs=args.rows, max_num_batched_tokens=512, kv_cache_memory_bytes=2**28, enforce_eager=True
        ) as llm:
            best: dict[str, tuple[float, float]] = {}
            for _ in range(args.rounds):
                for name, constraint in CONSTRAINTS.items():
                    params = SamplingParams(structured_outputs=constraint, max_tokens=args.tokens, ignore_eos=True, temperature=0)
                    start, cpu = time.perf_counter(), time.process_time()
                    outputs = llm.generate([[5, 6, 7]] * args.rows, params, use_tqdm=False)
                    took = time.process_time() - cpu, time.perf_counter() - start
                    assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs)
                    best[name] = tuple(map(min, took, best.get(name, took)))
    print(f"{args.rows} rows, vocabulary of {vocab}")
    for name, (cpu, clock) in best.items():
        print(f"{name:12} {1e3 * cpu / args.tokens:7.2f} ms of CPU a step ({100 * (cpu / best['no grammar'][0] - 1):+.1f} %), ", end="")
        print(f"{1e3 * clock / args.tokens:7.2f} ms by the clock ({100 * (clock / best['no grammar'][1] - 1):+.1f} %)")


if __name__ == "__main__":
    main()
