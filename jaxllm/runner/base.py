"""The part of `core_types.Executor` that is the same for every runner: background compilation, and traces of host and devices."""

from __future__ import annotations

import jax

from jaxllm.runner.compile import BucketPrograms, CompileGuard


class Runner:
    """A subclass keeps its parameters, its programs by bucket and the guard over their compilation."""

    guard: CompileGuard
    _ladders: tuple[BucketPrograms, ...]
    _params: list[jax.Array]
    _profiling = False

    def compile_in_background(self) -> None:
        """Compile the other buckets while requests are served."""
        for programs in self._ladders:
            programs.start_background()

    def wait_until_compiled(self) -> None:
        """Return when all buckets are ready; benchmarks start then."""
        for programs in self._ladders:
            programs.wait()

    @property
    def num_compilations(self) -> int:
        return self.guard.total

    def start_profile(self, directory: str) -> bool:
        """Record a trace into `directory`; False where one is being recorded already. One trace at a time."""
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

    def shutdown(self) -> None:
        """Stop compiling and drop the arrays."""
        for programs in self._ladders:
            programs.close()
        self._params = []
