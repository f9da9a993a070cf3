from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from jaxllm.errors import DeadlineExceededError
from jaxllm.server.errors import MAX_ERROR_CHARS, MAX_LISTED_ERRORS
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO, error_of

JSON = {"content-type": "application/json"}


def post(client: TestClient, body: object, path: str = "/v1/completions"):
    return client.post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "a"} tail',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"x": ' + b'{"x": ' * 500 + b"1" + b"}" * 501,
        b"[]",
        b'"text"',
        b"null",
        b"5",
    ],
)
def test_bodies_that_are_no_json_object_of_ours_are_refused(client: TestClient, path: str, content: bytes):
    response = client.post(path, content=content, headers=JSON)

    assert response.status_code == 400
    assert error_of(response)["type"] == "BadRequestError"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_content_types_are_refused(client: TestClient, content_type: str):
    response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": content_type})

    assert response.status_code == 400
    assert "application/json" in error_of(response)["message"]


def test_a_charset_in_the_content_type_is_fine(client: TestClient):
    response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "Application/JSON; charset=utf-8"})

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 999999),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", [1]),
        ("top_p", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("n", 0),
        ("n", -1),
        ("n", 5_000_000),
        ("max_tokens", -1),
        ("max_tokens", 10**9),
        ("max_tokens", 10**30),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 1000),
        ("seed", 2**70),
        ("seed", "x"),
        ("logprobs", 10**9),
        ("logprobs", -2),
        ("prompt_logprobs", 10**9),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("bad_words", [""]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**9]),
        ("logprob_token_ids", [10**9]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 10**9),
        ("truncation_side", "middle"),
        ("priority", 3),
        ("priority", "high"),
        ("cache_salt", ""),
        ("cache_salt", "a/b"),
        ("cache_salt", "x" * 200),
        ("request_id", "x" * 300),
        ("request_id", "a\nb"),
        ("stream", "maybe"),
        ("echo", 5),
        ("stream_options", {"include_usage": True}),
        ("suffix", "x"),
        ("best_of", 2),
        ("thinking_token_budget", 5),
        ("use_beam_search", True),
        ("length_penalty", 2),
        ("guided_json", {}),
        ("regex", "a+"),
        ("json_schema", '{"type": "object"}'),
        ("grammar", 'root ::= "x"'),
        ("ebnf", 'root ::= "x"'),
        ("structural_tag", "{}"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"regexp": "a"}),
        ("structured_outputs", {}),
        ("prompt_embeds", "AAAA"),
        ("kv_transfer_params", {"a": 1}),
        ("response_format", {"type": "yaml"}),
    ],
)
def test_fields_at_fault_are_named_with_their_value(client: TestClient, engine: FakeEngine, field: str, value: object):
    response = post(client, {"prompt": "a", field: value})

    error = error_of(response)
    assert response.status_code == 400
    assert error["param"].split(".")[0] == field
    assert field in error["message"]
    assert not engine.open


def test_many_errors_are_reported_up_to_a_bound(client: TestClient):
    response = post(client, {"prompt": "a", "logit_bias": {f"{number}{'x' * 5000}": 1 for number in range(1000)}})

    message = error_of(response)["message"]
    assert message.count("; ") == MAX_LISTED_ERRORS
    assert len(message) < (MAX_LISTED_ERRORS + 1) * MAX_ERROR_CHARS
    assert "990 more errors" in message


def test_an_unknown_model_is_not_found_and_the_served_names_are_listed(make_client):
    client = make_client(served_model_name=("first", "second"))

    for path, body in [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO}), ("/tokenize", {"prompt": "a"})]:
        response = post(client, {**body, "model": "third"}, path)
        assert response.status_code == 404
        error = error_of(response)
        assert (error["type"], error["param"]) == ("NotFoundError", "model")
        assert "first, second" in error["message"]


def test_every_served_name_is_accepted_and_echoed(make_client):
    client = make_client(served_model_name=("first", "second"))

    assert [post(client, {"prompt": "a", "model": name}).json()["model"] for name in ("first", "second")] == ["first", "second"]
    assert post(client, {"prompt": "a"}).json()["model"] == "first"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["first", "second"]
    assert client.get("/v1/models/second").json()["id"] == "second"


def test_unknown_paths_and_methods_have_the_same_error_shape(client: TestClient):
    assert error_of(client.get("/v1/nothing"))["code"] == 404
    assert error_of(client.get("/v1/completions"))["code"] == 405
    assert error_of(client.get("/v1/models/nothing"))["param"] == "model"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_answers_503_with_retry_after(client: TestClient, engine: FakeEngine, streamed: bool):
    engine.queue_full = True

    response = post(client, {"prompt": "a", "stream": streamed})

    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert error_of(response)["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize("streamed", [False, True])
def test_refusals_of_streams_are_ordinary_responses(client: TestClient, streamed: bool):
    response = post(client, {"prompt": [600], "stream": streamed})

    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_dead_engine_answers_503_with_its_cause(client: TestClient, engine: FakeEngine, streamed: bool):
    engine.dead = "the engine process was killed"

    response = post(client, {"prompt": "a", "stream": streamed})

    assert response.status_code == 503
    assert "was killed" in error_of(response)["message"]


def test_a_request_that_is_not_finished_in_time_is_a_504(client: TestClient, engine: FakeEngine):
    def late(request, position):
        raise DeadlineExceededError("the deadline of the request passed after 2.0 s")

    engine.on_token = late
    response = post(client, {"prompt": "a"})

    assert response.status_code == 504
    assert error_of(response)["type"] == "TimeoutError"


def test_a_bug_of_ours_is_a_500_that_tells_the_client_nothing_inside(client: TestClient, engine: FakeEngine):
    def fail(request, position):
        raise RuntimeError("secret detail")

    engine.on_token = fail
    response = post(client, {"prompt": "a"})

    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "InternalServerError"


def test_wide_bodies_are_no_deep_ones(client: TestClient):
    response = client.post("/tokenize", content=json.dumps({"prompt": "a", "extra": [[1]] * 1000}), headers=JSON)

    assert response.status_code == 200
