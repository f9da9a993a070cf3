"""Health, metrics, keys, limits, ids, tokenizing: everything beside generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm import __version__
from jaxllm.errors import ConfigError
from jaxllm.server.app import create_app
from jaxllm.server.config import ServerConfig
from jaxllm.server.state import ServerState
from tests.checkpoints import script_ids
from tests.server.fake_engine import CONTEXT, VOCAB, FakeEngine
from tests.server.helpers import HELLO, error_of


@pytest.fixture
def loading() -> TestClient:
    return TestClient(create_app(ServerState(ServerConfig())))


def test_a_serving_server_is_healthy_and_ready(client: TestClient):
    for path in ("/health", "/ready", "/ping"):
        assert client.get(path).status_code == 200
    assert client.post("/ping").status_code == 200
    assert client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/v1/models", "/metrics"])
def test_nothing_is_healthy_or_ready_while_the_model_loads(loading: TestClient, path: str):
    response = loading.get(path)

    assert response.status_code == 503
    assert "loading" in error_of(response)["message"]
    assert response.headers["retry-after"]


def test_requests_are_refused_while_the_model_loads(loading: TestClient):
    assert loading.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 503
    assert loading.get("/version").status_code == 200


def test_a_dead_engine_is_neither_healthy_nor_ready(client: TestClient, engine: FakeEngine):
    engine.dead = "killed by signal 9"

    for path in ("/health", "/ready", "/ping"):
        response = client.get(path)
        assert response.status_code == 503
        assert "killed by signal 9" in error_of(response)["message"]


def test_a_closing_server_is_healthy_but_not_ready(make_client):
    client = make_client()
    client.app.state.server.close()

    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 503
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def test_metrics_are_prometheus_text(client: TestClient):
    response = client.get("/metrics")

    assert response.headers["content-type"].startswith("text/plain")
    assert "jaxllm:num_requests_running 0.0" in response.text


def test_models_have_their_context_length(client: TestClient):
    (card,) = client.get("/v1/models").json()["data"]

    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("scripted", "model", "jaxllm", CONTEXT)


# ----------------------------------------------------------------------------------------------------------------- tokens


def test_prompts_are_tokenised_and_back(client: TestClient):
    tokenised = client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()

    assert tokenised["tokens"] == script_ids("aé")
    assert (tokenised["count"], tokenised["max_model_len"], len(tokenised["token_strs"])) == (3, CONTEXT, 3)
    assert client.post("/detokenize", json={"tokens": tokenised["tokens"]}).json() == {"prompt": "aé"}


def test_conversations_are_tokenised_as_chat_would(client: TestClient, engine: FakeEngine):
    client.post("/v1/chat/completions", json={"messages": HELLO})

    tokens = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    many = client.post("/tokenize", json={"messages": [{"role": "user", "content": str(i)} for i in range(300)]}).json()["tokens"]
    assert tokens == engine.seen[0][0]
    assert "".join(f"<|user|>{i}<|end|>" for i in range(300)) in client.post("/detokenize", json={"tokens": many}).json()["prompt"]


def test_texts_beyond_the_context_are_counted(client: TestClient):
    assert client.post("/tokenize", json={"prompt": "x" * 20_000}).json()["count"] == 20_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_bad_tokenizing_requests_name_their_field(client: TestClient, path, body, param):
    assert error_of(client.post(path, json=body))["param"] == param


# ------------------------------------------------------------------------------------------------------------------- keys


def test_requests_under_v1_need_one_of_the_keys(make_client):
    client = make_client(api_key=("one", "two"))

    assert client.get("/v1/models").status_code == 401
    assert error_of(client.get("/v1/models"))["type"] == "AuthenticationError"
    for wrong in ("Bearer three", "Bearer ", "Basic one", "one", "Bearer one two"):
        assert client.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
    for key in ("one", "two"):
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_the_key_may_come_from_the_environment(make_client, monkeypatch):
    monkeypatch.setenv("JAXLLM_API_KEY", "hidden")

    client = make_client()

    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
    assert client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer hidden"}).status_code == 200


def test_health_and_preflight_need_no_key(make_client):
    client = make_client(api_key=("one",))
    preflight = {"Origin": "http://page", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    assert client.get("/health").status_code == 200
    response = client.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert client.get("/v1/models", headers={"Origin": "http://page"}).headers["access-control-allow-origin"] == "*"


def test_a_root_path_does_not_open_a_way_around_the_key(make_client):
    client = make_client(api_key=("one",), root_path="/proxy")

    for path in ("/v1/models", "/proxy/v1/models"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer one"}).status_code == 200


def test_keys_are_not_shown():
    assert "secret" not in repr(ServerConfig(api_key=("secret",)))


# ---------------------------------------------------------------------------------------------------------- limits and ids


def test_bodies_above_the_limit_are_refused(make_client):
    client = make_client(max_request_body_size=1000)

    announced = client.post("/v1/completions", json={"prompt": "x" * 2000})
    unannounced = client.post(
        "/v1/completions", content=iter([b'{"prompt": "'] + [b"x" * 100] * 20), headers={"content-type": "application/json"}
    )

    for response in (announced, unannounced):
        assert response.status_code == 413
        assert error_of(response)["type"] == "RequestTooLargeError"
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


class Tagging:
    """Middleware as a class: answers have a header that names it."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-tag", b"class")]
            await send(message)

        await self._app(scope, receive, tagged)


