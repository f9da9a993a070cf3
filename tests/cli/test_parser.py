"""The command line of one subcommand: spellings, YAML files, refusals and help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxllm.cli.parser import Arguments, CommandParser
from jaxllm.config import CONFIG_GROUPS, NOT_OFFERED, EngineConfig
from jaxllm.errors import ConfigError


@dataclass(frozen=True)
class Names:
    """Names and their tags."""

    tags: tuple[str, ...] = field(default=(), metadata={"help": "Tags"})
    hidden: bool = field(default=False, metadata={"help": "Hidden", "group": "other"})


def parse(*argv: str) -> Arguments:
    return make_parser().parse(argv)


def make_parser() -> CommandParser:
    return CommandParser("serve", "Serve a model.", groups={**CONFIG_GROUPS, "names": Names}, positional_model=True)


def write(folder: Path, text: str) -> str:
    path = folder / "preset.yaml"
    path.write_text(text)
    return str(path)


# --------------------------------------------------------------------------- spellings


def test_only_what_was_given_is_an_option():
    assert parse().options == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["MODEL", "--seed", "3"],
        ["--seed", "3", "MODEL"],
        ["--seed=3", "--model", "MODEL"],
        ["--seed", "3", "--", "MODEL"],
    ],
)
def test_the_model_may_stand_anywhere(argv: list[str]):
    assert parse(*argv).options == {"model": "MODEL", "seed": 3}


@pytest.mark.parametrize("argv", [["a", "b"], ["a", "--model", "b"]])
def test_two_models_are_refused(argv: list[str]):
    with pytest.raises(ConfigError, match=r"'a'.*'b'|'b'.*'a'"):
        parse(*argv)


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--enforce_eager"], {"enforce_eager": True}),
        (["--max_model_len=8K"], {"max_model_len": 8192}),
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["--max-logprobs", "-1"], {"max_logprobs": -1}),
        (["--hf-overrides", '{"a": {"b": 1}}'], {"hf_overrides": {"a": {"b": 1}}}),
        (["--tags", "a", "b", "--tags", "c"], {"tags": ("a", "b", "c")}),
    ],
)
def test_vllm_spellings(argv: list[str], options: dict[str, object]):
    assert parse(*argv).options == options


def test_values_keep_their_underscores():
    assert parse("--tokenizer", "some_dir/with_underscores", "--chat-template=a_b").options == {
        "tokenizer": "some_dir/with_underscores",
        "chat_template": "a_b",
    }


def test_options_are_told_apart_by_their_dataclasses():
    args = parse("--seed", "1", "--tags", "x")

    assert args.only(CONFIG_GROUPS) == {"seed": 1}
    assert args.only({"names": Names}) == {"tags": ("x",)}


# --------------------------------------------------------------------------- refusals


def test_an_unknown_flag_offers_the_nearest():
    with pytest.raises(ConfigError, match=r"--max-modl-len.*--max-model-len"):
        parse("--max-modl-len", "5")


def test_flags_are_not_abbreviated():
    with pytest.raises(ConfigError, match="unknown flag --max-model"):
        parse("--max-model", "5")


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_is_not_offered_is_refused_with_the_reason(name: str):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError) as error:
        # The one boolean that is on anyway is refused when it is turned off.
        parse(*(["--no-enable-chunked-prefill"] if name == "enable_chunked_prefill" else [flag, "x"]))
    assert NOT_OFFERED[name] in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-chunked-prefill"],
        ["--no-enable-lora"],
        ["--no-trust-remote-code"],
        ["--pipeline-parallel-size", "1"],
        ["--data_parallel_size=1"],
        ["--kv-cache-dtype", "auto"],
    ],
)
def test_asking_for_what_is_done_anyway_is_fine(argv: list[str]):
    assert parse(*argv, "MODEL", "--seed", "1").options == {"model": "MODEL", "seed": 1}


@pytest.mark.parametrize(
    "argv", [["--pipeline-parallel-size", "2"], ["--pipeline-parallel-size"], ["--kv-cache-dtype=fp8"], ["--enable-lora"]]
)
def test_asking_for_something_else_is_refused(argv: list[str]):
    with pytest.raises(ConfigError, match=r"is not offered"):
        parse(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", "x"], r"--seed.*'x'"),
        (["--seed"], r"--seed.*expected one argument"),
        (["--hf-overrides", "[1]"], "JSON object"),
        (["--hf-overrides.a", "1"], r"unknown flag --hf-overrides\.a; did you mean --hf-overrides"),
        (["--enforce-eager=yes"], "--enforce-eager"),
    ],
)
def test_wrong_values_name_the_flag(argv: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


def test_a_command_without_model_takes_no_words():
    with pytest.raises(ConfigError, match="unexpected argument 'word'"):
        CommandParser("collect-env", "Print versions.").parse(["word"])


def test_environment_variables_do_not_change_options(monkeypatch: pytest.MonkeyPatch):
    for prefix in ("JAXLLM", "VLLM"):
        monkeypatch.setenv(f"{prefix}_SEED", "7")
        monkeypatch.setenv(f"{prefix}_MODEL", "other")

    assert EngineConfig.from_options(**parse().options) == EngineConfig()


# --------------------------------------------------------------------------- YAML


def test_the_command_line_wins_over_the_file(tmp_path: Path):
    path = write(tmp_path, "model: from-file\nseed: 1\nmax-num-seqs: 1k\n")

    assert parse("--config", path, "--seed", "2").options == {"model": "from-file", "seed": 2, "max_num_seqs": 1000}


def test_a_model_on_the_command_line_wins_over_the_file(tmp_path: Path):
    assert parse("mine", "--config", write(tmp_path, "model: from-file\n")).options == {"model": "mine"}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("enable_prefix_caching: false", {"enable_prefix_caching": False}),
        ("no-enable-prefix-caching: true", {"enable_prefix_caching": False}),
        ("hf-overrides: {a: 1}", {"hf_overrides": {"a": 1}}),
        ("hf-overrides: '{\"a\": 1}'", {"hf_overrides": {"a": 1}}),
        ("gpu-memory-utilization: 1", {"gpu_memory_utilization": 1.0}),
        ("tags: [a, 2]", {"tags": ("a", "2")}),
        ("tags: a", {"tags": ("a",)}),
        ("pipeline-parallel-size: 1\nenable-lora: false", {}),
        ("max-model-len:", {}),
    ],
)
def test_yaml_values(tmp_path: Path, text: str, options: dict[str, object]):
    assert parse("--config", write(tmp_path, text)).options == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modl-len: 1", "did you mean max-model-len"),
        ("quantization: awq", "not offered"),
        ("pipeline-parallel-size: 2", "not offered"),
        ("seed: 1\nseed: 2", "twice: seed"),
        ("seed: 1\n--seed: 2", "given twice"),
        ("enable-prefix-caching: true\nno-enable-prefix-caching: true", "given twice"),
        ("seed: [1]", r"seed: expected an integer"),
        ("enforce-eager: 1", "true or false"),
        ("model: [a]", "expected text"),
        ("- a", "flag-name: value"),
        ("a: [", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("config: other.yaml", "no such option"),
    ],
)
def test_yaml_mistakes_are_errors(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse("--config", write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        parse("--config", str(tmp_path / "nothing.yaml"))


# --------------------------------------------------------------------------- help


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_group_and_flag_compactly(capsys: pytest.CaptureFixture[str]):
    text = help_of(capsys, "--help")

    assert len(text.splitlines()) < 50
    for word in ("cache:", "--max-model-len", "--no-enable-prefix-caching", "--help=GROUP", "--config", "other", "--hidden"):
        assert word in text


def test_help_of_a_group_explains_its_flags_and_no_others(capsys: pytest.CaptureFixture[str]):
    text = help_of(capsys, "--help=CacheConfig")

    assert "--block-size" in text
    assert "Positions per KV page" in text
    assert "0.92" in text
    assert "--dtype" not in text


def test_help_of_a_flag(capsys: pytest.CaptureFixture[str]):
    text = help_of(capsys, "--help=max_num_seqs")

    assert "Most requests running at once" in text
    assert "--block-size" not in text


def test_help_of_everything(capsys: pytest.CaptureFixture[str]):
    text = help_of(capsys, "--help=all")

    assert all(option.flag in text for option in make_parser().options.values())


def test_help_of_a_flag_that_is_not_offered_says_why(capsys: pytest.CaptureFixture[str]):
    assert NOT_OFFERED["quantization"] in " ".join(help_of(capsys, "--help=quantization").split())


def test_help_of_an_unknown_group_lists_the_groups():
    with pytest.raises(ConfigError, match="model, cache, scheduler"):
        parse("--help=modle")
