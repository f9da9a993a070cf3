"""Encoders with decoders in one engine, in float32: cross attention from pages, batches of many lengths, against transformers."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from jaxllm.core_types import CacheKind
from tests.golden.case import Golden, load_golden
from tests.golden.cases import CASES
from tests.runner.harness import Engine, Generated, greedy

pytestmark = pytest.mark.heavy

MAX_DELTA = 2e-4
ENGINE_CASES = ["t5", "t5_gated", "bart"]
LENGTHS = (1, 9, 40, 64)


def start(name: str, folder: Path, **options) -> tuple[Engine, Golden]:
    return Engine(CASES[name].write(folder), **{"max_num_batched_tokens": 288, **options}), load_golden(name)


def inputs(golden: Golden) -> list[list[int]]:
    """The golden input among others: ends of it, so that beginnings differ."""
    return [*(golden.encoder[-length:].tolist() for length in LENGTHS), golden.encoder.tolist()]


def generate(engine: Engine, golden: Golden, encoder_inputs: list[list[int]], prompt: list[int] | None = None, **fields) -> list[Generated]:
    params = greedy(len(golden.tokens), **fields)
    ids = [engine.add(golden.prompt if prompt is None else prompt, params, encoder_token_ids=given) for given in encoder_inputs]
    results = engine.run()
    return [results[i] for i in ids]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory):
    """By name: an engine, and what it gave for `inputs` together."""

    @functools.cache
    def run(name: str) -> tuple[Engine, list[Generated]]:
        engine, golden = start(name, tmp_path_factory.mktemp(name))
        return engine, generate(engine, golden, inputs(golden), logprobs=5)

    return run


@pytest.mark.parametrize("name", ENGINE_CASES)
def test_a_mixed_batch_gives_what_transformers_gives(name: str, mixed) -> None:
    engine, results = mixed(name)
    golden, result = load_golden(name), results[-1]
    assert result.tokens == golden.tokens.tolist()
    for step, want_ids, want in zip(result.logprobs, golden.top_ids, golden.top_logprobs, strict=True):
        got = dict(zip(step.token_ids, step.logprobs, strict=True))
        assert max(abs(got[int(i)] - p) for i, p in zip(want_ids, want, strict=True)) < MAX_DELTA
    assert len({tuple(result.tokens) for result in results}) > 1
    assert engine.core.scheduler.kv.usage == 0


def test_what_a_request_gets_does_not_depend_on_the_others(mixed) -> None:
    engine, together = mixed("t5_gated")
    golden = load_golden("t5_gated")
    for given, result in zip(inputs(golden)[:2], together, strict=False):
        assert generate(engine, golden, [given])[0].tokens == result.tokens


def test_two_devices_give_the_tokens_of_one(mixed, tmp_path: Path) -> None:
    engine, golden = start("t5_gated", tmp_path, tensor_parallel_size=2)
    assert [r.tokens for r in generate(engine, golden, inputs(golden))] == [r.tokens for r in mixed("t5_gated")[1]]


def test_a_preempted_request_is_encoded_again_and_needs_no_prefix_cache(tmp_path: Path) -> None:
    # For both inputs there is room, for both outputs there is not.
    engine, golden = start("bart", tmp_path, num_pages={CacheKind.FULL: 5, CacheKind.ENCODER: 21}, enable_prefix_caching=False)
    results = generate(engine, golden, [golden.encoder.tolist()] * 2)

    assert max(result.num_preemptions for result in results) > 0
    assert [result.tokens for result in results] == [golden.tokens.tolist()] * 2
    assert engine.core.scheduler.kv.usage == 0


def test_a_prompt_of_the_decoder_goes_on_and_is_cached_with_its_input_only(mixed) -> None:
    engine, golden = mixed("bart")[0], load_golden("bart")
    prompt, rest = golden.sequence[:20].tolist(), golden.tokens[19:].tolist()
    given, other = golden.encoder.tolist(), golden.encoder[1:].tolist()

    engine.core.reset_prefix_cache()  # another test may have computed just that
    first = generate(engine, golden, [given, other], prompt)
    again = generate(engine, golden, [given, other], prompt)

    assert first[0].tokens[: len(rest)] == rest
    assert first[0].tokens != first[1].tokens
    assert [result.tokens for result in again] == [result.tokens for result in first]
    assert [result.num_cached_tokens for result in [*first, *again]] == [0, 0, 16, 16]


def test_an_input_that_is_not_finite_ends_its_request_and_no_other(mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = mixed("t5_gated")
    golden, params = load_golden("t5_gated"), list(engine.runner._params)
    place = engine.runner.program.model_def.names.index("embed.weight")
    bad = next(token for token in range(5, 128) if token not in {*golden.encoder.tolist(), *golden.sequence.tolist()})
    params[place] = params[place].at[bad].set(np.inf)
    monkeypatch.setattr(engine.runner, "_params", params)

    broken, *_, fine = generate(engine, golden, [[bad, 7, 8], *inputs(golden)])

    assert "not finite" in broken.error
    assert fine.tokens == golden.tokens.tolist()
