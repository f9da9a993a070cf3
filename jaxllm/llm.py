"""The batch API: `LLM`, with vLLM's names and signatures, over an engine in this process."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo
from jaxllm.engine.beam_search import BeamSearch
from jaxllm.engine.client import InprocClient, error_from
from jaxllm.engine.front import Front, load_text_side
from jaxllm.engine.input_processor import ProcessedRequest, Prompt
from jaxllm.engine.interrupts import interrupts_between_steps
from jaxllm.engine.metrics import EngineMetrics
from jaxllm.engine.output_processor import PoolingState, RequestState
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError
from jaxllm.launch import start_engine
from jaxllm.llm_pooling import PoolingMethods, Progress, one_each, progress_bar, prompt_list, refuse
from jaxllm.outputs import BeamSearchOutput, Logprob, Metric, PoolingRequestOutput, RequestOutput
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

ChatMessages = Sequence[Mapping[str, Any]]


class LLM(PoolingMethods):
    """A model to generate with, or a pooling model to embed, classify and score with, in this process.

    Args:
        model: Hugging Face directory, hub id or .gguf file; None is the embedded default model.
        options: every option of `EngineConfig`, by vLLM's names.

    Close it with `close()`, `with LLM(...) as llm:`, or by letting go of it.

    Raises:
        ConfigError: an option that is unknown, not offered, or out of its range.
        ModelLoadError: the model cannot be loaded.
        OutOfMemoryPlanError: the model does not fit the device's memory as configured.
    """

    def __init__(self, model: str | None = None, **options: Any):
        from jaxllm.weights.download import resolve_model

        self._client: InprocClient | None = None
        self.config = config = EngineConfig.from_options(model=model, **options)
        if config.scheduler.max_num_queued_tokens is not None:
            raise ConfigError("max_num_queued_tokens is for servers: here prompts wait until the engine takes them")
        files = resolve_model(config.model)
        tokenizer, defaults = load_text_side(config.model, files)
        core, info = start_engine(config, files, tokenizer)
        self.info: EngineInfo = info
        self._client = InprocClient(core, info)
        self._front = Front(config, tokenizer, defaults, info, EngineMetrics(info, model_name=files.name))
        self._ids = map(str, itertools.count())
        self._lock = threading.RLock()
        atexit.register(_close_if_alive, weakref.ref(self))

    # ------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        priority: Sequence[int] | None = None,
        **not_offered: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt. Outputs are in the order of the prompts.

        Args:
            prompts: one prompt or several; text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}. A model with an encoder reads
                them there, and takes {"encoder_prompt": ..., "decoder_prompt": ...} as well.
            sampling_params: for all, or one for each prompt; None takes the model's defaults.
            use_tqdm: show a progress bar, or a callable that makes one.
            priority: one for each prompt, lower first; needs scheduling_policy="priority".

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be served; nothing was generated then.
        """
        refuse(**not_offered)
        return self._generate(prompt_list(prompts), sampling_params, use_tqdm, priority, add_special_tokens=True)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **not_offered: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template (or `chat_template`). Outputs keep their order.

        Args:
            messages: a list of {"role", "content"} messages, or a list of such lists.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: go on with the last message instead; needs add_generation_prompt=False.
            tools: JSON descriptions that the template shows to the model.
            chat_template_kwargs: further variables for the template.

        Raises:
            InvalidRequestError: the template refuses the messages, or a parameter cannot be served.
        """
        refuse(lora_request=lora_request, **not_offered)
        prompts = [
            self._front.tokenizer.apply_chat_template(
                conversation,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                content_format=chat_template_content_format,
                variables=chat_template_kwargs,
            )
            for conversation in _conversations(messages)
        ]
        return self._generate(prompts, sampling_params, use_tqdm, priority, add_special_tokens=False)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` most likely continuations of each prompt, best first.

        A sequence scores its cumulative log-probability over length ** length_penalty. `concurrency_limit` bounds the prompts searched
        at once. Equal beginnings of beams are computed once, through the prefix cache.

        Raises:
            InvalidRequestError: a prompt that cannot be served, or a beam so wide that 2 * beam_width exceeds max_logprobs.
        """
        refuse(lora_request=lora_request)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequestError(f"concurrency_limit must be at least 1, got {concurrency_limit}", param="concurrency_limit")
        single = SamplingParams(
            temperature=params.temperature, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False, ignore_eos=True
        )
        searches = []
        for prompt in prompt_list(prompts):
            request = self._front.input.process(next(self._ids), prompt, single)
            searches.append(
                BeamSearch(
                    request.prompt_token_ids,
                    params,
                    eos_token_ids=self._front.defaults.eos_token_ids,
                    max_model_len=self.info.max_model_len,
                )
            )
            searches[-1].encoder_token_ids = request.encoder_prompt_token_ids
        group = concurrency_limit or max(1, len(searches))
        with progress_bar(use_tqdm, len(searches), "Searched prompts") as bar:
            for start in range(0, len(searches), group):
                self._search(searches[start : start + group], single, bar)
        return [self._decoded(search) for search in searches]

    def _search(self, searches: list[BeamSearch], single: SamplingParams, bar: tqdm) -> None:
        """Run searches together to their end, all live beams of all of them in one batch a token."""
        live = searches
        while live:
            prompts: list[Prompt] = [search.prompt_of(beam) for search in live for beam in search.live]
            outputs = iter(self._generate(prompts, single, False, None, add_special_tokens=False))
            for search in live:
                search.expand([self._candidates(next(outputs)) for _ in search.live])
            still_live = [search for search in live if search.live]
            bar.update(len(live) - len(still_live))
            live = still_live

    def _candidates(self, output: RequestOutput) -> dict[int, Logprob]:
        """The log-probabilities of one step, without those of ids that have no text (a head padded past the tokenizer)."""
        logprobs = output.outputs[0].logprobs
        if not logprobs:
            raise RequestFailedError(f"a beam ended with {output.outputs[0].finish_reason!r} and no log-probabilities")
        return {token: entry for token, entry in logprobs[0].items() if token < self._front.tokenizer.vocab_size}

    def _decoded(self, search: BeamSearch) -> BeamSearchOutput:
        sequences = search.result()
        for sequence in sequences:
            sequence.text = self._front.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        return BeamSearchOutput(sequences)

    # ------------------------------------------------------------------------------------------------- the loop

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: Progress,
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        each = one_each("sampling_params", self.get_default_sampling_params() if params is None else params, prompts)
        priorities = one_each("priority", 0 if priority is None else priority, prompts)
        requests = [
            self._front.input.process(next(self._ids), prompt, _final_only(one), priority=level, add_special_tokens=add_special_tokens)
            for prompt, one, level in zip(prompts, each, priorities, strict=True)
        ]
        return self._run_all(requests, use_tqdm)

    def _run(self, requests: list[ProcessedRequest], bar: tqdm, raise_interrupt: Callable[[], None]) -> list[Any]:
        """Step the engine until every request is finished; whatever interrupts it leaves nothing running."""
        client, front = self._open_client(), self._front
        waiting, done = deque(requests), dict[str, Any]()
        num_prompt_tokens = num_output_tokens = 0
        try:
            while len(done) < len(requests):
                raise_interrupt()
                self._admit(waiting)
                progress = front.take(client.step())
                if progress.aborts:
                    client.abort_requests(list(progress.aborts))
                for state in progress.updated:
                    if not state.finished:
                        continue
                    done[state.request_id] = _final_output(state)
                    num_prompt_tokens += len(state.prompt_token_ids)
                    num_output_tokens += state.num_generated_tokens
                    bar.set_postfix_str(_speed(num_prompt_tokens, num_output_tokens, bar.format_dict["elapsed"]), refresh=False)
                    bar.update()
            raise_interrupt()
        finally:
            for request in requests:
                if request.request_id not in done:
                    client.abort_requests(front.abort(request.request_id))
            self._settle()
        return [done[request.request_id] for request in requests]

    def _run_all(self, requests: list[ProcessedRequest], use_tqdm: Progress) -> list[Any]:
        bar = progress_bar(use_tqdm, len(requests), "Processed prompts", postfix=_speed(0, 0, 0.0))
        with self._lock, bar, interrupts_between_steps() as raise_interrupt:
            return self._run(requests, bar, raise_interrupt)

    def _admit(self, waiting: deque[ProcessedRequest]) -> None:
        """Hand over as many requests as the engine's queue takes; the others wait here."""
        client, output = self._open_client(), self._front.output
        bound = self.config.scheduler.max_num_queued_reqs
        while waiting:
            room = None if bound is None else bound + self.info.max_num_seqs - output.num_open_sequences
            if room is not None and len(waiting[0].children) > room and len(output):
                return
            request = waiting.popleft()
            self._front.open(request)
            client.add_requests(request.children)

    def _settle(self) -> None:
        """Let steps in flight end, so that no page stays in use by requests that are over."""
        client = self._open_client()
        while client.has_work:
            self._front.take(client.step())

    # ------------------------------------------------------------------------------------------------- the rest

    def get_tokenizer(self) -> Any:
        """The tokenizer, as a transformers PreTrainedTokenizerFast."""
        return self._front.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no parameters are given: the model's generation config under its override."""
        return SamplingParams(**self._front.defaults.sampling)

    def get_metrics(self) -> list[Metric]:
        """Every metric of this engine as it stands, by vLLM's names with the prefix `jaxllm:`."""
        return self._front.metrics.snapshot()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests go on and nothing of theirs is found later. True: it always can."""
        return self._open_client().reset_prefix_cache()

    def close(self) -> None:
        """Free the device's memory. Called again, does nothing."""
        client, self._client = self._client, None
        if client is not None:
            client.shutdown()

    def _open_client(self) -> InprocClient:
        if self._client is None:
            raise EngineDeadError("this LLM is closed")
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_client", None) is not None:
            self.close()


def _close_if_alive(reference: weakref.ref[LLM]) -> None:
    llm = reference()
    if llm is not None:
        llm.close()


def _conversations(messages: Any) -> Sequence[ChatMessages]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(
            f"messages must be a list of messages, or a list of such lists; got {type(messages).__name__}", param="messages"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else messages


def _final_only(params: Any) -> Any:
    """`params` asking for the finished output only; anything else is refused where it is checked."""
    return params.clone(output_kind=RequestOutputKind.FINAL_ONLY) if isinstance(params, SamplingParams) else params


def _final_output(state: RequestState) -> RequestOutput | PoolingRequestOutput:
    """Raises what a pooling request failed with; of others the output says that they failed."""
    if state.failure is not None:
        logger.error("request %s failed: %s", state.request_id, state.failure.error)
        if isinstance(state, PoolingState) and (error := error_from(state.failure)) is not None:
            raise error
    output = state.take()
    assert output is not None
    return output


def _speed(num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> str:
    seconds = seconds or 1.0
    return f"est. speed input: {num_prompt_tokens / seconds:.2f} toks/s, output: {num_output_tokens / seconds:.2f} toks/s"
