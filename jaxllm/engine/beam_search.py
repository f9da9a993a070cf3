"""Beam search over one prompt: which continuations live, which are done. Asks for log-probabilities only, so it runs on any engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jaxllm.outputs import BeamSearchSequence, Logprob
from jaxllm.sampling_params import BeamSearchParams


class BeamSearch:
    """The beams of one prompt.

    `live` are the sequences to expand, best first; each needs the log-probabilities of its `2 * beam_width` best next tokens, so that
    enough candidates are left where up to `beam_width` of them end a sequence.
    """

    # What an encoder reads, where there is one.
    encoder_token_ids: Sequence[int] | None = None

    def __init__(self, prompt_token_ids: Sequence[int], params: BeamSearchParams, *, eos_token_ids: Collection[int], max_model_len: int):
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._max_len = min(max_model_len, len(prompt_token_ids) + params.max_tokens)
        self._done: list[BeamSearchSequence] = []
        self.live = [BeamSearchSequence(tokens=list(prompt_token_ids), cum_logprob=0.0)]

    def prompt_of(self, beam: BeamSearchSequence) -> Sequence[int] | Mapping[str, Sequence[int]]:
        """What the engine is to go on from, for the next tokens of a live beam."""
        if self.encoder_token_ids is None:
            return beam.tokens
        return {"encoder_prompt": self.encoder_token_ids, "decoder_prompt": beam.tokens}

    def expand(self, candidates: Sequence[Mapping[int, Logprob]]) -> None:
        """Go one token further. `candidates[i]` are the best next tokens of `live[i]`."""
        width, eos = self._params.beam_width, self._eos
        grown: list[tuple[float, int, int]] = []
        for index, (beam, tokens) in enumerate(zip(self.live, candidates, strict=True)):
            for token, entry in tokens.items():
                total = beam.cum_logprob + entry.logprob
                if token not in eos:
                    grown.append((total, index, token))
                    continue
                kept = [*beam.tokens, token] if self._params.include_stop_str_in_output else beam.tokens
                logprobs = [*beam.logprobs, dict(tokens)]
                self._done.append(BeamSearchSequence(tokens=kept, cum_logprob=total, finish_reason="stop", logprobs=logprobs))
        # All of them have one length, so the sum of log-probabilities orders them as the score does.
        grown.sort(key=lambda item: -item[0])
        self.live = [
            BeamSearchSequence(
                tokens=[*self.live[index].tokens, token],
                cum_logprob=total,
                logprobs=[*self.live[index].logprobs, dict(candidates[index])],
            )
            for total, index, token in grown[:width]
        ]
        self._done = sorted(self._done, key=self._score, reverse=True)[:width]
        if self.live and len(self.live[0].tokens) >= self._max_len:
            for beam in self.live:
                beam.finish_reason = "length"
            self._done, self.live = self._done + self.live, []
        elif len(self._done) == width and all(self._best_possible(beam) <= self._score(self._done[-1]) for beam in self.live):
            self.live = []

    def result(self) -> list[BeamSearchSequence]:
        """The best sequences, best first. Once no beam is live."""
        return sorted(self._done, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        """cum_logprob / length ** length_penalty. The length counts prompt and output, without the end-of-sequence token (vLLM's rule)."""
        length = len(beam.tokens) - (beam.finish_reason == "stop" and self._params.include_stop_str_in_output)
        return beam.cum_logprob / length**self._params.length_penalty

    def _best_possible(self, beam: BeamSearchSequence) -> float:
        """No continuation of `beam` scores higher: log-probabilities only lower the sum, and the length is between now and the limit."""
        penalty = self._params.length_penalty
        return beam.cum_logprob / (self._max_len if penalty > 0 else len(beam.tokens)) ** penalty
