import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    entry = {"model_id": "small", "model_name": "scripted", "api_base": os.environ["URL"] + "/v1", "supports_schema": True}
    (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([{**entry, "supports_tools": True}]))
    env = {**os.environ, "LLM_USER_PATH": folder}

    def llm(*args: str) -> str:
        command = [str(Path(sys.executable).with_name("llm")), "-m", "small", "-o", "temperature", "0", *args]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()

    assert llm("hi") == llm("--no-stream", "hi") == os.environ["SENTENCE"]
    assert '"sky"' in llm("--schema", '{"type": "object", "properties": {"sky": {"enum": ["sun"]}}, "required": ["sky"]}', "hi")
    assert llm("-T", "llm_version", "hi") == os.environ["SENTENCE"]
