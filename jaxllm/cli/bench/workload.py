"""What a benchmark asks for: prompts as token ids, and how many tokens each request produces."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from jaxllm.cli.parser import at_least
from jaxllm.errors import ConfigError

# Low ids are special tokens or single bytes in most vocabularies.
LOWEST_RANDOM_ID = 10


class BenchRequest(msgspec.Struct, frozen=True):
    """One request: exactly `out` tokens after `prompt`."""

    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    out: Annotated[int, msgspec.Meta(ge=1)]


class Workload(NamedTuple):
    """Requests and what to call them in reports."""

    name: str
    requests: list[BenchRequest]


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
    requests = [BenchRequest(prefix + tokens(around(input_len)), around(output_len)) for _ in range(num_prompts)]
    return Workload(f"random {input_len} in / {output_len} out", requests)


def load_workload(path: str, name: str | None = None) -> Workload:
    """Read `{name: [{"prompt": [token ids], "out": tokens}, ...], ...}`.

    Args:
        name: which list; may be left out where the file holds one.

    Raises:
        ConfigError: no such file or list, or it is not of this form.
    """
    try:
        content = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=dict[str, Any])
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        name = next(iter(lists)) if name is None and len(lists) == 1 else name
        if name not in lists:
            raise ConfigError(f"--workload {path} has no list {name!r}; choose one with --workload-name: {', '.join(lists)}")
        return Workload(name, msgspec.convert(lists[name], Annotated[list[BenchRequest], msgspec.Meta(min_length=1)]))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f'--workload {path} must hold lists of objects {{"prompt": [token ids], "out": tokens}} ({error})') from None


def add_workload_flags(own: argparse._ArgumentGroup) -> None:
    """The flags that `workload_of` reads, under vLLM's names and ours."""
    own.add_argument("--workload", metavar="FILE", help="JSON file of fixed requests, instead of random ones")
    own.add_argument("--workload-name", metavar="NAME", help="Which list of the file")
    own.add_argument("--dataset-name", choices=["random"], default="random", help="Kind of requests; fixed ones come with --workload")
    for name, default, text in (
        ("num-prompts", 1000, "Random requests"),
        ("input-len", 1024, "Their input"),
        ("output-len", 128, "output"),
    ):
        own.add_argument(f"--{name}", f"--random-{name}", type=at_least(1), default=default, metavar="N", help=f"{text} [{default}]")
    own.add_argument("--random-prefix-len", type=at_least(0), default=0, metavar="N", help="Tokens that all of them begin with [0]")
    own.add_argument("--random-range-ratio", type=_ratio, default=0.0, metavar="R", help="Draw lengths from L*(1-R) to L*(1+R) [0]")


def _ratio(text: str) -> float:
    if not 0 <= (ratio := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return ratio


def workload_of(own: argparse.Namespace, vocab_size: int) -> Workload:
    """The workload that the flags describe. Raises ConfigError where a file does not hold it."""
    if own.workload:
        return load_workload(own.workload, own.workload_name)
    if own.workload_name:
        raise ConfigError("--workload-name needs --workload FILE")
    lengths = own.num_prompts, own.input_len, own.output_len
    return random_workload(*lengths, vocab_size=vocab_size, prefix_len=own.random_prefix_len, range_ratio=own.random_range_ratio)
