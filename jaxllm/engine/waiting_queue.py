"""Requests that wait for a slot, best key first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxllm.engine.request import Request


class WaitingQueue:
    """A heap by `Request.key` from which any member can be taken out.

    A member that leaves out of turn stays in the heap as a husk; husks are swept when they outnumber the members.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], str]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._members.values()))

    def push(self, request: Request) -> None:
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.key, request.request_id))

    def pop(self) -> Request:
        """The member with the smallest key. IndexError where there is none."""
        while True:
            key, request_id = heapq.heappop(self._heap)
            request = self._members.get(request_id)
            if request is not None and request.key == key:
                del self._members[request_id]
                return request

    def remove(self, request: Request) -> None:
        del self._members[request.request_id]
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(member.key, member.request_id) for member in self._members.values()]
            heapq.heapify(self._heap)
