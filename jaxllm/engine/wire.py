"""What crosses between the front and the engine process: frames of a kind and msgpack."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm import errors
from jaxllm.core_types import EngineInfo, EngineOutputs, EngineRequest
from jaxllm.errors import EngineDeadError, JaxllmError
from jaxllm.logging import LogFormat


class ToEngine(bytes, enum.Enum):
    """First frame of a message to the engine; the other frames are its arguments."""

    HELLO = b"hello"  # the first message: both sockets are connected once it has been answered
    ADD = b"add"  # EngineRequest, one frame each
    ABORT = b"abort"  # list of request ids
    CALL = b"call"  # Call
    STOP = b"stop"


class FromEngine(bytes, enum.Enum):
    """First frame of a message from the engine."""

    READY = b"ready"  # EngineInfo
    FAILED = b"failed"  # Failure: the engine could not start, or had to stop
    OUTPUTS = b"outputs"  # EngineOutputs of one step
    REPLY = b"reply"  # Reply to a Call


class StartMessage(msgspec.Struct, kw_only=True):
    """What the child reads from its standard input before anything else. The pipe then stays open as long as the parent lives."""

    factory: str
    config: str
    sys_path: list[str]
    socket_dir: str
    to_engine: str
    from_engine: str
    # How the child shows its log lines, and from which level: as the parent does.
    log_level: int
    log_format: LogFormat = "text"


class Call(msgspec.Struct, array_like=True):
    """A method of the core to be run between two steps."""

    call_id: int
    name: str
    args: list[Any] = []


class Reply(msgspec.Struct, array_like=True):
    call_id: int
    value: Any
    error: str | None = None


class Failure(msgspec.Struct, array_like=True):
    """An exception as one line: the name of its jaxllm type (or empty) and the message."""

    kind: str
    message: str


class _RequestName(msgspec.Struct):
    request_id: str


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(EngineRequest).decode
decode_ids = msgspec.msgpack.Decoder(list[str]).decode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_outputs = msgspec.msgpack.Decoder(EngineOutputs).decode
decode_info = msgspec.msgpack.Decoder(EngineInfo).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def encode_requests(requests: Sequence[EngineRequest]) -> list[bytes]:
    return [ToEngine.ADD, *map(encode, requests)]


def decode_request_id(frame: bytes) -> str:
    """The id alone, of a request that could not be decoded."""
    return msgspec.msgpack.decode(frame, type=_RequestName).request_id


def encode_failure(error: BaseException) -> bytes:
    """Only the root cause: our own errors explain themselves, others are followed to where they come from."""
    if isinstance(error, JaxllmError):
        return encode(Failure(type(error).__name__, str(error)))
    while error.__cause__ is not None:
        error = error.__cause__
    return encode(Failure("", f"{type(error).__name__}: {error}"))


def decode_failure(frame: bytes) -> JaxllmError:
    """The failure as the exception that the front raises."""
    failure = msgspec.msgpack.decode(frame, type=Failure)
    kind = getattr(errors, failure.kind, EngineDeadError) if failure.kind else EngineDeadError
    return kind(failure.message)
