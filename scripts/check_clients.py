"""Drive official clients against a server of ours: does each of them work unchanged?

    python scripts/check_clients.py [--directory DIR] [NAME ...]

The programs in scripts/clients are the clients' side. Each runs in an environment of its own under DIR (by default a folder in the user's
cache), made on demand from the package index, and exits with 0 where everything was as it should be. The server runs a tiny model that
says one sentence, and what grammars make of it where calls or JSON must come.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.checkpoints import write_scripted_model
from tests.server.served import Served

CLIENTS = Path(__file__).resolve().parent / "clients"
# Program -> what it needs of the package index.
PACKAGES = {
    "openai_python.py": ["openai"],
    "openai_node.mjs": ["openai"],
    "anthropic_python.py": ["anthropic"],
    "langchain_chat.py": ["langchain-openai"],
    "instructor_openai.py": ["instructor"],
    "pydantic_ai_agent.py": ["pydantic-ai-slim[openai]"],
    "openai_agents.py": ["openai-agents"],
    "litellm_completion.py": ["litellm"],
    "llm_command.py": ["llm"],
}
PROMPT = "Go\n"
SENTENCE = "Hello from a very small model."


def environment(directory: Path, program: str) -> list[str]:
    """The command that runs a program, in an environment that has what it needs."""
    place = directory / program.partition(".")[0]
    if program.endswith(".mjs"):
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "node_modules").is_dir():
            subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", *PACKAGES[program]], cwd=place, check=True, stdout=subprocess.DEVNULL
            )
        # Packages are looked for beside the program.
        shutil.copy(CLIENTS / program, place / program)
        return ["node", str(place / program)]
    python = place / "bin" / "python"
    if not (place / "ready").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *PACKAGES[program]], check=True)
        (place / "ready").touch()
    return [str(python), str(CLIENTS / program)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(name.partition('.')[0] for name in PACKAGES)}")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache" / "jaxllm-clients")
    args = parser.parse_args()
    chosen = [program for program in PACKAGES if not args.names or program.partition(".")[0] in args.names]
    commands = {}
    for program in chosen:
        if program.endswith(".mjs") and not (shutil.which("node") and shutil.which("npm")):
            print(f"{program:24} skipped: there is no node here")
            continue
        commands[program] = environment(args.directory, program)
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(f"{{{{ {PROMPT!r} }}}}")
        model = write_scripted_model(Path(folder), SENTENCE, start=len(PROMPT), max_positions=1024)
        flags = ["--enforce-eager", "--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        server = Served(model, *flags, max_model_len=1024)
        try:
            failed = [program for program, command in commands.items() if not _passes(program, command, server.url)]
        finally:
            server.kill()
    return 1 if failed else 0


def _passes(program: str, command: list[str], url: str) -> bool:
    start = time.perf_counter()
    env = {**os.environ, "URL": url, "SENTENCE": SENTENCE, "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "PYTHONPATH": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    print(f"{program:24} {'passes' if done.returncode == 0 else 'FAILS'} in {time.perf_counter() - start:.1f} s", flush=True)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:])
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
