"""The two files of a batch: requests, and the answers that are there already.

An answer's id holds the number and a checksum of its request's line. So a run that was killed can go on, whatever the requests call
themselves, and a file of answers to other requests is noticed. Memory: five bytes a line.
"""

from __future__ import annotations

import fcntl
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from types import TracebackType

from jaxllm.errors import ConfigError, JaxllmError

_ID = re.compile(rb'\{"id":"batch_req_(\d+)_([0-9a-f]{8})"')


def answer_id(number: int, line: bytes) -> str:
    """The id of the answer to line `number`, counted from 1."""
    return f"batch_req_{number}_{zlib.crc32(line):08x}"


class BatchFiles:
    """Opens both files, and tells which lines are answered. One process at a time holds the answers.

    Raises:
        ConfigError: a file cannot be opened, or the answers belong to other requests.
    """

    def __init__(self, input_path: str, output_path: str):
        if os.path.exists(output_path) and os.path.samefile(input_path, output_path):
            raise ConfigError(f"the answers cannot go to the file of the requests, {input_path!r}")
        try:
            self._input = open(input_path, "rb")  # noqa: SIM115
            self._output = os.open(output_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"{error.filename!r} cannot be opened: {(error.strerror or str(error)).lower()}") from None
        try:
            self._path = output_path
            self._lock(output_path)
            self.num_lines = sum(1 for line in self._input if line.strip())
            self._checksums = array("I")
            self._is_done = bytearray()
            if os.path.isfile(output_path):
                self._read_answers(output_path)
            self.num_done = sum(self._is_done)
            self._check(output_path)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def open_lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of every line that has no answer yet."""
        self._input.seek(0)
        for number, line in enumerate(self._input, 1):
            if line.strip() and not self._answered(number):
                yield number, line

    def write(self, answer: bytes) -> None:
        """Append one answer, a line of JSON without its end. Raises JaxllmError, where the disk is full for instance."""
        rest = memoryview(answer + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._output, rest) :]
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise JaxllmError(f"{self._path!r} cannot be written: {reason}; once it can, the same command goes on") from None

    def _answered(self, number: int) -> bool:
        return number <= len(self._is_done) and bool(self._is_done[number - 1])

    def _lock(self, path: str) -> None:
        try:
            fcntl.flock(self._output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path!r} is being written by another run; choose another file, or end that run") from None

    def _read_answers(self, path: str) -> None:
        """Note what is answered, and cut off an answer that a killed run left unfinished."""
        whole = 0
        with open(path, "rb") as answers:
            for line in answers:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                if line.strip():
                    self._note(line, path)
        if whole < os.fstat(self._output).st_size:
            os.ftruncate(self._output, whole)

    def _note(self, line: bytes, path: str) -> None:
        found = _ID.match(line)
        if found is None:
            raise ConfigError(f"{path!r} holds lines that are no answers of a batch; choose another file")
        number = int(found[1])
        if not 1 <= number <= _LONGEST_BATCH:
            raise ConfigError(f"{path!r} answers line {number}; a batch has at most {_LONGEST_BATCH} lines")
        missing = number - len(self._is_done)
        if missing > 0:
            self._is_done.extend(bytes(missing))
            self._checksums.frombytes(bytes(self._checksums.itemsize * missing))
        self._is_done[number - 1] = 1
        self._checksums[number - 1] = int(found[2], 16)

    def _check(self, path: str) -> None:
        """Whether the answers belong to these requests."""
        self._input.seek(0)
        seen = 0
        for number, line in enumerate(self._input, 1):
            if number > len(self._is_done):
                break
            if self._answered(number):
                seen += 1
                if zlib.crc32(line) != self._checksums[number - 1]:
                    raise ConfigError(f"{path!r} answers another request than line {number} of the input; choose another file")
        if seen < self.num_done:
            raise ConfigError(f"{path!r} answers more lines than the input has; choose another file")

    def _close(self) -> None:
        self._input.close()
        os.close(self._output)


_LONGEST_BATCH = 1 << 28
