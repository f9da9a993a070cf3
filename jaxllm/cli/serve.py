"""`jaxllm serve [MODEL]`: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cli.parser import CommandParser
from jaxllm.config import CONFIG_GROUPS, EngineConfig
from jaxllm.server.config import ServerConfig

SERVER_GROUPS = {"server": ServerConfig}


def build_parser() -> CommandParser:
    return CommandParser(
        "serve",
        "Serve a model over HTTP with an OpenAI-compatible API. MODEL is a Hugging Face directory, a hub id or a .gguf file;\n"
        "nothing serves the embedded default model.",
        groups={**CONFIG_GROUPS, **SERVER_GROUPS},
        positional_model=True,
    )


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    engine_config = EngineConfig.from_options(**args.only(CONFIG_GROUPS))
    server_config = ServerConfig(**args.only(SERVER_GROUPS))

    # The server brings FastAPI and uvicorn: not before the command line is known to be right.
    from jaxllm.server.app import run_server

    run_server(engine_config, server_config)
    return 0
