"""Texts that are hard to stream, over a live server: each part of the model's script is told after a prompt of its own length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkpoints import FIRST_BYTE_ID, script_ids, write_scripted_model
from tests.server.helpers import choices, chunks, error_of
from tests.server.served import Served

pytestmark = pytest.mark.heavy

WORDS = ["ABC", "DE", "F", "GH"]
CHARACTERS = "é 你好 😀 👩‍👩‍👧‍👦 🇩🇪 naïve a\u0301 ok"
LONE = FIRST_BYTE_ID + 0x80
# Everything but WORDS is spelt in bytes, one token each.
PARTS: dict[str, list[int | str]] = {
    "letters": ["abcdefghijklmnopqrstuvwxyz"],
    "words": ["ABC", "DE", "F", "GH"],
    "characters": [CHARACTERS],
    "lone byte": ["ok ", LONE, " fine"],
    "cut character": ["ok ", *script_ids("😀")[:-1]],
    "garbage": [LONE] * 400,
}
SCRIPT = [token for part in PARTS.values() for token in [*script_ids(part, WORDS), 0]]
CONTEXT = len(SCRIPT) + 100
# Tokens of the test template around one user message.
CHAT_TOKENS = 3


def prompt_tokens(part: str) -> int:
    """Length of the prompt after which the model tells a part."""
    before = list(PARTS)[: list(PARTS).index(part)]
    return 1 + sum(len(script_ids(PARTS[name], WORDS)) + 1 for name in before)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # The first prompt must be long enough for a chat.
    directory = write_scripted_model(tmp_path_factory.mktemp("texts"), SCRIPT, start=1 + CHAT_TOKENS, words=WORDS, max_positions=CONTEXT)
    server = Served(directory, "--enforce-eager", max_model_len=CONTEXT)
    yield server
    server.kill()


def completion(served: Served, part: str, **fields: Any) -> Any:
    prompt = [FIRST_BYTE_ID + ord("x")] * (prompt_tokens(part) + CHAT_TOKENS)
    response = served.post("/v1/completions", prompt=prompt, **{"max_tokens": 60, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response


def chat(served: Served, part: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "x" * prompt_tokens(part)}]
    response = served.post("/v1/chat/completions", messages=messages, **{"max_tokens": 60, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response


def whole_text(served: Served, part: str, **fields: Any) -> str:
    return completion(served, part, **fields).json()["choices"][0]["text"]


def deltas(served: Served, part: str, **fields: Any) -> list[str]:
    return [choice["text"] for choice in choices(completion(served, part, stream=True, **fields).text)]


def chat_deltas(served: Served, part: str, **fields: Any) -> list[str]:
    return [choice["delta"].get("content") or "" for choice in choices(chat(served, part, stream=True, **fields).text)]


# --------------------------------------------------------------------------- characters


def test_characters_of_several_tokens_come_whole(served: Served):
    count = {"max_tokens": 100}
    assert whole_text(served, "characters", **count) == CHARACTERS
    assert chat(served, "characters", **count).json()["choices"][0]["message"]["content"] == CHARACTERS
    for parts in (deltas(served, "characters", **count), chat_deltas(served, "characters", **count)):
        assert "".join(parts) == CHARACTERS
        assert not any("\ufffd" in part for part in parts)
        assert len(parts) > 20


@pytest.mark.parametrize(("part", "text"), [("lone byte", "ok \ufffd fine"), ("cut character", "ok \ufffd")])
def test_bytes_that_are_no_character_are_replaced(served: Served, part: str, text: str):
    assert whole_text(served, part) == text
    assert chat(served, part).json()["choices"][0]["message"]["content"] == text
    assert "".join(deltas(served, part)) == text
    assert "".join(chat_deltas(served, part)) == text


def test_endless_garbage_is_delivered_as_it_comes(served: Served):
    parts = deltas(served, "garbage", max_tokens=450)
    assert "".join(parts) == "\ufffd" * 400 == whole_text(served, "garbage", max_tokens=450)
    assert max(map(len, parts)) < 200


# --------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["DEFGH"], "ABC", "DEFGH"),
        (["BCDE"], "A", "BCDE"),
        (["EFG"], "ABCD", "EFG"),
        (["CX", "HX", "DEFGX", "GHI"], "ABCDEFGH", None),
        (["FGH", "CDEFG"], "AB", "CDEFG"),
    ],
    ids=str,
)
def test_of_a_stop_string_nothing_is_seen_and_what_is_none_is_released(served: Served, stop: list[str], text: str, reason: str | None):
    assert whole_text(served, "words", stop=stop) == text
    for parts in (deltas(served, "words", stop=stop), chat_deltas(served, "words", stop=stop)):
        assert "".join(parts) == text
    last = choices(completion(served, "words", stop=stop, stream=True).text)[-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


def test_a_stop_string_is_shown_where_it_is_asked_for(served: Served):
    fields = {"stop": ["DEF"], "include_stop_str_in_output": True}
    assert whole_text(served, "words", **fields) == "".join(deltas(served, "words", **fields)) == "ABCDEF"


@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abcd")])
def test_a_stop_token_is_text_only_where_it_is_asked_for(served: Served, include: bool, text: str):
    fields = {"stop_token_ids": script_ids("d"), "include_stop_str_in_output": include}
    assert whole_text(served, "letters", **fields) == "".join(deltas(served, "letters", **fields)) == text


# --------------------------------------------------------------------------- shape of streams


def test_a_streamed_echo_starts_with_the_prompt_and_its_logprobs(served: Served):
    fields = {"echo": True, "logprobs": 1, "max_tokens": 5}
    first, *others = choices(completion(served, "letters", stream=True, **fields).text)
    whole = completion(served, "letters", **fields).json()["choices"][0]

    assert first["text"] == "x" * (1 + CHAT_TOKENS)
    assert first["logprobs"]["tokens"] == ["x"] * (1 + CHAT_TOKENS)
    assert first["logprobs"]["token_logprobs"][0] is None
    assert "".join([first["text"], *(part["text"] for part in others)]) == whole["text"] == "xxxxabcde"
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [item for part in (first, *others) for item in (part["logprobs"] or {name: []})[name]] == whole["logprobs"][name]


def test_an_echo_is_scored_without_a_token(served: Served):
    body = completion(served, "letters", echo=True, logprobs=2, max_tokens=0).json()
    assert body["choices"][0]["text"] == "xxxx"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 1 + CHAT_TOKENS
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("part", "limit", "reason"), [("letters", 9, "length"), ("letters", 60, "stop"), ("words", 60, "stop")])
def test_only_the_last_chunk_of_a_choice_has_a_reason(served: Served, part: str, limit: int, reason: str):
    for response in (completion(served, part, max_tokens=limit, stream=True), chat(served, part, max_tokens=limit, stream=True)):
        *others, last = choices(response.text)
        assert last["finish_reason"] == reason
        assert {other["finish_reason"] for other in others} == {None}


def test_streams_of_several_sequences_have_their_indices(served: Served):
    fields = {"n": 2, "temperature": 0.5, "seed": 1, "max_tokens": 12, "stream": True}
    for response in (completion(served, "letters", **fields), chat(served, "letters", **fields)):
        parts = {index: choices(response.text, index) for index in (0, 1)}
        assert {choice["index"] for chunk in chunks(response.text) for choice in chunk["choices"]} == {0, 1}
        for found in parts.values():
            texts = [part["text"] if "text" in part else part["delta"].get("content") or "" for part in found]
            assert "".join(texts) == "abcdefghijkl"
            assert [part["finish_reason"] for part in found if part["finish_reason"]] == ["length"]


# --------------------------------------------------------------------------- limits


def test_a_request_whose_bans_leave_nothing_on_the_way_is_told_so(served: Served):
    fields = {"prompt": "x", "allowed_token_ids": script_ids("a"), "bad_words": ["aa"], "max_tokens": 9}

    whole = served.post("/v1/completions", **fields)
    *before, last = chunks(served.post("/v1/completions", **fields, stream=True).text)

    assert whole.status_code == 400
    assert "no token is left" in error_of(whole)["message"]
    assert [choice["text"] for chunk in before for choice in chunk["choices"]] == ["a"]
    assert (last["error"]["code"], last["error"]["message"]) == (400, error_of(whole)["message"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"n": 5_000_000}, "n"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ("chat/completions", {"max_tokens": 10**9}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 10**9}, "max_completion_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * (CONTEXT + 1000)}]}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * (CONTEXT - CHAT_TOKENS)}]}, "prompt"),
        ("completions", {"prompt": [10**6]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"n": 128, "max_tokens": 10**9}, "max_tokens"),
        ("completions", {"prompt": "x " * 200_000}, "prompt"),
        ("completions", {"stop_token_ids": [517], "min_tokens": 1}, "stop_token_ids"),
        ("completions", {"allowed_token_ids": [FIRST_BYTE_ID + ord("a")], "bad_words": ["a"]}, "allowed_token_ids"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_served_is_refused_while_others_go_on(served: Served, path: str, fields: dict[str, Any], param: str):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path.startswith("chat") else {"prompt": "x"}

    for stream in (False, True):
        response = served.post(f"/v1/{path}", **{**prompt, **fields, "stream": stream})
        assert response.status_code == 400
        assert error_of(response)["param"] == param
        assert param in error_of(response)["message"]

    assert whole_text(served, "letters") == PARTS["letters"][0]
