"""`jaxllm complete`: continue text in the terminal, streamed. Each line is a prompt of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from jaxllm.cli.backends import Backend, Sampling, add_backend_flags, open_backend, sampling_of
from jaxllm.cli.chat import note, print_stream, read_line
from jaxllm.cli.parser import CommandParser
from jaxllm.config import CONFIG_GROUPS
from jaxllm.errors import JaxllmError


def build_parser() -> CommandParser:
    parser = CommandParser(
        "complete",
        "Continue text: with a running server (--url), or with a model loaded here (MODEL, or --local for the default model).",
        groups=CONFIG_GROUPS,
        positional_model=True,
    )
    add_backend_flags(parser)
    parser.own.add_argument("-q", "--quick", metavar="PROMPT", help="Continue one prompt and leave")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    with open_backend(args, "complete") as backend:
        sampling = sampling_of(args.own)
        if args.own.quick is not None:
            print_stream(backend.complete(args.own.quick, sampling), sys.stdout)
            return 0
        note(f"Completing with {backend.model}. Each line is a prompt; ctrl-C stops a completion, ctrl-D leaves.")
        return continue_lines(backend, sampling, read_line)


def continue_lines(backend: Backend, sampling: Sampling, read: Callable[[], str]) -> int:
    """The interactive loop. `read` returns a line, or raises EOFError at the end."""
    while True:
        try:
            line = read().rstrip("\n")
        except EOFError:
            note("")
            return 0
        except KeyboardInterrupt:
            note("\nctrl-D leaves")
            continue
        if not line:
            continue
        try:
            print_stream(backend.complete(line, sampling), sys.stdout)
        except JaxllmError as error:
            note(f"error: {error}")
