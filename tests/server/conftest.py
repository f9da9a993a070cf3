from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from jaxllm.server.app import create_app
from jaxllm.server.config import ServerConfig
from jaxllm.server.http import HttpProtocol
from jaxllm.server.state import ServerState
from jaxllm.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, load_test_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_test_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


def serving_state(engine: Any, **options: Any) -> ServerState:
    state = ServerState(ServerConfig(**options))
    state.serve(engine)
    return state


@pytest.fixture
def make_client(engine: FakeEngine) -> Callable[..., TestClient]:
    """A client of an application in this process; options are those of ServerConfig."""

    def make(**options: Any) -> TestClient:
        return TestClient(create_app(serving_state(engine, **options)), raise_server_exceptions=False)

    return make


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()


class LiveServer:
    """A real uvicorn in a thread of its own, on a port that the system chose."""

    def __init__(self, state: ServerState):
        self.state = state
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        config = uvicorn.Config(create_app(state), http=HttpProtocol, loop="uvloop", lifespan="off", log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.listener]}, daemon=True)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        for _ in range(1000):
            if self._server.started:
                break
            self._thread.join(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)


@pytest.fixture
def live(engine: FakeEngine) -> Iterator[LiveServer]:
    with LiveServer(serving_state(engine)) as server:
        yield server
