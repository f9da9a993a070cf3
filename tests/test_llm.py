from __future__ import annotations

import gc
import json
import os
import signal
import weakref

import pytest

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, NotSupportedError
from jaxllm.sampling_params import RequestOutputKind
from tests.checkpoints import FIRST_BYTE_ID, tiny_config, write_tokenizer
from tests.scripted_engine import scripted_engine, spells


def byte_ids(text):
    return [FIRST_BYTE_ID + byte for byte in text.encode()]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """LLMs over a scripted engine; `say` is the text that every request gets."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(vocab_size=512)))
    write_tokenizer(tmp_path)
    made = []

    def make(say="hello ", generation_config=None, **options):
        said = spells(say) if isinstance(say, str) else say
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        monkeypatch.setattr("jaxllm.llm.start_engine", lambda config, files, num_sampled_ids: scripted_engine(config, said))
        made.append(LLM(str(tmp_path), **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def idle(llm):
    core = llm._client._core
    return not core.has_work and core.scheduler.stats().kv_cache_usage == 0.0


def test_generate_takes_every_form_of_prompts_and_keeps_their_order(make):
    llm = make(say=lambda prompt, index: prompt[0])
    params = SamplingParams(max_tokens=2)
    assert [o.outputs[0].text for o in llm.generate(["a", "b", byte_ids("c"), {"prompt": "d"}], params, use_tqdm=False)] == [
        "aa",
        "bb",
        "cc",
        "dd",
    ]
    assert llm.generate("x", params, use_tqdm=False)[0].prompt == "x"
    assert llm.generate(byte_ids("xy"), params, use_tqdm=False)[0].prompt_token_ids == byte_ids("xy")
    assert llm.generate({"prompt_token_ids": byte_ids("z")}, params, use_tqdm=False)[0].outputs[0].text == "zz"
    assert llm.generate([], params) == []
    many = llm.generate([chr(97 + i % 26) for i in range(100)], [SamplingParams(max_tokens=1 + i % 7) for i in range(100)], use_tqdm=False)
    assert [o.outputs[0].text for o in many] == [chr(97 + i % 26) * (1 + i % 7) for i in range(100)]
    assert idle(llm)


def test_outputs_are_finished_and_complete(make):
    output = make().generate("x", SamplingParams(max_tokens=4, logprobs=1, output_kind=RequestOutputKind.DELTA), use_tqdm=False)[0]
    sequence = output.outputs[0]
    assert (output.finished, sequence.text, sequence.finish_reason, len(sequence.logprobs)) == (True, "hell", "length", 4)
    assert sequence.cumulative_logprob == pytest.approx(-2.0)
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time
    assert output.num_cached_tokens == 0


def test_parameter_lists_must_match_the_prompts(make):
    llm = make()
    with pytest.raises(InvalidRequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequestError, match="priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], SamplingParams(), priority=[1, 2, 3])


def test_priorities_decide_the_order_of_service(make):
    llm = make(scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=2), priority=[3, 1, 2], use_tqdm=False)
    finished = [output.metrics.finished_time for output in outputs]
    assert finished[1] < finished[2] < finished[0]


def test_one_bad_prompt_is_refused_before_anything_runs(make):
    llm = make()
    with pytest.raises(InvalidRequestError, match="context holds 512"):
        llm.generate(["a", "b" * 512], SamplingParams())
    assert llm._client._core.executor.num_steps == 0
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].text == "h"


def test_stop_strings_end_sequences_and_free_their_pages(make):
    llm = make(say="abcSTOPxyz")
    outputs = llm.generate(["p"] * 20, SamplingParams(max_tokens=None, stop="STOP"), use_tqdm=False)
    assert {(o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs} == {("abc", "stop", "STOP")}
    assert idle(llm)


def test_n_sequences_come_together(make):
    output = make().generate("x", SamplingParams(n=5, max_tokens=3), use_tqdm=False)[0]
    assert [(sequence.index, sequence.text) for sequence in output.outputs] == [(index, "hel") for index in range(5)]


def test_interrupting_leaves_nothing_running(make):
    llm = make()

    class Interrupting:
        def __init__(self, **options):
            self.format_dict = {"elapsed": 1.0}

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            return None

        def set_postfix_str(self, *args, **options):
            raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=1 if i == 0 else 300) for i in range(20)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 20, params, use_tqdm=Interrupting)
    assert idle(llm)
    assert len(llm._front.output) == 0
    assert llm.reset_prefix_cache()


def test_ctrl_c_comes_between_two_steps(make):
    pressed_in_step = []

    def say(prompt, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGINT)
            pressed_in_step.append(index)
        return 50

    llm = make(say=say)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", SamplingParams(max_tokens=300), use_tqdm=False)
    assert pressed_in_step == [5]
    assert idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_more_prompts_than_the_queue_bound_wait_for_their_turn(make):
    llm = make(max_num_queued_reqs=2, max_num_seqs=2)
    outputs = llm.generate(["x"] * 15, SamplingParams(max_tokens=3, n=3), use_tqdm=False)
    assert all(sequence.text == "hel" for output in outputs for sequence in output.outputs)


def test_a_bound_of_queued_tokens_is_for_servers(make):
    with pytest.raises(ConfigError, match="max_num_queued_tokens"):
        make(max_num_queued_tokens=5)


def test_chat_goes_through_the_template(make):
    llm = make()
    conversation = [{"role": "user", "content": "hi"}]
    output = llm.chat(conversation, SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert output.prompt == "<|user|>hi<|end|><|assistant|>"
    assert output.prompt_token_ids == [2, *byte_ids("hi"), 1, 3]
    outputs = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "ab"}]], use_tqdm=False, add_generation_prompt=False)
    assert [o.prompt for o in outputs] == ["<|user|>hi<|end|>", "<|user|>hi<|end|><|assistant|>ab<|end|>"]
    template = "{{ greeting }}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{{ messages[0]['content'] }}"
    output = llm.chat(
        conversation,
        use_tqdm=False,
        chat_template=template,
        chat_template_kwargs={"greeting": "yo:"},
        tools=[{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}],
    )[0]
    assert output.prompt == "yo:fhi"


def test_chat_continues_the_final_message(make):
    llm = make()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    output = llm.chat(messages, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt == "<|user|>hi<|end|><|assistant|>so"
    with pytest.raises(InvalidRequestError, match="set add_generation_prompt to false"):
        llm.chat(messages, continue_final_message=True)


def test_defaults_come_from_the_generation_config(make):
    file = {"temperature": 0.3, "top_k": 7, "max_new_tokens": 5}
    llm = make(generation_config=file)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, 5)
    assert len(llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids) == 5
    assert len(llm.generate("x", SamplingParams(), use_tqdm=False)[0].outputs[0].token_ids) == 16
    assert (
        make(generation_config=file, override_generation_config={"presence_penalty": 1.5}).get_default_sampling_params().presence_penalty
        == 1.5
    )
    with pytest.raises(ConfigError, match="typical_p"):
        make(generation_config=file, override_generation_config={"typical_p": 1})


def test_what_is_not_offered_is_refused_by_name(make):
    llm = make()
    for name in ("lora_request", "tokenization_kwargs", "mm_processor_kwargs"):
        with pytest.raises(NotSupportedError, match=name):
            llm.generate("x", **{name: {"a": 1}})
        with pytest.raises(NotSupportedError, match=name):
            llm.chat([{"role": "user", "content": "x"}], **{name: {"a": 1}})
    with pytest.raises(ConfigError, match="quantization='awq'"):
        LLM(quantization="awq")
    make(quantization=None, trust_remote_code=False, pipeline_parallel_size=1)
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM(max_model_length=5)


def test_beam_search_returns_the_best_beams(make):
    llm = make(say="h")
    output = llm.beam_search(["ab", "c"], BeamSearchParams(beam_width=2, max_tokens=3))[0]
    h = byte_ids("h")[0]
    # The engine gives h -0.5, then id 0 (end of sequence) -1, id 1 -2, id 2 -3 after every prefix.
    best = [(beam.tokens, beam.cum_logprob, beam.finish_reason) for beam in output.sequences]
    assert best[0] == ([*byte_ids("ab"), h, h, h], -1.5, "length")
    assert output.sequences[0].text == "abhhh"
    assert len(output.sequences) == 2
    with pytest.raises(InvalidRequestError, match="logprobs asks for 60"):
        llm.beam_search("a", BeamSearchParams(beam_width=30, max_tokens=3))
    limited = llm.beam_search(["ab", "c"], BeamSearchParams(beam_width=2, max_tokens=3), concurrency_limit=1)
    assert limited[0] == output


def test_bar_is_a_bool_or_made_by_the_caller(make, capsys):
    llm = make()
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "toks/s" in shown
    llm.generate(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_metrics_count_what_was_done(make):
    llm = make(say="abSTOP")
    llm.generate(["x", "y"], SamplingParams(max_tokens=3, n=2), use_tqdm=False)
    llm.generate("x", SamplingParams(max_tokens=30, stop="STOP"), use_tqdm=False)
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["jaxllm:num_requests_running"] == 0
    assert metrics['jaxllm:request_success{finished_reason="length"}'] == 4
    assert metrics['jaxllm:request_success{finished_reason="stop"}'] == 1
    assert metrics["jaxllm:generation_tokens"] == 4 * 3 + 6


def test_closing_is_final_and_happens_by_itself(make):
    with make() as llm:
        executor = llm._client._core.executor
    assert executor.is_shut_down
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")


def test_letting_go_closes(make, tmp_path):
    make().close()
    llm = LLM(str(tmp_path))
    executor, reference = llm._client._core.executor, weakref.ref(llm)
    del llm
    gc.collect()
    assert reference() is None
    assert executor.is_shut_down


def test_tokenizer_is_one_of_transformers(make):
    tokenizer = make().get_tokenizer()
    assert tokenizer.encode("hi") == byte_ids("hi")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|user|>hi<|end|>"
