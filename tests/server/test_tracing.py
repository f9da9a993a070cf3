"""Spans of requests, log lines as JSON, and comments in silent streams."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxllm.errors import ConfigError
from jaxllm.logging import JsonFormatter
from jaxllm.server.app import create_app
from jaxllm.server.tracing import RequestTracer
from tests.server.conftest import serving_state
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO

SERVICE = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_span_has_the_times_and_the_trace_of_its_request(engine: FakeEngine):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    state = serving_state(engine)
    state.tracer = RequestTracer("http://unused", exporter=exporter)
    client = TestClient(create_app(state))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"messages": HELLO, "temperature": 0.5}
    for stream in (False, True):
        assert client.post("/v1/chat/completions", json={**body, "stream": stream}, headers=headers).status_code == 200
    client.post("/v1/completions", json={"prompt": ["a", "b"]})
    state.tracer.close()

    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["llm_request"] * 4
    for span in spans[:2]:
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        assert span.attributes["gen_ai.usage.completion_tokens"] == len("Hello world") + 1
        assert span.attributes["gen_ai.request.temperature"] == 0.5
        assert 0 <= span.attributes["gen_ai.latency.time_to_first_token"] <= span.attributes["gen_ai.latency.e2e"]
        assert span.start_time <= span.end_time
    assert spans[2].parent is None


@contextlib.contextmanager
def http_collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP collector over HTTP: its address, and the requests that it received."""
    messages = pytest.importorskip(SERVICE)
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            received.append(messages.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()


@contextlib.contextmanager
def grpc_collector() -> Iterator[tuple[str, list[Any]]]:
    grpc, service = pytest.importorskip("grpc"), pytest.importorskip(f"{SERVICE}_grpc")
    received: list[Any] = []

    class Collector(service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return pytest.importorskip(SERVICE).ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", received
    server.stop(0)


@pytest.mark.parametrize(("protocol", "collector"), [("grpc", grpc_collector), ("http/protobuf", http_collector)])
def test_spans_reach_a_collector(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, protocol: str, collector: Any):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with collector() as (endpoint, received):
        state = serving_state(engine, otlp_traces_endpoint=endpoint)
        client = TestClient(create_app(state))
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3}, headers=headers).json()
        state.tracer.close()

    (spans,) = [scope.spans for request in received for resource in request.resource_spans for scope in resource.scope_spans]
    (span,) = spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    found = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
    assert found["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.request.max_tokens"] == 3
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert 0 < span.start_time_unix_nano < span.end_time_unix_nano
    resource = {item.key: item.value.string_value for item in received[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "jaxllm"


def test_missing_packages_are_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[otel\]'"):
        RequestTracer("http://localhost:4317")


def test_a_log_line_is_one_json_object():
    try:
        raise ValueError("no\nmore")
    except ValueError:
        record = logging.LogRecord("jaxllm.x", logging.ERROR, __file__, 1, "%s failed", ("it",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("ERROR", "jaxllm.x", "it failed")
    assert "ValueError" in found["exception"]
    assert found["time"].endswith("Z")


def test_a_silent_stream_gets_comments_also_before_its_first_token(engine: FakeEngine):
    def hold(request: object, position: int) -> object:
        return asyncio.sleep(0.2 if position in (0, 2) else 0)

    engine.on_token = hold
    client = TestClient(create_app(serving_state(engine, sse_keep_alive_interval=0.02)))
    text = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True}).text

    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")
    said = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in said) == "Hello world"
