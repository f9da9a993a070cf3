"""Requests with a grammar inside the engine: masks, ends, waiting for compilation, preemption, others beside them."""

from __future__ import annotations

import itertools
import random
import re
from concurrent.futures import Future

import numpy as np
import pytest

from jaxllm.core_types import ErrorKind
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.structured_output import GrammarMasks, OutputGrammar, mask_of
from jaxllm.sampling_params import ReasoningMarks, SamplingParams, StructuredOutputsParams
from jaxllm.text.grammar import output_grammar
from jaxllm.text.grammar_compiler import GrammarCompiler
from tests.engine.harness import Collected, check_empty, make_request, run
from tests.engine.mock_runner import MockRunner, alone, cache_spec, next_token
from tests.tiny_tokenizers import byte_ids, byte_level

EOS = 0
TOKENIZER = byte_level()
VOCAB = TOKENIZER.vocab_size
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
# Something to choose from among few allowed ids.
CHAOS = lambda prefix: next_token(prefix, 1009)


def core_of(*, overlapped: bool = True, model=CHAOS, compiler=COMPILER, pages: int = 65, **options) -> EngineCore:
    spec = cache_spec(num_pages=pages)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 200, **options}
    scheduler = Scheduler(spec, grammars=GrammarMasks(compiler, VOCAB), **settings)
    return EngineCore(scheduler, MockRunner(spec, model=model), async_scheduling=overlapped)


def constrained(request_id: str, *, prompt=(5, 6, 7), constraint: dict, **fields):
    grammar = output_grammar(StructuredOutputsParams(**constraint))
    fields.setdefault("max_tokens", 60)
    return make_request(request_id, list(prompt), output_grammar=grammar, eos_token_ids=[EOS], **fields)


def text_of(collected: Collected, request_id: str) -> str:
    return TOKENIZER.decode(collected.tokens[request_id], skip_special_tokens=True)


overlapped = pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "plain"])


@overlapped
def test_every_output_fits_its_grammar_and_plain_requests_get_what_they_get_alone(overlapped):
    core = core_of(overlapped=overlapped, model=next_token)
    pattern = "[a-f]{3}(-[0-9]{2,5})*;"
    requests = []
    for i in range(12):
        requests.append(make_request(f"plain{i}", [1, 2, i], max_tokens=20))
        requests.append(constrained(f"regex{i}", prompt=[3, i, i], constraint={"regex": pattern}))
        requests.append(constrained(f"choice{i}", prompt=[4, i], constraint={"choice": ["yes", "no", "maybe"]}))
    got = run(core, requests)
    for i in range(12):
        assert got.tokens[f"plain{i}"] == alone([1, 2, i], 20)
        assert re.fullmatch(pattern, text_of(got, f"regex{i}")) or got.reason(f"regex{i}") == "length"
        assert text_of(got, f"choice{i}") in ("yes", "no", "maybe")
        assert got.reason(f"choice{i}") == "stop"
        assert got.last[f"choice{i}"].grammar_complete
    assert len({text_of(got, f"regex{i}") for i in range(12)}) > 1
    check_empty(core.scheduler)


@overlapped
def test_preemption_keeps_the_place_in_the_grammar(overlapped):
    requests = lambda: [constrained(f"r{i}", prompt=[i] * 9, constraint={"regex": "([0-9]{3},){12}"}) for i in range(6)]
    roomy = run(core_of(overlapped=overlapped), requests())
    core = core_of(overlapped=overlapped, pages=25)
    tight = run(core, requests())
    assert tight.tokens == roomy.tokens
    assert all(re.fullmatch("([0-9]{3},){12}", text_of(tight, f"r{i}")) for i in range(6))
    assert core.executor.num_steps > 49
    check_empty(core.scheduler)


def test_a_complete_grammar_ends_the_request_without_a_further_token():
    got = run(core_of(), [constrained("r", constraint={"regex": "abc"})])
    assert got.tokens["r"] == byte_ids("abc")
    assert got.reason("r") == "stop"


def test_end_of_sequence_ends_it_where_the_grammar_may_end():
    got = run(core_of(model=lambda prefix: 0), [constrained("r", constraint={"regex": "a*b*"})])
    assert got.tokens["r"] == [EOS]
    assert got.reason("r") == "stop"
    assert not got.last["r"].grammar_complete


