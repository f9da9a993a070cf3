"""What a grammar on every row costs a decode step.

    python scripts/grammar_cost.py TOKENIZER [--config CONFIG] [--rows N] [--tokens N] [--hidden N] [--layers N]

TOKENIZER is a folder with the tokenizer of a real model, CONFIG a config.json whose shape is taken, with random weights. Without one, a
small model is made for the tokenizer's vocabulary. The same requests run in turn without a constraint, with a regular expression and with
JSON schemas. Timed are steps that give each row a token. Printed are medians over all of them: CPU time of a step, host and (on CPU) device
together, which depends less on what else the machine does; time by the clock; and how much more each is than without a constraint.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
            steps: dict[str, list[tuple[float, float]]] = {name: [] for name in CONSTRAINTS}
            names = list(CONSTRAINTS)
            for turn in range(args.rounds + 1):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    took = step_times(llm, CONSTRAINTS[name], args)
                    if turn:  # the first one compiles
                        steps[name] += took
            print(f"{args.rows} rows, vocabulary of {llm.info.vocab_size}, medians of {len(steps['no grammar'])} steps each")
    for name, took in steps.items():
        parts = []
        for kind, what in enumerate(("of CPU", "by the clock")):
            median, plain = (statistics.median(step[kind] for step in one) for one in (took, steps["no grammar"]))
            parts.append(f"{1e3 * median:7.2f} ms {what} ({100 * (median / plain - 1):+.1f} %)")
        print(f"{name:12} {', '.join(parts)} a step")


def write_files(args: argparse.Namespace, folder: Path) -> None:
    from transformers import AutoTokenizer

    for file in args.tokenizer.iterdir():
        shutil.copy(file, folder)
    if args.config is not None:
        shutil.copy(args.config, folder / "config.json")
    else:
        config = tiny_config(
            "LlamaForCausalLM", vocab_size=-(-len(AutoTokenizer.from_pretrained(args.tokenizer)) // 128) * 128, hidden_size=args.hidden,
            intermediate_size=4 * args.hidden, num_hidden_layers=args.layers, max_position_embeddings=512,
        )  # fmt: skip
        write_model(folder, config, tokenizer=False)


def step_times(llm: LLM, constraint: StructuredOutputsParams | None, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds of CPU and by the clock of each step that gave every row a token and began behind another one."""
    client, steps, before = llm._client, [], (time.process_time(), time.perf_counter(), 0)
    assert client is not None
    step = client.step

    def timed() -> Any:
        nonlocal before
        outputs = step()
        now = (time.process_time(), time.perf_counter(), len(outputs.outputs))
        if before[2] == now[2] == args.rows:
            steps.append((now[0] - before[0], now[1] - before[1]))
        before = now
        return outputs

    client.step = timed
    params = SamplingParams(structured_outputs=constraint, max_tokens=args.tokens, ignore_eos=True, temperature=0)
    outputs = llm.generate([[5, 6, 7]] * args.rows, params, use_tqdm=False)
    client.step = step
    assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs)
    return steps


if __name__ == "__main__":
    main()
