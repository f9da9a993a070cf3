"""The parser of one subcommand: its own flags, the flags generated from config dataclasses, a YAML file, help by group.

parser = CommandParser("serve", "Start the HTTP server", groups=CONFIG_GROUPS, positional_model=True)
parser.own.add_argument("--flag", ...)
args = parser.parse(argv)      # args.own, args.options: only what was given
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxllm.cli.config_file import read_config_file
from jaxllm.cli.options import Option, field_name, flag_name, options_of
from jaxllm.config import NOT_OFFERED, happens_anyway
from jaxllm.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    """What a command line said: `own` flags with their defaults, `options` by field name and only those that were given."""

    own: argparse.Namespace
    options: dict[str, Any]

    def only(self, kinds: Mapping[str, type]) -> dict[str, Any]:
        """The given options that belong to these config dataclasses."""
        names = options_of(kinds)
        return {name: value for name, value in self.options.items() if name in names}


def at_least(low: float, kind: type = int) -> Callable[[str], Any]:
    """Reads a number of at least `low`: the `type` of a flag of a command's own."""

    def read(text: str) -> Any:
        if (value := kind(text)) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    # What argparse calls it where the text is no number.
    read.__name__ = kind.__name__
    return read


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class CommandParser:
    """Parses `jaxllm COMMAND ...`.

    Args:
        command: the words after `jaxllm`.
        summary: one line for the help.
        groups: config dataclasses by group name; each field becomes a flag.
        positional_model: accept the model as a bare word too.
    """

    def __init__(self, command: str, summary: str, *, groups: Mapping[str, type] | None = None, positional_model: bool = False):
        self.command = command
        self.summary = summary
        self.positional_model = positional_model
        self.options = options_of(groups or {})
        self._purpose = {group: (kind.__doc__ or "").strip().splitlines()[0] for group, kind in (groups or {}).items()}
        self._parser = _Parser(prog=f"jaxllm {command}", add_help=False, allow_abbrev=False)
        self.own = self._parser.add_argument_group("options")
        self._sections: dict[str, argparse._ArgumentGroup] = {}
        if self.options:
            self.own.add_argument("--config", metavar="FILE", help="YAML file of flags (keys are flag names); the command line wins")
        for option in self.options.values():
            if option.group not in self._sections:
                self._sections[option.group] = self._parser.add_argument_group(option.group)
            _add_flag(self._sections[option.group], option)
        if self.options:
            self._add_not_offered()

    def _add_not_offered(self) -> None:
        """Flags that we know and do not offer, so that whoever asks for what is done anyway may keep them."""
        section = self._parser.add_argument_group("not offered")
        for name in NOT_OFFERED.keys() - self.options.keys():
            takes: dict[str, Any] = {"action": "store_true"} if happens_anyway(name, True) else {"nargs": "?", "const": True, "type": _word}
            section.add_argument(flag_name(name), default=argparse.SUPPRESS, help=NOT_OFFERED[name].replace("%", "%%"), **takes)
            section.add_argument(flag_name(f"no_{name}"), dest=name, action="store_false", default=argparse.SUPPRESS)

    # ----------------------------------------------------------------------- parsing

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Parse, or print the help that was asked for and exit.

        Raises:
            ConfigError: an unknown flag (the message offers the nearest), one that is not offered, or a value of the wrong type.
        """
        self._answer_help(argv)
        # vLLM's other spelling: underscores in the names of flags.
        words = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
        namespace, rest = self._parser.parse_known_args(words)
        values = vars(namespace)
        given = {name: values.pop(name) for name in list(values) if name in self.options}
        for name in list(values):
            if name in NOT_OFFERED and not happens_anyway(name, values.pop(name)):
                raise ConfigError(f"{flag_name(name)} is not offered: {NOT_OFFERED[name]}")
        self._take_rest(rest, given)
        path = values.pop("config", None) if self.options else None
        from_file = read_config_file(path, self.options, NOT_OFFERED) if path else {}
        return Arguments(own=namespace, options=from_file | given)

    def _take_rest(self, rest: Sequence[str], given: dict[str, Any]) -> None:
        """What argparse did not recognise: the model as a bare word, or an error."""
        words = [word for word in rest if word != "--"]
        for word in words:
            if word.startswith("-"):
                raise ConfigError(self._unknown(word.partition("=")[0]))
        if words and not self.positional_model:
            raise ConfigError(f"unexpected argument {words[0]!r}; flags start with --")
        if len(words) > 1 or (words and "model" in given):
            models = [*([given["model"]] if "model" in given else []), *words]
            raise ConfigError(f"one model at a time, got {', '.join(map(repr, models))}")
        if words:
            given["model"] = words[0]

    def _unknown(self, flag: str) -> str:
        name = field_name(flag).partition(".")[0]
        if name in NOT_OFFERED and self.options:
            return f"{flag} is not offered: {NOT_OFFERED[name]}"
        near = difflib.get_close_matches(flag.replace("_", "-"), self._parser._option_string_actions, n=1)
        return f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else f"; `jaxllm {self.command} --help` lists the flags")

    # ----------------------------------------------------------------------- help

    def _answer_help(self, argv: Sequence[str]) -> None:
        before = list(argv[: list(argv).index("--")]) if "--" in argv else argv
        for word in before:
            if word in ("-h", "--help"):
                self._print_and_exit(self.format_help())
            if word.startswith("--help="):
                self._print_and_exit(self.format_group(word.removeprefix("--help=")))

    def _print_and_exit(self, text: str) -> NoReturn:
        sys.stdout.write(text)
        sys.exit(0)

    def format_help(self) -> str:
        """The command's own flags in full, the generated ones as a list of groups."""
        model = " [MODEL]" if self.positional_model else ""
        parts = [f"usage: jaxllm {self.command}{model} [options]\n\n{self.summary}\n"]
        if self.own._group_actions:
            parts.append(self._section("options", self.own._group_actions))
        if self.options:
            width = shutil.get_terminal_size().columns - 2
            lines = [f"groups of options (`jaxllm {self.command} --help=GROUP`, `--help=FLAG` or `--help=all` explains them):"]
            for group in self._sections:
                lines.append(f"  {group}: {self._purpose.get(group, '')}".rstrip(": "))
                flags = " ".join(_shown(option) for option in self.options.values() if option.group == group)
                lines += textwrap.wrap(flags, max(width, 60), initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
            parts.append("\n".join(lines) + "\n")
        return "\n".join(parts)

    def format_group(self, name: str) -> str:
        """Help for one group, for one flag, or for `all`.

        Raises:
            ConfigError: no group or flag of that name; the message lists the groups.
        """
        if name == "all":
            return "\n".join([self._section("options", self.own._group_actions), *(self._group(group) for group in self._sections)])
        group = name.lower().removesuffix("config")
        if group in self._sections:
            return self._group(group)
        action = self._parser._option_string_actions.get(flag_name(field_name(name)))
        if action is not None:
            return self._section(action.container.title if hasattr(action, "container") else "option", [action])  # type: ignore[attr-defined]
        raise ConfigError(f"no group or flag {name!r}; groups: {', '.join([*self._sections, 'all'])}")

    def _group(self, group: str) -> str:
        purpose = self._purpose.get(group)
        return self._section(f"{group}: {purpose}" if purpose else group, self._sections[group]._group_actions)

    def _section(self, title: str, actions: Sequence[argparse.Action]) -> str:
        formatter = argparse.HelpFormatter(prog="", max_help_position=32)
        formatter.start_section(title.rstrip(":."))
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()


def _shown(option: Option) -> str:
    """A flag as the compact list shows it: the spelling that changes the default."""
    return "--no-" + option.flag.removeprefix("--") if option.kind == "bool" and option.default is True else option.flag


def _add_flag(section: argparse._ArgumentGroup, option: Option) -> None:
    """Give one option to argparse. Absent flags leave no trace, so that a YAML file or the dataclass decides."""
    names = ([option.alias] if option.alias else []) + [option.flag]
    help_text = option.help.replace("%", "%%")
    if option.default not in (None, "", (), []):
        shown = str(option.default).lower() if option.kind == "bool" else option.default
        help_text += f" [{shown}]"
    shared: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": help_text}
    if option.kind == "bool":
        section.add_argument(*names, action=argparse.BooleanOptionalAction, **shared)
        return
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else _METAVARS[option.kind]
    shared |= {"type": _reader(option), "metavar": metavar}
    if option.kind == "list":
        section.add_argument(*names, action=_Extend, nargs="+", **shared)
    else:
        section.add_argument(*names, **shared)


def _word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _reader(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return text if option.kind == "list" else option.read(text)
        except ValueError as error:
            # The only kind of error whose message argparse passes on.
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "json": "JSON", "list": "TEXT"}


class _Extend(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))
