"""Responses kept for retrieval and continuation: a bounded number of them, of a bounded size in all."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from jaxllm.errors import InvalidRequestError, QueueFullError
from jaxllm.server.conversation import Message
from jaxllm.server.errors import NotFoundError
from jaxllm.server.responses_api.objects import ResponseObject


@dataclass(slots=True)
class _Entry:
    """JSON of a response, and of the conversation that it ends."""

    response: bytes
    messages: bytes
    background: bool

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


@dataclass(slots=True)
class Running:
    """A response that is being made in the background."""

    response: ResponseObject
    task: asyncio.Task[None]


class ResponseStore:
    """Forgets the least recently used responses first.

    Args:
        max_entries: most responses, running ones apart, of which there may be as many again; 0 keeps none.
        max_bytes: most bytes of JSON in all.
    """

    def __init__(self, max_entries: int, max_bytes: int):
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._bytes = 0

    @property
    def keeps(self) -> bool:
        return self.max_entries > 0

    def add_running(self, running: Running) -> None:
        """Raises QueueFullError where too many responses are made in the background."""
        if len(self._running) >= self.max_entries:
            raise QueueFullError(f"{len(self._running)} responses are being made in the background already; try again later")
        self._running[running.response.id] = running

    def finish(self, response: ResponseObject, messages: list[Message]) -> None:
        """Keep a response that has ended, with the conversation up to its end."""
        self._running.pop(response.id, None)
        entry = _Entry(msgspec.json.encode(response), msgspec.json.encode(messages), response.background)
        self.delete(response.id, missing_ok=True)
        self._entries[response.id] = entry
        self._bytes += entry.size
        while self._entries and (len(self._entries) > self.max_entries or self._bytes > self.max_bytes):
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.size

    def running(self, response_id: str) -> Running | None:
        return self._running.get(response_id)

    async def cancel(self, response_id: str) -> None:
        """End a response that is being made, and wait until it has ended."""
        running = self._running.get(response_id)
        if running is not None:
            running.task.cancel()
            await asyncio.wait({running.task})

    def response(self, response_id: str) -> bytes:
        """JSON of a response as far as it is made. Raises NotFoundError."""
        running = self._running.get(response_id)
        return msgspec.json.encode(running.response) if running is not None else self._find(response_id, "response_id").response

    def is_background(self, response_id: str) -> bool:
        return response_id in self._running or self._find(response_id, "response_id").background

    def conversation(self, response_id: str) -> list[Message]:
        """The messages up to the end of a response, without its instructions.

        Raises:
            NotFoundError: not kept (any longer).
            InvalidRequestError: not finished yet.
        """
        if response_id in self._running:
            raise InvalidRequestError(f"response {response_id!r} is not finished yet; poll it until it is", param="previous_response_id")
        return msgspec.json.decode(self._find(response_id, "previous_response_id").messages)

    def delete(self, response_id: str, *, missing_ok: bool = False) -> None:
        """Raises NotFoundError where it is not kept."""
        if missing_ok and response_id not in self._entries:
            return
        self._find(response_id, "response_id")
        self._bytes -= self._entries.pop(response_id).size

    def _find(self, response_id: str, param: str) -> _Entry:
        entry = self._entries.get(response_id)
        if entry is None:
            raise NotFoundError(
                f"no response {response_id!r:.100} is kept here: it never was, or has been forgotten "
                f"(the last {self.max_entries} are kept, and {self.max_bytes} bytes of them)",
                param=param,
            )
        self._entries.move_to_end(response_id)
        return entry
