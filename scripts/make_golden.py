"""Make tests/golden/*.npz: what transformers computes for the tiny checkpoints of tests/golden/cases.

Run where torch and transformers are installed (they are no dependencies of the project):

    python scripts/make_golden.py [CASE ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.checkpoints import TABLED, random_tensors, write_model
from tests.golden.case import Case, golden_path
from tests.golden.cases import CASES

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
    failed = []
    for name in sys.argv[1:] or CASES:
        try:
            make(CASES[name])
        except Exception as error:  # the other cases are still worth making
            failed.append(name)
            print(f"{name}: {error!r}")
    if failed:
        raise SystemExit(f"not made: {', '.join(failed)}")


def tensor_shapes(case: Case) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the checkpoint that transformers saves; None where `tests.checkpoints` has its own table."""
    if case.config["model_type"] in TABLED:
        return None
    values = {key: value for key, value in case.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(case.config["model_type"], **values)
    with tempfile.TemporaryDirectory() as folder:
        auto_class(case).from_config(config, dtype=torch.float32).save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    if case.config["model_type"] == "t5" and not case.config.get("tie_word_embeddings", True):
        # transformers ties heads of T5 unless the checkpoint has another one.
        shapes["lm_head.weight"] = shapes["shared.weight"]
    return shapes


def auto_class(case: Case) -> type:
    return transformers.AutoModelForSeq2SeqLM if case.config.get("is_encoder_decoder") else transformers.AutoModelForCausalLM


def make(case: Case) -> None:
    shapes = tensor_shapes(case)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), case.config, tensors=random_tensors(case.config, case.seed, shapes))
        model, info = auto_class(case).from_pretrained(
            directory, dtype=torch.float32, attn_implementation=case.attention, output_loading_info=True
        )
    broken = {kind: names for kind, names in info.items() if names}
    if broken:
        raise ValueError(f"transformers does not load the checkpoint cleanly: {broken}")
    model.eval()
    for prompt_seed in range(200):
        generator = np.random.default_rng([case.seed, prompt_seed])
        prompt = generator.integers(5, case.config["vocab_size"], case.prompt_len)
        encoder, forward = None, model
        if case.config.get("is_encoder_decoder"):
            encoder, prompt = prompt, np.array([case.config["decoder_start_token_id"]])
            forward = decoder_behind(model, encoder)
        tokens, step_logits = greedy(forward, prompt, case.num_steps, case.config["vocab_size"])
        best = np.sort(step_logits, axis=-1)
        if case.num_steps == 0 or ((best[:, -1] - best[:, -2]).min() > MIN_MARGIN and len(set(tokens)) >= MIN_DISTINCT):
            break
    else:
        raise ValueError("no prompt with a clear margin and varied tokens; choose another seed")
    sequence = np.concatenate([prompt, tokens[:-1]])
    full = forward(torch.tensor(sequence)[None]).logits[0].numpy()
    if case.num_steps and np.abs(full[-case.num_steps :] - step_logits).max() > 1e-3:
        raise ValueError("transformers gives other logits with its cache than without")
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
        **({} if encoder is None else {"encoder": encoder.astype(np.int32)}),
        **({} if shapes is None else {"shapes": np.array(json.dumps(shapes))}),
    )
    size = golden_path(case.name).stat().st_size
    print(f"{case.name}: prompt seed {prompt_seed}, {len(sequence)} positions, {len(set(tokens))} distinct tokens, {size} bytes")


def decoder_behind(model: torch.nn.Module, encoder: np.ndarray) -> Callable[..., Any]:
    """The model as one of its decoder's tokens, its encoder having read these."""
    read = model.get_encoder()(input_ids=torch.tensor(encoder)[None])
    return lambda ids, **options: model(encoder_outputs=read, decoder_input_ids=ids, **options)


def greedy(model: Callable[..., Any], prompt: np.ndarray, num_steps: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [num_steps], logits [num_steps, V]), decoding with the cache as a user of transformers would."""
    tokens, rows, cache, given = [], [], None, torch.tensor(prompt)[None]
    for _ in range(num_steps):
        out = model(given, cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, -1].numpy())
        tokens.append(int(rows[-1].argmax()))
        given = torch.tensor([[tokens[-1]]])
    return np.array(tokens, np.int64), np.array(rows, np.float32).reshape(num_steps, vocab)


if __name__ == "__main__":
    main()
