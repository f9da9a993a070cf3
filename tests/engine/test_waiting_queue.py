"""Waiting requests come out by key, whoever left in between."""

from __future__ import annotations

import random

import pytest

from jaxllm.engine.request import Request
from jaxllm.engine.waiting_queue import WaitingQueue
from tests.engine.harness import make_request


def _request(name: str, sequence: int, priority: int = 0) -> Request:
    return Request(make_request(name, [1], priority=priority), sequence=sequence, by_priority=True, max_len=9, num_groups=1, seed=0)


def test_random_use_pops_by_key() -> None:
    rng = random.Random(0)
    queue, members = WaitingQueue(), []
    for i in range(3000):
        action = rng.random()
        if action < 0.5:
            request = _request(f"r{i % 40}", i, rng.randint(0, 3))
            if any(member.request_id == request.request_id for member in members):
                continue
            queue.push(request)
            members.append(request)
        elif action < 0.75 and members:
            gone = members.pop(rng.randrange(len(members)))
            queue.remove(gone)
        elif members:
            best = min(members, key=lambda member: member.key)
            assert queue.pop() is best
            members.remove(best)
        assert len(queue) == len(members)
        assert len(queue._heap) <= 2 * len(queue) + 17


def test_an_empty_queue_has_nothing_to_pop() -> None:
    queue = WaitingQueue()
    queue.push(request := _request("a", 0))
    queue.remove(request)
    with pytest.raises(IndexError):
        queue.pop()
