from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.checkpoints import script_ids
from tests.server.fake_engine import CONTEXT, EOS, FakeEngine
from tests.server.helpers import choices, chunks, error_of, usage_of


def complete(client: TestClient, **body):
    response = client.post("/v1/completions", json={"prompt": "abc", **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **body) -> str:
    response = client.post("/v1/completions", json={"prompt": "abc", "stream": True, **body})
    assert response.status_code == 200, response.text
    return response.text


def test_a_completion_has_text_reason_and_complete_usage(client: TestClient):
    body = complete(client)

    assert body["object"] == "text_completion"
    assert body["model"] == "scripted"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["text"] == "Hello world"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    # Eleven bytes and the end of sequence.
    assert body["usage"] == usage_of(3, 12)


def test_sixteen_tokens_are_the_default(client: TestClient, engine: FakeEngine):
    engine.script = script_ids("x" * 40)

    body = complete(client)

    assert body["choices"][0]["text"] == "x" * 16
    assert body["choices"][0]["finish_reason"] == "length"


def test_streamed_text_is_the_unstreamed_text(client: TestClient, engine: FakeEngine):
    engine.script = script_ids("é你😀👩‍👩‍👧 end")
    whole = complete(client, max_tokens=64)["choices"][0]["text"]

    parts = choices(stream(client, max_tokens=64))

    assert "".join(part["text"] for part in parts) == whole == "é你😀👩‍👩‍👧 end"
    assert not any("\ufffd" in part["text"] for part in parts)
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]


def test_batches_number_their_choices_by_prompt_then_sequence(client: TestClient, engine: FakeEngine):
    engine.scripts = lambda request: script_ids(chr(request.prompt_token_ids[0] - script_ids("\0")[0]) * 3)

    body = complete(client, prompt=["a", "b", "c"], n=2, temperature=1)

    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["aaa", "aaa", "bbb", "bbb", "ccc", "ccc"]
    assert body["usage"] == usage_of(3, 24)


def test_streamed_batches_interleave_and_each_choice_ends_once(client: TestClient, engine: FakeEngine):
    engine.scripts = lambda request: script_ids(chr(request.prompt_token_ids[0] - script_ids("\0")[0]) * 3)

    body = stream(client, prompt=["a", "b"], n=2)

    for index, text in enumerate(["aaa", "aaa", "bbb", "bbb"]):
        parts = choices(body, index)
        assert "".join(part["text"] for part in parts) == text
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        assert parts[-1]["finish_reason"] == "stop"
    order = [choice["index"] for chunk in chunks(body) for choice in chunk["choices"]]
    assert order.index(3) < len(order) - 1 - order[::-1].index(0)


@pytest.mark.parametrize("prompt", [[261, 262], [[261, 262]]])
def test_prompts_may_be_token_ids(client: TestClient, engine: FakeEngine, prompt):
    complete(client, prompt=prompt)

    assert engine.seen[0][0] == [261, 262]


def test_several_prompts_may_be_token_ids(client: TestClient, engine: FakeEngine):
    complete(client, prompt=[[261], [262, 263], [264]])

    assert sorted(seen[0] for seen in engine.seen) == [[261], [262, 263], [264]]


def test_echo_puts_the_prompt_first(client: TestClient):
    assert complete(client, echo=True)["choices"][0]["text"] == "abcHello world"
    assert complete(client, echo=True, prompt=script_ids("xy"))["choices"][0]["text"] == "xyHello world"


def test_echo_with_logprobs_covers_prompt_and_output(client: TestClient):
    logprobs = complete(client, echo=True, logprobs=2, max_tokens=2)["choices"][0]["logprobs"]

    assert logprobs["tokens"] == ["a", "b", "c", "H", "e"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"b": -0.25, "c": -1.0}


def test_streamed_echo_with_logprobs_sends_the_prompt_part_first(client: TestClient):
    parts = choices(stream(client, echo=True, logprobs=2, max_tokens=2))

    assert parts[0]["text"] == "abc"
    assert parts[0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert parts[0]["logprobs"]["token_logprobs"][0] is None
    assert [part["logprobs"]["text_offset"] for part in parts] == [[0, 1, 2], [3], [4]]
    assert "".join(part["text"] for part in parts) == "abcHe"


@pytest.mark.parametrize("streamed", [False, True])
def test_scoring_a_prompt_generates_nothing_visible(client: TestClient, streamed: bool):
    body = {"echo": True, "logprobs": 1, "max_tokens": 0, "stream_options": {"include_usage": True} if streamed else None}
    if streamed:
        got = stream(client, **body)
        parts, usage = choices(got), chunks(got)[-1]["usage"]
    else:
        whole = complete(client, **body)
        parts, usage = whole["choices"], whole["usage"]

    assert "".join(part["text"] for part in parts) == "abc"
    assert parts[0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert parts[-1]["finish_reason"] == "length"
    assert usage == usage_of(3, 0)


def test_max_tokens_0_without_echo_is_refused(client: TestClient):
    error = error_of(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0}))

    assert error["param"] == "max_tokens"
    assert "echo" in error["message"]