def test_with_ignore_eos_it_goes_on_as_long_as_the_grammar_does():
    got = run(core_of(model=lambda prefix: 0), [
        constrained("open", constraint={"regex": "a*"}, ignore_eos=True, max_tokens=9),
        constrained("closed", constraint={"regex": "a{3,5}"}, ignore_eos=True),
    ])  # fmt: skip
    assert (text_of(got, "open"), got.reason("open")) == ("a" * 9, "length")
    assert (text_of(got, "closed"), got.reason("closed")) == ("a" * 5, "stop")


def test_min_tokens_puts_the_end_off_and_the_grammar_wins():
    got = run(core_of(model=lambda prefix: 0), [
        constrained("long", constraint={"regex": "a*"}, min_tokens=6),
        constrained("short", constraint={"choice": ["ab"]}, min_tokens=6),
        constrained("stop", constraint={"regex": "(a|b)*"}, min_tokens=4, stop_token_ids=byte_ids("a")),
    ])  # fmt: skip
    assert got.tokens["long"] == [*byte_ids("aaaaaa"), EOS]
    assert (text_of(got, "short"), got.reason("short")) == ("ab", "stop")
    assert text_of(got, "stop").startswith("bbbb")


def test_allowed_token_ids_narrow_the_grammar_down():
    core = core_of()
    got = run(core, [
        constrained("both", constraint={"regex": "[a-z]{20}"}, allowed_token_ids=byte_ids("xyz")),
        constrained("dead", constraint={"regex": "[a-z]{3}1"}, allowed_token_ids=byte_ids("xyz")),
        constrained("done", constraint={"regex": "x*"}, allowed_token_ids=byte_ids("yz")),
        make_request("plain", [1], max_tokens=5),
    ])  # fmt: skip
    assert re.fullmatch("[xyz]{20}", text_of(got, "both"))
    assert got.reason("dead") == "error"
    assert got.last["dead"].error_kind == "invalid"
    assert "output grammar" in (got.last["dead"].error or "")
    assert len(got.tokens["dead"]) == 3
    assert (got.tokens["done"], got.reason("done")) == ([], "stop")
    assert len(got.tokens["plain"]) == 5
    check_empty(core.scheduler)


class SlowCompiler:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.futures: list[tuple[Future, str]] = []

    def submit(self, grammar: str, eos) -> Future:
        self.futures.append((Future(), grammar))
        return self.futures[-1][0]

    def finish(self) -> None:
        for future, grammar in self.futures:
            future.set_result(COMPILER.submit(grammar, [EOS]).result())


@overlapped
def test_a_request_whose_grammar_is_not_compiled_keeps_nobody_waiting(overlapped):
    compiler = SlowCompiler()
    core = core_of(overlapped=overlapped, compiler=compiler)
    collected = Collected()
    for request in [constrained(f"slow{i}", constraint={"choice": ["yes"]}) for i in range(6)] + [
        make_request("plain", [1, 2], max_tokens=5)
    ]:
        core.add_request(request)
    core.add_request(constrained("gone", constraint={"choice": ["yes"]}))
    for _ in range(20):
        collected.take(core.step().outputs)
    assert collected.reason("plain") == "length"
    assert set(collected.last) == {"plain"}
    core.abort_requests(["gone"])
    compiler.finish()
    run(core, collected=collected)
    assert all(text_of(collected, f"slow{i}") == "yes" for i in range(6))
    assert collected.reason("gone") == "abort"
    check_empty(core.scheduler)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_only():
    core = core_of()
    broken = make_request("broken", [1], output_grammar="start: (", eos_token_ids=[EOS])
    got = run(core, [broken, constrained("good", constraint={"choice": ["yes"]})])
    assert (got.reason("broken"), got.last["broken"].error_kind) == ("error", "invalid")
    assert text_of(got, "good") == "yes"
    check_empty(core.scheduler)


def test_an_engine_without_a_tokenizer_refuses():
    spec = cache_spec()
    core = EngineCore(Scheduler(spec, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=50), MockRunner(spec))
    assert run(core, [constrained("r", constraint={"choice": ["a"]})]).reason("r") == "error"


