"""Options of the HTTP server. Light: the command line reads this file before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxllm.config import check_fields, option
from jaxllm.errors import ConfigError
from jaxllm.logging import LogFormat

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]

API_KEY_VARIABLE = "JAXLLM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how the server listens, who may ask, and what it answers beside the model's output."""

    host: str | None = option(None, "Address to listen on. Default: every IPv4 address of this machine")
    port: int = option(8000, "Port to listen on; 0 lets the system choose one", low=0)
    uds: str | None = option(None, "Path of a Unix domain socket to listen on instead of host and port")
    root_path: str = option("", "Path prefix under which a proxy serves this server")
    api_key: tuple[str, ...] = dataclasses.field(
        default=(),
        repr=False,
        metadata={"help": f"Key that requests under /v1 must bring as a bearer token; repeatable. Default: ${API_KEY_VARIABLE}, if set"},
    )
    served_model_name: tuple[str, ...] = option((), "Name of the model in the API; repeatable, the first one is used in responses")
    enable_auto_tool_choice: bool = option(False, "Let the model call tools as it likes (tool_choice auto); needs tool_call_parser")
    tool_call_parser: str | None = option(
        None, "How the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, ...; auto tells it by the chat template"
    )
    reasoning_parser: str | None = option(
        None, "How the model shows its reasoning: deepseek_r1, qwen3, mistral, ...; auto tells it by the chat template"
    )
    enable_reasoning_content: bool = option(False, "Send reasoning a second time as reasoning_content, as older clients expect it")
    trust_request_chat_template: bool = option(False, "Allow requests to bring a chat template of their own")
    enable_prompt_tokens_details: bool = option(False, "Report cached tokens in usage, which is the default")
    enable_force_include_usage: bool = option(False, "Report usage in every chunk of every stream, asked for or not")
    enable_request_id_headers: bool = option(False, "Send X-Request-Id with every response (the request's own, if it brought one)")
    enable_log_requests: bool = option(False, "Log a line for each request (sizes and parameters, no texts)")
    disable_log_requests: bool = option(False, "Log no line for each request, which is the default")
    log_format: LogFormat = option("text", "How log lines are written: text, or json for one object a line")
    otlp_traces_endpoint: str | None = option(
        None, "Where OpenTelemetry spans of requests are sent (OTLP); needs the extra otel. Default: nowhere"
    )
    sse_keep_alive_interval: float | None = option(
        None, "Seconds of silence after which a stream gets a comment, so that proxies keep it open. Default: never", above=0
    )
    metrics_prefix: str = option("jaxllm", "Prefix of the metrics' names; vllm fits existing dashboards")
    request_timeout: float | None = option(
        None,
        "Seconds after which a request is given up; a request may ask for less with the header X-Request-Timeout. Default: none",
        above=0,
    )
    shutdown_timeout: float = option(5.0, "Seconds that running requests may still take once the server is told to stop", low=0)
    enable_tokenizer_info_endpoint: bool = option(False, "Serve /tokenizer_info, which tells the chat template and the special tokens")
    enable_dev_endpoints: bool = option(False, "Serve /reset_prefix_cache, /start_profile and /stop_profile")
    profile_dir: str = option("jaxllm-profile", "Directory for the traces of /start_profile")
    max_request_body_size: int = option(32 * 2**20, "Largest request body in bytes", low=1)
    max_stored_responses: int = option(1_000, "How many responses of /v1/responses are kept for retrieval and continuation; 0: none", low=0)
    max_stored_responses_bytes: int = option(256 * 2**20, "Bytes that they may take in all, their conversations included", low=0)
    allowed_origins: tuple[str, ...] = option(("*",), "Origins that browsers may call from; repeatable, or a JSON list")
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that browsers may use from other origins; repeatable, or a JSON list")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that browsers may send from other origins; repeatable, or a JSON list")
    allow_credentials: bool = option(False, "Let browsers send credentials from other origins")
    ssl_keyfile: str | None = option(None, "Private key (PEM) for HTTPS")
    ssl_certfile: str | None = option(None, "Certificate (PEM) for HTTPS")
    ssl_ca_certs: str | None = option(None, "Certificates (PEM) of those who may sign a client's certificate")
    ssl_cert_reqs: int = option(0, "Whether clients need a certificate: 0 no, 1 they may have one, 2 they must")
    ssl_ciphers: str | None = option(None, "Ciphers for HTTPS, in OpenSSL's notation. Default: Python's")
    middleware: tuple[str, ...] = option(
        (), "ASGI middleware around the application: module.name of a class or an async function; repeatable, the last one outermost"
    )
    disable_fastapi_docs: bool = option(False, "Do not serve /docs, /redoc and /openapi.json")
    disable_uvicorn_access_log: bool = option(False, "Log no line for each HTTP exchange")
    uvicorn_log_level: LogLevel = option("info", "Log level of the HTTP server")

    def __post_init__(self) -> None:
        for name in ("api_key", "served_model_name", "allowed_origins", "allowed_methods", "allowed_headers", "middleware"):
            object.__setattr__(self, name, _words(name, getattr(self, name)))
        check_fields(self)
        if self.port > 65535:
            raise ConfigError(f"port must be an integer from 0 to 65535, got {self.port!r}")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must start with /, got {self.root_path!r}")
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        if self.enable_log_requests and self.disable_log_requests:
            raise ConfigError("enable_log_requests and disable_log_requests exclude each other; give one of them")
        self._check_parsers()
        if not self.metrics_prefix.isidentifier():
            raise ConfigError(f"metrics_prefix must consist of letters, digits and _, got {self.metrics_prefix!r}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given, missing = ("ssl_keyfile", "ssl_certfile") if self.ssl_keyfile else ("ssl_certfile", "ssl_keyfile")
            raise ConfigError(f"{given} needs {missing} beside it")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_cert_reqs or self.ssl_ciphers):
            raise ConfigError("ssl_ca_certs, ssl_cert_reqs and ssl_ciphers need ssl_certfile and ssl_keyfile beside them")
        if self.ssl_cert_reqs not in (0, 1, 2) or (self.ssl_cert_reqs and self.ssl_ca_certs is None):
            raise ConfigError(f"ssl_cert_reqs must be 0, or 1 or 2 with ssl_ca_certs beside it; got {self.ssl_cert_reqs!r}")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name}={path!r} is not a file")

    def _check_parsers(self) -> None:
        from jaxllm.server.parsers import REASONING_FORMATS, TOOL_FORMATS

        for name, formats in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            value = getattr(self, name)
            if value is not None and value != "auto" and value not in formats:
                raise ConfigError(f"{name} must be auto or one of {', '.join(sorted(formats))}; got {value!r}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("enable_auto_tool_choice needs tool_call_parser beside it; auto tells it by the chat template")
        if self.enable_reasoning_content and self.reasoning_parser is None:
            raise ConfigError("enable_reasoning_content needs reasoning_parser beside it; auto tells it by the chat template")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys in force: those given, else that of the environment."""
        from_environment = os.environ.get(API_KEY_VARIABLE, "").strip()
        return self.api_key or ((from_environment,) if from_environment else ())


def _words(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    """A tuple of words from one word, several, or the text of a JSON list."""
    words: list[str] = []
    for item in (value,) if isinstance(value, str) else value:
        if isinstance(item, str) and item.startswith("["):
            try:
                words += json.loads(item)
            except ValueError as error:
                raise ConfigError(f'{name}: expected a JSON list such as ["a"], got {item!r} ({error})') from None
        else:
            words.append(item)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            # The value itself may be a secret.
            raise ConfigError(f"{name} must hold non-empty strings")
    return tuple(words)
