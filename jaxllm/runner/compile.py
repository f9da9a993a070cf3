"""Compiled programs: the persistent cache, the buckets that become ready one after the other, and the guard against recompilation."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxllm.config import CompileConfig
from jaxllm.runner.buckets import Bucket, smallest_fit

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def enable_persistent_cache(config: CompileConfig) -> Path | None:
    """Keep compiled programs on disk. jax keys them by program, compiler version, device and flags. Returns the folder in use."""
    if not config.compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    root = os.environ.get("JAXLLM_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxllm")
    folder = Path(config.compilation_cache_dir or os.path.join(root, "xla")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


class CompileGuard:
    """Counts the process' compilations, and reports those that come up in a step unannounced: each one is a bug.

    Only the threads that run steps are watched, so other engines and the user's own jax code may compile what they like.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self.total = 0
        self.unexpected = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A step runs inside: this thread should not compile."""
        with self._set(watched=True):
            yield

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Compilations of this thread are wanted inside."""
        with self._set(watched=False):
            yield

    @contextlib.contextmanager
    def _set(self, *, watched: bool) -> Iterator[None]:
        before = getattr(self._thread, "watched", False)
        self._thread.watched = watched
        try:
            yield
        finally:
            self._thread.watched = before

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event != _COMPILE_EVENT:
            return
        self.total += 1
        if getattr(self._thread, "watched", False):
            self.unexpected += 1
            logger.warning("a program was compiled (%.2f s) outside of the ladder; this costs latency and should not happen", duration_secs)


class BucketPrograms:
    """The step of each bucket. Serving may start when one that fits everything is ready; the others follow in the background.

    Args:
        buckets: the ladder; the last one fits every step.
        build: compiles one bucket; called in any thread.
        lazy: compile a bucket when it is first the best fit, in the thread that needs it.
    """

    def __init__(self, buckets: Sequence[Bucket], build: Callable[[Bucket], Any], guard: CompileGuard, *, lazy: bool):
        self.buckets = tuple(buckets)
        self._build = build
        self._guard = guard
        self._lazy = lazy
        self._ready: dict[Bucket, Any] = {}
        self._closing = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def compile(self, bucket: Bucket) -> Any:
        """The program of `bucket`, compiled now if it is not ready."""
        if bucket not in self._ready and not self._closing.is_set():
            with self._guard.expected():
                program = self._build(bucket)
            self._ready[bucket] = program
        return self._ready.get(bucket)

    def compile_first(self) -> int:
        """Compile the bucket that takes every step, and beside it the one for a few decodes, which would crawl in the first.

        Returns the bytes of temporaries of the largest step. Lazy programs compile nothing here and give 0.
        """
        if self._lazy:
            return 0
        decode = next((b for b in self.buckets if b.decode_only and b.num_rows > 1), self.buckets[0])
        with ThreadPoolExecutor(2, thread_name_prefix="compile") as pool:
            small = pool.submit(self.compile, decode)
            largest = self.compile(self.buckets[-1])
            small.result()
        memory = largest.memory_analysis()
        # What it returns beside the state that it was given.
        returned = getattr(memory, "output_size_in_bytes", 0) - getattr(memory, "alias_size_in_bytes", 0)
        return int(getattr(memory, "temp_size_in_bytes", 0) + max(returned, 0))

    def start_background(self) -> None:
        """Compile what is missing in other threads, small buckets first. A no-op for lazy programs."""
        missing = sorted((b for b in self.buckets if b not in self._ready), key=lambda b: b.num_tokens)
        if self._lazy or not missing:
            return
        # Compilation is parallel in itself; two at a time hide its serial parts without starving the steps that already run.
        self._pool = ThreadPoolExecutor(min(2, os.cpu_count() or 1), thread_name_prefix="compile")
        self._pending = [self._pool.submit(self._compile_and_log, bucket) for bucket in missing]

    def _compile_and_log(self, bucket: Bucket) -> None:
        try:
            self.compile(bucket)
        except Exception:
            logger.exception("compiling %s failed; steps go on in larger buckets", bucket)

    def wait(self) -> None:
        """Return when every bucket is ready (or has failed)."""
        for future in self._pending:
            future.result()

    def get(self, num_tokens: int, num_rows: int) -> tuple[Bucket, Any]:
        """The cheapest ready program that takes the step.

        Raises:
            ValueError: no bucket of the ladder fits: the scheduler broke its own limits.
        """
        if not self._lazy:
            bucket = smallest_fit(list(self._ready), num_tokens, num_rows)
            if bucket is not None:
                return bucket, self._ready[bucket]
        bucket = smallest_fit(self.buckets, num_tokens, num_rows)
        if bucket is None:
            raise ValueError(f"no bucket takes {num_tokens} tokens in {num_rows} rows; the largest is {self.buckets[-1]}")
        return bucket, self.compile(bucket)

    def close(self) -> None:
        """Stop compiling; a compilation that runs is waited for."""
        self._closing.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
