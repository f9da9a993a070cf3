"""One request inside the engine: its tokens, its progress and its pages."""

from __future__ import annotations

import enum
import hashlib

from jaxllm.core_types import EngineRequest, TokenLogprobs
from jaxllm.engine.structured_output import OutputGrammar
from jaxllm.engine.thinking import ThinkingBudget


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    # Was in a step that failed as a whole: is tried again alone.
    SUSPECT = 2
    FINISHED = 3


class Request:
    """Scheduler state of one sequence.

    Progress is one pair of numbers: `num_computed` (positions whose K/V exist or are being written by a step in flight) chases
    `num_tokens`. A token that a step in flight is sampling counts in `num_in_flight` and not yet in `token_ids`.

    `page_ids[g]` is the page table of cache group g (0 where a window has moved past), `num_sent[g]` how much of it the runner knows,
    `capacity` the number of positions that all tables cover.
    """

    def __init__(
        self,
        request: EngineRequest,
        *,
        sequence: int,
        by_priority: bool,
        max_len: int,
        num_groups: int,
        seed: int,
        grammar: OutputGrammar | None = None,
        thinking: ThinkingBudget | None = None,
    ):
        params = request.sampling_params
        self.request_id = request.request_id
        self.params = params
        self.pooling = request.pooling_params
        self.second_start = request.second_start
        self.encoder_token_ids = request.encoder_token_ids
        self.arrival_time = request.arrival_time
        self.deadline = request.deadline
        self.cache_salt = request.cache_salt
        # Order of service; the largest key among the running is the first to be preempted.
        self.key = (request.priority, request.arrival_time, sequence) if by_priority else (0, 0.0, sequence)

        self.token_ids = list(request.prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.max_total = max_len if params.max_tokens is None else min(max_len, self.prompt_len + params.max_tokens)
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(params.eos_token_ids)
        self.stop_ids = frozenset(params.stop_token_ids or ())
        self.grammar = grammar
        self.thinking = thinking
        self.bad_word_sequences = [word for word in params.bad_words_token_ids or () if len(word) > 1]
        self.seed = params.seed if params.seed is not None else _derived_seed(seed, request.request_id)
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []

        self.status = Status.WAITING
        self.slot = -1
        self.is_new_row = False
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_steps_in_flight = 0
        # Since the last output.
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.first_scheduled_time: float | None = None
        self.sent_first_output = False
        self.sent_bans: list[int] = []

        self.page_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_page = [0] * num_groups
        self.num_sent = [0] * num_groups
        self.capacity = 0
        self.page_hashes: list[bytes] = []
        self.cache_epoch = -1
        self.num_registered = 0
        self.num_pending = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def needs_last_token(self) -> bool:
        """Whether what may be sampled next depends on the token sampled last, so that the request waits for one in flight."""
        return bool(self.bad_word_sequences)

    @property
    def awaits_mask(self) -> bool:
        """Whether the next token may only be sampled once it is known which ones fit."""
        return self.grammar is not None or (self.thinking is not None and self.thinking.is_due(self.num_in_flight))

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def banned_token_ids(self) -> list[int]:
        """The ids that would complete a bad word of several tokens after the outputs so far, ascending."""
        outputs = self.token_ids[self.prompt_len :]
        return sorted({word[-1] for word in self.bad_word_sequences if outputs[-(len(word) - 1) :] == word[:-1]})


def _derived_seed(engine_seed: int, request_id: str) -> int:
    """A seed for a request that brings none: the same in every run with the same engine seed and request id."""
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
