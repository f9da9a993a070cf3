from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.core_types import EngineInfo, EngineOutput, ErrorKind, FinishReason, TokenLogprobs
from jaxllm.engine.generation_config import GenerationDefaults
from jaxllm.engine.input_processor import InputProcessor
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.tokenizer import Tokenizer, TokenizerParts

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


def byte_tokenizer() -> Tokenizer:
    """One id per byte, and <end> behind them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(TokenizerParts(backend, {"eos_token": "<end>"}))


TOKENIZER = byte_tokenizer()
END = 256
INFO = EngineInfo(
    max_model_len=4096,
    vocab_size=300,
    page_size=16,
    num_pages=10,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    dtype="float32",
    platform="cpu",
)
INPUT = InputProcessor(INFO, TOKENIZER, GenerationDefaults({}, [END]), max_logprobs=-1)


def ids(text):
    return TOKENIZER.encode(text)


def start(**params):
    processor = OutputProcessor(TOKENIZER)
    state = processor.add(INPUT.process("r", "hello", SamplingParams(max_tokens=None, **params), arrival_time=1.0))
    return processor, state


def feed(processor, token_ids, request_id="r", **fields):
    return processor.process([EngineOutput(request_id=request_id, new_token_ids=token_ids, **fields)], now=5.0)


def taken(processor, state, steps, request_id="r"):
    """Feed each step's tokens and take after each; the last step ends the request by length."""
    outputs = []
    for index, step in enumerate(steps):
        feed(processor, step, request_id, finish_reason=FinishReason.LENGTH if index == len(steps) - 1 else None)
        outputs.append(state.take())
    return outputs


def test_delta_outputs_join_to_the_whole_and_cumulative_ones_grow():
    text = "héllo 你好 😀!"
    steps = [[token] for token in ids(text)]
    deltas = taken(*start(output_kind=DELTA), steps)
    assert "".join(output.outputs[0].text for output in deltas) == text
    assert [token for output in deltas for token in output.outputs[0].token_ids] == ids(text)
    assert not any("�" in output.outputs[0].text for output in deltas)
    grown = taken(*start(output_kind=CUMULATIVE), steps)
    assert [len(output.outputs[0].token_ids) for output in grown] == list(range(1, len(steps) + 1))
    assert grown[-1].outputs[0].text == text
    assert text.startswith(grown[3].outputs[0].text)
    assert [output.finished for output in grown] == [False] * (len(steps) - 1) + [True]
    assert grown[-1].outputs[0].finish_reason == "length"


def test_final_only_gives_one_output():
    processor, state = start(output_kind=FINAL_ONLY)
    outputs = taken(processor, state, [[token] for token in ids("abc")])
    assert outputs[:2] == [None, None]
    assert outputs[2].outputs[0].text == "abc"
    assert len(processor) == 0


def test_a_slow_reader_gets_one_output_for_many_steps():
    processor, state = start(output_kind=DELTA, logprobs=0)
    for token in ids("abcdef"):
        feed(processor, [token], logprobs=[TokenLogprobs([token], [-1.0], 1)])
    output = state.take()
    assert output.outputs[0].text == "abcdef"
    assert len(output.outputs[0].logprobs) == 6
    assert output.outputs[0].cumulative_logprob == pytest.approx(-6.0)
    assert state.take() is None


def test_a_taken_output_does_not_change_later():
    processor, state = start(output_kind=CUMULATIVE, logprobs=0)
    feed(processor, ids("a"), logprobs=[TokenLogprobs(ids("a"), [-1.0], 1)])
    first = state.take().outputs[0]
    feed(processor, ids("b"), logprobs=[TokenLogprobs(ids("b"), [-1.0], 1)])
    assert (first.token_ids, len(first.logprobs), first.text) == (ids("a"), 1, "a")


