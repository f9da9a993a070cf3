"""The words that engine, runner and front share. No jax here, and nothing that acts.

Dims used everywhere: T tokens of a step, R rows (requests) of a step, S slots, H query heads, K KV heads, G = H / K, D head dim,
P pages per row, V vocabulary, M model width, F MLP width.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams

# --------------------------------------------------------------------------- front <-> engine (crosses a process: msgspec)


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(enum.StrEnum):
    """Whose fault an `EngineOutput.error` is; `engine.client.error_from` turns it back into an exception type."""

    INVALID = "invalid"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    FAILED = "failed"


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate (a request with n > 1 becomes n of these) or to pool. Validated by the front, checked again here."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    # Seconds since the epoch; a request not finished by then ends with finish reason "abort".
    deadline: float | None = None
    # Set where the answer is a vector; sampling parameters mean nothing then.
    pooling_params: PoolingParams | None = None
    # Of a pair: the index of the second text's first token.
    second_start: int | None = None
    # The input of a model's encoder; the prompt is then its decoder's.
    encoder_token_ids: list[int] = []


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: entry 0 is the sampled (or prompt) token, then the top tokens, best first.

    `rank` is that of entry 0 (1 = most likely).
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class Pooled(msgspec.Struct, array_like=True):
    """The answer to a pooling request: float32 values, [W], or [tokens, W] for a task of tokens."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> Pooled:
        return cls(np.ascontiguousarray(array, np.float32).tobytes(), array.shape)

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, np.float32).reshape(self.shape)


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int] = []
    pooled: Pooled | None = None
    logprobs: list[TokenLogprobs] | None = None
    # Positions 1.. of the prompt, delivered once, before or with the first token.
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    # The stop token id that ended the request; None on end-of-sequence.
    stop_reason: int | None = None
    # Whether the request ended because its grammar allows nothing more: its last token is then text, not a mark of the end.
    grammar_complete: bool = False
    # Why the request failed, where finish_reason is "error" or a deadline aborted it.
    error: str | None = None
    error_kind: ErrorKind | None = None
    # Prompt tokens found in the prefix cache, sent with the first output.
    num_cached_tokens: int | None = None
    first_scheduled_time: float | None = None
    # Since the request's last output.
    num_preemptions: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True):
    """A snapshot after a step; counters are deltas since the last snapshot."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    # Tokens computed, and tokens that the padded shapes had room for: their ratio is the padding waste.
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    # Host seconds: building the schedule and the batch, and committing results.
    host_seconds: float = 0.0


class EngineOutputs(msgspec.Struct, kw_only=True):
    """Everything that one engine step sends to the front."""

    outputs: list[EngineOutput] = []
    stats: SchedulerStats | None = None


class PoolingInfo(msgspec.Struct, kw_only=True):
    """What a pooling model answers with."""

    # The first one is what a request gets that names none.
    tasks: list[str]
    # Of an answer.
    width: int
    # Names of the classes, in order; empty for embeddings.
    labels: list[str] = []
    # Whether a pair is one input with a separator of the tokenizer between its texts.
    pairs: bool = False
    # Dimensions that an embedding may be cut to; True: any number.
    matryoshka: bool | list[int] = False
    # Whether texts are lowercased before they are tokenised.
    lower_case: bool = False

    def check_scores(self) -> None:
        """Raises InvalidRequestError where what the model says of a pair is no score."""
        if "classify" not in self.tasks or self.width != 1:
            raise InvalidRequestError(f"this model gives {self.width} classes; scores need a cross-encoder with one, or an embedding model")


class EncoderInfo(msgspec.Struct, kw_only=True):
    """What the front must know of an encoder: its longest input, and what every sequence of the decoder begins with."""

    max_len: int
    decoder_start: list[int]


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the front must know of a started engine."""

    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    platform: str
    # Set where the model answers with vectors and does not generate.
    pooling: PoolingInfo | None = None
    # Set where prompts are the input of an encoder.
    encoder: EncoderInfo | None = None
    # Phase name -> seconds, in order.
    startup_seconds: dict[str, float] = {}

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt that can be served."""
        return self.max_model_len - 1 if self.encoder is None else self.encoder.max_len

    def room(self, prompt_len: int) -> int:
        """Tokens that can be generated after a prompt of so many."""
        return self.max_model_len - (prompt_len if self.encoder is None else len(self.encoder.decoder_start))

    def max_kept(self, max_tokens: int | None) -> int:
        """Tokens of the longest prompt after which there is room for so many."""
        return max(1, self.max_model_len - max(1, max_tokens or 1)) if self.encoder is None else self.encoder.max_len


# --------------------------------------------------------------------------- scheduler <-> runner


class CacheKind(enum.StrEnum):
    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    RECURRENT = "recurrent"
    ENCODER = "encoder"


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same positions and therefore share one page table.

    `window` is the number of positions a query sees, itself included (None for full attention). `num_pages` counts page 0, the sink.

    Where the kind is `recurrent`, a page holds the state of a sequence instead of its positions: page k of a table is that after the
    positions computed so far of [k * interval, (k + 1) * interval). Steps end at the latest where an interval does, so that each table
    entry ends as a snapshot that others may start from. A step at position p reads the page of p - 1 (none: zeros) and writes that of p.

    Where it is `encoder`, positions are those of the input of an encoder, at most `window`; a request's pages are written once, before its
    first step. There is one such group at most, the last one.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    num_pages: int
    window: int | None = None
    interval: int | None = None


@dataclass(frozen=True)
class CacheSpec:
    """The paged KV cache: its page size in positions and its groups, each with a page pool of its own."""

    page_size: int
    groups: tuple[CacheGroup, ...]

    def positions_per_page(self, group: CacheGroup) -> int:
        """Positions that an entry of the group's page tables stands for, a multiple of the page size."""
        return group.interval or self.page_size

    def table_width(self, group: CacheGroup, max_model_len: int) -> int:
        """Entries that a page table of the group may have."""
        longest = group.window if group.kind is CacheKind.ENCODER and group.window is not None else max_model_len
        return -(-longest // self.positions_per_page(group))

    @property
    def encoder_group(self) -> CacheGroup | None:
        """The group of encoder inputs, if there is one."""
        last = self.groups[-1] if self.groups else None
        return last if last is not None and last.kind is CacheKind.ENCODER else None


@dataclass(slots=True)
class NewRow:
    """A request that takes a slot (first admission, or again after preemption).

    `token_ids` holds prompt and outputs so far; `page_ids[g]` the pages of cache group g in order of position (0 where a window
    group holds none). `encoder_token_ids` is the encoder's input, whose keys and values are to be written before the step.
    """

    slot: int
    request_id: str
    prompt_len: int
    token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    page_ids: list[list[int]]
    pooling_params: PoolingParams | None = None
    second_start: int | None = None
    encoder_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ScheduledRow:
    """The share of one request in one step: tokens [start, start + num_tokens) of its sequence.

    `samples` says whether the last of them predicts a new token (a prompt chunk that is not the last does not). `new_page_ids[g]` are
    pages to append to the slot's table of group g (empty for a row that is also in `new_rows`). The runner knows the tokens that came
    with the slot's `NewRow`; every later one was sampled by the step before and is still on the device. The token of a row that `waits`
    is sampled by `StepHandle.sample`, once it is known what may come.
    """

    slot: int
    start: int
    num_tokens: int
    samples: bool
    new_page_ids: list[list[int]]
    waits: bool = False


@dataclass(slots=True)
class SchedulerOutput:
    """One step, decided by the scheduler. Small and deterministic, so that it can be broadcast to other hosts."""

    step_id: int
    rows: list[ScheduledRow]
    new_rows: list[NewRow] = field(default_factory=list)
    # Slots whose host-side bans must be refreshed before this step (multi-token bad words): slot -> banned token ids.
    banned_token_ids: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class RowResult:
    """What a step gave for one row, in the order of `SchedulerOutput.rows`.

    `token_id` is None where the row did not sample. `prompt_logprobs` covers the positions start+1 .. start+num_tokens of the prompt
    that this chunk predicts. `pooled` is the answer of a pooling model. `error` is set where activations were not finite or no
    token was left to sample; the request must end.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.FAILED
    pooled: Pooled | None = None


@dataclass(slots=True)
class StepResult:
    rows: list[RowResult]
    num_padded_tokens: int


class StepHandle(Protocol):
    """A step that was enqueued on the device."""

    def sample(self, masks: dict[int, np.ndarray]) -> None:
        """Sample rows that wait, by slot: each mask holds the ids that may come, [ceil(V / 32)] uint32, bit by bit, lowest first. The host
        finds them while the device computes the step. Called at most once, before `result`.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the device and read the step's results. Called once."""
        ...


class Executor(Protocol):
    """What EngineCore needs of the device side; `runner.ModelRunner` is the real one, tests use a mock of ten lines."""

    cache_spec: CacheSpec

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Build the batch and enqueue the step; returns before the device is done."""
        ...

    def start_profile(self, directory: str) -> bool:
        """Record a trace into `directory` until `stop_profile`; False where one is being recorded already."""
        ...

    def stop_profile(self) -> bool:
        """Write the trace; False where none is being recorded."""
        ...

    def shutdown(self) -> None: ...
