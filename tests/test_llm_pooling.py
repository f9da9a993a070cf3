"""Pooling models through `LLM` and the whole engine, on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, PoolingParams, SamplingParams
from jaxllm.errors import ConfigError, InvalidRequestError
from tests.golden.pooling_cases import CASES, random_tensor
from tests.pooling_models import CLS, SEP, WORDS, ids_of, write_pooling_model

pytestmark = pytest.mark.heavy

RAW = PoolingParams(use_activation=False)


def start(model: Path, **options: Any) -> LLM:
    return LLM(str(model), **{"enforce_eager": True, "max_num_seqs": 8, **options})


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pooling_model(tmp_path_factory.mktemp("bert"), CASES["bert"].config)


@pytest.fixture(scope="module")
def llm(bert: Path):
    with start(bert, max_num_batched_tokens=160, hf_overrides={"matryoshka_dimensions": [8, 16]}) as llm:
        yield llm


def vectors(outputs: list[Any]) -> np.ndarray:
    return np.array([output.outputs.embedding for output in outputs])


def test_embeddings_keep_their_order_and_do_not_depend_on_the_batch(llm: LLM) -> None:
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, length)) for length in generator.integers(1, 150, 40)]
    together = llm.embed(texts, use_tqdm=False)

    assert [output.prompt for output in together] == texts
    assert np.allclose(np.linalg.norm(vectors(together), axis=1), 1)
    for i in (0, 17, 39):
        assert np.abs(vectors(llm.embed(texts[i], use_tqdm=False))[0] - vectors(together)[i]).max() < 1e-5


def test_text_and_token_ids_of_it_are_the_same_prompt(llm: LLM) -> None:
    ids = [CLS, *ids_of("the cat sat"), SEP]
    text, given, as_dict = llm.embed(["the cat sat", ids, {"prompt_token_ids": ids}], use_tqdm=False)
    assert text.prompt_token_ids == given.prompt_token_ids == ids
    assert np.abs(np.ptp(vectors([text, given, as_dict]), axis=0)).max() < 1e-6


def test_truncation_keeps_special_tokens_of_texts(llm: LLM) -> None:
    text = "the quick brown fox"
    right, left, whole = (
        llm.encode(text, PoolingParams(truncate_prompt_tokens=keep, truncation_side=side), use_tqdm=False)[0].prompt_token_ids
        for keep, side in ((4, "right"), (4, "left"), (-1, "right"))
    )
    assert right == [CLS, *ids_of("the quick"), SEP]
    assert left == [CLS, *ids_of("brown fox"), SEP]
    assert whole == [CLS, *ids_of(text), SEP]
    with pytest.raises(InvalidRequestError, match="161 tokens, but this model takes at most 160"):
        llm.embed([[5] * 161], use_tqdm=False)


def test_dimensions_are_those_of_the_model(llm: LLM) -> None:
    (short,), (whole,) = llm.embed("a cat", pooling_params=PoolingParams(dimensions=8), use_tqdm=False), llm.embed("a cat", use_tqdm=False)
    expected = np.array(whole.outputs.embedding[:8])
    assert np.allclose(short.outputs.embedding, expected / np.linalg.norm(expected), atol=1e-6)
    with pytest.raises(InvalidRequestError, match=r"dimensions=9 is not one of this model's: \[8, 16\]"):
        llm.embed("a cat", pooling_params=PoolingParams(dimensions=9), use_tqdm=False)


def test_score_of_an_embedding_model_is_the_cosine(llm: LLM) -> None:
    texts = ["the cat sat", "a dog ran", "sun"]
    one, *others = vectors(llm.embed(texts, use_tqdm=False))
    scores = llm.score(texts[0], texts[1:], use_tqdm=False)
    assert np.allclose([score.outputs.score for score in scores], [one @ other for other in others], atol=1e-6)
    with pytest.raises(InvalidRequestError, match="data_1 has 2 texts and data_2 has 3"):
        llm.score(texts[:2], texts, use_tqdm=False)


def test_other_work_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="generates nothing"):
        llm.generate("the cat", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="this model does not classify; its tasks are embed, token_embed"):
        llm.classify("the cat", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="use classify"):
        PoolingParams(task="score")


def test_a_prompt_must_fit_a_step(bert: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=64 is less than max_model_len=100"):
        start(bert, max_num_batched_tokens=64, max_model_len=100)
    with start(bert, max_num_batched_tokens=64) as llm:
        assert llm.info.max_model_len == 64


def test_sentence_transformers_modules_say_what_becomes_of_hidden_states(bert: Path, tmp_path: Path) -> None:
    for file in bert.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in zip(kinds, paths, strict=True)]
    dense = {"in_features": 64, "out_features": 12, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 50, "do_lower_case": true}')
    for path, settings in (("1_Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}), ("2_Dense", dense)):
        (tmp_path / path).mkdir()
        (tmp_path / path / "config.json").write_text(json.dumps(settings))
    weights = {"linear.weight": random_tensor("linear.weight", (12, 64)), "linear.bias": random_tensor("linear.bias", (12,))}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")

    with start(bert) as plain:
        hidden = plain.encode("the cat sat", RAW, pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    with start(tmp_path) as llm:
        assert llm.info.max_model_len == 50
        (found,) = vectors(llm.embed("The CAT sat", use_tqdm=False))

    pooled = np.concatenate([hidden[0], hidden.mean(0)])
    expected = np.tanh(weights["linear.weight"] @ pooled + weights["linear.bias"])
    assert np.allclose(found, expected / np.linalg.norm(expected), atol=1e-5)


def test_a_cross_encoder_reads_pairs_with_their_token_types(tmp_path: Path) -> None:
    with start(write_pooling_model(tmp_path, CASES["bert_cross_encoder"].config)) as llm:
        pair, swapped = llm.score(["a cat", "good film"], ["good film", "a cat"], use_tqdm=False)
        ids = [CLS, *ids_of("a cat"), SEP, *ids_of("good film"), SEP]
        assert pair.prompt_token_ids == ids
        (as_one_text,) = llm.classify([ids], use_tqdm=False)
        logits = llm.score("a cat", "good film", pooling_params=RAW, use_tqdm=False)[0].outputs.score
        assert pair.outputs.score == pytest.approx(1 / (1 + np.exp(-logits)), abs=1e-6)
        assert len({round(score, 4) for score in (pair.outputs.score, swapped.outputs.score, as_one_text.outputs.probs[0])}) == 3
        (cut,) = llm.score("a cat", "the quick brown fox sat", truncate_prompt_tokens=8, use_tqdm=False)
        assert cut.prompt_token_ids == [CLS, *ids_of("a cat"), SEP, *ids_of("the quick brown"), SEP]


def test_a_reranker_made_of_two_tokens_scores_as_they_are_weighed_in_generation(tmp_path: Path) -> None:
    config = CASES["qwen3"].config | {"tie_word_embeddings": False}
    override = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    override |= {"is_original_qwen3_reranker": True}
    write_pooling_model(tmp_path, config, specials=False)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": random_tensor("lm_head.weight", (99, 32))}, tmp_path / "model.safetensors", {"format": "pt"})
    no, yes = ids_of("no yes")

    with start(tmp_path, hf_overrides=override) as llm:
        found = [score.outputs.score for score in llm.score("the cat sat", ["good film", "moon"], use_tqdm=False)]
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    with start(tmp_path, hf_overrides=override, chat_template=template) as llm:
        (templated,) = llm.score("the cat", "moon", use_tqdm=False)
        assert templated.prompt_token_ids == [1, *ids_of("the cat"), 1, *ids_of("moon")]
    with start(tmp_path) as llm:
        params = SamplingParams(max_tokens=1, logprob_token_ids=[no, yes])
        outputs = llm.generate([[*ids_of("the cat"), 1, *ids_of("film")], [*ids_of("the cat"), 1]], params, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="this model generates text"):
            llm.embed("the cat", use_tqdm=False)
    each = [output.outputs[0].logprobs[0] for output in outputs]
    expected = [np.exp(one[yes].logprob) / (np.exp(one[yes].logprob) + np.exp(one[no].logprob)) for one in each]
    assert np.allclose(found, expected, atol=1e-5)


def test_a_reward_model_scores_every_token(tmp_path: Path) -> None:
    config = CASES["qwen2_tokens"].config | {"architectures": ["Qwen2ForRewardModel"], "id2label": None, "label2id": None}
    write_pooling_model(tmp_path, config, specials=False)
    weights = load_file(tmp_path / "model.safetensors")
    with start(tmp_path) as llm:
        (found,) = llm.reward("the cat sat", use_tqdm=False)
        (last,) = llm.encode("the cat sat", PoolingParams(use_activation=False, step_tag_id=ids_of("sat")[0]), use_tqdm=False)
    with start(tmp_path, convert="embed") as llm:
        hidden = llm.encode("the cat sat", RAW, pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    inner = np.maximum(hidden @ weights["score.0.weight"].T + weights["score.0.bias"], 0)
    logits = inner @ weights["score.2.weight"].T + weights["score.2.bias"]
    assert found.outputs.data.shape == (3, 1)
    assert np.allclose(last.outputs.data, logits[2:], atol=1e-4)


def test_classes_have_names_and_probabilities(tmp_path: Path) -> None:
    with start(write_pooling_model(tmp_path, CASES["distilbert_classify"].config)) as llm:
        (output,) = llm.classify("a good film", use_tqdm=False)
        assert llm.info.pooling.labels == ["sad", "neutral", "glad"]
    assert output.outputs.num_classes == 3
    assert sum(output.outputs.probs) == pytest.approx(1)