def test_stop_string_ends_the_sequence_and_tells_the_engine():
    processor, state = start(output_kind=DELTA, stop=["DEFGH"], logprobs=0)
    texts, aborts = [], []
    for part in ["ABC", "DE", "F", "GHI"]:
        entries = [TokenLogprobs([token], [-1.0], 1) for token in ids(part)]
        progress = feed(processor, ids(part), logprobs=entries)
        output = state.take()
        texts.append(output.outputs[0].text)
        aborts.append(progress.aborts)
    final = output.outputs[0]
    assert texts == ["ABC", "", "", ""]
    assert (final.finish_reason, final.stop_reason, output.finished) == ("stop", "DEFGH", True)
    assert final.token_ids == ids("GH")
    assert len(final.logprobs) == 2
    assert aborts == [{}, {}, {}, {"r": FinishReason.STOP}]
    assert feed(processor, ids("JK")).updated == []


def test_held_back_text_is_released_when_the_match_fails_or_the_sequence_ends():
    processor, state = start(output_kind=DELTA, stop=["DEFGH"])
    texts = [output.outputs[0].text for output in taken(processor, state, [ids("ABDE"), ids("x"), ids("DEF")])]
    assert texts == ["AB", "DEx", "DEF"]


def test_no_abort_where_the_engine_ended_the_sequence_itself():
    processor, _ = start(stop=["b"])
    assert feed(processor, ids("ab"), finish_reason=FinishReason.LENGTH).aborts == {}


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_stop_token_is_output_but_not_text(include, text):
    processor, state = start(stop_token_ids=ids("c"), include_stop_str_in_output=include)
    feed(processor, ids("abc"), finish_reason=FinishReason.STOP, stop_reason=ids("c")[0])
    output = state.take().outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (text, ids("abc"), "stop", ids("c")[0])


def test_end_of_sequence_has_no_stop_reason():
    processor, state = start()
    feed(processor, [*ids("ab"), END], finish_reason=FinishReason.STOP)
    output = state.take().outputs[0]
    assert (output.text, output.token_ids[-1], output.stop_reason) == ("ab", END, None)


def test_logprobs_hold_the_sampled_token_first_and_ranks():
    a, b, c = ids("abc")
    processor, state = start(logprobs=2)
    feed(processor, [c], logprobs=[TokenLogprobs([c, a, b], [-3.0, -0.5, -1.0], 7)])
    feed(processor, [a], logprobs=[TokenLogprobs([a, a, b], [-0.5, -0.5, -1.0], 1)])
    output = state.take().outputs[0]
    assert list(output.logprobs[0].items()) == [(c, Logprob(-3.0, 7, "c")), (a, Logprob(-0.5, 1, "a")), (b, Logprob(-1.0, 2, "b"))]
    assert list(output.logprobs[1].items()) == [(a, Logprob(-0.5, 1, "a")), (b, Logprob(-1.0, 2, "b"))]
    assert output.cumulative_logprob == pytest.approx(-3.5)


def test_named_logprob_ids_have_no_rank_and_ids_beyond_the_tokenizer_no_text():
    a, b = ids("ab")
    processor, state = start(logprob_token_ids=[b, 299])
    feed(processor, [a], logprobs=[TokenLogprobs([a, b, 299], [-0.5, -1.0, -9.0], 1)])
    assert state.take().outputs[0].logprobs == [{a: Logprob(-0.5, 1, "a"), b: Logprob(-1.0, None, "b"), 299: Logprob(-9.0, None, "")}]


def test_no_logprobs_unless_asked():
    processor, state = start()
    feed(processor, ids("a"), logprobs=[TokenLogprobs(ids("a"), [-0.5], 1)])
    output = state.take().outputs[0]
    assert output.logprobs is None
    assert output.cumulative_logprob is None


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_prompt_logprobs_start_with_none(kind):
    processor, state = start(output_kind=kind, prompt_logprobs=0)
    entries = [TokenLogprobs([token], [-1.0], 2) for token in ids("ello")]
    feed(processor, ids("a"), prompt_logprobs=entries, num_cached_tokens=3)
    output = state.take()
    assert output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[token] for token in ids("ello")]
    assert output.num_cached_tokens == 3
    feed(processor, ids("b"))
    assert (state.take().prompt_logprobs is None) == (kind == DELTA)


