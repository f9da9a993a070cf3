"""Random traffic against the mock device: every request ends, gets its own tokens, and leaves nothing behind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from jaxllm.core_types import CacheSpec, EngineRequest
from jaxllm.engine import scheduler as scheduler_module
from tests.engine.harness import Collected, check_books, check_empty, make_core, make_request
from tests.engine.mock_runner import VOCAB, alone, cache_spec, next_token


@dataclass
class _Traffic:
    """A random world: pools, limits, and requests with what they must give."""

    seed: int
    random: random.Random = field(init=False)
    # Time as the scheduler sees it: steps.
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def spec(self) -> CacheSpec:
        page_size = self.random.choice([2, 4, 8])
        shape = self.random.choice(["full", "mixed", "window", "three", "state", "hybrid", "all"])
        full_pages = self.random.randint(80 // page_size, 240 // page_size)

        def window() -> tuple[int, int]:
            width = self.random.choice([1, 3, 5, 8, 16])
            least = -(-(width - 1) // page_size) + 2
            return width, self.random.randint(least, least + 120 // page_size)

        if shape == "full":
            return cache_spec(page_size, full_pages)
        states = (page_size * self.random.randint(1, 4), self.random.randint(3, 30))
        if shape == "window":
            return cache_spec(page_size, 0, [window()], full=False)
        if shape == "state":
            return cache_spec(page_size, 0, full=False, states=states)
        if shape == "hybrid":
            return cache_spec(page_size, full_pages, states=states)
        if shape == "all":
            return cache_spec(page_size, full_pages, [window()], states=states)
        return cache_spec(page_size, full_pages, [window() for _ in range(1 if shape == "mixed" else 2)])

    def prompt(self) -> list[int]:
        shared = [[7] * 40, list(range(40)), [7] * 12 + list(range(28))]
        head = self.random.choice(shared)[: self.random.randint(0, 40)]
        return head + [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 12))]

    def request(self, index: int) -> EngineRequest:
        extra: dict = {}
        if self.random.random() < 0.2:
            extra["cache_salt"] = self.random.choice("ab")
        if self.random.random() < 0.15:
            extra["prompt_logprobs"] = 1
        if self.random.random() < 0.2:
            extra["stop_token_ids"] = [self.random.randrange(VOCAB) for _ in range(4)]
            extra["min_tokens"] = self.random.randint(0, 3)
        if self.random.random() < 0.15:
            extra["bad_words_token_ids"] = [[self.random.randrange(VOCAB), self.random.randrange(VOCAB)] for _ in range(300)]
        if self.random.random() < 0.15:
            extra["deadline"] = self.clock + self.random.randint(1, 150)
        return make_request(
            f"r{index}",
            self.prompt(),
            max_tokens=self.random.choice([3, 10, 30, None]),
            priority=self.random.randint(0, 2),
            arrival_time=float(index),
            **extra,
        )


def expected(request: EngineRequest, max_len: int) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that runs alone."""
    params, tokens, outputs = request.sampling_params, list(request.prompt_token_ids), []
    limit = max_len if params.max_tokens is None else min(max_len, len(tokens) + params.max_tokens)
    while True:
        banned = {word[-1] for word in params.bad_words_token_ids or () if len(word) > 1 and outputs[-(len(word) - 1) :] == word[:-1]}
        token = next_token(tokens)
        while token in banned:
            token = (token + 1) % VOCAB
        tokens.append(token)
        outputs.append(token)
        if token in params.stop_token_ids and len(outputs) >= params.min_tokens:
            return outputs, "stop"
        if len(tokens) >= limit:
            return outputs, "length"


@pytest.mark.parametrize("seed", range(120))
def test_random_traffic_gives_every_request_its_own_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _Traffic(seed)
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(time=lambda: world.clock))
    rng = world.random
    core = make_core(
        world.spec(),
        overlapped=rng.random() < 0.6,
        max_num_seqs=rng.randint(1, 9),
        max_num_batched_tokens=rng.choice([1, 5, 16, 64, 512]),
        max_model_len=rng.choice([60, 80]),
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.8,
    )
    scheduler, collected, requests, aborted = core.scheduler, Collected(), {}, set()

    for _ in range(20_000):
        while len(requests) < 30 and rng.random() < 0.25:
            request = world.request(len(requests))
            requests[request.request_id] = request
            core.add_request(request)
        if rng.random() < 0.03 and requests:
            victim = rng.choice(list(requests))
            aborted.add(victim)
            core.abort_requests([victim, "unknown"])
            assert victim not in scheduler._requests
            check_books(scheduler)
        if rng.random() < 0.01:
            core.reset_prefix_cache()
            check_books(scheduler)
        world.clock += 1
        collected.take(core.step().outputs)
        check_books(scheduler)
        if len(requests) == 30 and not core.has_work:
            break
    else:
        raise AssertionError("requests that never end")

    check_empty(scheduler)
    assert core.executor.max_tokens_per_step <= scheduler.max_num_batched_tokens
    for request_id, request in requests.items():
        tokens, reason = expected(request, scheduler.max_len) if len(request.prompt_token_ids) < scheduler.max_len else ([], "error")
        if collected.reason(request_id) == "abort":
            assert request_id in aborted or request.deadline is not None
            assert collected.tokens[request_id] == tokens[: len(collected.tokens[request_id])]
            continue
        assert (collected.tokens[request_id], collected.reason(request_id)) == (tokens, reason), request_id
        if request.sampling_params.prompt_logprobs is not None and reason != "error":
            prompt = request.prompt_token_ids
            assert collected.prompt_logprobs[request_id] == [-float(next_token(prompt[:end])) for end in range(1, len(prompt))]


PROMPTS = [[3 * i % VOCAB for i in range(length)] for length in (1, 7, 40, 61, 64, 90)] + [[5] * 50 + [i] for i in range(6)]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("num_pages", [18, 400])
@pytest.mark.parametrize("states", [None, (32, 4), (16, 60)])
def test_greedy_tokens_do_not_depend_on_how_they_are_computed(
    overlapped: bool, enable_prefix_caching: bool, chunk: int, num_pages: int, states: tuple[int, int] | None
) -> None:
    """18 pages of 8 hold one long request and a bit, and 4 state pages even less: everybody is preempted some time."""
    core = make_core(
        cache_spec(8, num_pages, [(20, num_pages)], states=states),
        overlapped=overlapped,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=chunk,
        max_model_len=140,
        max_num_seqs=6,
    )
    collected, preemptions = Collected(), 0
    for i, prompt in enumerate(PROMPTS):
        core.add_request(make_request(str(i), prompt, max_tokens=40))
    while core.has_work:
        outputs = core.step()
        preemptions += outputs.stats.num_preemptions
        collected.take(outputs.outputs)
    assert collected.tokens == {str(i): alone(prompt, 40) for i, prompt in enumerate(PROMPTS)}
    assert (preemptions > 0) == (num_pages == 18 or (states is not None and states[1] == 4))
    check_empty(core.scheduler)
