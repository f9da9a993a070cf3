"""Writing grammars in llguidance's Lark dialect, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from jaxllm.text.lookaround import in_slashes

ANY_TEXT = "/(?s:.)*/"


class LarkRules:
    """Collects rules; every method returns the text that stands for its part in a rule."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def grammar(self, start: str, *shared: str) -> str:
        """The whole text; `shared` are further lines of it."""
        return "\n".join([f"start: {start}", *shared, *self.lines, ""])

    def rule(self, body: str, marks: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{marks}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def one_of(self, parts: Iterable[str]) -> str:
        return self.rule(" | ".join(parts))

    def up_to(self, text: str, end: str) -> str:
        """Text and what ends it, in one piece: the lexer would not give back the beginning of an end that it took for text."""
        return self.rule(f"{text} {end}", "[lazy]")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def text_without(words: Iterable[str], start: str = "") -> str:
    """The body of a terminal of any text in which none of the words appears, and that does not match the expression `start`."""
    anywhere = "|".join(map(re.escape, words))
    excluded = [f"(?s:.)*({anywhere})(?s:.)*"] if anywhere else []
    excluded += [start] if start else []
    return f"{ANY_TEXT} & ~/{in_slashes('|'.join(excluded))}/" if excluded else ANY_TEXT
