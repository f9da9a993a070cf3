"""Where a terminal session gets its text from: a running server over HTTP, or a model loaded here. Both stream.

A stream is a plain iterator of `Piece`s. Closing it, or an interrupt while waiting for it, aborts the request.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxllm.cli.parser import Arguments, CommandParser
from jaxllm.config import CONFIG_GROUPS, EngineConfig
from jaxllm.errors import ConfigError

DEFAULT_URL = "http://localhost:8000/v1"
# Secrets may come from the environment; the first that is set is used.
API_KEY_VARIABLES = ("JAXLLM_API_KEY", "OPENAI_API_KEY")

if TYPE_CHECKING:
    from jaxllm.cli.http_client import HttpBackend
    from jaxllm.cli.local_model import LocalBackend

# Answers one request at a time.
Backend: TypeAlias = "HttpBackend | LocalBackend"
Message = dict[str, str]
# Fields of a request that the session's flags set; the others are left to the model's defaults.
Sampling = Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. `finish_reason` is set on the last one."""

    text: str
    finish_reason: str | None = None


def backend_parser(command: str, does: str) -> CommandParser:
    """The parser of a terminal session, with the flags that `open_backend` and `sampling_of` read."""
    parser = CommandParser(
        command,
        f"{does}: with a running server (--url), or with a model loaded here (MODEL, or --local for the default model).",
        groups=CONFIG_GROUPS,
        positional_model=True,
    )
    parser.own.add_argument("--url", metavar="URL", help=f"Server to talk to [{DEFAULT_URL}]")
    parser.own.add_argument("--model-name", metavar="NAME", help="Model to ask for at the server [the first one it lists]")
    parser.own.add_argument("--api-key", metavar="KEY", help=f"Key for the server [${' or $'.join(API_KEY_VARIABLES)}]")
    parser.own.add_argument("--local", action="store_true", help="Load the model here; without MODEL the embedded default one")
    parser.own.add_argument("--max-tokens", type=int, metavar="N", help="Longest answer in tokens [the model's or server's default]")
    parser.own.add_argument("--temperature", type=float, metavar="X", help="Sampling temperature; 0 always takes the likeliest token")
    parser.own.add_argument("--top-p", type=float, metavar="X", help="Sample from the likeliest tokens that sum up to this probability")
    return parser


def sampling_of(own: argparse.Namespace) -> Sampling:
    return {name: value for name in ("max_tokens", "temperature", "top_p") if (value := getattr(own, name)) is not None}


def open_backend(args: Arguments, command: str) -> AbstractContextManager[Backend]:
    """A running server, or a model loaded here where the command line names one.

    Raises:
        ConfigError: both were asked for, or no server answers.
    """
    own = args.own
    if not own.local and not args.options:
        from jaxllm.cli.http_client import HttpBackend

        key = own.api_key or next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
        hint = f"name another with --url, or load a model here: `jaxllm {command} MODEL` (--local for the default model)"
        return HttpBackend(own.url or DEFAULT_URL, model=own.model_name, api_key=key, hint=hint)

    for flag, value in (("--url", own.url), ("--model-name", own.model_name), ("--api-key", own.api_key)):
        if value is not None:
            reason = "--local" if own.local else next(iter(args.options)).replace("_", "-")
            raise ConfigError(f"{flag} belongs to a running server, and {reason!r} loads a model here; give one of them")
    from jaxllm.cli.local_model import LocalBackend

    return LocalBackend(EngineConfig.from_options(**args.only(CONFIG_GROUPS)))
