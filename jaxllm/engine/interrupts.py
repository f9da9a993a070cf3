"""Ctrl-C for an engine that steps in the main thread."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt for a Ctrl-C that came meanwhile.

    Raised in the middle of a step it would leave the engine half changed. A second Ctrl-C is raised at once.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    presses = 0

    def note(signum: int, frame: Any) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    def raise_interrupt() -> None:
        if presses:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