def test_without_detokenizing_there_are_ids_and_no_text():
    processor, state = start(detokenize=False, logprobs=0)
    feed(processor, ids("ab"), logprobs=[TokenLogprobs([token], [-1.0], 1) for token in ids("ab")])
    output = state.take().outputs[0]
    assert (output.text, output.token_ids) == ("", ids("ab"))
    assert output.logprobs[0] == {ids("a")[0]: Logprob(-1.0, 1, None)}


def test_sequences_of_one_request_are_joined_in_order():
    processor, state = start(n=3)
    feed(processor, ids("b"), "1_r")
    output = state.take()
    assert [(sequence.index, sequence.text) for sequence in output.outputs] == [(0, ""), (1, "b"), (2, "")]
    feed(processor, ids("c"), "2_r", finish_reason=FinishReason.LENGTH)
    feed(processor, ids("a"), "0_r", finish_reason=FinishReason.STOP)
    assert not state.take().finished
    feed(processor, ids("B"), "1_r", finish_reason=FinishReason.LENGTH)
    output = state.take()
    assert output.finished
    assert [(sequence.text, sequence.finish_reason) for sequence in output.outputs] == [("", "stop"), ("bB", "length"), ("c", "length")]


def test_deltas_hold_only_the_sequences_that_moved():
    processor, state = start(n=3, output_kind=DELTA)
    outputs = [EngineOutput(request_id=f"{index}_r", new_token_ids=ids(text)) for index, text in [(2, "z"), (0, "x")]]
    progress = processor.process(outputs)
    assert progress.updated == [state]
    assert [(sequence.index, sequence.text) for sequence in state.take().outputs] == [(0, "x"), (2, "z")]


def test_abort_ends_what_is_open_and_keeps_what_came():
    processor, state = start(n=2, stop=["bcd"])
    feed(processor, ids("ab"), "0_r")
    feed(processor, ids("q"), "1_r", finish_reason=FinishReason.LENGTH)
    assert processor.abort("r") == ["0_r"]
    output = state.take()
    assert output.finished
    assert [(sequence.text, sequence.finish_reason) for sequence in output.outputs] == [("ab", "abort"), ("q", "length")]
    assert processor.abort("r") == []
    assert len(processor) == 0


def test_times_are_recorded():
    processor, state = start()
    processor.process([EngineOutput(request_id="r", new_token_ids=ids("a"), first_scheduled_time=2.0)], now=3.0)
    processor.process([EngineOutput(request_id="r", new_token_ids=ids("b"), finish_reason=FinishReason.LENGTH)], now=4.0)
    metrics = state.take().metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time) == (1.0, 2.0, 3.0)
    assert (metrics.last_token_time, metrics.finished_time) == (4.0, 4.0)


def test_a_failed_request_says_why():
    processor, state = start()
    feed(processor, [], finish_reason=FinishReason.ERROR, error="the logits are not finite", error_kind=ErrorKind.FAILED)
    assert state.failure is not None
    assert "not finite" in state.failure.error
    assert state.take().outputs[0].finish_reason == "error"


def test_a_request_whose_output_cannot_be_processed_fails_alone(caplog):
    processor, bad = start(logprobs=0)
    good = processor.add(INPUT.process("s", "hello", SamplingParams(max_tokens=None)))
    empty = TokenLogprobs([], [], 1)
    outputs = [
        EngineOutput(request_id="r", new_token_ids=ids("a"), logprobs=[empty]),
        EngineOutput(request_id="s", new_token_ids=ids("a")),
    ]
    progress = processor.process(outputs)
    assert progress.aborts == {"r": FinishReason.ERROR}
    assert bad.take().outputs[0].finish_reason == "error"
    assert "IndexError" in bad.failure.error
    assert good.take().outputs[0].text == "a"


def test_open_ids_are_known_with_their_sequences():
    processor, _ = start(n=2)
    assert processor.knows(INPUT.process("r", "x", SamplingParams()))
    assert processor.knows(INPUT.process("0_r", "x", SamplingParams()))
    assert not processor.knows(INPUT.process("2_r", "x", SamplingParams()))
