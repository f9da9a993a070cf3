"""What a benchmark asks for: prompts as token ids, and how many tokens each request produces."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError

# Low ids are special tokens or single bytes in most vocabularies.
LOWEST_RANDOM_ID = 10


@dataclass(frozen=True)
class BenchRequest:
    """One request: exactly `output_len` tokens after `prompt`."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class Workload:
    """Requests and what to call them in reports."""

    name: str
    requests: tuple[BenchRequest, ...]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[BenchRequest]:
        return iter(self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.output_len for request in self)

    @property
    def longest(self) -> int:
        """Positions of the longest request, prompt and output."""
        return max(len(request.prompt) + request.output_len for request in self)


def random_workload(
    num_prompts: int, input_len: int, output_len: int, *, vocab_size: int, prefix_len: int = 0, range_ratio: float = 0.0, seed: int = 0
) -> Workload:
    """Random prompts that share a random prefix of `prefix_len` tokens.

    Args:
        range_ratio: r draws lengths uniformly from [length * (1 - r), length * (1 + r)].
    """
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(min(LOWEST_RANDOM_ID, vocab_size - 1), vocab_size) for _ in range(count)]

    def around(length: int) -> int:
        return max(1, draw.randint(int(length * (1 - range_ratio)), int(length * (1 + range_ratio))))

    prefix = tokens(prefix_len)
    requests = tuple(BenchRequest(prefix + tokens(around(input_len)), around(output_len)) for _ in range(num_prompts))
    return Workload(f"random {input_len} in / {output_len} out", requests)


def load_workload(path: str, name: str | None = None) -> Workload:
    """Read `{name: [{"prompt": [token ids], "out": tokens}, ...], ...}`.

    Args:
        name: which list; may be left out where the file holds one.

    Raises:
        ConfigError: no such file or list, or it is not of this form.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text())
        lists: dict[str, Any] = {key: value for key, value in content.items() if isinstance(value, list)}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--workload {path}: cannot be read as a JSON object of request lists ({error})") from None
    if name is None and len(lists) == 1:
        name = next(iter(lists))
    if name not in lists:
        problem = f"has no list {name!r}" if name else "holds several lists; choose one with --workload-name"
        raise ConfigError(f"--workload {path}: {problem}; there are {', '.join(lists)}")
    try:
        requests = tuple(BenchRequest(list(map(int, item["prompt"])), int(item["out"])) for item in lists[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f'--workload {path}: {name!r} must hold objects {{"prompt": [token ids], "out": tokens}} ({error!r})') from None
    if not requests or any(not request.prompt or request.output_len < 1 for request in requests):
        raise ConfigError(f"--workload {path}: {name!r} must hold requests of at least one token in and out")
    return Workload(name, requests)


def add_workload_flags(own: argparse._ArgumentGroup, *, num_prompts: int, input_len: int, output_len: int) -> None:
    """The flags that `workload_of` reads, under vLLM's names and ours."""
    own.add_argument("--workload", metavar="FILE", help="JSON file of fixed requests, instead of random ones")
    own.add_argument("--workload-name", metavar="NAME", help="Which list of the file")
    own.add_argument("--dataset-name", choices=["random"], default="random", help="Kind of requests; fixed ones come with --workload")
    own.add_argument("--num-prompts", type=int, default=num_prompts, metavar="N", help=f"Random requests [{num_prompts}]")
    for side, length in (("input", input_len), ("output", output_len)):
        flags = (f"--{side}-len", f"--random-{side}-len")
        own.add_argument(
            *flags, dest=f"{side}_len", type=int, default=length, metavar="N", help=f"Their {side} length in tokens [{length}]"
        )
    own.add_argument(
        "--random-prefix-len", dest="prefix_len", type=int, default=0, metavar="N", help="Tokens that all of them begin with [0]"
    )
    own.add_argument(
        "--random-range-ratio", dest="range_ratio", type=float, default=0.0, metavar="R", help="Draw lengths from L*(1-R) to L*(1+R) [0]"
    )
    own.add_argument("--workload-seed", type=int, default=0, metavar="N", help="Seed of the random requests [0]")


def check_workload_flags(own: argparse.Namespace) -> None:
    """Raises ConfigError for flags that no workload can have, before anything slow is started."""
    for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
        if getattr(own, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(own, name)}")
    if not 0 <= own.range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {own.range_ratio}")
    if own.workload:
        load_workload(own.workload, own.workload_name)
    elif own.workload_name:
        raise ConfigError("--workload-name needs --workload FILE")


def workload_of(own: argparse.Namespace, vocab_size: int) -> Workload:
    """The workload that the flags describe."""
    if own.workload:
        return load_workload(own.workload, own.workload_name)
    return random_workload(
        own.num_prompts,
        own.input_len,
        own.output_len,
        vocab_size=vocab_size,
        prefix_len=own.prefix_len,
        range_ratio=own.range_ratio,
        seed=own.workload_seed,
    )


def check_fits(requests: Sequence[BenchRequest], max_model_len: int) -> None:
    """Raises ConfigError where a request is longer than the engine takes."""
    longest = max(len(request.prompt) + request.output_len for request in requests)
    if longest > max_model_len:
        raise ConfigError(
            f"the longest request needs {longest} positions and the engine has max_model_len={max_model_len}; shorten the requests"
        )
