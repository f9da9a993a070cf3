from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import aclosing

import psutil
import pytest

from jaxllm import AsyncLLM, EngineConfig, SamplingParams
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError, QueueFullError
from jaxllm.sampling_params import RequestOutputKind
from tests.checkpoints import tiny_config, write_tokenizer

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(vocab_size=512)))
    write_tokenizer(tmp_path)
    return lambda **options: EngineConfig.from_options(model=str(tmp_path), **options)


def engine(config, factory="start_hello", **options):
    return AsyncLLM(config=config(**options), engine_factory=f"tests.scripted_engine:{factory}")


async def collect(llm, prompt, request_id=None, **params):
    return [output async for output in llm.generate(prompt, SamplingParams(**params), request_id)]


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_deltas_cumulative_and_final_outputs_agree(config):
    async def run():
        async with engine(config) as llm:
            assert llm.info.max_model_len == 512
            deltas = await collect(llm, "x", max_tokens=10, output_kind=DELTA)
            cumulative = await collect(llm, [77], max_tokens=10)
            (final,) = await collect(llm, {"prompt": "x"}, max_tokens=10, output_kind=FINAL_ONLY)
            assert "".join(output.outputs[0].text for output in deltas) == "hello hell"
            assert cumulative[-1].outputs[0].text == final.outputs[0].text == "hello hell"
            assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
            assert final.outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_many_requests_at_once_each_get_their_own(config):
    async def run():
        async with engine(config, max_num_seqs=4) as llm:
            outputs = await asyncio.gather(*(collect(llm, "x" * (1 + i % 5), max_tokens=1 + i, output_kind=DELTA) for i in range(60)))
            for index, parts in enumerate(outputs):
                assert "".join(part.outputs[0].text for part in parts) == ("hello " * 20)[: 1 + index]
            assert len(llm._front.output) == 0
            assert llm._streams == {}

    asyncio.run(run())


def test_a_slow_reader_gets_fewer_and_larger_deltas(config):
    async def run():
        async with engine(config) as llm:
            outputs = []
            async for output in llm.generate("x", SamplingParams(max_tokens=300, output_kind=DELTA)):
                outputs.append(output)
                await asyncio.sleep(0.2)
            assert "".join(output.outputs[0].text for output in outputs) == "hello " * 50
            assert len(outputs) < 100

    asyncio.run(run())


@pytest.mark.parametrize("leave", ["break", "cancel", "close"])
def test_leaving_the_iterator_aborts_the_request(config, leave):
    async def run():
        async with engine(config, "start_slow") as llm:
            started = asyncio.Event()

            async def read():
                async with aclosing(llm.generate("x", SamplingParams(max_tokens=400), "r")) as outputs:
                    async for _ in outputs:
                        started.set()
                        if leave == "break":
                            break

            if leave == "close":
                outputs = llm.generate("x", SamplingParams(max_tokens=400), "r")
                await anext(outputs)
                await outputs.aclose()
            else:
                task = asyncio.create_task(read())
                await started.wait()
                if leave == "cancel":
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert llm._streams == {}
            assert len(llm._front.output) == 0
            # The prefix cache is only reset while no page is in use.
            end = time.monotonic() + 5
            while not await llm.reset_prefix_cache():
                assert time.monotonic() < end

    asyncio.run(run())


def test_abort_ends_the_iterator_with_what_came(config):
    async def run():
        async with engine(config, "start_slow") as llm:
            reading = asyncio.create_task(collect(llm, "x", "r", max_tokens=400))
            await until(lambda: "r" in llm._streams and llm._streams["r"].state.num_generated_tokens > 3)
            await llm.abort(["unknown", "r"])
            last = (await reading)[-1]
            assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
            assert last.outputs[0].text.startswith("hel")

    asyncio.run(run())


def test_stop_strings_end_a_stream(config):
    async def run():
        async with engine(config) as llm:
            outputs = await collect(llm, "x", max_tokens=400, stop="o h", output_kind=DELTA)
            assert "".join(output.outputs[0].text for output in outputs) == "hell"
            assert outputs[-1].outputs[0].stop_reason == "o h"

    asyncio.run(run())


