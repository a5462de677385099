"""A server of an object store that records its changes: what TensorStore's client needs of S3.

Objects are in memory. Each change is applied a moment after its request has come, so that requests
which a client sends together overlap, as they do in a store far away.
"""

import contextlib
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

LATENCY = 0.005  # seconds from a request to its effect

Objects = dict[str, bytes]


class Change(NamedTuple):
    """An object that was written, or removed if `data` is None; or a mark of the client."""

    name: str
    data: bytes | None
    began: int  # number of changes when its request came


class Store(ThreadingHTTPServer):
    """The server; `objects` may be replaced."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted; more are lost for a second

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: Objects = {}
        self.changes: list[Change] = []
        self.sent = 0  # bytes of objects
        self.lock = threading.Lock()
        self.reads: list[tuple[str, str | None]] = []  # objects and ranges that were asked for
        # Called with both before the answer; returns an HTTP status to answer instead, or None.
        self.before_read: Callable[[str, str | None], HTTPStatus | None] = lambda name, range: None

    def handle_error(self, request, client_address) -> None:
        """Prints nothing of a client that was ended, or no longer waited for its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def change(self, name: str, data: bytes | None, began: int) -> None:
        self.changes.append(Change(name, data, began))
        apply(self.objects, self.changes[-1])

    def mark(self, data: bytes) -> None:
        self.changes.append(Change("", data, len(self.changes)))


def apply(objects: Objects, change: Change) -> None:
    if not change.name:
        return
    if change.data is None:
        objects.pop(change.name, None)
    else:
        objects[change.name] = change.data


@contextlib.contextmanager
def running() -> Iterator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise a client waits for the second packet of an answer, its body.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Store

    def log_message(self, *args):
        pass

    def _name(self) -> str:
        """Returns the name of the object: the path without the bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _answer(self, status: HTTPStatus, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        name = self._name()
        if not name:
            self._list(query.get("prefix", [""])[0], query.get("start-after", [""])[0])
            return
        with self.server.lock:
            data = self.server.objects.get(name)
            self.server.reads.append((name, self.headers.get("Range")))
        status = self.server.before_read(name, self.headers.get("Range"))
        if status is not None:
            self._answer(status)
        elif data is None:
            self._answer(HTTPStatus.NOT_FOUND)
        elif self.headers.get("If-None-Match") == _tag(data):
            self._answer(HTTPStatus.NOT_MODIFIED, ETag=_tag(data))
        elif self.headers.get("If-Match", _tag(data)) != _tag(data):
            self._answer(HTTPStatus.PRECONDITION_FAILED)
        elif wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, len(data) - int(last))
            end = min(int(last) + 1, len(data)) if first and last else len(data)
            place = f"bytes {start}-{end - 1}/{len(data)}"
            body = data[start:end]
            self.server.sent += len(body)
            self._answer(HTTPStatus.PARTIAL_CONTENT, body, ETag=_tag(data), Content_Range=place)
        else:
            self.server.sent += len(data) if self.command == "GET" else 0
            self._answer(HTTPStatus.OK, data, ETag=_tag(data))

    do_HEAD = do_GET

    def _list(self, prefix: str, after: str) -> None:
        with self.server.lock:
            sizes = {name: len(data) for name, data in self.server.objects.items()}
        found = [name for name in sorted(sizes) if name.startswith(prefix) and name > after]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{sizes[name]}</Size></Contents>"
            for name in found
        )
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{entries}"
            f"</ListBucketResult>"
        )
        self._answer(HTTPStatus.OK, body.encode(), Content_Type="application/xml")

    def do_PUT(self) -> None:
        self._change(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def do_DELETE(self) -> None:
        self._change(None)

    def _change(self, data: bytes | None) -> None:
        name = self._name()
        with self.server.lock:
            began = len(self.server.changes)
        time.sleep(LATENCY)
        with self.server.lock:
            old = self.server.objects.get(name)
            tag = None if old is None else _tag(old)
            is_wanted = self.headers.get("If-Match", tag) == tag
            if self.headers.get("If-None-Match") == "*":
                is_wanted = old is None
            if is_wanted:
                self.server.change(name, data, began)
        if not is_wanted:
            self._answer(HTTPStatus.PRECONDITION_FAILED)
        elif data is None:
            self._answer(HTTPStatus.NO_CONTENT)
        else:
            self._answer(HTTPStatus.OK, ETag=_tag(data))
