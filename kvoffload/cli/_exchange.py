"""One HTTP exchange with an untrusted server, bounded in total time and in bytes."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.request
from typing import IO, Any

__all__ = ["Exchange"]


class Exchange:
    """A GET of an http or https URL, redirects included, that another thread can end.

    The timeout of a socket applies to each call: a server that sends one byte per second is never
    late. Therefore all sockets of the exchange are shut down once it is abandoned, be it in the
    handshake, the headers or the body. `seconds` covers the whole exchange.
    """

    def __init__(self, url: str, seconds: float, most_bytes: int) -> None:
        self.url = url
        self._late = f"no whole answer within {seconds:g} s"
        self._deadline = time.monotonic() + seconds
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []  # copies: TLS takes the descriptor of the first
        self._ended = False

    def read(self) -> bytes:
        """Return the body; ValueError if it is too long, else an OSError or HTTPException."""
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _Connecting(self),
            _Redirecting(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.UnknownHandler(),
        ):
            opener.add_handler(handler)
        try:
            with opener.open(self.url, timeout=self.seconds_left()) as answer:
                body = bytearray()
                while part := answer.read1(2**16):
                    body += part
                    if len(body) > self._most_bytes:
                        raise ValueError(f"more than {self._most_bytes:,} bytes")
                    self.seconds_left()
        finally:
            self.end()
        return bytes(body)

    def end(self) -> None:
        """Shut down all open sockets and open no more; any thread may call it. Repeatable."""
        with self._lock:
            self._ended = True
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def seconds_left(self) -> float:
        """Return the seconds until the deadline; TimeoutError if it has passed."""
        left = self._deadline - time.monotonic()
        if left <= 0 or self._ended:
            raise TimeoutError(self._late)
        return left

    def connect(
        self, address: tuple[str, int], _timeout: object = None, source: Any = None
    ) -> socket.socket:
        """Return a connection that ends with the exchange; called as `socket.create_connection`."""
        found = socket.create_connection(address, self.seconds_left(), source)
        with self._lock:
            if not self._ended:
                self._sockets.append(found.dup())
                return found
        found.close()
        raise TimeoutError(self._late)


class _Connecting(urllib.request.AbstractHTTPHandler):
    """A handler whose connections end with an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request in plain text."""
        return self.do_open(self._plain, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request over TLS."""
        return self.do_open(self._secure, request)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _plain(self, host: str, **options: Any) -> http.client.HTTPConnection:
        return self._bound(http.client.HTTPConnection(host, **options))

    def _secure(self, host: str, **options: Any) -> http.client.HTTPConnection:
        return self._bound(http.client.HTTPSConnection(host, **options))

    def _bound(self, connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
        # The standard library keeps this hook for its own tests: it is below TLS and proxies.
        connection._create_connection = self._exchange.connect  # type: ignore[attr-defined]
        return connection


class _Redirecting(urllib.request.HTTPRedirectHandler):
    """A handler of redirects that does not read their bodies, which may have no end."""

    def http_error_302(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
    ) -> Any:
        """Follow a redirect."""
        fp.close()
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302
