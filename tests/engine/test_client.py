"""Engine clients: what reaches the engine and comes back, and how both sides end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineOutput, EngineOutputs, ErrorKind, FinishReason
from jaxllm.engine import wire
from jaxllm.engine.client import InprocClient, ProcessClient, error_from
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError, RequestFailedError
from tests.engine import mock_engine
from tests.engine.harness import Collected, make_request
from tests.engine.mock_runner import alone

ROOT = Path(__file__).resolve().parents[2]


def _config(**options: object) -> EngineConfig:
    return EngineConfig.from_options(**options)


def _process_client(factory: str = "start", **options: object) -> ProcessClient:
    client = ProcessClient(_config(**options), f"tests.engine.mock_engine:{factory}")
    asyncio.run(client.wait_ready())
    return client


Client = InprocClient | ProcessClient


@pytest.fixture(params=["process", "inproc"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    made = _process_client() if request.param == "process" else InprocClient(*mock_engine.start(_config()))
    yield made
    made.shutdown()


def _outputs(client: Client) -> EngineOutputs:
    if isinstance(client, InprocClient):
        return client.step()
    return asyncio.run(asyncio.wait_for(client.get_outputs(), 30))


def _collect(client: Client, count: int) -> Collected:
    collected = Collected()
    while len(collected.last) < count:
        collected.take(_outputs(client).outputs)
    return collected


def _read_on(client: Client) -> None:
    while True:
        _outputs(client)


def _gone(pid: int, within: float = 5.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_requests_are_served(client: Client) -> None:
    client.add_requests([make_request(str(i), [i, 2, 3], max_tokens=20) for i in range(20)])
    collected = _collect(client, 20)
    assert collected.tokens == {str(i): alone([i, 2, 3], 20) for i in range(20)}


def test_requests_are_served_in_one_event_loop_after_the_other() -> None:
    client = _process_client()

    async def serve() -> Collected:
        collected = Collected()
        for i in range(3):
            client.add_requests([make_request(str(i), [i, 2, 3], max_tokens=20)])
            while len(collected.last) <= i:
                collected.take((await asyncio.wait_for(client.get_outputs(), 30)).outputs)
        assert await client.call("reset_prefix_cache")
        return collected

    for _ in range(2):
        assert asyncio.run(serve()).tokens == {str(i): alone([i, 2, 3], 20) for i in range(3)}
    client.shutdown()


def test_waiting_for_outputs_can_be_cancelled() -> None:
    client = _process_client()

    async def serve() -> Collected:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.get_outputs(), 0.05)
        client.add_requests([make_request("a", [1], max_tokens=3)])
        collected = Collected()
        while not collected.last:
            collected.take((await asyncio.wait_for(client.get_outputs(), 30)).outputs)
        return collected

    assert asyncio.run(serve()).tokens["a"] == alone([1], 3)
    client.shutdown()


def test_an_aborted_request_ends_and_its_pages_are_free(client: Client) -> None:
    client.add_requests([make_request("long", [1], max_tokens=None), make_request("short", [2], max_tokens=30)])
    while not _outputs(client).outputs:
        pass
    client.abort_requests(["long", "nobody"])
    collected, usage = Collected(), 1.0
    while len(collected.last) < 2 or usage > 0:
        outputs = _outputs(client)
        collected.take(outputs.outputs)
        usage = outputs.stats.kv_cache_usage if outputs.stats else usage
    assert collected.reason("long") == "abort"
    assert collected.reason("short") == "length"


def test_a_refused_request_gets_its_error_and_the_others_go_on(client: Client) -> None:
    client.add_requests([make_request("ok", [1]), make_request("empty", []), make_request("long", [1] * 1000)])
    collected = _collect(client, 3)
    assert collected.tokens["ok"] == alone([1], 8)
    assert isinstance(error_from(collected.last["empty"]), InvalidRequestError)
    assert "1000 tokens" in str(error_from(collected.last["long"]))
    assert error_from(collected.last["ok"]) is None


def test_a_request_that_cannot_be_decoded_gets_its_error() -> None:
    client = _process_client()
    try:
        frame = msgspec.msgpack.decode(wire.encode(make_request("bad", [1])))
        frame["sampling_params"]["top_p"] = 7
        client._process.send([wire.ToEngine.ADD, wire.encode(frame), wire.encode(make_request("good", [2]))])
        collected = _collect(client, 2)
        assert "Expected `float` <= 1.0 - at `$.sampling_params.top_p`" in str(error_from(collected.last["bad"]))
        assert collected.tokens["good"] == alone([2], 8)
    finally:
        client.shutdown()


def test_a_full_queue_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    client = InprocClient(*mock_engine.start(_config(max_num_queued_reqs=2)))
    client.add_requests([make_request(str(i), [i]) for i in range(12)])
    collected = _collect(client, 12)
    refused = [request_id for request_id, output in collected.last.items() if isinstance(error_from(output), QueueFullError)]
    assert refused == ["10", "11"]


def test_every_error_kind_has_its_exception() -> None:
    kinds = {ErrorKind.INVALID: InvalidRequestError, ErrorKind.QUEUE_FULL: QueueFullError, ErrorKind.FAILED: RequestFailedError}
    for kind, expected in kinds.items():
        output = EngineOutput(request_id="x", finish_reason=FinishReason.ERROR, error="why", error_kind=kind)
        assert type(error_from(output)) is expected


def test_reset_prefix_cache_reaches_the_engine(client: Client) -> None:
    for name, expected in (("first", 0), ("again", 16), ("after reset", 0)):
        if name == "after reset":
            assert client.reset_prefix_cache() if isinstance(client, InprocClient) else asyncio.run(client.call("reset_prefix_cache"))
        client.add_requests([make_request(name, list(range(20)))])
        assert _collect(client, 1).cached[name] == expected


def test_shutdown_leaves_no_process_and_can_be_repeated() -> None:
    client = _process_client()
    client.add_requests([make_request("open", [1], max_tokens=None)])
    pid, socket_dir = client.pid, client._process._dir
    client.shutdown()
    client.shutdown()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(socket_dir)
    with pytest.raises(EngineDeadError, match="shut down"):
        client.check_health()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.add_requests([make_request("late", [1])])


def test_shutdown_ends_a_consumer_that_waits() -> None:
    client = _process_client()
    seen: list[BaseException] = []

    def consume() -> None:
        try:
            _read_on(client)
        except EngineDeadError as error:
            seen.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    client._finalizer()
    thread.join(10)
    assert len(seen) == 1


def test_a_dropped_client_takes_its_process_along() -> None:
    client = _process_client()
    pid = client.pid
    del client
    assert pid is not None
    assert _gone(pid)


def test_an_engine_stuck_in_a_step_is_killed_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.engine.process._STOP_SECONDS", 0.3)
    client = _process_client("start_stuck")
    client.add_requests([make_request("x", [1])])
    pid = client.pid
    client.shutdown()
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_killing_the_engine_ends_everything_open_within_two_seconds() -> None:
    client = _process_client(seed=5)
    client.add_requests([make_request("open", [1], max_tokens=None)])
    while not _outputs(client).outputs:
        pass
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        _read_on(client)
    assert time.monotonic() - killed < 2
    late_call = client.call("reset_prefix_cache")
    for late in (client.check_health, lambda: asyncio.run(late_call), lambda: client.add_requests([make_request("late", [1])])):
        with pytest.raises(EngineDeadError):
            late()
    client.shutdown()


def test_killing_the_engine_ends_an_async_wait_and_a_call() -> None:
    client = _process_client("start_stuck")

    async def wait_for_death() -> None:
        client.add_requests([make_request("open", [1], max_tokens=None)])
        # The first step of the overlapped loop returns before it is computed; the second never does.
        await client.get_outputs()
        waiting = [asyncio.ensure_future(client.get_outputs())]
        await asyncio.sleep(0.2)
        waiting.append(asyncio.ensure_future(client.call("reset_prefix_cache")))
        await asyncio.sleep(0.2)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for task in waiting:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(task, 10)

    asyncio.run(wait_for_death())
    client.shutdown()


def test_a_lost_device_brings_its_cause_to_every_open_request(client: Client) -> None:
    client.shutdown()
    made = _process_client("start_dying") if isinstance(client, ProcessClient) else InprocClient(*mock_engine.start_dying(_config()))
    try:
        made.add_requests([make_request(str(i), [1]) for i in range(20)])
        with pytest.raises(EngineDeadError, match="device lost"):
            _read_on(made)
        with pytest.raises(EngineDeadError, match="device lost"):
            made.check_health()
    finally:
        made.shutdown()


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("start_refused", ConfigError, "^block_size 7 cannot work; 8 would$"),
        ("start_broken", EngineDeadError, "^ZeroDivisionError: the true cause$"),
        ("start_killed", EngineDeadError, "killed by SIGKILL"),
        ("not_there", EngineDeadError, "^AttributeError: .*not_there"),
    ],
)
def test_a_failed_start_brings_one_root_cause(factory: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        _process_client(factory)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


_PARENT = """
    import asyncio, os, signal, sys, threading, time
    from jaxllm.config import EngineConfig
    from jaxllm.engine.client import ProcessClient
    from jaxllm.engine.process import EngineProcess
    from tests.engine.harness import make_request
