"""Look-ahead in expressions, which automata do not have, as intersections of languages, which they do.

`A(?=B)C` matches what begins with A and goes on with something that C matches to the end and that begins with B: A (C & B.*); `(?!B)`
takes the complement of B.*. This holds where the look-ahead stands outside groups and alternatives, so that C reaches to the end.
"""

from __future__ import annotations

import re
from itertools import pairwise

# A class without an end is taken whole, and nothing is gone back over: a hostile pattern would take for ever.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\(\?[=!]|\(|\)|\||.", re.DOTALL)
_BETWEEN_SLASHES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n", "\\ ": " "}


def look_ahead_to_lark(pattern: str) -> str | None:
    """A Lark grammar for a pattern with look-ahead; None where it has none, more than 32 times, inside a group or beside an alternative."""
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
    cuts, depth, inside = [0], 0, False
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if piece == "|" and depth == 0:
            return None
        if piece in ("(?=", "(?!"):
            if depth:
                return None
            cuts.append(found.start())
            inside = True
        depth += piece.startswith("(") - (piece == ")")
        if inside and depth == 0:
            cuts.append(found.end())
            inside = False
    parts = [pattern[start:end] for start, end in pairwise([*cuts, len(pattern)])]
    # Each look-ahead nests what follows it one level deeper.
    return parts if depth == 0 and len(parts) <= 2 * 32 + 1 else None


def in_slashes(pattern: str) -> str:
    """An expression as it stands between slashes in Lark."""
    return re.sub(r"\\.|[/\n]", lambda found: _BETWEEN_SLASHES.get(found[0], found[0]), pattern, flags=re.DOTALL)


def _terminal(pattern: str) -> str:
    return f"/{in_slashes(pattern)}/" if pattern else '""'
