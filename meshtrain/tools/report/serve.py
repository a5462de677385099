"""Serves a report on loopback; its page updates while the run continues."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshtrain.errors import ConfigError
from meshtrain.tools.report import page

HOST = "127.0.0.1"
FRESH_SECONDS = 1.0  # the files are read again after this time at the earliest
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def server(read: Callable[[], dict[str, Any]], port: int) -> tuple[ThreadingHTTPServer, str]:
    """Returns a server and the address of its page; `read()` returns the page's data.

    `port` 0: any free one. Requests without the token of the address get 403. Raises ConfigError if
    the port cannot be used.
    """
    token = secrets.token_urlsafe(24)
    # Several browsers may ask at once; the files are read for one of them.
    lock = threading.Lock()
    newest: dict[str, Any] = {"at": -FRESH_SECONDS}

    def data() -> dict[str, Any]:
        with lock:
            if time.monotonic() - newest["at"] >= FRESH_SECONDS:
                newest.update(data=read(), at=time.monotonic())
            return newest["data"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            given = parse_qs(url.query).get("token", [""])[0]
            if not hmac.compare_digest(given.encode(), token.encode()):
                text = "wrong token: open the address that was printed\n"
                return self._send(403, "text/plain", text)
            if url.path == "/":
                return self._send(200, "text/html", page.html(data(), live=True))
            if url.path == "/data.json":
                return self._send(200, "application/json", page.to_json(data()))
            return self._send(404, "text/plain", "not found\n")

        def _send(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
            for name, value in (HEADERS | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing: the line would have the token."""

    try:
        http_server = ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--port={port}: {reason}; use another port, or 0 for any free one"
        ) from error
    return http_server, f"http://{HOST}:{http_server.server_port}/?token={token}"
