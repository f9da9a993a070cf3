"""Look-ahead matches what Python's re matches."""

from __future__ import annotations

import itertools
import re

import pytest

from jaxllm.errors import InvalidRequestError
from tests.text.test_grammar import matcher_of
from tests.tiny_tokenizers import byte_ids


@pytest.mark.parametrize(
    "pattern",
    ["a(?!b)c?", "^(?!a)[abc]*$", "(?=.*b)(?=.*c)[abc]{2,4}", "(?!.*cc)[ac]+b", "a(?=b)[ab]+(?!c)c?", "(?!ab$)[ab]{2}c?", "[(?!](?!a)b?",
     "(?:a|b)(?=c|b)[abc]"],
)  # fmt: skip
def test_every_short_text_gets_the_verdict_of_python(pattern):
    matcher = matcher_of(regex=pattern)
    for text in map("".join, itertools.chain.from_iterable(itertools.product("abc(", repeat=n) for n in range(5))):
        one, ids = matcher.deep_copy(), byte_ids(text)
        got = one.try_consume_tokens(ids) == len(ids) and one.is_accepting()
        assert got == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", ["(a(?=b))b", "a(?!b)|c", "(?<=a)b", "a(?!b"])
def test_what_cannot_be_told_is_refused(pattern):
    with pytest.raises(InvalidRequestError):
        matcher_of(regex=pattern)


@pytest.mark.parametrize(
    "pattern", ["(?=a)" + "[" * 200_000, "(?=a)" + "[" * 200_000 + "\\", "a" * 200_000 + "(?=", "(?=a)" * 20_000, ")((?=a)"]
)
def test_hostile_patterns_are_refused_at_once(pattern):
    with pytest.raises(InvalidRequestError):
        matcher_of(regex=pattern)
