"""GBNF grammars mean what llama.cpp documents: checked through the matcher."""

from __future__ import annotations

import re

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.text.gbnf import gbnf_to_lark, is_gbnf
from tests.text.test_grammar import accepts


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a"* "b"+ "c"?', ["b", "aabbc"], ["a", "c", ""]),
        ('root ::= "a"{2} | "b"{1,} "c" | "d"{,2} "e" | "f"{1,2}', ["aa", "bbc", "e", "dde", "f", "ff"], ["a", "c", "ddde", "fff"]),
        ('root ::= ("a" | "b" "c")+ # comment ::= "x"\n  "d"', ["ad", "bcad"], ["bd", "d"]),
        ('root ::= [^a-c\\]\\n"] [-x] [x-]', ["d-x", "é--"], ["a-x", "]-x", "dxy"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\"\\\\\\n\\t/"', ['Aé😀"\\\n\t/'], ["A"]),
        ('root ::= . "b"', ["ab", "\nb", "éb"], ["b", "aab"]),
        ('root ::= [a-z]+ "end"', ["xend", "enfend", "endend"], ["end", "enden"]),
        ('my-rule ::= "x" | "y"\nroot ::= my-rule my-rule', ["xy"], ["x"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a" | ', ["", "a"], ["aa"]),
        ('root ::= list\nlist ::= "[" ws (list ("," ws list)*)? "]" ws\nws ::= [ \\n]*', ["[]", "[ [],[[]\n] ]"], ["[", "[,]", "[[] []]"]),
        ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"', ["1", "12+(3+4)"], ["", "1+", "(1"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
    ],
)
def test_what_a_grammar_accepts(grammar, good, bad):
    got = {text: accepts(text, grammar=grammar) for text in [*good, *bad]}
    assert got == {**dict.fromkeys(good, True), **dict.fromkeys(bad, False)}


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('rout ::= "x"', "no rule 'root'"),
        ("root ::= a b\na ::= [a]", "'b', which is not defined"),
        ('root ::= "a"\n\nroot ::= "b"', "defined twice"),
        ('root ::= ("a"', "expected ')'"),
        ('root ::= "a")', "')'"),
        ("root ::= [a-", "end of a class"),
        ("root ::= [z-a]", "ends before it begins"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a"{3,1}', "ends before it begins"),
        ('root ::= "a"{}', "a count"),
        ('root ::= "a" = "b"', "expected a string"),
        ('::= "a"', "expected a rule"),
    ],
)
def test_mistakes_are_explained(grammar, says):
    with pytest.raises(InvalidRequestError, match=re.escape(says)):
        gbnf_to_lark(grammar)


def test_lark_is_told_from_gbnf():
    assert is_gbnf('# comment\nroot::="x"')
    assert not is_gbnf('start: "a ::= b"')
    assert not is_gbnf('root := "x"')


def test_marks_of_repetition_do_not_pile_up_for_ever():
    assert accepts("aaa", grammar='root ::= "a"{1,2}*')
    for grammar in ('root ::= "a"' + "*" * 100_000, 'root ::= "a"{' + "9" * 10_000 + "}"):
        with pytest.raises(InvalidRequestError):
            gbnf_to_lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= a " + "#" * 10_000,
        "root ::= " + "[" * 200_000,
        "root ::= " + '"' * 199_999,
        "root ::= " + "{" * 200_000,
        "root ::= " + "a" * 200_000,
        "\n" * 200_000 + "root ::= (",
        "root ::= " + "(" * 60 + '"a"' + (")" + "*" * 60) * 60,
    ],
    ids=lambda grammar: grammar.strip()[:16],
)
def test_hostile_grammars_are_refused_at_once(grammar):
    with pytest.raises(InvalidRequestError):
        gbnf_to_lark(grammar)


def test_white_space_alone_is_no_gbnf():
    assert not is_gbnf("\n" * 200_000 + "start: X")