def test_refusals_reach_the_caller_and_others_go_on(config):
    async def run():
        async with engine(config, "start_slow", max_num_seqs=1, max_num_queued_reqs=1) as llm:
            first = asyncio.create_task(collect(llm, "x", "a", max_tokens=60))
            await until(lambda: "a" in llm._streams and llm._streams["a"].state.num_generated_tokens)
            second = asyncio.create_task(collect(llm, "x", "b", max_tokens=5))
            await until(lambda: "b" in llm._streams)
            with pytest.raises(InvalidRequestError, match="in use"):
                await collect(llm, "x", "a")
            with pytest.raises(QueueFullError):
                await collect(llm, "x", "c")
            with pytest.raises(InvalidRequestError, match="context holds 512"):
                await collect(llm, "x" * 600)
            assert len((await first)[-1].outputs[0].token_ids) == 60
            assert len((await second)[-1].outputs[0].token_ids) == 5

    asyncio.run(run())


def test_a_deadline_ends_a_request_with_what_came(config):
    async def run():
        async with engine(config, "start_slow") as llm:
            outputs = [o async for o in llm.generate("x", SamplingParams(max_tokens=400), deadline=time.time() + 0.3)]
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert 0 < len(outputs[-1].outputs[0].token_ids) < 400

    asyncio.run(run())


def test_a_long_text_is_tokenised_beside_the_loop(config):
    async def run():
        async with engine(config) as llm:
            (output,) = await collect(llm, "y" * 20_000, max_tokens=3, truncate_prompt_tokens=-1, output_kind=FINAL_ONLY)
            assert len(output.prompt_token_ids) == 509

    asyncio.run(run())


def test_death_of_the_engine_fails_everything_open_and_later(config, caplog):
    async def run():
        llm = engine(config, "start_slow")
        await llm.start()
        readers = [asyncio.create_task(collect(llm, "x", max_tokens=400)) for _ in range(5)]
        await until(lambda: len(llm._streams) == 5)
        os.kill(llm._client.pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        for call in (llm.check_health(), collect(llm, "x"), llm.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await call
        llm.shutdown()

    asyncio.run(run())
    assert [record.levelname for record in caplog.records if "SIGKILL" in record.message] == ["CRITICAL"]


def test_shutdown_fails_open_requests_and_leaves_no_process(config, caplog):
    async def run():
        llm = engine(config, "start_slow")
        await llm.start()
        pid = llm._client.pid
        reader = asyncio.create_task(collect(llm, "x", max_tokens=400))
        await until(lambda: len(llm._streams) == 1)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader
        assert is_gone(pid)
        llm.shutdown()

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "CRITICAL"]


def test_what_keeps_the_engine_from_starting_is_raised_as_it_was(config):
    async def run():
        llm = engine(config, "start_refused")
        for _ in range(2):
            with pytest.raises(ConfigError, match="8 would"):
                await llm.start()

    asyncio.run(run())


def test_a_start_that_is_given_up_leaves_no_process(config):
    async def run():
        llm = engine(config, "start_never")
        starting = asyncio.create_task(llm.start())
        await until(lambda: llm._client.pid is not None)
        pid = llm._client.pid
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await asyncio.to_thread(llm.shutdown)
        await until(lambda: is_gone(pid))

    asyncio.run(run())


def test_mistakes_are_found_before_a_process_starts(config, tmp_path):
    with pytest.raises(ConfigError, match="did you mean"):
        AsyncLLM(max_model_length=3)
    with pytest.raises(ModelLoadError):
        AsyncLLM(str(tmp_path / "nowhere" / "model"))
    with pytest.raises(ConfigError, match="typical_p"):
        engine(config, override_generation_config={"typical_p": 1})


def test_defaults_come_from_the_generation_config(config, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "max_new_tokens": 9}))
    llm = engine(config, override_generation_config={"presence_penalty": 1})
    assert llm.default_sampling_params == {"temperature": 0.5, "max_tokens": 9, "presence_penalty": 1}
    llm.shutdown()


def test_metrics_bear_the_served_name_and_prefix(config):
    async def run():
        factory = "tests.scripted_engine:start_hello"
        llm = AsyncLLM(config=config(), metrics_prefix="vllm", served_model_name="m", engine_factory=factory)
        async with llm:
            await collect(llm, "x", max_tokens=7)
            labels = {"model_name": "m", "engine": "0"}
            assert llm.metrics.registry.get_sample_value("vllm:generation_tokens_total", labels) == 7

    asyncio.run(run())
