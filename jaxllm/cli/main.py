"""The `jaxllm` command. Subcommands load when they are called, so that `--help` costs nothing."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxllm.errors import ConfigError, JaxllmError

# Subcommand -> (module with `main(argv) -> exit status`, what it does).
COMMANDS = {
    "serve": ("jaxllm.cli.serve", "Serve a model over HTTP with an OpenAI-compatible API"),
    "chat": ("jaxllm.cli.chat", "Chat in the terminal, with a running server or with a model loaded here"),
    "complete": ("jaxllm.cli.complete", "Continue text in the terminal, with a running server or with a model loaded here"),
    "run-batch": ("jaxllm.cli.run_batch", "Answer a file of requests in OpenAI's batch format"),
    "plan": ("jaxllm.cli.plan", "Plan an engine for accelerators that are not there: what fits, and how fast it can be"),
    "bench": ("jaxllm.cli.bench.main", "Measure latency, throughput, serving and start-up"),
    "collect-env": ("jaxllm.cli.collect_env", "Print versions, devices and memory, for a bug report"),
}

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxllm ARGV...`; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-V"], ["-v"], ["--version"]):
        from jaxllm import __version__

        print(__version__)
        return 0
    name = f"jaxllm {words[0]}" if words and words[0] in COMMANDS else "jaxllm"
    purpose = "An inference engine for large language models in JAX. `jaxllm --version` prints the version."
    return run_command(name, partial(dispatch, "jaxllm", purpose, COMMANDS), words)


def dispatch(program: str, purpose: str, commands: Mapping[str, tuple[str, str]], words: Sequence[str]) -> int:
    """Call the command that `words` begin with, or print the help that lists them. Raises ConfigError where there is no such command."""
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, commands))
        lines = [f"usage: {program} COMMAND [options]", "", purpose, "", "commands:"]
        lines += [f"  {name:<{width}}  {summary}" for name, (_, summary) in commands.items()]
        print("\n".join([*lines, "", f"`{program} COMMAND --help` explains a command."]))
        return 0 if words else USAGE_ERROR
    command, *rest = words
    if command not in commands:
        near = difflib.get_close_matches(command, commands, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(commands)}"
        raise ConfigError(f"no command {command!r}; {hint}")
    status: int = importlib.import_module(commands[command][0]).main(rest)
    return status


def run_command(name: str, command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Call a subcommand and turn the errors that we raise on purpose into one line."""
    try:
        return command(argv)
    except JaxllmError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away (`jaxllm ... | head`): nothing to tell anyone.
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
