"""A whole server process: binding, loading, signals, closing."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.server.app import create_app
from jaxllm.server.config import ServerConfig
from jaxllm.server.lifecycle import bind, serve_forever, url_of
from jaxllm.server.state import ServerState
from tests.server.helpers import HELLO, chunks

ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, folder: Path, **options):
        port_file = folder / "url"
        command = [
            sys.executable,
            "-m",
            "tests.server.fake_server",
            str(port_file),
            json.dumps({"host": "127.0.0.1", "port": 0, **options}),
        ]
        self.popen = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not port_file.exists() or not port_file.read_text():
            assert self.popen.poll() is None, self.popen.stderr.read()
            time.sleep(0.01)
        self.url = port_file.read_text()

    def wait_ready(self) -> None:
        while self.status("/ready") != 200:
            time.sleep(0.02)

    def status(self, path: str) -> int:
        return httpx.get(self.url + path).status_code

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.popen.send_signal(number)
        return self.end()

    def end(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=30)
        return self.popen.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[Process] = []

    def start(**options) -> Process:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Process(folder, **options))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.popen.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_orderly(start, number):
    server = start()
    server.wait_ready()

    status, out, err = server.stop(number)

    assert status == 0, err
    assert "engine shut down" in out
    assert "Traceback" not in err


def test_a_ready_server_prints_its_url_and_a_request_that_works(start):
    server = start()
    server.wait_ready()

    _, out, _ = server.stop()

    assert f"Serving scripted at {server.url}" in out
    assert f"curl {server.url}/v1/chat/completions" in out
    assert '"temperature": 0' in out


def test_the_server_answers_while_the_model_loads(start):
    server = start(load_seconds=1)

    assert server.status("/health") == 503
    assert server.status("/ready") == 503
    assert server.status("/v1/models") == 503
    server.wait_ready()
    assert server.status("/health") == 200


def test_a_signal_ends_a_server_that_is_still_loading(start):
    server = start(load_seconds=60)
    assert server.status("/ready") == 503

    status, _, err = server.stop()

    assert status == 0, err
    assert "Traceback" not in err


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(start):
    server = start(load_error="model.safetensors is missing")

    status, _, err = server.end()

    assert status == 1
    assert err.strip().endswith("error: model.safetensors is missing")
    assert "Traceback" not in err


def test_running_requests_may_finish_within_the_grace_period(start):
    server = start(shutdown_timeout=20)
    server.wait_ready()
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 400}
    ) as response:
        parts = response.iter_text()
        body = next(parts)
        server.popen.send_signal(signal.SIGTERM)
        body += "".join(parts)

    assert chunks(body)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.end()[0] == 0


def test_requests_that_outlast_the_grace_period_are_told_and_ended(start):
    server = start(forever=True, shutdown_timeout=0.2)
    server.wait_ready()
    with httpx.stream("POST", server.url + "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response:
        parts = response.iter_text()
        body = next(parts)
        server.popen.send_signal(signal.SIGTERM)
        body += "".join(parts)

    assert chunks(body)[-1]["error"]["code"] == 503
    status, out, err = server.end()
    assert status == 0, err
    assert "engine shut down" in out


def test_a_second_signal_ends_the_grace_period(start):
    server = start(forever=True, shutdown_timeout=3600)
    server.wait_ready()
    with httpx.stream("POST", server.url + "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response:
        next(response.iter_raw())
        server.popen.send_signal(signal.SIGTERM)
        threading.Timer(0.5, server.popen.send_signal, [signal.SIGTERM]).start()
        assert server.end()[0] == 0


def test_a_body_that_stopped_half_way_does_not_hold_up_the_end(start):
    server = start(shutdown_timeout=0.2)
    server.wait_ready()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        while server.status("/ready") != 200:
            time.sleep(0.02)
        status, _, err = server.stop()
        assert client.recv(100) == b""

    assert status == 0
    assert "Traceback" not in err


def test_a_unix_socket_is_served_and_removed(start, tmp_path: Path):
    path = tmp_path / "socket"
    server = start(uds=str(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.02)
        assert client.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 200

    assert server.stop()[0] == 0
    assert not path.exists()


def test_https_is_served_with_a_certificate_and_its_key(start, tmp_path: Path):
    certificate, key = make_certificate(tmp_path)
    server = start(ssl_certfile=certificate, ssl_keyfile=key)

    with httpx.Client(verify=ssl.create_default_context(cafile=certificate)) as client:
        assert client.get(server.url.replace("127.0.0.1", "localhost") + "/version").status_code == 200
    assert server.url.startswith("https://")


def test_clients_show_a_certificate_where_the_server_wants_one(start, tmp_path: Path):
    certificate, key = make_certificate(tmp_path)
    server = start(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=certificate, ssl_cert_reqs=2, ssl_ciphers="ECDHE+AESGCM")

    context = ssl.create_default_context(cafile=certificate)
    url = server.url.replace("127.0.0.1", "localhost") + "/version"
    with httpx.Client(verify=context) as client, pytest.raises(httpx.TransportError):
        client.get(url)
    context.load_cert_chain(certificate, key)
    with httpx.Client(verify=context) as client:
        assert client.get(url).status_code == 200


def test_an_unusable_certificate_is_one_clear_error(tmp_path: Path):
    certificate, _ = make_certificate(tmp_path)
    config = ServerConfig(host="127.0.0.1", port=0, ssl_certfile=certificate, ssl_keyfile=certificate)

    with bind(config) as listener, pytest.raises(ConfigError, match="ssl_keyfile"):
        serve_forever(ServerState(config), create_app(ServerState(config)), listener, EngineConfig())


def make_certificate(folder: Path) -> tuple[str, str]:
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    return certificate, key


# --------------------------------------------------------------------------------------------------------------- binding


def test_a_port_in_use_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: address already in use.*--port"):
            bind(ServerConfig(host="127.0.0.1", port=port))


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1"])
def test_an_address_of_another_machine_is_one_clear_error(host):
    with pytest.raises(ConfigError, match=host):
        bind(ServerConfig(host=host, port=0))


def test_a_stale_unix_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path):
    path = str(tmp_path / "socket")
    bind(ServerConfig(uds=path)).close()

    with bind(ServerConfig(uds=path)), pytest.raises(ConfigError, match="already in use"):
        bind(ServerConfig(uds=path))


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "precious"
    path.write_text("data")

    with pytest.raises(ConfigError, match="precious"):
        bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "data"


def test_urls_are_for_people():
    config = ServerConfig(port=0, root_path="/proxy")
    with bind(config) as listener:
        assert url_of(config, listener) == f"http://localhost:{listener.getsockname()[1]}/proxy"
