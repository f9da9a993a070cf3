"""What a grammar on every row costs a decode step.

    python scripts/grammar_cost.py TOKENIZER [--config CONFIG] [--rows N] [--tokens N] [--hidden N] [--layers N]

TOKENIZER is a folder with the tokenizer of a real model, CONFIG a config.json whose shape is taken, with random weights. Without one, a
small model is made for the tokenizer's vocabulary. The same requests run in turn without a constraint, with a regular expression and with
JSON schemas. Printed are medians over the rounds: CPU time of a step, host and (on CPU) device together, which does not depend on what else
the machine does; time by the clock; and how much more each is than without a constraint in the same round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
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
    parser.add_argument("--config", type=Path)
    for name, default in (("rows", 32), ("tokens", 48), ("hidden", 256), ("layers", 4), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(args, Path(folder))
        with LLM(
            folder, max_model_len=512, max_num_seqs=args.rows, max_num_batched_tokens=512, kv_cache_memory_bytes=2**30, enforce_eager=True,
            load_format="dummy" if args.config else "auto",
        ) as llm:  # fmt: skip
            # The first round compiles.
            rounds = [{name: step_time(llm, constraint, args) for name, constraint in CONSTRAINTS.items()} for _ in range(args.rounds + 1)][
                1:
            ]
            print(f"{args.rows} rows, vocabulary of {llm.info.vocab_size}, medians of {args.rounds} rounds")
    for name in CONSTRAINTS:
        parts = []
        for kind, what in enumerate(("of CPU", "by the clock")):
            took = statistics.median(one[name][kind] for one in rounds)
            more = statistics.median(one[name][kind] / one["no grammar"][kind] - 1 for one in rounds)
            parts.append(f"{1e3 * took:7.2f} ms {what} ({100 * more:+.1f} %)")
        print(f"{name:12} {', '.join(parts)} a step")


def write_files(args: argparse.Namespace, folder: Path) -> None:
    from transformers import AutoTokenizer

    if args.config is not None:
        shutil.copy(args.config, folder / "config.json")
    else:
        config = tiny_config(
            "LlamaForCausalLM", vocab_size=-(-len(AutoTokenizer.from_pretrained(args.tokenizer)) // 128) * 128, hidden_size=args.hidden,
            intermediate_size=4 * args.hidden, num_hidden_layers=args.layers, max_position_embeddings=512,
        )  # fmt: skip
        write_model(folder, config, tokenizer=False)
    for file in args.tokenizer.iterdir():
        shutil.copy(file, folder)


def step_time(llm: LLM, constraint: StructuredOutputsParams | None, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds a step: of CPU, and by the clock."""
    params = SamplingParams(structured_outputs=constraint, max_tokens=args.tokens, ignore_eos=True, temperature=0)
    start, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate([[5, 6, 7]] * args.rows, params, use_tqdm=False)
    took = (time.process_time() - cpu) / args.tokens, (time.perf_counter() - start) / args.tokens
    assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs)
    return took


if __name__ == "__main__":
    main()
