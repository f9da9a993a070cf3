"""`jaxllm serve [MODEL]`: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cli.parser import Arguments, CommandParser
from jaxllm.config import CONFIG_GROUPS, EngineConfig
from jaxllm.server.config import ServerConfig

SERVER_GROUPS: dict[str, type] = {"server": ServerConfig}


def build_parser() -> CommandParser:
    return CommandParser(
        "serve",
        "Serve a model over HTTP with an OpenAI-compatible API. MODEL is a Hugging Face directory, a hub id or a .gguf file;\n"
        "without it the embedded default model is served.",
        groups={**SERVER_GROUPS, **CONFIG_GROUPS},
        positional_model=True,
    )


def configs(args: Arguments) -> tuple[EngineConfig, ServerConfig]:
    return EngineConfig.from_options(**args.only(CONFIG_GROUPS)), ServerConfig(**args.only(SERVER_GROUPS))


def main(argv: Sequence[str]) -> int:
    engine_config, server_config = configs(build_parser().parse(argv))

    # The server brings FastAPI and uvicorn: not before the command line is known to be right.
    from jaxllm.server.app import run_server

    run_server(engine_config, server_config)
    return 0
