"""Where a terminal session gets its text from: a running server over HTTP, or a model loaded here. Both stream.

A stream is a plain iterator of `Piece`s. Closing it, or an interrupt while waiting for it, aborts the request.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from jaxllm.cli.parser import Arguments, CommandParser
from jaxllm.config import CONFIG_GROUPS, EngineConfig
from jaxllm.errors import ConfigError

DEFAULT_URL = "http://localhost:8000/v1"
# Secrets may come from the environment; the first that is set is used.
API_KEY_VARIABLES = ("JAXLLM_API_KEY", "OPENAI_API_KEY")

Message = dict[str, str]


@dataclass(frozen=True)
class Sampling:
    """What the session's flags say of sampling; None leaves it to the model's defaults."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. `finish_reason` is set on the last one."""

    text: str
    finish_reason: str | None = None


class Backend(Protocol):
    """Answers one request at a time."""

    @property
    def model(self) -> str: ...

    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[Piece]: ...

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]: ...


def add_backend_flags(parser: CommandParser) -> None:
    """The flags that `open_backend` and `sampling_of` read."""
    parser.own.add_argument("--url", metavar="URL", help=f"Server to talk to [{DEFAULT_URL}]")
    parser.own.add_argument("--model-name", metavar="NAME", help="Model to ask for at the server [the first one it lists]")
    parser.own.add_argument("--api-key", metavar="KEY", help=f"Key for the server [${' or $'.join(API_KEY_VARIABLES)}]")
    parser.own.add_argument("--local", action="store_true", help="Load the model here; without MODEL the embedded default one")
    parser.own.add_argument("--max-tokens", type=int, metavar="N", help="Longest answer in tokens [the model's or server's default]")
    parser.own.add_argument("--temperature", type=float, metavar="X", help="Sampling temperature; 0 always takes the likeliest token")
    parser.own.add_argument("--top-p", type=float, metavar="X", help="Sample from the likeliest tokens that sum up to this probability")


def sampling_of(own: argparse.Namespace) -> Sampling:
    return Sampling(max_tokens=own.max_tokens, temperature=own.temperature, top_p=own.top_p)


def open_backend(args: Arguments, command: str) -> AbstractContextManager[Backend]:
    """A running server, or a model loaded here where the command line names one.

    Raises:
        ConfigError: both were asked for, or no server answers.
    """
    own = args.own
    if not own.local and not args.options:
        from jaxllm.cli.http_client import HttpBackend

        key = own.api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
        return HttpBackend(own.url or DEFAULT_URL, model=own.model_name, api_key=key, command=command)

    for flag, value in (("--url", own.url), ("--model-name", own.model_name), ("--api-key", own.api_key)):
        if value is not None:
            reason = "--local" if own.local else next(iter(args.options)).replace("_", "-")
            raise ConfigError(f"{flag} belongs to a running server, and {reason!r} loads a model here; give one of them")
    from jaxllm.cli.local_model import LocalBackend

    return LocalBackend(EngineConfig.from_options(**args.only(CONFIG_GROUPS)))
