"""`jaxllm collect-env` reports what a bug report needs and keeps secrets out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxllm.cli import collect_env
from jaxllm.cli.main import main


@pytest.fixture(autouse=True)
def no_device_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "devices", lambda: {"backend": "cpu", "devices": [{"id": 0, "memory_bytes": 2**30}]})


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["collect-env", *argv]) == 0
    return capsys.readouterr().out


def test_json_holds_every_section(capsys: pytest.CaptureFixture[str]):
    found: dict[str, Any] = json.loads(report(capsys, "--json"))

    assert list(found) == ["system", "processor", "memory", "devices", "folders", "environment", "packages"]
    assert found["packages"]["jax"]
    assert found["memory"]["total_bytes"] > 0
    assert found["processor"]["cores"] >= 1


def test_text_is_readable(capsys: pytest.CaptureFixture[str]):
    text = report(capsys)

    assert "memory_bytes 1.0 GiB" in text
    assert "  jax: " in text


def test_secrets_of_the_environment_stay_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("JAXLLM_API_KEY", "key_secret")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    text = report(capsys)

    assert "secret" not in text
    assert "JAX_PLATFORMS: cpu" in text


def test_every_package_on_request(capsys: pytest.CaptureFixture[str]):
    assert "pytest" in json.loads(report(capsys, "--json", "--packages"))["packages"]


def test_devices_that_cannot_be_listed_are_an_entry_not_a_crash(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(collect_env, "_DEVICES", "raise SystemExit('no such device')")

    assert collect_env.devices() == {"error": "no such device"}
