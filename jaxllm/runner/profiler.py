"""Traces of host and devices."""

from __future__ import annotations

import jax


class Profiler:
    """One trace at a time; the part of `core_types.Executor` that is the same for every runner."""

    _profiling = False

    def start_profile(self, directory: str) -> bool:
        """Record a trace into `directory`; False where one is being recorded already."""
        if self._profiling:
            return False
        jax.profiler.start_trace(directory)
        self._profiling = True
        return True

    def stop_profile(self) -> bool:
        """Write the trace; False where none is being recorded."""
        if not self._profiling:
            return False
        self._profiling = False
        jax.profiler.stop_trace()
        return True
