"""Text and YAML become values of the type that the dataclass declares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from jaxllm.cli.options import options_of, read_bool, read_int, read_json
from jaxllm.config import CONFIG_GROUPS


def test_every_engine_option_becomes_an_option_with_its_default():
    options = options_of(CONFIG_GROUPS)

    for group, kind in CONFIG_GROUPS.items():
        for field in dataclasses.fields(kind):
            assert options[field.name].group == group
            assert options[field.name].default == field.default
            assert options[field.name].help


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model", "str"),
        ("max_model_len", "int"),
        ("gpu_memory_utilization", "float"),
        ("enable_prefix_caching", "bool"),
        ("hf_overrides", "json"),
    ],
)
def test_annotations_choose_how_an_option_is_read(name: str, kind: str):
    assert options_of(CONFIG_GROUPS)[name].kind == kind


def test_literals_become_choices():
    assert options_of(CONFIG_GROUPS)["scheduling_policy"].choices == ("fcfs", "priority")


def test_the_same_option_in_two_groups_is_a_mistake():
    @dataclass
    class Group:
        seed: int = 0

    with pytest.raises(TypeError, match="seed"):
        options_of({"a": Group, "b": Group})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("0.5M", 2**19),
        ("2g", 2 * 10**9),
        (7, 7),
        ("123456789012345678", 123456789012345678),
    ],
)
def test_integers_may_carry_a_unit(text: Any, value: int):
    assert read_int(text) == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "8 k b", "0.3k1", True, 1.0, None, "1.0001k"])
def test_what_is_no_integer_is_refused(text: Any):
    with pytest.raises(ValueError, match="integer"):
        read_int(text)


@pytest.mark.parametrize("value", ["yes", 1, 0, "", None])
def test_booleans_are_true_or_false_and_nothing_else(value: Any):
    with pytest.raises(ValueError, match="true or false"):
        read_bool(value)


@pytest.mark.parametrize("text", ["[1]", "{", "3", ""])
def test_json_options_take_objects_only(text: str):
    with pytest.raises(ValueError, match="JSON object"):
        read_json(text)
