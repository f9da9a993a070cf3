"""What a golden case is: one tiny random checkpoint, and what transformers computed for it beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints import random_tensors, write_model

# Longer than any window (16) and than a chunk of 64.
PROMPT_LEN = 80
NUM_STEPS = 32


@dataclass(frozen=True)
class Case:
    """A checkpoint by its config and seed.

    Attributes:
        name: of the golden file.
        config: config.json.
        spellings: further configs that mean the same.
        max_model_len: of the engine, where the mathematics depends on it.
        prompt_len: tokens of the prompt, or of the encoder's input where the prompt is one token.
        num_steps: greedy tokens after it; 0 where transformers, decoding step by step, changes the rotation on the way.
        attention: transformers' implementation, where its plain one is not right.
    """

    name: str
    config: dict[str, Any]
    spellings: tuple[dict[str, Any], ...] = ()
    max_model_len: int | None = None
    prompt_len: int = PROMPT_LEN
    num_steps: int = NUM_STEPS
    seed: int = 0
    attention: str = "eager"

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint, with the names and shapes that transformers gives it."""
        with np.load(golden_path(self.name)) as data:
            shapes = json.loads(str(data["shapes"])) if "shapes" in data else None
        return random_tensors(self.config, self.seed, shapes)

    def write(self, directory: Path, spelling: int = -1) -> Path:
        """Write the Hugging Face directory; `spelling` picks one of `spellings`."""
        config = self.config if spelling < 0 else self.spellings[spelling]
        return write_model(directory, config, tensors=self.tensors())


@dataclass(frozen=True)
class Golden:
    """What transformers gave in float32.

    Attributes:
        prompt: [prompt_len] token ids; the decoder's where there is an encoder.
        tokens: [num_steps] greedy continuation.
        top_ids, top_logprobs: [num_steps, 5] best tokens of each step, best first.
        positions: [n] positions of the whole sequence (prompt and tokens) whose logits are kept.
        logits: [n, V].
        encoder: [prompt_len] the input of the encoder, where there is one.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    positions: np.ndarray
    logits: np.ndarray
    encoder: np.ndarray | None = None

    @property
    def sequence(self) -> np.ndarray:
        """All tokens that were given to the model: the prompt and the continuation without its last token."""
        return np.concatenate([self.prompt, self.tokens[:-1]])


def golden_path(name: str) -> Path:
    return Path(__file__).parent / f"{name}.npz"


def load_golden(name: str) -> Golden:
    with np.load(golden_path(name)) as data:
        return Golden(**{key: data[key] for key in Golden.__dataclass_fields__ if key in data})
