"""Log lines on the terminal, for programs of ours; as a library jaxllm leaves logging to its user."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message and, where there is one, exception."""

    converter = staticmethod(time.gmtime)  # type: ignore[assignment]

    def format(self, record: logging.LogRecord) -> str:
        when = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"
        line = {"time": when, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(level: int = logging.INFO, log_format: LogFormat = "text") -> None:
    """Show log lines of ours from `level` on and warnings of others, unless the program has arranged its logging already."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        if log_format == "json":
            for handler in root.handlers:
                handler.setFormatter(JsonFormatter())
    own = logging.getLogger("jaxllm")
    if own.level == logging.NOTSET:
        own.setLevel(level)


def current_level() -> int:
    """The level from which log lines of ours are shown here."""
    return logging.getLogger("jaxllm").getEffectiveLevel()


def current_format() -> LogFormat:
    """How log lines are written here."""
    return "json" if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers) else "text"
