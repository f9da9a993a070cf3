"""Make tests/golden/*.npz: what transformers computes for the tiny checkpoints of tests/golden/cases.py.

Run where torch and transformers are installed (they are no dependencies of the project):

    python scripts/make_golden.py [CASE ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.golden.cases import CASES, Case, golden_path

# Greedy tokens must not hang on rounding: a prompt is used if the best token leads by this everywhere.
MIN_MARGIN = 0.02
# A model that repeats itself shows little.
MIN_DISTINCT = 5
# Fewer positions than this, spread over the sequence, keep their full logits.
NUM_POSITIONS = 6


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    for name in sys.argv[1:] or CASES:
        make(CASES[name])


def make(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = case.write(Path(folder))
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    broken = {kind: names for kind, names in info.items() if names}
    if broken:
        raise SystemExit(f"{case.name}: transformers does not load the checkpoint cleanly: {broken}")
    model.eval()
    for prompt_seed in range(200):
        generator = np.random.default_rng([case.seed, prompt_seed])
        prompt = generator.integers(5, case.config["vocab_size"], case.prompt_len)
        tokens, step_logits = greedy(model, prompt, case.num_steps)
        best = np.sort(step_logits, axis=-1)
        if case.num_steps == 0 or ((best[:, -1] - best[:, -2]).min() > MIN_MARGIN and len(set(tokens)) >= MIN_DISTINCT):
            break
    else:
        raise SystemExit(f"{case.name}: no prompt with a clear margin and varied tokens; choose another seed")
    sequence = np.concatenate([prompt, tokens[:-1]])
    full = model(torch.tensor(sequence)[None]).logits[0].numpy()
    if case.num_steps and np.abs(full[-case.num_steps :] - step_logits).max() > 1e-3:
        raise SystemExit(f"{case.name}: transformers gives other logits with its cache than without")
    logprobs = torch.log_softmax(torch.tensor(step_logits), -1).numpy()
    top_ids = np.argsort(-logprobs, axis=-1)[:, :5]
    positions = np.unique(np.linspace(0, len(sequence) - 1, NUM_POSITIONS).astype(int))
    np.savez_compressed(
        golden_path(case.name),
        prompt=prompt.astype(np.int32),
        tokens=tokens.astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, top_ids, -1).astype(np.float32),
        positions=positions.astype(np.int32),
        logits=full[positions].astype(np.float32),
    )
    size = golden_path(case.name).stat().st_size
    print(f"{case.name}: prompt seed {prompt_seed}, {len(sequence)} positions, {len(set(tokens))} distinct tokens, {size} bytes")


def greedy(model: torch.nn.Module, prompt: np.ndarray, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [num_steps], logits [num_steps, V]), decoding with the cache as a user of transformers would."""
    tokens, rows, cache, given = [], [], None, torch.tensor(prompt)[None]
    for _ in range(num_steps):
        out = model(given, cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, -1].numpy())
        tokens.append(int(rows[-1].argmax()))
        given = torch.tensor([[tokens[-1]]])
    vocab = model.config.vocab_size
    return np.array(tokens, np.int64), np.array(rows, np.float32).reshape(num_steps, vocab)


if __name__ == "__main__":
    main()
