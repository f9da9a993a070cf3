"""Make tests/golden/pooling.npz: what transformers computes for the tiny checkpoints of tests/golden/pooling_cases.py; or, of a directory
with all-MiniLM-L6-v2, tests/golden/minilm.npz: what sentence-transformers computes.

Run where torch, transformers and, for the directory, sentence-transformers are installed (they are no dependencies of the project):

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
    """By the directory's own modules: poolings, normalisation, and how much of a text is read."""
    from sentence_transformers import SentenceTransformer

    texts = sentences()
    embeddings = SentenceTransformer(str(directory), device="cpu").encode(texts, batch_size=8)
    np.savez_compressed(PATH.with_name("minilm.npz"), texts=np.array(texts), embeddings=embeddings)
    print(f"{len(texts)} texts, embeddings {embeddings.shape}")


def sentences() -> list[str]:
    """Of no word to more than the model reads, with capitals, accents, signs and characters that it does not know."""
    story = "It was a bright cold day in April, and the clocks were striking thirteen; a vile wind blew over 42 roofs. "
    short = ["", " ", "Hello", "hello", "What's the capital of France?", "Paris is the capital of France.", "def f(x): return x ** 2"]
    signs = ["Ünïcödé Ärger, naïve café", "数学は楽しい", "🙂 ok", "e\u0301 é", "\u200bzero\u00a0width", "<b>&amp;</b>\n\ttab", "x" * 150]
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "rivers", "run"]
    # 254 words and the two special tokens are all that is read.
    lengths = (1, 2, 3, 5, 8, 13, 21, 34, 55, 64, 89, 100, 127, 128, 180, 200, 233, 250, 252, 253, 254, 255, 256, 257, 300, 377, 511, 600)
    counted = [" ".join(words[(length + i) % len(words)] for i in range(length)) for length in lengths]
    return [*short, *signs, *(story * count for count in (1, 3, 8, 20)), *counted]


def answers(case: PoolingCase) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        model = load(case, Path(folder))
    result = []
    for prompt in case.prompts():
        ids = torch.tensor(prompt)[None]
        more = {"token_type_ids": (torch.arange(len(prompt)) >= len(prompt) // 2).long()[None]} if case.pairs else {}
        output = model(ids, **more)
        answer = (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0]
        if case.rewards:
            answer = rewards(answer, 2 if "Process" in case.architecture else 1)
        if case.token_ids:
            no, yes = case.token_ids
            answer = answer[-1, [yes]] - answer[-1, [no]]
        result.append((answer[kept(len(prompt))] if case.per_token else answer).numpy())
    return result


def rewards(hidden: torch.Tensor, classes: int) -> torch.Tensor:
    """What Qwen2.5-Math-RM and -PRM have behind the decoder."""
    width = hidden.shape[-1]
    first, last = (
        [torch.from_numpy(random_tensor(f"score.{i}.{part}", shape)) for part, shape in (("weight", (out, width)), ("bias", (out,)))]
        for i, out in ((0, width), (2, classes))
    )
    linear = torch.nn.functional.linear
    return linear(torch.relu(linear(hidden, *first)), *last)


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
