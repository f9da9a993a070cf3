"""`--config FILE.yaml`: the keys are flag names, with dashes or underscores; the command line wins."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.cli.options import Option, field_name
from jaxllm.config import happens_anyway
from jaxllm.errors import ConfigError


def read_config_file(path: str, options: Mapping[str, Option], not_offered: Mapping[str, str]) -> dict[str, Any]:
    """Read options from a YAML file.

    Args:
        options: the options that the command knows, by field name.
        not_offered: options that are refused, with the reason.

    Returns:
        Field name -> value, for the keys in the file. `null` leaves an option at its default.

    Raises:
        ConfigError: no such file, not YAML, a key twice, an unknown key, or a value of the wrong type.
    """
    values: dict[str, Any] = {}
    for key, value in _load_mapping(path).items():
        source = f"{path}: {key}"
        name = field_name(key)
        option = options.get(name)
        negated = options.get(name.removeprefix("no_")) if name.startswith("no_") else None
        if option is None and negated is not None and negated.kind == "bool":
            option, value = negated, not _read(negated, value, source)
        if option is None and name in not_offered and happens_anyway(name, value):
            continue
        if option is None:
            raise ConfigError(f"{source}: {_why_not(name, options, not_offered)}")
        if option.name in values:
            raise ConfigError(f"{source}: the option is given twice")
        if value is not None:
            values[option.name] = _read(option, value, source)
    return values


def _read(option: Option, value: Any, source: str) -> Any:
    try:
        return option.read(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _why_not(name: str, options: Mapping[str, Option], not_offered: Mapping[str, str]) -> str:
    if name in not_offered:
        return f"not offered: {not_offered[name]}"
    near = difflib.get_close_matches(name, options, n=1)
    return f"no such option; did you mean {near[0].replace('_', '-')}?" if near else "no such option"


def _load_mapping(path: str) -> dict[str, Any]:
    # Only a command that is given a file pays for the import.
    import yaml

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--config {path}: cannot be read ({reason})") from None
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(tree, yaml.MappingNode) or not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(f"--config {path}: expected lines of the form `flag-name: value`")
    # The loader keeps the last of two equal keys without a word.
    keys = [key.value for key, _ in tree.value]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"--config {path}: given twice: {', '.join(twice)}")
    return loaded
