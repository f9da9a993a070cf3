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


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["collect-env"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_section_is_there(capsys: pytest.CaptureFixture[str]):
    found = report(capsys)

    assert list(found) == ["system", "processor", "memory", "devices", "environment", "packages"]
    assert {"jax", "pytest"} <= found["packages"].keys()
    assert found["memory"]["total_bytes"] > 0
    assert found["processor"]["cores"] >= 1


def test_secrets_of_the_environment_stay_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("JAXLLM_API_KEY", "key_secret")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    found = report(capsys)

    assert "secret" not in json.dumps(found)
    assert found["environment"]["JAX_PLATFORMS"] == "cpu"


def test_devices_that_cannot_be_listed_are_an_entry_not_a_crash(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(collect_env, "_DEVICES", "raise SystemExit('no such device')")

    assert collect_env.devices() == {"error": "no such device"}
