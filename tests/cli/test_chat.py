"""The terminal chat: turns, commands, interrupts, errors."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Sequence

import pytest

from jaxllm.cli.backends import Message, Piece, Sampling
from jaxllm.cli.chat import Chat, converse
from jaxllm.cli.complete import continue_lines
from jaxllm.errors import InvalidRequestError


class Scripted:
    """A backend that answers from a list; an exception in an answer is raised at that point."""

    model = "scripted"

    def __init__(self, *answers: Sequence[str | BaseException]):
        self.answers = list(answers)
        self.asked: list[list[Message]] = []
        self.closed = 0

    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Generator[Piece]:
        self.asked.append(list(messages))
        return self._answer()

    def complete(self, prompt: str, sampling: Sampling) -> Generator[Piece]:
        self.asked.append([{"role": "prompt", "content": prompt}])
        return self._answer()

    def _answer(self) -> Generator[Piece]:
        try:
            for part in self.answers.pop(0):
                if isinstance(part, BaseException):
                    raise part
                yield Piece(part)
            yield Piece("", "stop")
        finally:
            self.closed += 1


def typed(*lines: str | BaseException) -> Callable[[], str]:
    """What a user types, then the end of the input."""
    script = iter(lines)

    def read() -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def roles(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_every_turn_sends_the_whole_conversation():
    backend, out = Scripted(["Hel", "lo"], ["Bye"]), io.StringIO()
    chat = Chat(backend, {}, system_prompt="Be brief.", out=out)

    converse(chat, "", typed("hi", "", "bye"))

    assert roles(backend.asked[0]) == [("system", "Be brief."), ("user", "hi")]
    assert roles(backend.asked[1]) == [("system", "Be brief."), ("user", "hi"), ("assistant", "Hello"), ("user", "bye")]
    assert out.getvalue() == "Hello\nBye\n"


def test_reset_forgets_the_turns_and_keeps_the_system_prompt():
    backend = Scripted(["a"], ["b"])
    chat = Chat(backend, {}, system_prompt="S", out=io.StringIO())

    converse(chat, "", typed("one", "/reset", "two"))

    assert roles(backend.asked[1]) == [("system", "S"), ("user", "two")]


@pytest.mark.parametrize(("command", "system"), [("/system New one", [("system", "New one")]), ("/system", [])])
def test_the_system_prompt_may_be_changed_or_dropped(command: str, system: list[tuple[str, str]]):
    backend = Scripted(["a"], ["b"])
    chat = Chat(backend, {}, system_prompt="Old", out=io.StringIO())

    converse(chat, "", typed("one", command, "two"))

    assert roles(backend.asked[1]) == [*system, ("user", "two")]


def test_exit_leaves_at_once():
    backend = Scripted()

    converse(Chat(backend, {}), "", typed("/exit", "never sent"))
    assert backend.asked == []


def test_a_mistyped_command_is_not_sent(capsys: pytest.CaptureFixture[str]):
    backend = Scripted()

    converse(Chat(backend, {}), "", typed("/rest"))

    assert backend.asked == []
    assert "/reset" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_what_came(capsys: pytest.CaptureFixture[str]):
    backend = Scripted(["par", KeyboardInterrupt()], ["ok"])
    chat = Chat(backend, {}, out=io.StringIO())

    converse(chat, "", typed("one", "two"))

    assert roles(backend.asked[1]) == [("user", "one"), ("assistant", "par"), ("user", "two")]
    assert backend.closed == 2
    assert "[stopped]" in capsys.readouterr().err


def test_ctrl_c_before_the_first_word_forgets_the_question():
    backend = Scripted([KeyboardInterrupt()], ["ok"])
    chat = Chat(backend, {}, out=io.StringIO())

    converse(chat, "", typed("one", "two"))

    assert roles(backend.asked[1]) == [("user", "two")]


def test_ctrl_c_at_the_prompt_does_not_leave():
    backend = Scripted(["a"])

    converse(Chat(backend, {}, out=io.StringIO()), "", typed(KeyboardInterrupt(), "one"))

    assert len(backend.asked) == 1


def test_a_refused_turn_leaves_the_conversation_as_it_was(capsys: pytest.CaptureFixture[str]):
    backend = Scripted(["a"], [InvalidRequestError("too long")], ["b"])
    chat = Chat(backend, {}, out=io.StringIO())

    converse(chat, "", typed("one", "much too long", "two"))

    assert roles(backend.asked[2]) == [("user", "one"), ("assistant", "a"), ("user", "two")]
    assert "error: too long" in capsys.readouterr().err


def test_completions_are_independent_of_each_other(capsys: pytest.CaptureFixture[str]):
    backend = Scripted(["a"], [InvalidRequestError("no")], ["c"])

    continue_lines(backend, {}, typed("  one\n", "\n", "two", "three"))

    assert [asked[0]["content"] for asked in backend.asked] == ["  one", "two", "three"]
    assert capsys.readouterr().out == "a\nc\n"
