"""`jaxllm run-batch`: answer a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from jaxllm.cli.parser import CommandParser, at_least
from jaxllm.cli.serve import SERVER_GROUPS, configs
from jaxllm.config import CONFIG_GROUPS
from jaxllm.errors import ConfigError

# Of a server's options those that concern what is answered; the others speak of listening.
_LISTENING = ("host", "port", "uds", "root_path", "api_key", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "shutdown_timeout")


def build_parser() -> CommandParser:
    parser = CommandParser(
        "run-batch",
        "Answer a file of requests in OpenAI's batch format: one JSON object {custom_id, method, url, body} a line.\n"
        "The answers go to the output file as they come. A run that was stopped goes on where the output file ends.",
        groups={**SERVER_GROUPS, **CONFIG_GROUPS},
        positional_model=True,
    )
    parser.own.add_argument("-i", "--input-file", metavar="FILE", help="Requests, one a line")
    parser.own.add_argument("-o", "--output-file", metavar="FILE", help="Answers, one a line; continued where it exists")
    parser.own.add_argument("--max-inflight", type=at_least(1), metavar="N", help="Most requests at once [twice --max-num-seqs]")
    parser.own.add_argument("--no-progress", action="store_true", help="Show no progress bar")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    for flag, value in (("-i", own.input_file), ("-o", own.output_file)):
        if value is None:
            raise ConfigError(f"{flag} FILE is missing; see `jaxllm run-batch --help`")
    if not os.path.isfile(own.input_file):
        raise ConfigError(f"-i {own.input_file!r} is not a file")
    for name in _LISTENING:
        if name in args.options:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to a server; run-batch opens no port")
    engine_config, server_config = configs(args)

    import uvloop

    from jaxllm.logging import configure_logging
    from jaxllm.server.batch import BatchFiles, run_batch

    configure_logging()

    with BatchFiles(own.input_file, own.output_file) as files:
        if files.num_done == files.num_lines:
            print(f"all {files.num_lines} requests are answered already", file=sys.stderr)
            return 0
        run = run_batch(engine_config, server_config, files, max_inflight=own.max_inflight, progress=not own.no_progress)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            counts = runner.run(run)
    print(f"{counts.succeeded} answered, {counts.failed} failed, {files.num_done} were answered before", file=sys.stderr)
    return 0
