"""The engine process: it is started by `process.EngineProcess`, serves one engine over two sockets and dies with its parent."""

from __future__ import annotations

# Only the standard library here: the watch over the parent must stand before anything that takes long is imported.
import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

    from jaxllm.engine.core import EngineCore
    from jaxllm.engine.wire import StartMessage

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the start message from standard input, start the engine, serve it until told to stop. Never returns."""
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group: the parent decides, and stops this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # Works also while this process is held up in native code. The parent starts us from a thread that lives as long as we may.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(1)
    lifeline = os.dup(0)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    watch = threading.Thread(target=_watch_parent, args=(lifeline, line), name="parent-watch", daemon=True)
    watch.start()
    code = _run(line)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: native threads (compilers) could hold up the interpreter's end.
    os._exit(code)


def _watch_parent(lifeline: int, line: bytes) -> None:
    """End at once when the parent's end of the pipe closes, whatever the reason."""
    while os.read(lifeline, 1):
        pass
    with contextlib.suppress(Exception):
        shutil.rmtree(_decode_start(line).socket_dir, ignore_errors=True)
    os._exit(1)


def _decode_start(line: bytes) -> StartMessage:
    import msgspec

    from jaxllm.engine.wire import StartMessage

    return msgspec.json.decode(line, type=StartMessage)


def _run(line: bytes) -> int:
    """Start and serve; returns the exit code."""
    start = _decode_start(line)
    sys.path[:] = start.sys_path
    import zmq

    from jaxllm.config import EngineConfig
    from jaxllm.engine import wire
    from jaxllm.logging import configure_logging

    configure_logging(start.log_level, start.log_format)

    context = zmq.Context()
    to_engine, from_engine = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((to_engine, start.to_engine), (from_engine, start.from_engine)):
        socket.set_hwm(0)
        socket.connect(address)
    try:
        # Once READY has come the parent removes the sockets' paths, so they must both be connected by then.
        to_engine.recv_multipart()
        module, _, function = start.factory.partition(":")
        core, info = getattr(importlib.import_module(module), function)(EngineConfig.from_json(start.config))
        from_engine.send_multipart([wire.FromEngine.READY, wire.encode(info)])
        _serve(core, to_engine, from_engine)
        core.shutdown()
        return 0
    except BaseException as error:
        import logging

        from jaxllm.errors import JaxllmError

        # Our own errors say what to do about them; of others the whole story belongs into the log, and one line to the parent.
        if not isinstance(error, JaxllmError):
            logging.getLogger(__name__).critical("the engine process stops", exc_info=True)
        from_engine.send_multipart([wire.FromEngine.FAILED, wire.encode_failure(error)])
        return 1
    finally:
        from_engine.close(linger=2000)
        to_engine.close(linger=0)
        context.term()


def _serve(core: EngineCore, to_engine: zmq.Socket, from_engine: zmq.Socket) -> None:
    """Steps while there is work, messages between steps. Returns on STOP; raises what the core raises."""
    import gc

    import zmq

    from jaxllm.engine import wire

    # What start-up left behind lives for ever: keep the collector from walking over it.
    gc.collect()
    gc.freeze()
    while True:
        if not core.has_work:
            to_engine.poll()
        while True:
            try:
                kind, *frames = to_engine.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if kind == wire.ToEngine.STOP:
                return
            if kind == wire.ToEngine.ADD:
                for frame in frames:
                    _add(core, frame)
            elif kind == wire.ToEngine.ABORT:
                core.abort_requests(wire.decode_ids(frames[0]))
            elif kind == wire.ToEngine.CALL:
                from_engine.send_multipart([wire.FromEngine.REPLY, wire.encode(_call(core, wire.decode_call(frames[0])))])
        if core.has_work:
            from_engine.send_multipart([wire.FromEngine.OUTPUTS, wire.encode(core.step())])


def _add(core: EngineCore, frame: bytes) -> None:
    from jaxllm.engine import wire
    from jaxllm.errors import InvalidRequestError

    try:
        request = wire.decode_request(frame)
    except Exception as error:
        core.refuse(wire.decode_request_id(frame), InvalidRequestError(f"the request could not be read: {error}"))
    else:
        core.add_request(request)


def _call(core: EngineCore, call: Any) -> Any:
    from jaxllm.engine.wire import Reply

    try:
        return Reply(call.call_id, getattr(core, call.name)(*call.args))
    except Exception as error:
        return Reply(call.call_id, None, f"{type(error).__name__}: {error}")
