"""`jaxllm chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TextIO

from jaxllm.cli.backends import Backend, Message, Piece, Sampling, backend_parser, open_backend, sampling_of
from jaxllm.cli.parser import CommandParser
from jaxllm.errors import JaxllmError

COMMANDS = """\
/reset         start again; the system prompt stays
/system TEXT   set the system prompt and start again; without TEXT drop it
/exit          leave (or ctrl-D); ctrl-C stops an answer"""


def build_parser() -> CommandParser:
    parser = backend_parser("chat", "Chat in the terminal")
    parser.own.add_argument("--system-prompt", metavar="TEXT", help="System prompt of the conversation")
    parser.own.add_argument("-q", "--quick", metavar="MESSAGE", help="Send one message, print the answer and leave")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    with open_backend(args, "chat") as backend:
        chat = Chat(backend, sampling_of(args.own), system_prompt=args.own.system_prompt)
        if args.own.quick is not None:
            chat.send(args.own.quick)
            return 0
        greeting = f"Chatting with {backend.model}. /help lists the commands; ctrl-C stops an answer, ctrl-D leaves."
        converse(chat, greeting, read_line)
        return 0


class Chat:
    """One conversation: its messages, and where its answers come from."""

    def __init__(self, backend: Backend, sampling: Sampling, *, system_prompt: str | None = None, out: TextIO | None = None):
        self._backend = backend
        self._sampling = sampling
        self._out = out or sys.stdout
        self.messages: list[Message] = []
        self.reset(system_prompt)

    @property
    def system_prompt(self) -> str | None:
        first = self.messages[0] if self.messages else None
        return first["content"] if first and first["role"] == "system" else None

    def reset(self, system_prompt: str | None) -> None:
        """Start again with this system prompt."""
        self.messages = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def send(self, text: str) -> None:
        """Ask, print the answer as it comes, and remember both.

        Raises:
            JaxllmError: the request failed; the conversation is as it was before.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            answer = print_stream(self._backend.chat(self.messages, self._sampling), self._out)
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()


def print_stream(pieces: Generator[Piece], out: TextIO) -> str:
    """Print pieces as they come; ctrl-C ends the answer. Returns what was printed."""
    answer, reason = "", None
    try:
        for piece in pieces:
            # Remembered first: an interrupt may come while it is being shown.
            answer += piece.text
            reason = piece.finish_reason or reason
            out.write(piece.text)
            out.flush()
    except KeyboardInterrupt:
        reason = "interrupt"
        pieces.close()
    finally:
        if answer and not answer.endswith("\n"):
            out.write("\n")
            out.flush()
    if reason in _NOTES:
        note(_NOTES[reason])
    return answer


_NOTES = {"length": "[cut off: the token limit was reached]", "interrupt": "[stopped]", "abort": "[given up by the server]"}


def converse(chat: Chat, greeting: str, read: Callable[[], str]) -> None:
    """The interactive loop. `read` returns a line, or raises EOFError at the end."""
    note(greeting)
    answer_lines(read, lambda line: (_obey if line.lstrip().startswith("/") else Chat.send)(chat, line.strip()))


def answer_lines(read: Callable[[], str], answer: Callable[[str], object]) -> None:
    """Answer what is typed, line by line, up to the end of the input; an answer that fails does not end it."""
    while True:
        try:
            line = read().rstrip("\n")
            if line.strip():
                answer(line)
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\nctrl-D leaves")
        except JaxllmError as error:
            note(f"error: {error}")


def _obey(chat: Chat, line: str) -> None:
    """Do what a command says. Raises EOFError where it is to leave."""
    command, _, argument = (part.strip() for part in line.partition(" "))
    if command == "/exit":
        raise EOFError
    if command == "/reset":
        chat.reset(chat.system_prompt)
        note("[a new conversation]")
    elif command == "/system":
        chat.reset(argument or None)
        note("[a new conversation with this system prompt]" if argument else "[a new conversation without system prompt]")
    elif command == "/help":
        note(COMMANDS)
    else:
        note(f"no command {command}; the commands are:\n{COMMANDS}")


def read_line() -> str:
    """A line of the terminal with editing and history, or of a pipe without a prompt."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line
    # Importing it gives input() its line editing; some builds of Python lack it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    return input("> ")


def note(text: str) -> None:
    """Words about the conversation go to stderr, so that stdout holds the answers alone."""
    print(text, file=sys.stderr, flush=True)
