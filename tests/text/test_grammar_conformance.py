"""Verdicts of public suites on expressions and grammars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.errors import InvalidRequestError
from tests.text.test_grammar import accepts, matcher_of


@pytest.mark.parametrize(
    ("file", "field"), [("regexes.jsonl", "regex"), ("ebnf_grammars.jsonl", "grammar"), ("lark_grammars.jsonl", "grammar")]
)
def test_verdicts(conformance_data: Path, file: str, field: str):
    wrong, count = [], 0
    for line in (conformance_data / "structured" / file).read_text("utf-8").splitlines():
        row = json.loads(line)
        if "compile" in row:
            count += 1
            if row["compile"] in ("ok", "error") and compiles(field, row[field]) != (row["compile"] == "ok"):
                wrong.append((row[field], row["compile"]))
            continue
        if field == "regex" and not row.get("python_agrees"):
            continue
        for text, expected in [(t, True) for t in row["accept"]] + [(t, False) for t in row["reject"] + row.get("incomplete", [])]:
            count += 1
            if accepts(text, **{field: row[field]}) != expected:
                wrong.append((row[field], text, expected))
    assert not wrong, f"{len(wrong)} of {count} verdicts"


def compiles(field: str, text: str) -> bool:
    try:
        matcher_of(**{field: text})
    except InvalidRequestError:
        return False
    return True