async def closed(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    return Response(status_code=418) if request.url.path == "/version" else await call_next(request)


def test_middleware_is_put_around_the_application(make_client):
    client = make_client(middleware=(f"{__name__}.closed", f"{__name__}.Tagging"))

    assert [(found.status_code, found.headers["x-tag"]) for found in map(client.get, ("/version", "/health"))] == [
        (418, "class"),
        (200, "class"),
    ]


@pytest.mark.parametrize("path", ["no.such.module", f"{__name__}.absent", f"{__name__}.HELLO"])
def test_middleware_that_is_none_is_refused(make_client, path: str):
    with pytest.raises(ConfigError, match=path):
        make_client(middleware=path)


def test_request_ids_are_sent_back_where_the_server_is_told_to(make_client):
    client = make_client(enable_request_id_headers=True)

    given = client.get("/health", headers={"X-Request-Id": "mine"})
    made = client.post("/v1/completions", json={"prompt": "a"})

    assert given.headers["x-request-id"] == "mine"
    assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"


def test_request_ids_are_not_sent_back_otherwise(client: TestClient):
    assert "x-request-id" not in client.get("/health", headers={"X-Request-Id": "mine"}).headers


def test_a_request_may_bring_a_time_limit(make_client, engine: FakeEngine):
    client = make_client(request_timeout=60.0)

    client.post("/v1/completions", json={"prompt": "a"})
    client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": "1.5"})
    client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": "600"})

    default, shorter, longer = (more["deadline"] for _, _, more in engine.seen)
    assert shorter < default - 50
    assert longer >= default
    assert longer < default + 50


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
def test_bad_time_limits_are_refused(client: TestClient, value: str):
    error = error_of(client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": value}))

    assert error["param"] == "X-Request-Timeout"


# ------------------------------------------------------------------------------------------------------------------- docs


def test_the_openapi_document_describes_bodies_and_responses(client: TestClient):
    document = client.get("/openapi.json").json()

    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    schemas = document["components"]["schemas"]
    assert {"temperature", "messages", "top_k", "stream"} <= set(schemas["ChatCompletionRequest"]["properties"])
    assert {"ChatCompletion", "Completion", "ErrorBody"} <= set(schemas)
    assert _dangling(document) == []
    assert "swagger" in client.get("/docs").text.lower()


def _dangling(document) -> list[str]:
    """References that lead nowhere."""
    found: list[str] = []

    def walk(value) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str) and reference.rsplit("/", 1)[1] not in document["components"]["schemas"]:
                found.append(reference)
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(document)
    return found


def test_the_documents_can_be_turned_off(make_client):
    client = make_client(disable_fastapi_docs=True)

    assert [client.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 404]


# ----------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"port": 70000}, "port"),
        ({"port": True}, "port"),
        ({"root_path": "proxy"}, "root_path"),
        ({"api_key": ("",)}, "api_key"),
        ({"enable_log_requests": True, "disable_log_requests": True}, "disable_log_requests"),
        ({"metrics_prefix": "a b"}, "metrics_prefix"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
        ({"max_request_body_size": 0}, "max_request_body_size"),
        ({"ssl_keyfile": "key.pem"}, "ssl_certfile"),
        ({"ssl_keyfile": "no.pem", "ssl_certfile": "no.pem"}, "ssl_keyfile"),
        ({"ssl_cert_reqs": 2}, "ssl_certfile"),
        ({"ssl_keyfile": __file__, "ssl_certfile": __file__, "ssl_cert_reqs": 2}, "ssl_ca_certs"),
        ({"allowed_origins": "[nonsense"}, "allowed_origins"),
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level"),
    ],
)
def test_bad_options_are_refused_by_name(options, word):
    with pytest.raises(ConfigError, match=word):
        ServerConfig(**options)


def test_lists_may_be_written_as_json():
    assert ServerConfig(allowed_origins='["http://a", "http://b"]').allowed_origins == ("http://a", "http://b")
