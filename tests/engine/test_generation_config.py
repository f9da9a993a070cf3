from __future__ import annotations

import pytest

from jaxllm.engine.generation_config import generation_defaults
from jaxllm.errors import ConfigError

FILE = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_new_tokens": 77, "eos_token_id": [4, 5]}


def resolve(source="auto", override=None, file=FILE, eos=()):
    return generation_defaults(source, override, generation_config=file, eos_token_ids=eos)


def test_auto_takes_the_sampling_names_that_are_set():
    assert resolve().sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 77}


def test_vllm_is_neutral_but_keeps_the_ends_of_sequence():
    defaults = resolve("vllm", eos=(4, 5, 4, None, 9))
    assert defaults.sampling == {}
    assert defaults.eos_token_ids == [4, 5, 9]


def test_override_lies_over_the_file_and_takes_penalties():
    override = {"temperature": 0.1, "presence_penalty": 1, "eos_token_id": 6}
    defaults = resolve(override=override, eos=(4, 5))
    assert defaults.sampling == {"temperature": 0.1, "top_k": 20, "max_tokens": 77, "presence_penalty": 1}
    assert defaults.eos_token_ids == [6]
    assert resolve("vllm", override=override).sampling == {"temperature": 0.1, "presence_penalty": 1}


def test_unknown_names_and_bad_values_fail_at_start():
    with pytest.raises(ConfigError, match=r"'temprature'.*temperature, top_p"):
        resolve(override={"temprature": 1})
    with pytest.raises(ConfigError, match="top_p must be"):
        resolve(override={"top_p": 7})
    with pytest.raises(ConfigError, match="eos_token_id must be"):
        resolve(override={"eos_token_id": "</s>"})
