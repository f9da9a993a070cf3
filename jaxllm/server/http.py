"""uvicorn's HTTP/1.1 with a bound on the head of a request, and without upgrades."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 20


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Request line and headers may hold `MAX_HEAD_BYTES` (more or less: what comes together is counted together). An offer to upgrade is
    passed over: Java's client makes one with its first request, and the parser would take the request's body for the other protocol.
    """

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                self.send_400_response("This server is no proxy.")
                return
            lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            # What was parsed was not told to anybody: see below.
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(b"\r\n".join([*lines, b"", b""]) + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The request line and headers may hold {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        if not self.parser.should_upgrade():
            super().on_message_complete()
