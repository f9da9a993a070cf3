"""Make tests/golden/pooling.npz: what transformers computes for the tiny checkpoints of tests/golden/pooling_cases.py; or, of a directory
with all-MiniLM-L6-v2, tests/golden/minilm.npz.

Run where torch and transformers are installed (they are no dependencies of the project):

    python scripts/make_pooling_golden.py [DIRECTORY]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.golden.pooling_cases import CASES, PATH, PoolingCase, kept, random_tensor


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    if sys.argv[1:]:
        make_minilm(Path(sys.argv[1]))
        return
    arrays = {f"{name}.{i}": answer for name, case in CASES.items() for i, answer in enumerate(answers(case))}
    np.savez_compressed(PATH, **arrays)
    print(f"{len(CASES)} cases, {PATH.stat().st_size} bytes")


def make_minilm(directory: Path) -> None:
    """As sentence-transformers does it: the first 256 tokens, the mean of their hidden states, normalised."""
    texts = sentences()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        hidden = model(**tokenizer(text, truncation=True, max_length=256, return_tensors="pt")).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    np.savez_compressed(PATH.with_name("minilm.npz"), texts=np.array(texts), embeddings=np.array(rows))


def sentences() -> list[str]:
    """Of one word to more than the model reads, with capitals, accents, signs and characters that it does not know."""
    story = "It was a bright cold day in April, and the clocks were striking thirteen; a vile wind blew over 42 roofs. "
    short = ["Hello", "hello", "What's the capital of France?", "Paris is the capital of France.", "def f(x): return x ** 2"]
    return [*short, "Ünïcödé Ärger, naïve café", "数学は楽しい", "🙂 ok", *(story * count for count in (1, 3, 8, 20))]


def answers(case: PoolingCase) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        model = load(case, Path(folder))
    result = []
    for prompt in case.prompts():
        ids = torch.tensor(prompt)[None]
        more = {"token_type_ids": (torch.arange(len(prompt)) >= len(prompt) // 2).long()[None]} if case.pairs else {}
        output = model(ids, **more)
        answer = (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0].numpy()
        result.append(answer[kept(len(prompt))] if case.per_token else answer)
    return result


def load(case: PoolingCase, folder: Path) -> torch.nn.Module:
    """The model of a checkpoint whose tensors have the names that transformers writes, and values that every machine can make."""
    auto = getattr(transformers, case.auto)
    values = {key: value for key, value in case.config.items() if key not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(case.config["model_type"], **values)
    auto.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    save_file({name: random_tensor(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(case.config))
    model, info = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    broken = {kind: names for kind, names in info.items() if names}
    if broken:
        raise SystemExit(f"{case.name}: transformers does not load the checkpoint cleanly: {broken}")
    return model.eval()


if __name__ == "__main__":
    main()
