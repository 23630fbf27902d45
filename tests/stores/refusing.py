"""An HTTP proxy before an S3 server that answers some requests itself, with errors of S3."""

from __future__ import annotations

import http.client
import http.server
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PRECONDITION_FAILED = 412


@dataclass
class Fault:
    """What the proxy answers in place of the server.

    Parameters
    ----------
    status, code : int, str
        The HTTP status, and the error code of S3.
    method, path : str
        Patterns of the requests that are refused.
    count : int
        How many requests are refused.
    seconds : float
        For how long, from now on.
    key : str
        Only requests that are signed with this access key.
    stored : bool
        Whether the server gets the request all the same, as if only its answer were lost.
    """

    status: int
    code: str
    method: str = ".*"
    path: str = ".*"
    count: int = 1 << 30
    seconds: float = 1e9
    key: str = ""
    stored: bool = False
    begun: float = field(default_factory=time.monotonic)
    seen: int = 0

    def takes(self, method: str, path: str, authorization: str) -> bool:
        """Whether a request is refused; if so, it is counted."""
        if self.seen >= self.count or time.monotonic() > self.begun + self.seconds:
            return False
        if self.key and f"Credential={self.key}/" not in authorization:
            return False
        found = bool(re.fullmatch(self.method, method) and re.search(self.path, path))
        self.seen += found
        return found


class Refusing:
    """The proxy; `fault` may be set at any time."""

    def __init__(self, server: int) -> None:
        self.fault: Fault | None = None
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and access key of each request."""
        self._serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler(server))
        self.port = self._serving.server_port
        threading.Thread(target=self._serving.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Take no more requests."""
        self._serving.shutdown()
        self._serving.server_close()

    def _handler(self, server: int) -> Callable[..., http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                authorization = self.headers.get("Authorization") or ""
                key = re.search("Credential=(.*?)/", authorization)
                proxy.requests.append((self.command, self.path, key[1] if key else ""))
                fault = proxy.fault
                refused = fault is not None and fault.takes(self.command, self.path, authorization)
                if refused and fault is not None and not fault.stored:
                    self.say(
                        fault.status, f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode(), {}
                    )
                    return
                connection = http.client.HTTPConnection("127.0.0.1", server, timeout=30)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                connection.request(self.command, self.path, body, headers)
                there = connection.getresponse()
                data = there.read()
                connection.close()
                if refused:  # the answer is lost
                    self.close_connection = True
                    self.connection.close()
                    return
                left = ("content-length", "transfer-encoding", "connection", "date", "server")
                told = {name: value for name, value in there.getheaders() if name.lower() not in left}
                length = there.getheader("Content-Length") if self.command == "HEAD" else None
                self.say(there.status, data, told, length)

            def say(self, status: int, data: bytes, headers: dict[str, str], length: str | None = None) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - the names that http.server looks up

        return Handler