def test_failed_steps_do_not_move_the_grammar():
    spec = cache_spec(num_pages=65)
    broken = itertools.count()

    def fail(step) -> None:
        if next(broken) % 5 == 3:
            raise RuntimeError("device trouble")

    scheduler = Scheduler(spec, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200, grammars=GrammarMasks(COMPILER, VOCAB))
    core = EngineCore(scheduler, MockRunner(spec, model=CHAOS, fail_compute=fail))
    got = run(core, [constrained(f"r{i}", prompt=[i, 1], constraint={"regex": "([0-9]{3},){4}"}) for i in range(4)])
    ended = [text_of(got, f"r{i}") for i in range(4) if got.reason(f"r{i}") == "stop"]
    assert all(re.fullmatch("([0-9]{3},){4}", text) for text in ended)
    check_empty(core.scheduler)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed):
    rng = random.Random(seed)
    kinds = [
        {"regex": "[a-c]{1,8}(;[0-9]+)*!"},
        {"choice": ["a", "ab", "abc"]},
        {"json": {"type": "array", "items": {"type": "boolean"}}},
        None,
    ]
    core = core_of(overlapped=bool(seed % 2), pages=33)
    requests = []
    for i in range(30):
        constraint, prompt = rng.choice(kinds), [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
        fields = {"max_tokens": rng.randrange(1, 40), "min_tokens": 0, "ignore_eos": rng.random() < 0.2}
        if constraint is None:
            requests.append(make_request(f"r{i}", prompt, **fields))
        else:
            requests.append(constrained(f"r{i}", prompt=prompt, constraint=constraint, **fields))
    collected = Collected()
    for request in requests:
        core.add_request(request)
        if rng.random() < 0.5:
            collected.take(core.step().outputs)
        if rng.random() < 0.1:
            core.abort_requests([rng.choice(requests).request_id])
    got = run(core, collected=collected)
    assert {request.request_id for request in requests} == set(got.last)
    assert {str(output.finish_reason) for output in got.last.values()} <= {"stop", "length", "abort"}
    check_empty(core.scheduler)


@overlapped
def test_reasoning_that_has_to_end_does_and_what_follows_is_free(overlapped):
    closing = byte_ids("</t>")
    marks = ReasoningMarks(starts=["<t>"], ends=["</t>"], is_open=True, closing="</t>", closing_ids=closing)
    core = core_of(overlapped=overlapped, model=next_token)
    limited = make_request("r", [5, 6, 7], max_tokens=20, thinking_token_budget=3, reasoning_marks=marks)
    tokens = run(core, [limited, make_request("plain", [1], max_tokens=20)]).tokens["r"]
    assert tokens[3 : 3 + len(closing)] == closing
    free = [i for i in range(20) if not 3 <= i < 3 + len(closing)]
    assert [tokens[i] for i in free] == [next_token([5, 6, 7, *tokens[:i]]) for i in free]
    check_empty(core.scheduler)


def test_a_grammar_does_not_keep_the_next_step_from_being_enqueued():
    core = core_of()
    core.add_request(constrained("r", constraint={"regex": "[0-9]{12}"}))
    core.scheduler.await_grammars(10)
    collected, calls = Collected(), 0
    while core.has_work:
        collected.take(core.step().outputs)
        calls += 1
    assert re.fullmatch("[0-9]{12}", text_of(collected, "r"))
    # One call enqueues the first step, and one reads what was enqueued behind the last token.
    assert calls <= 12 + 2


@overlapped
def test_a_grammar_that_grows_beyond_the_limits_is_the_fault_of_its_request(overlapped):
    core = core_of(overlapped=overlapped, model=next_token)
    got = run(core, [constrained("r", constraint={"regex": "(a?){5000}a{5000}"}), make_request("plain", [1, 2], max_tokens=20)])
    assert got.last["r"].error_kind is ErrorKind.INVALID
    assert "too many expressions" in got.last["r"].error
    assert "<" not in got.last["r"].error
    assert got.tokens["plain"] == alone([1, 2], 20)
    check_empty(core.scheduler)


@overlapped
def test_a_token_that_the_grammar_has_no_place_for_is_the_fault_of_the_engine(overlapped, monkeypatch):
    everything = lambda self, grammars: [np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32) for _ in grammars]
    monkeypatch.setattr(GrammarMasks, "masks", everything)
    core = core_of(overlapped=overlapped, model=lambda prefix: byte_ids("x")[0])
    got = run(core, [constrained("wrong", constraint={"regex": "[a-f]*"}), constrained("right", constraint={"regex": "x{4}"})])
    assert got.last["wrong"].error_kind is ErrorKind.FAILED
    assert (text_of(got, "right"), got.reason("right")) == ("xxxx", "stop")
    check_empty(core.scheduler)


def test_masks_hold_one_bit_per_id():
    grammar = OutputGrammar(COMPILER.submit(output_grammar(StructuredOutputsParams(choice=["a", "b"])), [EOS]), SamplingParams())
    (mask,) = GrammarMasks(COMPILER, VOCAB).masks([grammar])
    assert mask.dtype == np.uint32
    assert mask.tolist() == mask_of(byte_ids("ab"), -(-VOCAB // 32)).tolist()
