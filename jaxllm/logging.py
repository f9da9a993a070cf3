"""Log lines on the terminal, for programs of ours; as a library jaxllm leaves logging to its user."""

from __future__ import annotations

import logging


def configure_logging(level: int = logging.INFO) -> None:
    """Show log lines of ours from `level` on and warnings of others, unless the program has arranged its logging already."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    own = logging.getLogger("jaxllm")
    if own.level == logging.NOTSET:
        own.setLevel(level)


def current_level() -> int:
    """The level from which log lines of ours are shown here."""
    return logging.getLogger("jaxllm").getEffectiveLevel()
