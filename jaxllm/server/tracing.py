"""OpenTelemetry spans of requests, one a prompt, under the trace that the client's `traceparent` names.

Attributes have the names that vLLM gives them. The OpenTelemetry packages are an extra (`otel`), imported only where spans are wanted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm import __version__
from jaxllm.errors import ConfigError
from jaxllm.outputs import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from jaxllm.server.generating import Job

TRACE_HEADERS = ("traceparent", "tracestate")
_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_SPAN = "llm_request"


class RequestTracer:
    """Records a span for each request that has ended.

    Raises:
        ConfigError: the packages are missing, or the environment asks for a protocol that is none.
    """

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None):
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint) if exporter is None else exporter
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs the OpenTelemetry packages ({error.name} is missing): pip install 'jaxllm[otel]'"
            ) from None
        name = os.environ.get("OTEL_SERVICE_NAME", "jaxllm")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": __version__}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxllm")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, job: Job, request_id: str, metrics: RequestMetrics | None, *, num_prompt_tokens: int, num_tokens: int) -> None:
        """A request has ended, or was given up; `metrics` as far as it came."""
        from opentelemetry.trace import SpanKind

        metrics = RequestMetrics(arrival_time=job.started) if metrics is None else metrics
        ended = metrics.finished_time or time.time()
        span = self._tracer.start_span(
            _SPAN,
            context=self._propagator.extract(job.trace_headers),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(metrics.arrival_time),
            attributes={
                "gen_ai.response.model": job.model,
                "gen_ai.request.id": request_id,
                "gen_ai.request.temperature": job.params.temperature,
                "gen_ai.request.top_p": job.params.top_p,
                "gen_ai.request.n": job.params.n,
                "gen_ai.usage.num_sequences": job.params.n,
                "gen_ai.usage.prompt_tokens": num_prompt_tokens,
                "gen_ai.usage.completion_tokens": num_tokens,
                **({} if job.params.max_tokens is None else {"gen_ai.request.max_tokens": job.params.max_tokens}),
                **_latencies(metrics, ended),
            },
        )
        span.end(_nanoseconds(ended))

    def close(self) -> None:
        """Send what was recorded."""
        self._provider.shutdown()


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """What of a request's headers names the trace that it is part of."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def _latencies(metrics: RequestMetrics, ended: float) -> dict[str, float]:
    """Seconds in the queue, to the first token, of prefill and of decode, as far as the request came."""
    arrival, scheduled, first, last = (
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
    )
    found = {"gen_ai.latency.e2e": ended - arrival}
    if scheduled is not None:
        found["gen_ai.latency.time_in_queue"] = scheduled - arrival
    if first is not None:
        found["gen_ai.latency.time_to_first_token"] = first - arrival
    if scheduled is not None and first is not None and last is not None:
        found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
        found["gen_ai.latency.time_in_model_decode"] = last - first
        found["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return found


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _exporter(endpoint: str) -> Any:
    protocol = os.environ.get(_PROTOCOL_VARIABLE, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://") or "://" not in endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    raise ConfigError(f"{_PROTOCOL_VARIABLE} must be grpc or http/protobuf, got {protocol!r}")
