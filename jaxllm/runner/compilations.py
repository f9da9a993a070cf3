"""How many programs this process has compiled or taken out of the compilation cache: after warm-up the number must stand still."""

from __future__ import annotations

import threading

import jax.monitoring

# jax reports it once a program, around the look-up in the persistent cache and the compilation.
_EVENT = "/jax/core/compile/backend_compile_duration"


class _Counter:
    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            with self._lock:
                self.count += 1


_counter = _Counter()


def num_compilations() -> int:
    """Programs that were compiled since this module was imported, whichever thread did it."""
    return _counter.count
