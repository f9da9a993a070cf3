"""Look-ahead in expressions, which automata do not have, as intersections of languages, which they do.

`A(?=B)C` matches what begins with A and goes on with something that C matches to the end and that begins with B: A (C & B.*); `(?!B)`
takes the complement of B.*. This holds where the look-ahead stands outside groups and alternatives, so that C reaches to the end.
"""

from __future__ import annotations

import re

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[=!]|\(|\)|\||.", re.DOTALL)
_BETWEEN_SLASHES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n", "\\ ": " "}


def look_ahead_to_lark(pattern: str) -> str | None:
    """A Lark grammar for a pattern with look-ahead; None where it has none, or has it inside a group or beside an alternative."""
    if "(?=" not in pattern and "(?!" not in pattern:
        return None
    parts = _split(pattern)
    if parts is None or len(parts) == 1:
        return None
    parts[0] = parts[0].removeprefix("^")
    last = parts[-1]
    if last.endswith("$") and not last.endswith("\\$"):
        parts[-1] = last[:-1]
    body = _terminal(parts[-1])
    # From the end to the start: text, look-ahead, text, look-ahead, ..., text.
    for text, ahead in zip(parts[-3::-2], parts[-2::-2], strict=True):
        inside = ahead[3:-1]
        # `$` inside says that nothing follows.
        open_end = "" if inside.endswith("$") and not inside.endswith("\\$") else " /(?s:.)*/"
        inside = inside if open_end else inside[:-1]
        condition = f"({_terminal(f'(?:{inside})')}{open_end})"
        body = f"{_terminal(text)} (({body}) & {'~' if ahead[2] == '!' else ''}{condition})".lstrip()
    return f"start: T\nT: {body}\n"


def _split(pattern: str) -> list[str] | None:
    """Text and look-aheads in turn, beginning and ending with text."""
    parts, depth, ahead = [""], 0, -1
    for piece in _PIECE.findall(pattern):
        if piece == "|" and depth == 0:
            return None
        if piece in ("(?=", "(?!"):
            if depth:
                return None
            parts.append("")
            ahead = depth
        depth += piece.startswith("(") - (piece == ")")
        parts[-1] += piece
        if piece == ")" and depth == ahead:
            parts.append("")
            ahead = -1
    return parts if depth == 0 else None


def in_slashes(pattern: str) -> str:
    """An expression as it stands between slashes in Lark."""
    return re.sub(r"\\.|[/\n]", lambda found: _BETWEEN_SLASHES.get(found[0], found[0]), pattern, flags=re.DOTALL)


def _terminal(pattern: str) -> str:
    return f"/{in_slashes(pattern)}/" if pattern else '""'