"""


def _parent(body: str) -> subprocess.Popen[str]:
    """A process that starts an engine; the body prints the engine's pid first."""
    source = textwrap.dedent(_PARENT) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _first_line(parent: subprocess.Popen[str]) -> str:
    assert parent.stdout is not None
    return parent.stdout.readline().strip()


@pytest.mark.parametrize("factory", ["start", "start_slowly", "start_stuck"])
def test_killing_the_parent_leaves_no_engine(factory: str) -> None:
    parent = _parent(
        f"""
        process = EngineProcess("tests.engine.mock_engine:{factory}", EngineConfig())
        if "{factory}" != "start_slowly":
            process.ready.result()
            from jaxllm.engine import wire
            process.send(wire.encode_requests([make_request("x", [1], max_tokens=None)]))
        while process.pid is None:
            time.sleep(0.01)
        print(process.pid, flush=True)
        time.sleep(600)
        """
    )
    pid = int(_first_line(parent))
    parent.kill()
    parent.wait()
    assert _gone(pid)


@pytest.mark.parametrize("ending", ["sys.exit(0)", "raise ValueError('oops')", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_parent_that_ends_without_shutdown_leaves_no_engine(ending: str) -> None:
    parent = _parent(
        f"""
        client = ProcessClient(EngineConfig(), "tests.engine.mock_engine:start")
        asyncio.run(client.wait_ready())
        print(client.pid, flush=True)
        {ending}
        """
    )
    pid = int(_first_line(parent))
    parent.wait(20)
    assert _gone(pid)


def test_an_engine_started_in_a_thread_that_ends_lives_on() -> None:
    made: list[ProcessClient] = []
    thread = threading.Thread(target=lambda: made.append(_process_client()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    made[0].add_requests([make_request("a", [1])])
    assert _collect(made[0], 1).tokens["a"] == alone([1], 8)
    made[0].shutdown()


def test_ctrl_c_stops_the_engine_in_order() -> None:
    parent = _parent(
        """
        client = ProcessClient(EngineConfig(), "tests.engine.mock_engine:start")
        asyncio.run(client.wait_ready())
        try:
            print(client.pid, flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            client.add_requests([make_request("after", [1], max_tokens=3)])
            tokens = []
            while len(tokens) < 3:
                for output in asyncio.run(client.get_outputs()).outputs:
                    tokens += output.new_token_ids
            print("served after the signal", flush=True)
            client.shutdown()
        """
    )
    pid = int(_first_line(parent))
    # As a terminal does, to the whole group; and to the engine itself.
    os.killpg(parent.pid, signal.SIGINT)
    os.kill(pid, signal.SIGINT)
    assert _first_line(parent) == "served after the signal"
    parent.wait(20)
    assert _gone(pid)


def test_ctrl_c_during_start_leaves_no_engine() -> None:
    parent = _parent(
        """
        starting = EngineProcess.__init__
        def started(self, *args):
            starting(self, *args)
            while self.pid is None:
                time.sleep(0.01)
            print(self.pid, flush=True)
        EngineProcess.__init__ = started
        asyncio.run(ProcessClient(EngineConfig(), "tests.engine.mock_engine:start_slowly").wait_ready())
        """
    )
    pid = int(_first_line(parent))
    time.sleep(0.5)
    parent.send_signal(signal.SIGINT)
    parent.wait(20)
    assert _gone(pid)


def test_clients_import_no_jax() -> None:
    source = "import sys, jaxllm.engine.client, jaxllm.engine.child; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT).returncode == 0
