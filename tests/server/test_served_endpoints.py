"""Responses, messages, token ids and profiles over a whole server: command line, HTTP, engine process and compiled steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.checkpoints import write_scripted_model
from tests.server.helpers import HELLO
from tests.server.served import NAME, Served

pytestmark = pytest.mark.heavy

CONTEXT = 512
# The token after position p is SCRIPT[p]: what comes depends on the length of the prompt alone.
SCRIPT = ("naïve café, " * 60).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), [*(5 + byte for byte in SCRIPT)], max_positions=CONTEXT)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    profiles = tmp_path_factory.mktemp("profiles")
    server = Served(model, "--enforce-eager", "--enable-dev-endpoints", "--profile-dir", str(profiles), max_model_len=CONTEXT)
    yield server
    server.kill()


def said_after(prompt_tokens: int, count: int) -> str:
    return SCRIPT[prompt_tokens - 1 : prompt_tokens - 1 + count].decode(errors="replace")


def test_responses_go_on_from_the_prefix_cache(served: Served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model=NAME, input="hi " * 20, max_output_tokens=8, temperature=0)
        # The client's stream helper takes only responses that are complete.
        *_, last = client.responses.create(
            model=NAME, input="go on", previous_response_id=first.id, max_output_tokens=8, temperature=0, stream=True
        )

    second = last.response
    assert last.type == "response.incomplete"
    assert first.output_text == said_after(first.usage.input_tokens, 8)
    assert second.output_text == said_after(second.usage.input_tokens, 8)
    assert first.status == second.status == "incomplete"
    assert second.usage.input_tokens_details.cached_tokens >= 16


def test_messages(served: Served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(model=NAME, messages=HELLO, max_tokens=8, extra_body={"temperature": 0})
        with client.messages.stream(model=NAME, messages=HELLO, max_tokens=8, extra_body={"temperature": 0}) as stream:
            streamed = stream.get_final_message()

    prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert message.content[0].text == streamed.content[0].text == said_after(prompt, 8)
    assert message.stop_reason == "max_tokens"


def test_token_ids(served: Served):
    body = served.post("/inference/v1/generate", token_ids=[6, 7, 8], sampling_params={"max_tokens": 5, "temperature": 0}).json()

    assert body["choices"][0]["token_ids"] == [5 + byte for byte in SCRIPT[2:7]]


def test_a_profile_is_written_by_the_engine(served: Served):
    started = served.post("/start_profile")
    again = served.post("/start_profile")
    served.post("/v1/completions", prompt="abc", max_tokens=4)
    stopped = served.post("/stop_profile")

    assert (started.status_code, again.status_code, stopped.status_code) == (200, 409, 200), stopped.text
    assert list(Path(started.json()["profile_dir"]).rglob("*.xplane.pb"))
    assert served.post("/reset_prefix_cache").status_code == 200


def test_a_batch_is_answered_without_a_server(model: Path, tmp_path: Path):
    prompts = [[6] * length for length in range(1, 21)]
    lines = [
        {"custom_id": str(len(ids)), "method": "POST", "url": "/v1/completions", "body": {"prompt": ids, "max_tokens": 4, "temperature": 0}}
        for ids in prompts
    ]
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "jaxllm.cli.main", "run-batch", str(model), "-i", str(requests), "-o", str(answers)]

    done = subprocess.run([*command, "--enforce-eager", "--max-num-seqs", "4"], capture_output=True, text=True, timeout=180)

    assert done.returncode == 0, done.stderr
    assert "20 answered, 0 failed" in done.stderr
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    texts = {int(answer["custom_id"]): answer["response"]["body"]["choices"][0]["text"] for answer in found}
    assert texts == {length: said_after(length, 4) for length in range(1, 21)}
