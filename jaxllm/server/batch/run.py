"""From the lines of a batch to answers: each is a request to the server's own application, in this process and without a port."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp
from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.errors import InvalidRequestError, JaxllmError, NotSupportedError
from jaxllm.server.app import create_app
from jaxllm.server.batch.files import BatchFiles, answer_id
from jaxllm.server.body import decode_json
from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import error_body
from jaxllm.server.state import ServerState

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
_QUEUE_FULL = 503
_RETRY_S = 0.5


@dataclass
class Counts:
    """How the lines of a run ended."""

    succeeded: int = 0
    failed: int = 0


async def run_batch(
    engine_config: EngineConfig, server_config: ServerConfig, files: BatchFiles, *, max_inflight: int | None, progress: bool
) -> Counts:
    """Load the model and answer every line that has no answer yet.

    Raises:
        ConfigError, ModelLoadError: the model cannot be loaded as configured.
        EngineDeadError: the engine ended; what has no answer by then can be answered by the next run.
    """
    from jaxllm.async_llm import AsyncLLM

    names = server_config.served_model_name
    engine = AsyncLLM(config=engine_config, metrics_prefix=server_config.metrics_prefix, served_model_name=names[0] if names else None)
    async with engine:
        state = ServerState(server_config)
        state.serve(engine)
        # Enough that the engine never waits for requests.
        return await answer_lines(state, files, max_inflight=max_inflight or 2 * engine.info.max_num_seqs, progress=progress)


async def answer_lines(state: ServerState, files: BatchFiles, *, max_inflight: int, progress: bool) -> Counts:
    """Answer the open lines with the engine that serves, at most `max_inflight` at once. The first fatal error ends all."""
    counts = Counts()
    lines = files.open_lines()
    keys = state.config.api_keys
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    app: ASGIApp = create_app(state)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    bar = tqdm(total=files.num_lines, initial=files.num_done, unit="request", desc="Answered", disable=not progress)
    client = httpx.AsyncClient(transport=transport, base_url="http://batch", headers=headers, timeout=None)

    async def work() -> None:
        """Take one line after the other."""
        for number, line in lines:
            custom_id, status, body = await _answer(state, client, line)
            succeeded = status == 200
            counts.succeeded += succeeded
            counts.failed += not succeeded
            name = answer_id(number, line)
            answer = {
                "id": name,
                "custom_id": custom_id,
                "response": {"status_code": status, "request_id": name, "body": msgspec.Raw(body)},
                "error": None if succeeded else _error_of(body),
            }
            files.write(msgspec.json.encode(answer))
            bar.update()

    with bar:
        async with client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(max_inflight, files.num_lines - files.num_done)):
                        group.create_task(work())
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
    return counts


async def _answer(state: ServerState, client: httpx.AsyncClient, line: bytes) -> tuple[Any, int, bytes]:
    """The request's name, and the status and JSON of its answer. Raises EngineDeadError."""
    custom_id = None
    try:
        item = decode_json(line)
        custom_id = item.get("custom_id") if isinstance(item, dict) else None
        url, body = _checked(item)
    except InvalidRequestError as error:
        return custom_id, 400, msgspec.json.encode(error_body(error))
    while True:
        response = await client.post(url, content=msgspec.json.encode(body), headers={"Content-Type": "application/json"})
        if response.status_code < 500:
            break
        # Where the engine is gone, no line fails by its own fault: they are left to the next run.
        await state.serving.engine.check_health()
        if response.status_code != _QUEUE_FULL:
            break
        await asyncio.sleep(_RETRY_S)
    return custom_id, response.status_code, response.content


def _checked(item: Any) -> tuple[str, dict[str, Any]]:
    """URL and body of a request. Raises InvalidRequestError for a line that is none that we answer."""
    if not isinstance(item, dict):
        raise InvalidRequestError(f"a line must be an object with custom_id, method, url and body; got {type(item).__name__}")
    if not isinstance(item.get("custom_id"), str):
        raise InvalidRequestError(f"custom_id must be text, got {item.get('custom_id')!r:.100}", param="custom_id")
    if item.get("method", "POST") != "POST":
        raise InvalidRequestError(f"method must be POST, got {item.get('method')!r:.100}", param="method")
    url, body = item.get("url"), item.get("body")
    if url not in URLS:
        raise InvalidRequestError(f"url must be one of {', '.join(URLS)}; got {url!r:.100}", param="url")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"body must be an object, got {type(body).__name__}", param="body")
    for name in ("stream", "background"):
        if body.get(name):
            raise NotSupportedError(f"{name} is not offered in a batch; leave it out", param=name)
    return url, body


def _error_of(body: bytes) -> dict[str, Any]:
    try:
        error = msgspec.json.decode(body)["error"]
        return {"code": error["type"], "message": error["message"]}
    except (msgspec.DecodeError, KeyError, TypeError):
        raise JaxllmError(f"the server answered without a readable error: {body[:200]!r}") from None
