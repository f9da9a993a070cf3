"""Make tests/golden/default_model.npz: greedy tokens and top-5 log-probabilities of the default model, as transformers computes them.

Run where torch, transformers and gguf are installed (they are no dependencies of the project), with the path of the model's GGUF file:

    python scripts/make_default_model_golden.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import inspect
import json.decoder
import statistics
import string
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
import transformers

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "default_model.npz"
NUM_STEPS = 32
# A continuation is kept up to the first step at which the best token leads by less: rounding could decide there.
MIN_MARGIN = 0.01

_ARTICLE = (
    "The lighthouse on the northern cape was built in 1871 after three ships had been lost in a single winter. Its keeper lived with his"
    " family in the stone house below the tower, kept goats, and wrote down the weather four times a day. When the lamp was changed from"
    " oil to electricity, the village held a feast that lasted two days, although half of the guests believed that the new light was too"
    " white and would drive the fish away. "
)
_QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "List three prime numbers greater than 50 and say how you know that they are prime.",
    "Translate to German: The train leaves at half past seven.",
    "My code raises KeyError: 'id'. What should I check first?",
)
_TEXTS = (
    "Once upon a time, in a small village at the edge of a great forest,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is 17 + 25?\nA: 42\nQ: What is 9 * 8?\nA:",
    '{"name": "Ada", "born": 1815, "field": "',
    "Zwei Dinge sind unendlich, das Universum und",
)


def prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    """Twenty prompts of about 10 to 1,500 tokens: questions in the chat format, beginnings, an article, source code."""

    def chat(text: str) -> list[int]:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(rendered)

    code = inspect.getsource(json.decoder), inspect.getsource(statistics), inspect.getsource(string), inspect.getsource(textwrap)
    cut = [tokenizer.encode(text)[:length] for text, length in zip(code, (400, 1500, 700, 1000), strict=True)]
    return [
        *(chat(question) for question in _QUESTIONS),
        *(tokenizer.encode(text) for text in _TEXTS),
        chat(_ARTICLE + "\n\nWho lived in the stone house?"),
        chat(_ARTICLE * 4 + "\n\nSummarise this in one sentence."),
        chat("Continue the story.\n\n" + _ARTICLE * 8),
        chat("What does this function do?\n\n" + inspect.getsource(textwrap.wrap)),
        *cut,
    ]


def main() -> None:
    path = Path(sys.argv[1])
    torch.set_grad_enabled(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    arrays: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(prompts(tokenizer)):
        tokens, logprobs = greedy(model, prompt)
        top_ids = np.argsort(-logprobs, axis=-1)[:, :5]
        arrays[f"prompt_{i}"] = np.array(prompt, np.int32)
        arrays[f"tokens_{i}"] = np.array(tokens, np.int32)
        arrays[f"top_ids_{i}"] = top_ids.astype(np.int32)
        arrays[f"top_logprobs_{i}"] = np.take_along_axis(logprobs, top_ids, -1).astype(np.float32)
        print(f"{len(prompt)} + {len(tokens)} tokens: {tokenizer.decode(prompt[-12:])!r} -> {tokenizer.decode(tokens)!r}")
    np.savez_compressed(OUT, **arrays)


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """(tokens, log-probabilities [steps, V]) of up to NUM_STEPS clear steps."""
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    cache, given = None, torch.tensor(prompt)[None]
    while len(tokens) < NUM_STEPS:
        out = model(given, cache=cache, use_cache=True)
        cache = out.cache
        row = torch.log_softmax(out.logits[0, -1], -1)
        best = row.topk(2)
        if float(best.values[0] - best.values[1]) < MIN_MARGIN:
            break
        tokens.append(int(best.indices[0]))
        rows.append(row.numpy())
        given = torch.tensor([[tokens[-1]]])
    return tokens, np.array(rows)


if __name__ == "__main__":
    main()