def test_token_ids_are_returned_on_request(client: TestClient):
    choice = complete(client, return_token_ids=True, max_tokens=2)["choices"][0]

    assert choice["prompt_token_ids"] == script_ids("abc")
    assert choice["token_ids"] == script_ids("He")


def test_token_ids_are_streamed_on_request(client: TestClient):
    parts = choices(stream(client, return_token_ids=True))

    assert parts[0]["prompt_token_ids"] == script_ids("abc")
    assert [token for part in parts[1:] for token in part["token_ids"]] == [*script_ids("Hello world"), EOS]


def test_prompt_logprobs_are_returned_on_request(client: TestClient):
    prompt = script_ids("abc")

    found = complete(client, prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]

    assert found[0] is None
    assert found[1] == {str(prompt[1]): {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}


def test_a_stop_string_that_spans_tokens_never_shows(client: TestClient, engine: FakeEngine):
    engine.script = script_ids("ABCDEFGH")

    streamed = choices(stream(client, stop=["DEFGH"]))
    whole = complete(client, stop="DEFGH")["choices"][0]

    assert "".join(part["text"] for part in streamed) == whole["text"] == "ABC"
    assert streamed[-1]["stop_reason"] == whole["stop_reason"] == "DEFGH"


def test_held_back_text_is_released_when_the_stop_string_does_not_come(client: TestClient, engine: FakeEngine):
    engine.script = script_ids("ABCDEFxy")

    assert "".join(part["text"] for part in choices(stream(client, stop=["DEFGH"]))) == "ABCDEFxy"


def test_lone_bytes_become_replacement_characters_and_nothing_is_lost(client: TestClient, engine: FakeEngine):
    lone = script_ids("\0")[0] + 0xE4
    engine.script = [*script_ids("a"), *[lone] * 50, *script_ids("b")]

    whole = complete(client, max_tokens=100)["choices"][0]["text"]
    streamed = "".join(part["text"] for part in choices(stream(client, max_tokens=100)))

    assert whole == streamed
    assert whole.startswith("a\ufffd")
    assert whole.endswith("\ufffdb")


def test_usage_is_streamed_on_request_in_a_last_chunk(client: TestClient):
    found = chunks(stream(client, stream_options={"include_usage": True}))

    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == usage_of(3, 12)
    assert all(chunk["usage"] is None for chunk in found[:-1])


def test_usage_is_streamed_continuously_on_request(client: TestClient):
    found = chunks(stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True}))

    assert [chunk["usage"]["completion_tokens"] for chunk in found[:3]] == [1, 2, 3]


def test_usage_is_not_streamed_unasked(client: TestClient):
    assert not any("usage" in chunk for chunk in chunks(stream(client)))


def test_the_server_can_force_usage_on_every_stream(make_client):
    found = chunks(stream(make_client(enable_force_include_usage=True)))

    assert found[0]["usage"]["completion_tokens"] == 1
    assert found[-1]["choices"] == []


def test_cached_tokens_are_reported_where_the_server_is_told_to(make_client, engine: FakeEngine):
    engine.cached_tokens = 2

    usage = complete(make_client(), prompt=["abc", "abcd"])["usage"]

    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_over_long_prompts_are_refused_and_the_longest_fitting_one_gets_one_token(client: TestClient):
    long = client.post("/v1/completions", json={"prompt": [261] * CONTEXT, "max_tokens": 1})
    longer = client.post("/v1/completions", json={"prompt": [261] * (CONTEXT + 1000)})
    fits = complete(client, prompt=[261] * (CONTEXT - 1), max_tokens=1)

    assert error_of(long)["param"] == "prompt"
    assert error_of(longer)["code"] == 400
    assert fits["choices"][0]["finish_reason"] == "length"
    assert fits["usage"]["completion_tokens"] == 1


