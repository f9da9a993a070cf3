"""The parent's side of the engine process: starting it, talking to it, noticing its death, ending it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo, EngineOutputs
from jaxllm.engine import wire
from jaxllm.errors import EngineDeadError, JaxllmError
from jaxllm.logging import current_format, current_level

# How often the reader looks whether the engine process is still there while it sends nothing.
_LIVENESS_MS = 250
# How long the engine may take to end in order (its step in progress included) before it is killed.
_STOP_SECONDS = 5.0
# Unix socket paths are limited to about 107 bytes.
_LONGEST_SOCKET_DIR = 80


class Inbox:
    """Outputs on their way from the reader thread to the one consumer, which waits in an event loop."""

    def __init__(self) -> None:
        self._items: deque[EngineOutputs] = deque()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.dead: EngineDeadError | None = None

    def put(self, outputs: EngineOutputs) -> None:
        with self._lock:
            self._items.append(outputs)
            self._wake()

    def close(self, error: EngineDeadError) -> None:
        """No more outputs will come: those that did are still given out, then `error` is raised."""
        with self._lock:
            if self.dead is None:
                self.dead = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            loop, event = self._waiter
            self._waiter = None
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(event.set)

    async def get(self) -> EngineOutputs:
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if self.dead is not None:
                    raise self.dead
                event = asyncio.Event()
                self._waiter = (asyncio.get_running_loop(), event)
            await event.wait()


class EngineProcess:
    """One engine in a process of its own.

    A thread starts the process, reads its messages and notices its end. `ready` brings the `EngineInfo`, or the one error that kept
    the engine from starting; outputs and the engine's death go to `inbox`.

    Args:
        factory: "module:function" that the child imports and calls with the config; it returns (EngineCore, EngineInfo).
        config: the engine's options.
    """

    def __init__(self, factory: str, config: EngineConfig):
        self.inbox = Inbox()
        self.ready: Future[EngineInfo] = Future()
        # Running futures cannot be cancelled: one waiter that gives up does not take the answer from the others.
        self.ready.set_running_or_notify_cancel()
        self._factory, self._config = factory, config
        self._dir = _socket_dir()
        self._addresses = [f"ipc://{self._dir}/{name}" for name in ("to", "from")]
        self._context = zmq.Context()
        self._to_engine = self._socket(zmq.PUSH, self._addresses[0])
        self._from_engine = self._socket(zmq.PULL, self._addresses[1])
        # ZMQ sockets belong to one thread at a time.
        self._send_lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words: JaxllmError | None = None
        self._told_to_stop = False
        self._closing = False
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def send(self, frames: list[bytes]) -> None:
        """Send a message. Raises EngineDeadError where nobody would read it."""
        with self._send_lock:
            if self.inbox.dead is not None:
                raise self.inbox.dead
            try:
                # Queues are unbounded, so only a peer that is gone could make this wait.
                self._to_engine.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineDeadError("the engine process has ended") from None

    def call(self, name: str, *args: Any) -> Future[Any]:
        """Run a method of the core between two steps."""
        call_id, future = next(self._call_ids), Future[Any]()
        self._calls[call_id] = future
        try:
            self.send([wire.ToEngine.CALL, wire.encode(wire.Call(call_id, name, list(args)))])
        except EngineDeadError:
            self._calls.pop(call_id, None)
            raise
        return future

    def close(self) -> None:
        """End the process: in order where it runs well, by force where it does not answer. Safe to call again."""
        with self._close_lock:
            if not self._closing:
                # An engine that is still starting does not listen: it is killed.
                if self.ready.done() and self.ready.exception() is None:
                    with contextlib.suppress(JaxllmError, zmq.ZMQError):
                        self.send([wire.ToEngine.STOP])
                        self._told_to_stop = True
                self._closing = True
                self.inbox.close(EngineDeadError("the engine has been shut down"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------ the reader thread

    def _read(self) -> None:
        """Start the process and follow it to its end."""
        try:
            self._process = self._spawn()
            self._follow(self._process)
            if self._told_to_stop:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_SECONDS)
        except Exception as error:
            self._last_words = EngineDeadError(f"the engine process could not be run: {type(error).__name__}: {error}")
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._report_end()
            self._clean_up()

    def _spawn(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        command = f"import sys; sys.path.append({root!r}); from jaxllm.engine.child import main; main()"
        start = wire.StartMessage(
            factory=self._factory,
            config=self._config.to_json(),
            sys_path=[entry or os.getcwd() for entry in sys.path],
            socket_dir=self._dir,
            to_engine=self._addresses[0],
            from_engine=self._addresses[1],
            log_level=current_level(),
            log_format=current_format(),
        )
        # A process group of its own: Ctrl-C in the terminal is for the parent, which then stops the engine in order.
        process = subprocess.Popen([sys.executable, "-P", "-c", command], stdin=subprocess.PIPE, process_group=0)
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died already; following it says how
        return process

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Read messages until the process has ended or is told to end."""
        while not self._closing and process.poll() is None:
            if self._to_engine.poll(_LIVENESS_MS, zmq.POLLOUT):
                self.send([wire.ToEngine.HELLO])
                break
        while not self._closing:
            if self._from_engine.poll(_LIVENESS_MS):
                self._receive()
            elif process.poll() is not None:
                while self._from_engine.poll(0):
                    self._receive()
                return

    def _receive(self) -> None:
        kind, frame = self._from_engine.recv_multipart()
        if kind == wire.FromEngine.OUTPUTS:
            self.inbox.put(wire.decode_outputs(frame))
        elif kind == wire.FromEngine.READY:
            # Both sockets are connected and need their paths no more: nothing is left behind however this process ends.
            shutil.rmtree(self._dir, ignore_errors=True)
            self.ready.set_result(wire.decode_info(frame))
        elif kind == wire.FromEngine.REPLY:
            reply = wire.decode_reply(frame)
            future = self._calls.pop(reply.call_id)
            if future.set_running_or_notify_cancel():
                if reply.error is None:
                    future.set_result(reply.value)
                else:
                    future.set_exception(JaxllmError(reply.error))
        elif kind == wire.FromEngine.FAILED:
            self._last_words = wire.decode_failure(frame)
            self._report_end()

    def _report_end(self) -> None:
        """Tell everybody who waits, once."""
        cause = self._last_words
        if cause is None:
            code = self._process.poll() if self._process is not None else None
            cause = EngineDeadError(f"the engine process ended unexpectedly: {_describe_exit(code)}")
        if not self.ready.done():
            self.ready.set_exception(cause)
        dead = cause if isinstance(cause, EngineDeadError) else EngineDeadError(str(cause))
        with self._send_lock:
            self.inbox.close(dead)
        while self._calls:
            with contextlib.suppress(KeyError):
                _, future = self._calls.popitem()
                if future.set_running_or_notify_cancel():
                    future.set_exception(self.inbox.dead or dead)

    def _clean_up(self) -> None:
        with self._send_lock:
            self._context.destroy(linger=0)
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(address)
        return socket


def _socket_dir() -> str:
    path = tempfile.mkdtemp(prefix="jaxllm-")
    if len(path) > _LONGEST_SOCKET_DIR:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="jaxllm-", dir="/tmp")
    return path


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it could not be started"
    if code >= 0:
        return f"exit code {code}; its own messages are above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may be out of memory)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
