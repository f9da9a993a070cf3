"""Models with an encoder through `LLM` and the server: what is a prompt, where the decoder begins, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.errors import InvalidRequestError
from jaxllm.launch import _encoder_info
from jaxllm.model_files import ModelFiles
from jaxllm.models.build import define_model
from jaxllm.runner.memory import Limits
from tests.dense import run_dense
from tests.golden.cases import CASES
from tests.golden.checking import load
from tests.server.served import Served

pytestmark = pytest.mark.heavy

CASE = CASES["t5_gated"]
TEXT = "translate: the house is small"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def write_unigram(folder: Path, size: int) -> None:
    """A tokenizer built like T5's: a unigram model, and an end behind every text."""
    letters = [f"{space}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz:" for space in ("", "▁")]
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁house", *letters]
    pieces += [f"▁w{number}" for number in range(size - len(pieces))]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - index / 100) for index, piece in enumerate(pieces)], unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = CASE.write(tmp_path_factory.mktemp("t5"))
    write_unigram(folder, CASE.config["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(str(folder), enforce_eager=True, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64) as llm:
        yield llm


def test_an_encoder_reads_the_prompt_in_every_form_and_its_decoder_starts_as_the_config_says(llm: LLM, folder: Path) -> None:
    ids = llm._front.tokenizer.encode(TEXT)
    forms: list[Any] = [TEXT, ids, {"prompt": TEXT}, {"encoder_prompt": TEXT}, {"encoder_prompt": {"prompt_token_ids": ids}}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)

    assert ids[-1] == 1
    assert [output.encoder_prompt_token_ids for output in outputs] == [ids] * 5
    assert [output.encoder_prompt for output in outputs] == [TEXT, None, TEXT, TEXT, None]
    assert [(output.prompt, output.prompt_token_ids) for output in outputs] == [(None, [0])] * 5
    tokens = outputs[0].outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in outputs] == [tokens] * 5
    assert outputs[0].outputs[0].text == llm._front.tokenizer.decode(tokens, skip_special_tokens=True)
    model, params = load(folder, CASE)
    assert run_dense(model, params, [0, *tokens[:-1]], ids).argmax(-1).tolist() == tokens


def test_a_decoder_goes_on_from_its_own_prompt(llm: LLM) -> None:
    whole = llm.generate(TEXT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    halves = {"encoder_prompt": TEXT, "decoder_prompt": {"prompt_token_ids": whole[:4]}}
    (output,) = llm.generate(halves, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [0, *whole[:4]]
    assert output.outputs[0].token_ids[:8] == whole[4:]
    (named,) = llm.generate({"encoder_prompt": TEXT, "decoder_prompt": "the house"}, GREEDY, use_tqdm=False)
    assert (named.prompt, named.prompt_token_ids) == ("the house", [0, 4, 5])


def test_the_length_of_an_input_does_not_count_in_the_context(llm: LLM) -> None:
    (output,) = llm.generate([[7] * 64], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=63), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 63


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([7] * 65, GREEDY, "the encoder takes 64 in one step"),
        ({"decoder_prompt": TEXT}, GREEDY, "holds encoder_prompt"),
        ({"encoder_prompt": TEXT, "cache_salt": "x"}, GREEDY, "nothing else"),
        ({"encoder_prompt": TEXT, "decoder_prompt": [7] * 64}, GREEDY, "send at most 63"),
        (TEXT, SamplingParams(prompt_logprobs=1), "leave prompt_logprobs out"),
    ],
)
def test_what_cannot_be_served_is_refused(llm: LLM, prompt: Any, params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([prompt], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [({}, [2]), ({"forced_bos_token_id": 0}, [2, 0]), ({"decoder_start_token_id": 3, "forced_bos_token_id": None}, [3])],
)
def test_a_decoder_starts_as_the_generation_config_says_or_else_the_config(generation_config: dict[str, Any], expected: list[int]) -> None:
    config = CASES["bart"].config
    files = ModelFiles(kind="hf", path=Path(), config=config, generation_config=generation_config, name="bart", tokenizer_path=Path())
    info = _encoder_info(files, define_model(config, dtype="float32"), Limits(4, 100, 8))
    assert (info.max_len, info.decoder_start) == (100, expected)


def test_beams_go_on_behind_their_input(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    greedy = llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0]
    (single,) = llm.beam_search(TEXT, BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
    (found,) = llm.beam_search(TEXT, BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    assert single.sequences[0].tokens == [0, *greedy.token_ids]
    assert found.sequences[0].cum_logprob >= greedy.cumulative_logprob - 1e-4
    assert len({tuple(beam.tokens) for beam in found.sequences}) == 3


def test_completions_are_served(llm: LLM, folder: Path) -> None:
    ids = llm._front.tokenizer.encode(TEXT)
    whole = llm.generate(TEXT, GREEDY, use_tqdm=False)[0].outputs[0]
    served = Served(folder, "--enforce-eager", "--max-num-batched-tokens", "64", max_model_len=32)
    try:
        asked = {"model": "scripted", "temperature": 0, "ignore_eos": True}
        found = served.post("/v1/completions", prompt=[TEXT, TEXT], max_tokens=12, **asked).json()
        assert [choice["text"] for choice in found["choices"]] == [whole.text] * 2
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (2 * len(ids), 24)
        # The prompt is not part of the decoder's context of 32.
        found = served.post("/v1/completions", prompt=[7] * 60, max_tokens=31, **asked).json()
        assert found["choices"][0]["finish_reason"] == "length"
        refused = served.post("/v1/completions", prompt=[7] * 65, max_tokens=4, **asked)
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert "the encoder takes 64" in refused.text
        refused = served.post("/v1/completions", prompt=TEXT, max_tokens=32, **asked)
        assert "ask for at most 31" in refused.text
    finally:
        served.kill()