def test_max_tokens_that_cannot_fit_are_refused_with_what_would(client: TestClient):
    error = error_of(client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 10**9}))

    assert error["param"] == "max_tokens"
    assert str(CONTEXT - 3) in error["message"]


@pytest.mark.parametrize(("side", "kept"), [(None, "defg"), ("left", "defg"), ("right", "abcd")])
def test_prompts_are_truncated_on_the_side_asked_for(client: TestClient, engine: FakeEngine, side, kept):
    body = complete(client, prompt="abcdefg", truncate_prompt_tokens=4, truncation_side=side)

    assert engine.seen[0][0] == script_ids(kept)
    assert body["usage"]["prompt_tokens"] == 4


def test_truncating_to_the_maximum_leaves_room_for_the_output(client: TestClient, engine: FakeEngine):
    complete(client, prompt="x" * 2000, truncate_prompt_tokens=-1, max_tokens=10)

    assert len(engine.seen[0][0]) == CONTEXT - 10


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(client: TestClient, engine: FakeEngine):
    error = error_of(client.post("/v1/completions", json={"prompt": "x" * 1_000_000}))

    assert "1000000 characters" in error["message"]
    assert error["param"] == "prompt"
    assert not engine.seen


def test_too_many_prompts_or_sequences_are_refused(client: TestClient):
    prompts = error_of(client.post("/v1/completions", json={"prompt": ["a"] * 1025}))
    sequences = error_of(client.post("/v1/completions", json={"prompt": ["a"] * 1000, "n": 100}))
    huge = error_of(client.post("/v1/completions", json={"prompt": "a", "n": 5_000_000}))

    assert (prompts["param"], sequences["param"], huge["param"]) == ("prompt", "n", "n")


@pytest.mark.parametrize("prompt", [None, 5, [], {}, [[]], ["a", 5], [1.5], [True], [["a"]], [[1], "a", None]])
def test_prompts_of_other_shapes_are_refused(client: TestClient, prompt):
    error = error_of(client.post("/v1/completions", json={"prompt": prompt}))

    assert error["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[10**9], [-1], [[261], [512]]])
def test_token_ids_outside_the_vocabulary_are_refused(client: TestClient, prompt):
    assert error_of(client.post("/v1/completions", json={"prompt": prompt}))["param"] == "prompt"


def test_one_bad_prompt_of_a_batch_leaves_nothing_running(client: TestClient, engine: FakeEngine):
    response = client.post("/v1/completions", json={"prompt": [[261], [262], [511, 600]]})

    assert error_of(response)["code"] == 400
    assert not engine.open


def test_request_ids_name_the_response_and_may_repeat(client: TestClient):
    by_field = complete(client, request_id="mine")
    again = client.post("/v1/completions", json={"prompt": "a", "request_id": "x"}, headers={"X-Request-Id": "header"}).json()

    assert by_field["id"] == "cmpl-mine"
    assert again["id"] == "cmpl-header"


def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngine):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.2, "seed": 5, "stop": ["x"], "stop_token_ids": [300], "ignore_eos": True, "min_tokens": 2,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "bad_words": ["bad"], "allowed_token_ids": [100, 101], "logprob_token_ids": [261], "max_tokens": 9,
    }  # fmt: skip

    complete(client, **fields, logit_bias={"261": 200}, priority=0, cache_salt="salt")

    _, params, more = engine.seen[0]
    for name, value in fields.items():
        assert getattr(params, name) == value, name
    assert params.logit_bias == {261: 100.0}
    assert more["cache_salt"] == "salt"


def test_defaults_of_the_model_apply_where_the_request_is_silent(client: TestClient, engine: FakeEngine):
    engine.default_sampling_params = {"temperature": 0.6, "presence_penalty": 1.0, "max_tokens": 5}

    complete(client, temperature=0.7)
    complete(client, max_tokens=3)

    first, second = engine.seen[0][1], engine.seen[1][1]
    assert (first.temperature, first.presence_penalty, first.max_tokens) == (0.7, 1.0, 5)
    assert (second.temperature, second.max_tokens) == (0.6, 3)


def test_null_means_unset_for_every_optional_field(client: TestClient):
    names = [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "logprobs",
        "max_tokens",
        "logit_bias",
        "best_of",
        "suffix",
        "echo",
        "user",
    ]

    assert complete(client, **dict.fromkeys(names))["choices"][0]["text"] == "Hello world"
