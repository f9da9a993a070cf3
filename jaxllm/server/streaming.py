"""Server-sent events: the response that carries them, and the frames of completions and chat.

A frame is put together from bytes that are the same in the whole stream and the few that change, so that a token costs microseconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.outputs import CompletionOutput
from jaxllm.server.errors import ClientDisconnected, error_body, error_response
from jaxllm.server.protocol import GenerationRequest
from jaxllm.server.responses import Usage
from jaxllm.server.state import ServerState, request_scope

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


def frame_of(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def frame_of_error(error: Exception) -> bytes:
    return frame_of(error_body(error))


class EventStream(Response):
    """Sends frames as they come.

    The status line waits for the first frame, or a comment that keeps the stream alive: what fails before is an ordinary error response,
    what fails later an event. The frames' generator is closed, and with it the generation, as soon as the client leaves.

    Args:
        failure: makes the event of what failed behind the first frame.
        end: what every stream ends with.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        state: ServerState,
        frames: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        failure: Callable[[Exception], bytes] = frame_of_error,
        end: bytes = DONE,
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._state = state
        self._frames = frames
        self._failure = failure
        self._end = end
        self._started = False
        self._is_quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = self._end
        interval = self._state.config.sse_keep_alive_interval
        keeping = None if interval is None else asyncio.create_task(self._keep_alive(send, interval))
        try:
            async with aclosing(self._frames) as frames, request_scope(self._state, receive):
                async for frame in frames:
                    self._is_quiet = False
                    if not self._started:
                        await self._start(send)
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        except ClientDisconnected:
            return
        except Exception as error:
            if keeping is not None:
                keeping.cancel()
            if not self._started:
                await error_response(error, scope)(scope, receive, send)
                return
            last = self._failure(error) + self._end
        finally:
            if keeping is not None:
                keeping.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _keep_alive(self, send: Send, interval: float) -> None:
        """Send a comment whenever nothing was sent for an interval, also before the first frame."""
        while True:
            await asyncio.sleep(interval)
            if self._is_quiet:
                if not self._started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._is_quiet = True


class EventWriter:
    """Collects named events of one answer, where they are wanted; else every frame is b""."""

    def __init__(self, *, events: bool):
        self._events = events
        self._frames: list[bytes] = []

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._events:
            self._frames.append(b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n")

    def _take_frames(self) -> bytes:
        frames, self._frames = self._frames, []
        return b"".join(frames)


class UsageMode:
    """What the chunks of one stream say about usage: nothing; null until a last chunk has it; or the usage so far in every one."""

    def __init__(self, state: ServerState, body: GenerationRequest):
        force = state.config.enable_force_include_usage
        self.include = force or body.include_usage
        self.continuous = force or body.continuous_usage

    def tail(self, usage: Usage | None) -> bytes:
        """The end of a chunk after its choices."""
        if not self.include:
            return b"]}\n\n"
        if not self.continuous or usage is None:
            return b'],"usage":null}\n\n'
        return b'],"usage":' + _encode(usage) + b"}\n\n"


class ChunkHead:
    """What all chunks of a stream begin with, up to the choices."""

    def __init__(self, *, id: str, object: str, created: int, model: str, system_fingerprint: str):
        fields = {"id": id, "object": object, "created": created, "model": model, "system_fingerprint": system_fingerprint}
        self.start = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._choices: dict[int, bytes] = {}

    def choice(self, index: int) -> bytes:
        """The head of a chunk with one choice, up to what follows its index."""
        head = self._choices.get(index)
        if head is None:
            head = self._choices[index] = self.start + b'{"index":%d,' % index
        return head

    def usage(self, usage: Usage) -> bytes:
        """The last chunk of a stream that reports usage."""
        return self.start + b'],"usage":' + _encode(usage) + b"}\n\n"


def chat_chunk(
    head: ChunkHead, index: int, delta: bytes, tail: bytes, *, logprobs: bytes = b"null", finish: bytes = b"null", extra: bytes = b""
) -> bytes:
    """A chat chunk; every argument but `index` is JSON already. `extra` holds further members of the choice, each led by a comma."""
    return b"".join((head.choice(index), b'"delta":', delta, b',"logprobs":', logprobs, b',"finish_reason":', finish, extra, b"}", tail))


def completion_chunk(
    head: ChunkHead, index: int, text: str, tail: bytes, *, logprobs: bytes = b"null", finish: bytes = b"null", extra: bytes = b""
) -> bytes:
    """A completions chunk; `logprobs`, `finish` and `extra` are JSON already."""
    return b"".join(
        (head.choice(index), b'"text":', _encode(text), b',"logprobs":', logprobs, b',"finish_reason":', finish, extra, b"}", tail)
    )


def finish_members(output: CompletionOutput, finish_reason: str | None = None) -> tuple[bytes, bytes]:
    """JSON of `finish_reason` (the output's, unless another is given), and the member `stop_reason` of the same choice (empty before
    the end)."""
    if output.finish_reason is None:
        return b"null", b""
    return _encode(finish_reason or output.finish_reason), b',"stop_reason":' + _encode(output.stop_reason)


def member(name: str, value: Any) -> bytes:
    """One more member of a JSON object, led by a comma."""
    return b"," + _encode(name) + b":" + _encode(value)
