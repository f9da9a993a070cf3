"""`jaxllm complete`: continue text in the terminal, streamed. Each line is a prompt of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from jaxllm.cli.backends import Backend, Sampling, backend_parser, open_backend, sampling_of
from jaxllm.cli.chat import answer_lines, note, print_stream, read_line
from jaxllm.cli.parser import CommandParser


def build_parser() -> CommandParser:
    parser = backend_parser("complete", "Continue text")
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
        continue_lines(backend, sampling, read_line)
        return 0


def continue_lines(backend: Backend, sampling: Sampling, read: Callable[[], str]) -> None:
    """The interactive loop. `read` returns a line, or raises EOFError at the end."""
    answer_lines(read, lambda line: print_stream(backend.complete(line, sampling), sys.stdout))
