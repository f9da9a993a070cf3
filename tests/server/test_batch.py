"""Files of requests: every line is answered once, whatever happens in between."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import jaxllm.async_llm
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.server.batch import BatchFiles, Counts, answer_lines
from tests.server import fake_batch
from tests.server.conftest import serving_state
from tests.server.fake_engine import FakeEngine, load_test_tokenizer
from tests.server.helpers import HELLO

CHAT = "/v1/chat/completions"


def request(custom_id: str, url: str = CHAT, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"messages": HELLO}})


class Batch:
    """Two files in a folder, and runs over them."""

    def __init__(self, folder: Path, engine: FakeEngine):
        self.engine = engine
        self.requests = folder / "in.jsonl"
        self.answers = folder / "out.jsonl"

    def write(self, *lines: str) -> None:
        self.requests.write_text("\n".join(lines) + "\n")

    def run(self, max_inflight: int = 4, **options: Any) -> Counts:
        with BatchFiles(str(self.requests), str(self.answers)) as files:
            return asyncio.run(answer_lines(serving_state(self.engine, **options), files, max_inflight=max_inflight, progress=False))

    def read(self) -> list[dict[str, Any]]:
        text = self.answers.read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def by_name(self) -> dict[str, dict[str, Any]]:
        found = {answer["custom_id"]: answer for answer in self.read()}
        assert len(found) == len(self.read())
        return found


@pytest.fixture
def batch(tmp_path: Path, engine: FakeEngine) -> Batch:
    return Batch(tmp_path, engine)


def test_chats_completions_and_responses_are_answered(batch: Batch):
    batch.write(request("a"), "", request("b", "/v1/completions", prompt="x", max_tokens=3), request("c", "/v1/responses", input="hi"))

    assert batch.run() == Counts(3, 0)

    answers = batch.by_name()
    assert all(answer["response"]["status_code"] == 200 and answer["error"] is None for answer in answers.values())
    assert answers["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
    assert answers["b"]["response"]["body"]["choices"][0]["text"] == "Hel"
    assert answers["c"]["response"]["body"]["object"] == "response"
    assert len({answer["id"] for answer in answers.values()}) == 3


def test_a_line_that_fails_fails_alone(batch: Batch):
    lines = {
        "json": "{",
        "nan": '{"custom_id": NaN}',
        "list": "[]",
        "name": json.dumps({"method": "POST", "url": CHAT, "body": {}}),
        "method": json.dumps({"custom_id": "method", "method": "GET", "url": CHAT, "body": {}}),
        "url": request("url", "/v1/nothing", prompt="x"),
        "embeddings": request("embeddings", "/v1/embeddings", input="x"),
        "rerank": request("rerank", "/v1/rerank", query="x", documents=["y"]),
        "body": json.dumps({"custom_id": "body", "method": "POST", "url": CHAT, "body": 3}),
        "stream": request("stream", messages=HELLO, stream=True),
        "field": request("field", messages=HELLO, temperature=9),
        "right": request("right"),
    }
    batch.write(*lines.values())

    assert batch.run() == Counts(1, 11)

    answers = batch.read()
    assert len(answers) == 12
    for answer in answers:
        right = answer["custom_id"] == "right"
        pooled = answer["custom_id"] in ("embeddings", "rerank")
        assert answer["response"]["status_code"] == (200 if right else 404 if pooled else 400)
        assert (answer["error"] is None) == right
    by_name = {answer["custom_id"]: answer for answer in answers}
    assert "gives no vectors" in by_name["embeddings"]["error"]["message"]
    assert by_name["field"]["response"]["body"]["error"]["param"] == "temperature"


def test_no_more_than_asked_run_at_once(batch: Batch, engine: FakeEngine):
    most = 0

    async def watch(request: Any, position: int) -> None:
        nonlocal most
        most = max(most, len(engine.open))
        await asyncio.sleep(0)

    engine.on_token = watch
    batch.write(*(request(str(number)) for number in range(20)))

    batch.run(max_inflight=3)

    assert most == 3
    assert len(batch.by_name()) == 20


def test_a_run_that_was_killed_goes_on_wherever_it_was_cut(batch: Batch):
    names = [str(number) for number in range(8)]
    batch.write(*(request(name) for name in names[:4]), "", "{", *(request(name) for name in names[4:]))
    batch.run()
    whole = batch.answers.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for cut in [0, *ends, *(end - 1 for end in ends), *random.Random(0).sample(range(len(whole)), 20)]:
        batch.answers.write_bytes(whole[:cut])
        answered = whole[:cut].count(b"\n")

        counts = batch.run(max_inflight=random.Random(cut).randint(1, 9))

        assert counts.succeeded + counts.failed == 9 - answered
        assert sorted(str(answer["custom_id"]) for answer in batch.read()) == [*names, "None"]
    assert batch.run() == Counts(0, 0)


def test_requests_of_the_same_name_are_all_answered(batch: Batch):
    batch.write(request("same"), request("same"), request("same", messages=[{"role": "user", "content": "other"}]))
    batch.run()
    whole = batch.answers.read_bytes()
    batch.answers.write_bytes(whole[: whole.index(b"\n") + 1])

    assert batch.run() == Counts(2, 0)


def test_an_engine_that_ends_leaves_the_rest_to_the_next_run(batch: Batch, engine: FakeEngine):
    names = [str(number) for number in range(10)]
    batch.write(*(request(name) for name in names))

    async def die(request: Any, position: int) -> None:
        if len(engine.seen) >= 5 and position == 3:
            engine.dead = "the engine process was killed"
        await asyncio.sleep(0)

    engine.on_token = die
    with pytest.raises(EngineDeadError, match="was killed"):
        batch.run(max_inflight=2)
    engine.dead, engine.on_token = None, lambda request, position: asyncio.sleep(0)
    before = len(batch.read())

    assert 0 < before < 10
    assert batch.run() == Counts(10 - before, 0)
    assert sorted(batch.by_name()) == names


def test_a_full_queue_is_waited_for(batch: Batch, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxllm.server.batch.run._RETRY_S", 0.01)
    engine.queue_full = True
    batch.write(request("a"))

    async def run() -> Counts:
        with BatchFiles(str(batch.requests), str(batch.answers)) as files:
            task = asyncio.create_task(answer_lines(serving_state(engine), files, max_inflight=1, progress=False))
            await asyncio.sleep(0.05)
            engine.queue_full = False
            return await task

    assert asyncio.run(run()) == Counts(1, 0)


def test_answers_to_other_requests_are_not_continued(batch: Batch):
    batch.write(request("a"), request("b"))
    batch.run()
    batch.write(request("b"), request("a"))
    with pytest.raises(ConfigError, match="another request than line 1"):
        batch.run()
    batch.write(request("a"))
    with pytest.raises(ConfigError, match="more lines than the input"):
        batch.run()
    batch.answers.write_text("mine\n")
    with pytest.raises(ConfigError, match="no answers of a batch"):
        batch.run()
    batch.answers.unlink()
    batch.answers.hardlink_to(batch.requests)
    with pytest.raises(ConfigError, match="file of the requests"):
        batch.run()


def test_two_runs_do_not_write_one_file(batch: Batch):
    batch.write(request("a"))
    with BatchFiles(str(batch.requests), str(batch.answers)), pytest.raises(ConfigError, match="another run"):
        batch.run()


def test_keys_of_the_environment_do_not_lock_the_batch_out(batch: Batch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXLLM_API_KEY", "secret")
    batch.write(request("a"))

    assert batch.run() == Counts(1, 0)


# ---------------------------------------------------------------------------------------------------------------- the command


def test_the_command(batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    class Engine(FakeEngine):
        def __init__(self, *, config: Any, **more: Any):
            super().__init__(load_test_tokenizer(tmp_path))

        async def __aenter__(self) -> Engine:
            return self

        async def __aexit__(self, *error: object) -> None: ...

    monkeypatch.setattr(jaxllm.async_llm, "AsyncLLM", Engine)
    batch.write(request("a"), request("b", temperature=9, messages=HELLO))
    argv = ["run-batch", "some-model", "-i", str(batch.requests), "-o", str(batch.answers), "--served-model-name", "m"]

    assert main([*argv, "--max-inflight", "1"]) == 0
    assert "1 answered, 1 failed" in capsys.readouterr().err
    assert batch.by_name()["a"]["response"]["body"]["model"] == "m"
    assert main(argv) == 0
    assert "answered already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-o", "out"], "-i FILE is missing"),
        (["-i", __file__], "-o FILE is missing"),
        (["-i", "missing.jsonl", "-o", "out"], "is not a file"),
        (["-i", __file__, "-o", "/missing/out"], "cannot be opened"),
        (["-i", __file__, "-o", "out", "--max-inflight", "0"], "--max-inflight"),
        (["-i", __file__, "-o", "out", "--port", "80"], "opens no port"),
    ],
)
def test_the_command_refuses(
    more: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)

    assert main(["run-batch", *more]) == 2
    assert said in capsys.readouterr().err


def test_a_full_disk_is_one_clear_line(batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """And the answers that found room count: the same command goes on behind them."""
    names = [str(number) for number in range(20)]
    batch.write(*(request(name) for name in names))
    room = 3_000

    def write(file: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os_write(file, data[:room])
        room -= written
        return written

    os_write = os.write
    monkeypatch.setattr(jaxllm.async_llm, "AsyncLLM", fake_batch.AsyncLLM)
    monkeypatch.setattr(os, "write", write)
    command = ["run-batch", "m", "-i", str(batch.requests), "-o", str(batch.answers), "--no-progress", "--max-inflight", "3"]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "no space left on device" in said
    assert "Traceback" not in said
    assert 3 < batch.answers.read_bytes().count(b"\n") < 20

    room = 10**9
    assert main(command) == 0
    assert sorted(batch.by_name(), key=int) == names


def test_a_killed_process_is_continued(batch: Batch):
    names = [str(number) for number in range(300)]
    batch.write(*(request(name) for name in names))
    command = [sys.executable, "-m", "tests.server.fake_batch", "m", "-i", str(batch.requests), "-o", str(batch.answers), "--no-progress"]
    for enough in (20, 150):
        process = subprocess.Popen([*command, "--max-inflight", "8"])
        while not batch.answers.exists() or batch.answers.read_bytes().count(b"\n") < enough:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
    before = batch.answers.read_bytes().count(b"\n")

    assert subprocess.run(command, timeout=60).returncode == 0

    assert 150 <= before < 300
    assert sorted(batch.by_name(), key=int) == names
