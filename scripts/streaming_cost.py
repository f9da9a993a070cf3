"""What a streamed token costs the front process: CPU microseconds from the engine's message to the socket.

    python scripts/streaming_cost.py [--streams N] [--tokens N] [--profile]

The engine, in its own process as ever, says the same words without a model; the client is a process that only reads. Counted is the CPU
time of this process alone, which does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.server.app import create_app
from jaxllm.server.config import ServerConfig
from jaxllm.server.lifecycle import _Server, _uvicorn_config, bind
from jaxllm.server.state import ServerState
from tests.checkpoints import tiny_config, write_model

# Reads N streams to their end: raw sockets, so that it keeps up.
CLIENT = """
import selectors, socket, sys
port, streams, path, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].encode()
head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
head += f"Content-Length: {len(body)}\\r\\nConnection: close\\r\\n\\r\\n"
chosen = selectors.DefaultSelector()
for _ in range(streams):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + body)
    chosen.register(connection, selectors.EVENT_READ)
while streams:
    for key, _ in chosen.select():
        if not key.fileobj.recv(1 << 20):
            chosen.unregister(key.fileobj)
            streams -= 1
"""


async def measure(args: argparse.Namespace, model: str) -> None:
    options = ServerConfig(port=0, host="127.0.0.1", disable_uvicorn_access_log=True)
    listener = bind(options)
    state = ServerState(options)
    server = _Server(_uvicorn_config(options, create_app(state)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    config = EngineConfig.from_options(model=model, max_num_seqs=args.streams, max_model_len=args.tokens + 64)
    async with AsyncLLM(config=config, engine_factory="tests.scripted_engine:start_hello") as engine:
        state.serve(engine)
        port = listener.getsockname()[1]
        for path, extra in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            body = {"stream": True, "max_tokens": args.tokens, "ignore_eos": True, "chat_template": None, **extra}
            for tokens in (1, args.tokens):
                command = [sys.executable, "-c", CLIENT, str(port), str(args.streams), path, json.dumps({**body, "max_tokens": tokens})]
                profile = cProfile.Profile() if args.profile and tokens > 1 else None
                before = time.process_time()
                client = subprocess.Popen(command)
                if profile is not None:
                    profile.enable()
                while client.poll() is None:
                    await asyncio.sleep(0.05)
                if profile is not None:
                    profile.disable()
                    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
                spent = time.process_time() - before
                if tokens > 1:
                    cost = 1e6 * spent / (args.streams * tokens)
                    print(f"{path}: {args.streams} streams of {tokens} tokens, {spent:.2f} s of CPU, {cost:.1f} us a token", flush=True)
    server.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes (which makes it longer)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), tiny_config("LlamaForCausalLM", vocab_size=512))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(args, folder))


if __name__ == "__main__":
    main()
