"""`python -m tests.server.fake_server PORT_FILE OPTIONS_JSON`: `run_server` around a fake engine, for tests of a whole process.

OPTIONS_JSON holds ServerConfig options, and of the engine: `load_seconds`, `load_error`, `forever` (requests never end).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import types
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxllmError, ModelLoadError
from jaxllm.server import app, lifecycle
from jaxllm.server.config import ServerConfig
from tests.server.fake_engine import FakeEngine, load_test_tokenizer


def main() -> int:
    port_file, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    load_seconds, load_error, forever = options.pop("load_seconds", 0), options.pop("load_error", None), options.pop("forever", False)

    class AsyncLLM(FakeEngine):
        def __init__(self, *, config: EngineConfig, **more: object):
            time.sleep(load_seconds)
            if load_error:
                raise ModelLoadError(load_error)
            super().__init__(load_test_tokenizer(Path(tempfile.mkdtemp())))
            if forever:
                self.on_token = lambda request, position: asyncio.sleep(3600 if position else 0)

        def shutdown(self) -> None:
            print("engine shut down", flush=True)

    module = types.ModuleType("jaxllm.async_llm")
    module.AsyncLLM = AsyncLLM
    sys.modules["jaxllm.async_llm"] = module
    bind = lifecycle.bind

    def bind_and_tell(config: ServerConfig):
        listener = bind(config)
        port_file.write_text(lifecycle.url_of(config, listener))
        return listener

    app.bind = bind_and_tell
    try:
        app.run_server(EngineConfig(), ServerConfig(**options))
    except JaxllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
